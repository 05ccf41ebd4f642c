//! What a provider's output means for liveness (004): one total classification per path.

use crate::label_enum;

label_enum! {
    /// What an observed event or frame does to the watchdog (004).
    pub enum Disposition {
        /// Execution began; arms nothing by itself.
        Start => "start",
        /// The provider moved; the stall clock starts anew.
        Progress => "progress",
        /// The provider is done; the watchdog is off.
        Terminal => "terminal",
        /// Says nothing about liveness.
        None => "none",
    }
}

label_enum! {
    /// Event types of the normalized path (004 `RunEvent`).
    pub enum RuntimeEventKind {
        Start => "start",
        Delta => "delta",
        Message => "message",
        Usage => "usage",
        Complete => "complete",
        Error => "error",
        Cancelled => "cancelled",
        Unknown => "unknown",
    }
}

/// 004 `ClassifyRuntimeEvent`: `has_content` is true for a non-empty delta or message.
/// A terminal is a terminal before its usage is looked at.
pub const fn classify_runtime_event(
    kind: RuntimeEventKind,
    has_content: bool,
    has_usage: bool,
) -> Disposition {
    match kind {
        RuntimeEventKind::Start => Disposition::Start,
        RuntimeEventKind::Complete | RuntimeEventKind::Error | RuntimeEventKind::Cancelled => {
            Disposition::Terminal
        }
        RuntimeEventKind::Delta | RuntimeEventKind::Message => {
            if has_content || has_usage {
                Disposition::Progress
            } else {
                Disposition::None
            }
        }
        RuntimeEventKind::Usage => {
            if has_usage {
                Disposition::Progress
            } else {
                Disposition::None
            }
        }
        RuntimeEventKind::Unknown => Disposition::None,
    }
}

label_enum! {
    /// Frame types of the tunnel path (004 `ProviderTunnelFrame`).
    pub enum TunnelFrameKind {
        ResponseStart => "response_start",
        Body => "body",
        Usage => "usage",
        End => "end",
        Error => "error",
        Unknown => "unknown",
    }
}

/// 004 `ClassifyProviderTunnelFrame`: `payload_bytes` counts for `Body` only.
pub const fn classify_tunnel_frame(kind: TunnelFrameKind, payload_bytes: usize) -> Disposition {
    match kind {
        TunnelFrameKind::End | TunnelFrameKind::Error => Disposition::Terminal,
        TunnelFrameKind::ResponseStart | TunnelFrameKind::Usage => Disposition::Progress,
        TunnelFrameKind::Body => {
            if payload_bytes > 0 {
                Disposition::Progress
            } else {
                Disposition::None
            }
        }
        TunnelFrameKind::Unknown => Disposition::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_events_classify_as_004_says() {
        use Disposition as D;
        use RuntimeEventKind as K;
        for k in K::ALL {
            for content in [false, true] {
                for usage in [false, true] {
                    let want = match k {
                        K::Start => D::Start,
                        K::Complete | K::Error | K::Cancelled => D::Terminal,
                        K::Delta | K::Message if content || usage => D::Progress,
                        K::Usage if usage => D::Progress,
                        K::Delta | K::Message | K::Usage | K::Unknown => D::None,
                    };
                    assert_eq!(
                        classify_runtime_event(*k, content, usage),
                        want,
                        "{k} {content} {usage}"
                    );
                }
            }
        }
    }

    #[test]
    fn tunnel_frames_classify_as_004_says() {
        use Disposition as D;
        use TunnelFrameKind as K;
        for (k, empty, full) in [
            (K::ResponseStart, D::Progress, D::Progress),
            (K::Body, D::None, D::Progress),
            (K::Usage, D::Progress, D::Progress),
            (K::End, D::Terminal, D::Terminal),
            (K::Error, D::Terminal, D::Terminal),
            (K::Unknown, D::None, D::None),
        ] {
            assert_eq!(classify_tunnel_frame(k, 0), empty, "{k}");
            assert_eq!(classify_tunnel_frame(k, 1), full, "{k}");
        }
    }
}
