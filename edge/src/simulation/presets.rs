//! Silences of minutes under paused time: what the presets let pass and what they end (G54).

use std::time::Duration;

use iop_shared::execution::Endpoint;

use super::judge::judge_answer;
use super::plan::{Asking, Plan};
use super::{Saw, Simulation};

/// One streaming request to a model whose provider thinks for so long before its first word.
fn thinks_for(first_delay: &str, liveness: &str) -> (Saw, Duration) {
    let edge_toml = format!(
        "[gate]\nkeepalive_open_after = \"0s\"\n[[providers]]\nid = \"e0\"\nadapter = \"scripted\"\n\
         script = {{ t = {{ reply = \"aaaa\", first_delay = {first_delay:?} }} }}\n\
         [[models]]\nname = \"m\"\n{liveness}\ncandidates = [{{ provider = \"e0\", target = \"t\" }}]\n"
    );
    let plan = Plan {
        edge_toml,
        nodes: Vec::new(),
        requests: Vec::new(),
        turns: Vec::new(),
        losses: Vec::new(),
    };
    let asking = Asking {
        at: Duration::ZERO,
        endpoint: Endpoint::Chat,
        stream: true,
        hosted_tool: false,
        leaves_after: None,
        reads_every: Duration::ZERO,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let sim = Simulation::start(&plan);
        let begun = tokio::time::Instant::now();
        let saw = sim.client(&asking).await.unwrap();
        judge_answer(&asking, &saw);
        (saw, begun.elapsed())
    })
}

#[test]
fn a_reasoning_silence_of_200_s_passes_with_the_default_preset_and_with_none() {
    for liveness in ["", "liveness = \"default\"", "liveness = \"batch\""] {
        let (saw, took) = thinks_for("200s", liveness);
        assert_eq!(
            (saw.status, saw.attempts, took.as_secs()),
            (200, 1, 200),
            "{liveness}"
        );
    }
    let (saw, took) = thinks_for("800s", "liveness = \"batch\"");
    assert_eq!((saw.status, took.as_secs()), (200, 800));
}

#[test]
fn each_preset_ends_a_longer_silence_at_its_own_limit() {
    // A stall that finds its only provider available is asked there again, while attempts and `max_elapsed` (600 s) last.
    for (liveness, code, limit, tries) in [
        ("liveness = \"interactive\"", "first_content_timeout", 20, 1),
        ("liveness = \"default\"", "response_stalled", 300, 2),
        ("", "response_stalled", 300, 2),
        ("liveness = \"batch\"", "response_stalled", 900, 1),
        ("response_stall_timeout = \"7s\"", "response_stalled", 7, 3),
    ] {
        let (saw, took) = thinks_for("2000s", liveness);
        let body = String::from_utf8_lossy(&saw.body);
        assert!(saw.status == 504 && body.contains(code), "{liveness}: {body}");
        assert_eq!(
            (u64::from(saw.attempts), took.as_secs()),
            (tries, limit * tries),
            "{liveness}"
        );
    }
}
