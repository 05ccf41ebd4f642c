//! Random declarations: `compile` takes exactly those in which a slow reading of the rules finds nothing wrong.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
struct Declared {
    nodes: Vec<usize>,
    entry: Option<usize>,
    /// `None` leads to the end.
    edges: Vec<(usize, Option<usize>)>,
    retry_routes: Vec<(usize, usize)>,
    waits: Vec<(usize, usize, usize)>,
    terminal: Vec<usize>,
    resume_targets: Vec<usize>,
}

fn name(n: usize) -> String {
    format!("n{n}")
}

/// How a node is left.
#[derive(Debug, Clone)]
enum Exit {
    Terminal,
    End,
    Edge(usize),
    Wait(usize, usize),
}

/// One declaration too many.
#[derive(Debug, Clone)]
enum Extra {
    Node(usize),
    Edge(usize, Option<usize>),
    RetryRoute(usize, usize),
    Wait(usize, usize, usize),
    Terminal(usize),
    ResumeTarget(usize),
    Entry(usize),
}

/// Nodes from 0 on, each with one way out, and a few declarations more; the number after the last names no node.
fn declared() -> impl Strategy<Value = Declared> {
    (1..=4usize).prop_flat_map(|count| {
        let node = move || 0..count;
        let any = move || 0..=count;
        let exit = prop_oneof![
            2 => Just(Exit::Terminal),
            1 => Just(Exit::End),
            4 => node().prop_map(Exit::Edge),
            1 => (node(), node()).prop_map(|(a, b)| Exit::Wait(a, b)),
        ];
        let extra = prop_oneof![
            any().prop_map(Extra::Node),
            (any(), proptest::option::weighted(0.8, any())).prop_map(|(from, to)| Extra::Edge(from, to)),
            (any(), any()).prop_map(|(from, to)| Extra::RetryRoute(from, to)),
            (any(), any(), any()).prop_map(|(at, a, b)| Extra::Wait(at, a, b)),
            any().prop_map(Extra::Terminal),
            any().prop_map(Extra::ResumeTarget),
            any().prop_map(Extra::Entry),
        ];
        (
            proptest::collection::vec(exit, count),
            proptest::collection::vec(extra, 0..3),
        )
            .prop_map(|(exits, extras)| declare(exits, extras))
    })
}

fn declare(exits: Vec<Exit>, extras: Vec<Extra>) -> Declared {
    let mut d = Declared {
        nodes: (0..exits.len()).collect(),
        entry: None,
        edges: Vec::new(),
        retry_routes: Vec::new(),
        waits: Vec::new(),
        terminal: Vec::new(),
        resume_targets: Vec::new(),
    };
    for (n, exit) in exits.into_iter().enumerate() {
        match exit {
            Exit::Terminal => d.terminal.push(n),
            Exit::End => d.edges.push((n, None)),
            Exit::Edge(to) => d.edges.push((n, Some(to))),
            Exit::Wait(a, b) => d.waits.push((n, a, b)),
        }
    }
    for extra in extras {
        match extra {
            Extra::Node(n) => d.nodes.push(n),
            Extra::Edge(from, to) => d.edges.push((from, to)),
            Extra::RetryRoute(from, to) => d.retry_routes.push((from, to)),
            Extra::Wait(at, a, b) => d.waits.push((at, a, b)),
            Extra::Terminal(n) => d.terminal.push(n),
            Extra::ResumeTarget(n) => d.resume_targets.push(n),
            Extra::Entry(n) => d.entry = Some(n),
        }
    }
    d
}

fn build(d: &Declared) -> Builder {
    let mut builder = Builder::new("random", 1);
    for n in &d.nodes {
        builder = builder.node(&name(*n), pass);
    }
    if let Some(entry) = d.entry {
        builder = builder.entry(&name(entry));
    }
    for (from, to) in &d.edges {
        builder = builder.edge(&name(*from), &to.map_or_else(|| END.to_owned(), name));
    }
    for (from, to) in &d.retry_routes {
        builder = builder.retry_route(&name(*from), &name(*to));
    }
    for (node, event, timeout) in &d.waits {
        builder = waits(builder, &name(*node), labels(), &name(*event), &name(*timeout));
    }
    for n in &d.terminal {
        builder = builder.terminal(&name(*n));
    }
    for n in &d.resume_targets {
        builder = builder.resume_target(&name(*n));
    }
    builder
}

