//! What `compile` refuses, what the digest covers, and what a route that breaks its declaration does to a run.

use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::record::Backoff;

type Builder = GraphBuilder<u32>;

async fn pass(_: Ctx, state: u32) -> NodeResult<u32, NoEffect> {
    Ok((state, Directive::completed()))
}

/// `a → b → c`, the last one terminal.
fn line() -> Builder {
    GraphBuilder::new("line", 1)
        .node("a", pass)
        .node("b", pass)
        .node("c", pass)
        .edge("a", "b")
        .edge("b", "c")
        .terminal("c")
}

fn labels() -> WaitLabels {
    WaitLabels {
        matcher: "any".to_owned(),
        payload: "bytes".to_owned(),
        continuation: "keep".to_owned(),
    }
}

fn waits(builder: Builder, node: &str, labels: WaitLabels, on_event: &str, on_timeout: &str) -> Builder {
    builder.wait_route(
        node,
        labels,
        on_event,
        on_timeout,
        |_, _| true,
        |state, _| Ok(state),
    )
}

fn policy(max_attempts: u32) -> RetryPolicy {
    RetryPolicy {
        label: "again".to_owned(),
        max_attempts,
        backoff: Backoff::Fixed,
        initial: Duration::from_secs(1),
        max: Duration::from_secs(1),
        multiplier_permille: 1000,
        jitter_permille: 0,
    }
}

fn choose(builder: Builder, from: &str, targets: &[&str]) -> Builder {
    builder.conditional_edge(from, targets, |_| Ok("b".to_owned()))
}

fn errors(builder: Builder) -> Vec<CompileError> {
    match builder.compile() {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0,
    }
}

fn s(text: &str) -> String {
    text.to_owned()
}

