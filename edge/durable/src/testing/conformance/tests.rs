use std::collections::BTreeSet;

/// A case that no adapter runs would promise nothing.
#[test]
fn every_case_is_in_the_list() {
    let list = include_str!("mod.rs");
    let listed: BTreeSet<&str> = list
        .lines()
        .filter_map(|line| line.trim().strip_suffix(','))
        .collect();
    let themes = [
        include_str!("creation.rs"),
        include_str!("revisions.rs"),
        include_str!("leases.rs"),
        include_str!("inbox.rs"),
        include_str!("atomicity.rs"),
        include_str!("claims.rs"),
        include_str!("rows.rs"),
        include_str!("payloads.rs"),
        include_str!("history.rs"),
        include_str!("corruption.rs"),
        include_str!("lifecycle.rs"),
        include_str!("lists.rs"),
        include_str!("gates.rs"),
        include_str!("counts.rs"),
        include_str!("definitions.rs"),
        include_str!("hints.rs"),
        include_str!("host_clock.rs"),
    ];
    let modules = list.lines().filter(|line| line.starts_with("pub mod ")).count();
    assert_eq!(themes.len(), modules);
    let mut cases = 0;
    for line in themes.iter().flat_map(|theme| theme.lines()) {
        if let Some(rest) = line.strip_prefix("pub async fn ") {
            let name = rest.split('(').next().unwrap();
            assert!(listed.contains(name), "{name} is not in the list");
            cases += 1;
        }
    }
    assert!(cases > 100);
}
