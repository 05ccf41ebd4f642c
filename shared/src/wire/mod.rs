//! What crosses the edge-node link (docs/link.md): header names, session lines, the one terminal.
//!
//! The embedded node speaks the same requests and responses in-process, so that there is one path.

pub mod command;
pub mod event;
pub mod headers;
pub mod session;
pub mod terminal;
pub mod tunnel;

/// The link version this build speaks; the `Upgrade` token is `iop-link/<version>`.
pub const LINK_VERSION: u32 = 1;
/// The `Upgrade` token of `LINK_VERSION`.
pub const UPGRADE_TOKEN: &str = "iop-link/1";
/// Path of the handshake, HTTP/1.1, node to edge.
pub const HANDSHAKE_PATH: &str = "/link";
/// Path of the session stream, edge to node.
pub const SESSION_PATH: &str = "/link/v1/session";
/// Prefix of tunnels, edge to node; the endpoint's word follows.
pub const TUNNEL_PREFIX: &str = "/link/v1/tunnels/";
/// Path of normalized runs, edge to node.
pub const RUNS_PATH: &str = "/link/v1/runs";
/// Prefix of commands, edge to node; the command's word follows.
pub const COMMAND_PREFIX: &str = "/link/v1/commands/";
/// Path on which the edge asks the node to take no new work from it.
pub const DRAIN_PATH: &str = "/link/v1/drain";

/// HTTP/2 settings of the link (docs/link.md: each has ended a whole connection somewhere).
pub mod h2 {
    use std::time::Duration;

    /// Edge: bounds memory per held run, in bytes.
    pub const EDGE_STREAM_WINDOW: u32 = 64 * 1024;
    /// Edge: a permission, not an allocation, in bytes. h2 charges small unread DATA frames against half of it and ends
    /// the whole connection when that is spent: with 64 MiB, 64 unread runs of one-byte tokens were enough.
    pub const EDGE_CONNECTION_WINDOW: u32 = 1024 * 1024 * 1024;
    /// Edge: cancelled runs remembered while their last frames arrive.
    pub const EDGE_CONCURRENT_RESET_STREAMS: usize = 4096;
    /// Node: upload window of one tunnel, in bytes.
    pub const NODE_STREAM_WINDOW: u32 = 256 * 1024;
    /// Node: upload window of all tunnels together, in bytes.
    pub const NODE_CONNECTION_WINDOW: u32 = 256 * 1024 * 1024;
    /// Node: streams reset by the edge before the node accepted them.
    pub const NODE_PENDING_ACCEPT_RESET_STREAMS: usize = 1024;
    /// Both: decoded header list, in bytes; the embedded path has the same limit.
    pub const MAX_HEADER_LIST: u32 = 128 * 1024;
    /// Both: PING interval, also while idle.
    pub const PING_INTERVAL: Duration = Duration::from_secs(5);
    /// Both: a PING unanswered for this long ends the connection.
    pub const PING_TIMEOUT: Duration = Duration::from_secs(8);
    /// Edge: the session's first valid line must arrive within this time.
    pub const SESSION_DEADLINE: Duration = Duration::from_secs(5);

    /// Node: streams the edge may open at once; hyper's default of 200 would queue silently.
    pub const fn node_max_concurrent_streams(capacity: u32) -> u32 {
        capacity.saturating_mul(2).saturating_add(64)
    }
}