#[test]
fn each_thing_that_is_wrong_is_found_and_names_its_node() {
    let name = |what: &str, why: &str| CompileError::Name {
        what: s(what),
        why: s(why),
    };
    let unknown = |node: &str, what| CompileError::UnknownNode { node: s(node), what };
    let target = |node: &str, what, target: &str| CompileError::UnknownTarget {
        node: s(node),
        what,
        target: s(target),
    };
    let twice = |node: &str, what| CompileError::Twice { node: s(node), what };
    let budget = |name: &str, why: &str| CompileError::Budget {
        budget: s(name),
        why: s(why),
    };
    let retry = |node: &str, why: &str| CompileError::Retry {
        node: s(node),
        why: s(why),
    };
    let long = "n".repeat(257);
    let bad_label = WaitLabels {
        payload: String::new(),
        ..labels()
    };
    let cases: Vec<(&str, Builder, CompileError)> = vec![
        (
            "empty name",
            Builder::new("", 1).node("a", pass).terminal("a"),
            name("name", "text: is empty"),
        ),
        (
            "NUL in the kind",
            line().kind("a\0"),
            name("kind", "text: contains U+0000"),
        ),
        (
            "empty node",
            line().node("", pass),
            name("node \"\"", "node: is empty"),
        ),
        (
            "long node",
            line().node(&long, pass),
            name(
                &format!("node {long:?}"),
                "node: is 257 bytes long, at most 256 are allowed",
            ),
        ),
        (
            "a node with the name of the end",
            line().node(END, pass),
            name("node \"__end__\"", "is the name of the end"),
        ),
        (
            "empty label of a wait route",
            waits(line(), "b", bad_label, "c", "c"),
            name("payload label of the wait route of node \"b\"", "text: is empty"),
        ),
        (
            "duplicate node",
            line().node("b", pass),
            CompileError::DuplicateNode { node: s("b") },
        ),
        (
            "edge to nowhere",
            line().node("d", pass).edge("d", "x"),
            target("d", "the edge", "x"),
        ),
        (
            "conditional edge to nowhere",
            choose(line().node("d", pass), "d", &["b", "x"]),
            target("d", "the conditional edge", "x"),
        ),
        (
            "retry route to nowhere",
            line().retry_route("b", "x"),
            target("b", "the retry route", "x"),
        ),
        (
            "retry route to the end",
            line().retry_route("b", END),
            target("b", "the retry route", END),
        ),
        (
            "event of a wait route to nowhere",
            waits(line(), "b", labels(), "x", "c"),
            target("b", "the wait route", "x"),
        ),
        (
            "timeout of a wait route to nowhere",
            waits(line(), "b", labels(), "c", "x"),
            target("b", "the wait route", "x"),
        ),
        (
            "edge from nowhere",
            line().edge("x", "b"),
            unknown("x", "an edge"),
        ),
        (
            "conditional edge from nowhere",
            choose(line(), "x", &["b"]),
            unknown("x", "an edge"),
        ),
        (
            "retry of nowhere",
            line().retry("x", policy(2)),
            unknown("x", "a retry"),
        ),
        (
            "retry route from nowhere",
            line().retry_route("x", "b"),
            unknown("x", "a retry route"),
        ),
        (
            "wait route of nowhere",
            waits(line(), "x", labels(), "b", "c"),
            unknown("x", "a wait route"),
        ),
        ("terminal nowhere", line().terminal("x"), unknown("x", "terminal")),
        (
            "resume target nowhere",
            line().resume_target("x"),
            unknown("x", "a resume target"),
        ),
        ("two edges", line().edge("a", "c"), twice("a", "outgoing route")),
        (
            "edge and conditional edge",
            choose(line(), "a", &["b", "c"]),
            twice("a", "outgoing route"),
        ),
        (
            "edge and end",
            line().edge("a", END),
            twice("a", "outgoing route"),
        ),
        (
            "two retry routes",
            line().retry_route("a", "b").retry_route("a", "c"),
            twice("a", "retry route"),
        ),
        (
            "two retries",
            line().retry("a", policy(2)).retry("a", policy(3)),
            twice("a", "retry"),
        ),
        (
            "two wait routes",
            waits(waits(line(), "a", labels(), "b", "c"), "a", labels(), "b", "c"),
            twice("a", "wait route"),
        ),
        (
            "no route, not terminal",
            line().node("d", pass).retry_route("a", "d"),
            CompileError::NoRoute { node: s("d") },
        ),
        (
            "a retry route alone is no route",
            line().node("d", pass).retry_route("a", "d").retry_route("d", "a"),
            CompileError::NoRoute { node: s("d") },
        ),
        (
            "terminal with a route",
            line().edge("c", "a"),
            CompileError::TerminalWithRoute { node: s("c") },
        ),
        (
            "terminal with a conditional route",
            choose(line(), "c", &["b"]),
            CompileError::TerminalWithRoute { node: s("c") },
        ),
        (
            "conditional edge without targets",
            choose(line().node("d", pass).retry_route("a", "d"), "d", &[]),
            CompileError::NoTargets { node: s("d") },
        ),
        (
            "out of reach",
            line().node("d", pass).edge("d", "a"),
            CompileError::Unreachable { node: s("d") },
        ),
        (
            "retry route to itself",
            line().retry_route("b", "b"),
            CompileError::RetryToSelf { node: s("b") },
        ),
        ("no nodes", Builder::new("none", 1), CompileError::Empty),
        (
            "unknown entry",
            line().entry("x"),
            CompileError::UnknownEntry { node: s("x") },
        ),
        (
            "entry out of the middle",
            line().entry("b"),
            CompileError::Unreachable { node: s("a") },
        ),
        (
            "budget without a name",
            line().budget("", 1),
            budget("", "budget: is empty"),
        ),
        (
            "budget twice",
            line().budget("t", 1).budget("t", 2),
            budget("t", "declared twice"),
        ),
        (
            "a count of the engine",
            line().budget("steps", 1),
            budget("steps", "the engine counts this itself"),
        ),
        (
            "another count of the engine",
            line().budget("retry:a", 1),
            budget("retry:a", "the engine counts this itself"),
        ),
        (
            "a third count of the engine",
            line().budget("recovery_attempts", 1),
            budget("recovery_attempts", "the engine counts this itself"),
        ),
        (
            "no attempts",
            line().retry("b", policy(0)),
            retry("b", "max_attempts: is 0, the first attempt counts too"),
        ),
        (
            "pause over the longest",
            line().retry(
                "b",
                RetryPolicy {
                    initial: Duration::from_secs(2),
                    ..policy(2)
                },
            ),
            retry("b", "initial: is longer than max"),
        ),
        (
            "version 0",
            Builder::new("v", 0).node("a", pass).terminal("a"),
            CompileError::Zero { what: "version" },
        ),
        (
            "no steps",
            line().max_steps(0),
            CompileError::Zero { what: "max_steps" },
        ),
        (
            "no checkpoints",
            line().keep_checkpoints(0),
            CompileError::Zero {
                what: "keep_checkpoints",
            },
        ),
    ];
    for (case, builder, expected) in cases {
        let found = errors(builder);
        assert_eq!(found, std::slice::from_ref(&expected), "{case}");
        let text = found[0].to_string();
        let names = match &expected {
            CompileError::Name { what, .. } => what,
            CompileError::DuplicateNode { node }
            | CompileError::UnknownTarget { node, .. }
            | CompileError::UnknownNode { node, .. }
            | CompileError::Twice { node, .. }
            | CompileError::NoRoute { node }
            | CompileError::TerminalWithRoute { node }
            | CompileError::NoTargets { node }
            | CompileError::Unreachable { node }
            | CompileError::RetryToSelf { node }
            | CompileError::UnknownEntry { node }
            | CompileError::Retry { node, .. } => node,
            CompileError::Budget { budget, .. } => budget,
            CompileError::Empty => "the graph",
            CompileError::Zero { what } => what,
        };
        assert!(text.contains(names), "{case}: {text}");
    }
}