fn repeats<T: Ord>(all: impl Iterator<Item = T>) -> bool {
    let mut all: Vec<T> = all.collect();
    let count = all.len();
    all.sort();
    all.dedup();
    all.len() != count
}

/// What can be reached, by going over all routes again and again.
fn reached(d: &Declared) -> Vec<usize> {
    let mut reached: Vec<usize> = d.entry.or(d.nodes.first().copied()).into_iter().collect();
    reached.extend(&d.resume_targets);
    for _ in 0..=d.nodes.len() {
        let on = |from: &usize| reached.contains(from);
        let mut more: Vec<usize> = Vec::new();
        more.extend(
            d.edges
                .iter()
                .filter(|(from, _)| on(from))
                .filter_map(|(_, to)| *to),
        );
        more.extend(
            d.retry_routes
                .iter()
                .filter(|(from, _)| on(from))
                .map(|(_, to)| *to),
        );
        more.extend(
            d.waits
                .iter()
                .filter(|(from, ..)| on(from))
                .flat_map(|(_, a, b)| [*a, *b]),
        );
        reached.extend(more);
        reached.sort_unstable();
        reached.dedup();
    }
    reached
}

/// Whether everything but reachability is right.
fn well_formed(d: &Declared) -> bool {
    let known = |n: &usize| d.nodes.contains(n);
    let terminal = |n: &usize| d.terminal.contains(n);
    let routed =
        |n: &usize| d.edges.iter().any(|(from, _)| from == n) || d.waits.iter().any(|(node, ..)| node == n);
    !d.nodes.is_empty()
        && !repeats(d.nodes.iter())
        && d.entry.iter().all(known)
        && d.terminal.iter().all(known)
        && d.resume_targets.iter().all(known)
        && d.edges
            .iter()
            .all(|(from, to)| known(from) && !terminal(from) && to.iter().all(known))
        && !repeats(d.edges.iter().map(|(from, _)| from))
        && d.retry_routes
            .iter()
            .all(|(from, to)| known(from) && known(to) && from != to)
        && !repeats(d.retry_routes.iter().map(|(from, _)| from))
        && d.waits
            .iter()
            .all(|(node, a, b)| known(node) && known(a) && known(b))
        && !repeats(d.waits.iter().map(|(node, ..)| node))
        && d.nodes.iter().all(|n| terminal(n) || routed(n))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn compile_takes_what_is_right_and_nothing_else(d in declared()) {
        let errors = errors(build(&d));
        if !well_formed(&d) {
            prop_assert!(!errors.is_empty(), "nothing found");
            let unreachable = errors.iter().any(|e| matches!(e, CompileError::Unreachable { .. }));
            prop_assert!(!unreachable, "reachability of a graph that is wrong: {errors:?}");
            return Ok(());
        }
        let reached = reached(&d);
        let mut expected: Vec<CompileError> = d
            .nodes
            .iter()
            .filter(|n| !reached.contains(n))
            .map(|n| CompileError::Unreachable { node: name(*n) })
            .collect();
        expected.sort_by_key(ToString::to_string);
        prop_assert_eq!(errors, expected);
    }
}

/// The random declarations contain enough of each kind for the property to say something.
#[test]
fn random_declarations_are_of_all_kinds() {
    use proptest::strategy::ValueTree as _;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let (mut right, mut unreachable, mut wrong) = (0, 0, 0);
    for _ in 0..4000 {
        let d = declared().new_tree(&mut runner).unwrap().current();
        match well_formed(&d) {
            false => wrong += 1,
            true if d.nodes.iter().all(|n| reached(&d).contains(n)) => right += 1,
            true => unreachable += 1,
        }
    }
    assert!(
        right > 50 && unreachable > 5 && wrong > 500,
        "{right} {unreachable} {wrong}"
    );
}
