//! What a seed decides: providers and what they do wrong, who asks when, which links break.

use std::fmt::Write as _;
use std::time::Duration;

use fastrand::Rng;
use iop_shared::execution::Endpoint;

use super::MAX_ATTEMPTS;

/// Letters of a provider's reply.
pub(super) const REPLY: usize = 16;

/// Everything that a seed decides.
pub(super) struct Plan {
    pub(super) edge_toml: String,
    /// Providers of each linked node, as configuration text.
    pub(super) nodes: Vec<String>,
    pub(super) requests: Vec<Asking>,
    /// Turns of runs.
    pub(super) turns: Vec<Asking>,
    pub(super) losses: Vec<Loss>,
}

pub(super) struct Asking {
    pub(super) at: Duration,
    pub(super) endpoint: Endpoint,
    pub(super) stream: bool,
    /// A tool that the provider would run.
    pub(super) hosted_tool: bool,
    pub(super) leaves_after: Option<Duration>,
    /// Between reads of the answer.
    pub(super) reads_every: Duration,
}

/// A link that breaks, and the node's return.
pub(super) struct Loss {
    pub(super) node: usize,
    pub(super) at: Duration,
    pub(super) back_after: Duration,
    /// It comes back as a new process.
    pub(super) restarted: bool,
}

fn chance(rng: &mut Rng, percent: u32) -> bool {
    rng.u32(0..100) < percent
}

fn ms(rng: &mut Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

/// Provider `n` says nothing but its own letter, so that an answer shows who gave it.
fn letter(n: usize) -> char {
    char::from(b'a' + u8::try_from(n).unwrap())
}

fn script(rng: &mut Rng, n: usize) -> String {
    let chunks = rng.u32(1..8);
    let reply = letter(n).to_string().repeat(REPLY);
    let mut keys = vec![
        format!("reply = {reply:?}"),
        format!("chunks = {chunks}"),
        format!("chunk_delay = \"{}ms\"", rng.u32(0..400)),
        format!("first_delay = \"{}ms\"", rng.u32(0..1500)),
    ];
    match rng.u32(0..10) {
        0 => keys.push("stall = \"before_headers\"".into()),
        1 => keys.push("stall = \"after_headers\"".into()),
        2 => keys.push("stall = \"after_preamble\"".into()),
        3 => keys.push(format!("stall = {{ after_chunks = {} }}", rng.u32(0..chunks + 1))),
        4 => keys.push(format!("cut = {{ after_chunks = {} }}", rng.u32(0..chunks + 1))),
        5 => keys.push(format!(
            "status = {}",
            rng.choice([400, 408, 429, 500, 503]).unwrap()
        )),
        _ => {}
    }
    if chance(rng, 40) {
        keys.push(format!("fail_first = {}", rng.u32(1..4)));
    }
    if chance(rng, 20) {
        keys.push(format!("retry_after = \"{}s\"", rng.u32(1..9)));
    }
    if chance(rng, 15) {
        keys.push("ignores_cancel = true".into());
    }
    if chance(rng, 25) {
        keys.push("normalized = true".into());
    }
    let probe = rng.choice(["available", "missing", "refuse", "hang"]).unwrap();
    keys.push(format!("probe = {probe:?}"));
    format!("{{ {} }}", keys.join(", "))
}

fn provider(rng: &mut Rng, id: &str, n: usize) -> String {
    let mut toml = String::new();
    let script = script(rng, n);
    let (capacity, stall) = (rng.u32(1..4), rng.u32(1..6));
    writeln!(
        toml,
        "[[providers]]\nid = {id:?}\nadapter = \"scripted\"\ncapacity = {capacity}"
    )
    .unwrap();
    writeln!(
        toml,
        "response_stall_timeout = \"{stall}s\"\nscript = {{ t = {script} }}"
    )
    .unwrap();
    if chance(rng, 30) {
        writeln!(toml, "first_content_timeout = \"{}s\"", rng.u32(1..8)).unwrap();
    }
    if chance(rng, 10) {
        writeln!(toml, "replay = false").unwrap();
    }
    toml
}

impl Plan {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let (linked, embedded) = (rng.usize(1..4), rng.usize(0..3));
        let mut n = 0;
        let (mut candidates, mut own, mut nodes) = (Vec::new(), String::new(), Vec::new());
        let mut candidate = |rng: &mut Rng, key: &str| {
            candidates.push(format!(
                "{{ provider = {key:?}, target = \"t\", priority = {}, weight = {} }}",
                rng.u32(0..3),
                rng.u32(1..4)
            ));
        };
        for i in 0..embedded {
            let id = format!("e{i}");
            own += &provider(rng, &id, n);
            candidate(rng, &id);
            n += 1;
        }
        for node in 0..linked {
            let mut toml = String::new();
            for i in 0..rng.usize(1..3) {
                let id = format!("p{i}");
                toml += &provider(rng, &id, n);
                candidate(rng, &format!("n{node}/{id}"));
                n += 1;
            }
            nodes.push(toml);
        }
        let edge_toml = format!(
            "[gate]\nmax_attempts = {MAX_ATTEMPTS}\nkeepalive_open_after = \"{}ms\"\nkeepalive_interval = \"700ms\"\n\
             on_node_lost = {:?}\n[ejection]\nconsecutive = {}\nbase = \"1s\"\nmax = \"8s\"\n\
             [queue]\nmax_depth = {}\nmax_wait = \"{}s\"\n\
             [link]\nlisten = \"127.0.0.1:0\"\ntokens = [{{ env = \"T\" }}]\n{own}\
             [[models]]\nname = \"m\"\naffinity = {:?}\ncandidates = [{}]\n",
            rng.u32(0..4000),
            rng.choice(["replay", "replay", "fail"]).unwrap(),
            rng.u32(1..4),
            rng.u32(1..12),
            rng.u32(1..12),
            rng.choice(["none", "prefix"]).unwrap(),
            candidates.join(", "),
        );
        let requests = (0..rng.usize(3..14)).map(|_| Asking::draw(rng));
        let requests = requests.collect();
        let turns = (0..rng.usize(0..5)).map(|_| Asking {
            endpoint: Endpoint::Chat,
            stream: true,
            ..Asking::draw(rng)
        });
        let turns = turns.collect();
        let losses = (0..rng.usize(0..4)).map(|_| Loss {
            node: rng.usize(0..linked),
            at: ms(rng, 0..20_000),
            back_after: ms(rng, 0..6_000),
            restarted: chance(rng, 50),
        });
        let losses = losses.collect();
        Self {
            edge_toml,
            nodes,
            requests,
            turns,
            losses,
        }
    }
}

impl Asking {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            at: ms(rng, 0..20_000),
            endpoint: rng.choice([Endpoint::Chat, Endpoint::Responses]).unwrap(),
            stream: chance(rng, 70),
            hosted_tool: chance(rng, 15),
            leaves_after: chance(rng, 25).then(|| ms(rng, 0..9_000)),
            reads_every: if chance(rng, 20) {
                ms(rng, 0..900)
            } else {
                Duration::ZERO
            },
        }
    }
}