#[test]
fn everything_wrong_is_found_at_once() {
    let builder = choose(Builder::new("", 0).kind("").entry("z"), "a", &["b", "x"])
        .node("a", pass)
        .node("a", pass)
        .node("b", pass)
        .node("", pass)
        .edge("c", "b")
        .edge("a", "y")
        .retry_route("b", "b")
        .retry("q", policy(0))
        .terminal("w")
        .budget("", 1)
        .max_steps(0);
    let found = match builder.compile() {
        Ok(_) => panic!("it is not right"),
        Err(errors) => errors,
    };
    let texts: Vec<String> = found.0.iter().map(ToString::to_string).collect();
    let expected = [
        "name: text: is empty",
        "kind: text: is empty",
        "version must be at least 1",
        "max_steps must be at least 1",
        "node \"a\" is declared twice",
        "node \"\": node: is empty",
        "budget \"\": budget: is empty",
        "the entry \"z\" is not a node",
        "terminal is declared for \"w\", which is not a node",
        "the conditional edge of node \"a\" names \"x\", which is not a node",
        "an edge is declared for \"c\", which is not a node",
        "the edge of node \"a\" names \"y\", which is not a node",
        "node \"a\" has more than one outgoing route",
        "the retry route of node \"b\" leads to itself",
        "a retry is declared for \"q\", which is not a node",
        "retry of node \"q\": max_attempts: is 0, the first attempt counts too",
        "node \"b\" has no outgoing route and is not declared terminal",
    ];
    assert_eq!(texts, expected);
    assert_eq!(found.to_string(), expected.join("; "));
}

#[test]
fn every_way_to_reach_a_node_counts() {
    let with = |builder: Builder| errors(builder.node("d", pass).terminal("d"));
    let unreachable = [CompileError::Unreachable { node: s("d") }];
    assert_eq!(with(line()), unreachable);
    assert_eq!(with(line().entry("a")), unreachable);
    for (way, builder) in [
        ("retry route", line().retry_route("b", "d")),
        ("event", waits(line(), "b", labels(), "d", "c")),
        ("timeout", waits(line(), "b", labels(), "c", "d")),
        ("resume target", line().resume_target("d")),
    ] {
        assert_eq!(with(builder), [], "{way}");
    }
    let chosen = choose(
        Builder::new("chosen", 1).node("a", pass).node("d", pass),
        "a",
        &["d", END],
    )
    .terminal("d");
    assert_eq!(errors(chosen), []);
    // What only a resume target reaches is reached too.
    let behind = line().resume_target("d").node("e", pass).edge("d", "e");
    assert_eq!(errors(behind.node("d", pass).terminal("e")), []);
}

#[test]
fn ends_may_be_declared_in_three_ways() {
    let one = || Builder::new("one", 1).node("b", pass);
    assert_eq!(errors(one().terminal("b")), []);
    assert_eq!(errors(one().edge("b", END)), []);
    assert_eq!(errors(choose(one(), "b", &["b", END])), []);
    // A terminal node may still have a retry, a retry route and a wait.
    let all = waits(
        line().retry("c", policy(2)).retry_route("c", "a"),
        "c",
        labels(),
        "a",
        "b",
    );
    assert_eq!(errors(all), []);
}

#[test]
fn the_digest_changes_with_each_thing_that_is_declared() {
    let all = || {
        let builder = choose(
            line().node("d", pass).node("e", pass).terminal("e"),
            "d",
            &["b", "e"],
        )
        .resume_target("d")
        .retry("a", policy(2))
        .retry_route("b", "a")
        .budget("tokens", 10);
        waits(builder, "a", labels(), "b", "c")
    };
    let digest = |builder: Builder| match builder.compile() {
        Ok(graph) => graph.definition().digest.clone(),
        Err(errors) => panic!("{errors}"),
    };
    let label = |change: fn(&mut WaitLabels)| {
        let mut labels = labels();
        change(&mut labels);
        labels
    };
    let retry = |change: fn(&mut RetryPolicy)| {
        let mut policy = policy(2);
        change(&mut policy);
        policy
    };
    let base = || line().resume_target("c");
    let mut seen = std::collections::BTreeMap::new();
    let mut builders: Vec<(String, Builder)> = vec![
        (s("all"), all()),
        (s("base"), base()),
        (s("kind"), base().kind("flow")),
        (s("name"), {
            let mut builder = base();
            s("other").clone_into(&mut builder.name);
            builder
        }),
        (s("version"), {
            let mut builder = base();
            builder.version = 2;
            builder
        }),
        (s("codec"), {
            let mut builder = base();
            builder.codec = Arc::new(Named("other"));
            builder
        }),
        (s("hook"), base().snapshot_hook(Hook("one"))),
        (s("another hook"), base().snapshot_hook(Hook("two"))),
        (s("entry"), base().entry("b").resume_target("a")),
        (s("the entry as a resume target"), base().resume_target("a")),
        (s("max steps"), base().max_steps(5)),
        (s("recovery attempts"), base().recovery_attempts(5)),
        (s("node"), base().node("d", pass).terminal("d").resume_target("d")),
        (
            s("named alike"),
            base().node("dd", pass).terminal("dd").resume_target("dd"),
        ),
        (s("edge"), base().retry_route("a", "c")),
        (s("retry route"), base().retry_route("b", "a")),
        (s("resume target"), base().resume_target("b")),
        (s("budget"), base().budget("t", 1)),
        (s("limit of a budget"), base().budget("t", 2)),
        (s("wait"), waits(base(), "a", labels(), "b", "c")),
        (s("wait, event"), waits(base(), "a", labels(), "c", "c")),
        (s("wait, timeout"), waits(base(), "a", labels(), "b", "b")),
        (
            s("wait, matcher"),
            waits(base(), "a", label(|l| l.matcher.push('2')), "b", "c"),
        ),
        (
            s("wait, payload"),
            waits(base(), "a", label(|l| l.payload.push('2')), "b", "c"),
        ),
        (
            s("wait, continuation"),
            waits(base(), "a", label(|l| l.continuation.push('2')), "b", "c"),
        ),
        (s("retry"), base().retry("a", policy(2))),
        (s("retry of another"), base().retry("b", policy(2))),
        (s("retry, label"), base().retry("a", retry(|p| p.label.push('2')))),
        (s("retry, attempts"), base().retry("a", policy(3))),
        (
            s("retry, backoff"),
            base().retry("a", retry(|p| p.backoff = Backoff::Exponential)),
        ),
        (
            s("retry, initial"),
            base().retry("a", retry(|p| p.initial = Duration::from_millis(1))),
        ),
        (
            s("retry, max"),
            base().retry("a", retry(|p| p.max = Duration::from_secs(2))),
        ),
        (
            s("retry, multiplier"),
            base().retry("a", retry(|p| p.multiplier_permille = 2000)),
        ),
        (
            s("retry, jitter"),
            base().retry("a", retry(|p| p.jitter_permille = 1)),
        ),
    ];
    let branch = |targets: &[&str]| {
        choose(
            Builder::new("line", 1)
                .node("a", pass)
                .node("b", pass)
                .node("c", pass),
            "a",
            targets,
        )
        .terminal("b")
        .terminal("c")
        .resume_target("c")
    };
    builders.push((s("targets"), branch(&["b", "c"])));
    builders.push((s("one target"), branch(&["b"])));
    builders.push((s("targets with the end"), branch(&["b", "c", END])));
    for (what, builder) in builders {
        if let Some(other) = seen.insert(digest(builder), what.clone()) {
            panic!("{what} has the digest of {other}");
        }
    }
}

#[test]
fn the_digest_does_not_change_with_code_order_or_retention() {
    let digest = |builder: Builder| match builder.compile() {
        Ok(graph) => graph.definition().digest.clone(),
        Err(errors) => panic!("{errors}"),
    };
    let one = waits(
        choose(line().node("d", pass), "d", &["b", "c"]).resume_target("d"),
        "a",
        labels(),
        "b",
        "c",
    );
    let two = Builder::new("line", 1)
        .terminal("c")
        .resume_target("d")
        .entry("a")
        .wait_route(
            "a",
            labels(),
            "b",
            "c",
            |_, payload| payload.bytes().is_empty(),
            |state, _| Ok(state + 1),
        )
        .node("d", |_: Ctx, state: u32| async move {
            Ok((state + 1, Directive::end()))
        })
        .node("c", pass)
        .node("a", pass)
        .node("b", pass)
        .edge("b", "c")
        .edge("a", "b")
        .conditional_edge("d", &["c", "b", "c"], |_| Ok(s("c")))
        .reducer(|_, update| update)
        .invariant(|_| Ok(()))
        .keep_checkpoints(3)
        .delete_on_success();
    assert_eq!(digest(one), digest(two));
}

struct Named(&'static str);

impl Codec<u32> for Named {
    fn label(&self) -> &str {
        self.0
    }

    fn encode(&self, state: &u32) -> Result<Bytes, String> {
        Json.encode(state)
    }

    fn decode(&self, bytes: &[u8]) -> Result<u32, String> {
        Json.decode(bytes)
    }
}

struct Hook(&'static str);

impl SnapshotHook for Hook {
    fn label(&self) -> &str {
        self.0
    }

    fn before_save(&self, state: Bytes) -> Result<Bytes, String> {
        Ok(state)
    }

    fn after_load(&self, state: Bytes) -> Result<Bytes, String> {
        Ok(state)
    }
}

mod model;
mod runs;
