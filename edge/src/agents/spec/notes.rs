//! What may be right in a declaration, but does not work where it is made. Pure.

use super::AgentSpec;

/// What a declaration may lean on, as it is where it is made.
pub(crate) struct Around<'a> {
    /// Runs end with the process.
    pub(crate) memory: bool,
    /// Whether a model of this name may be served.
    pub(crate) serves: &'a dyn Fn(&str) -> bool,
    /// Whether there is an agent of this name.
    pub(crate) has_agent: &'a dyn Fn(&str) -> bool,
    /// Whether there is a key of this name, with the role `operator`.
    pub(crate) decides: &'a dyn Fn(&str) -> bool,
}

/// What will not work as things are; each begins with its field.
pub(crate) fn notes(spec: &AgentSpec, around: &Around<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    if around.memory && spec.durable {
        notes.push(String::from("durable is true, but its runs end with the process"));
    }
    if !(around.serves)(&spec.model) {
        notes.push(format!("model is {:?}, which nothing here serves", spec.model));
    }
    for (i, tool) in spec.tools.iter().enumerate() {
        if let Some(other) = tool.agent.as_ref().filter(|it| !(around.has_agent)(&it.name)) {
            let name = &other.name;
            notes.push(format!(
                "tools[{i}].agent.name is {name:?}, and there is no such agent here"
            ));
        }
    }
    let deciders = &spec.approvals.deciders;
    if !deciders.is_empty() && !deciders.iter().any(|name| (around.decides)(name)) {
        notes.push(String::from(
            "approvals.deciders names no key with role operator: nobody can decide",
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_there_is_named_by_its_field() {
        let spec: AgentSpec = serde_json::from_value(json!({
            "model": "m", "durable": true, "approvals": { "deciders": ["a", "b"] },
            "tools": [{ "name": "x", "agent": { "name": "other" } }],
        }))
        .unwrap();
        let around = |there: bool| {
            let yes: &dyn Fn(&str) -> bool = if there { &|_| true } else { &|_| false };
            let around = Around {
                memory: !there,
                serves: yes,
                has_agent: yes,
                decides: yes,
            };
            notes(&spec, &around)
        };
        assert_eq!(around(true), Vec::<String>::new());
        let said = around(false);
        let fields = ["durable", "model", "tools[0].agent.name", "approvals.deciders"];
        assert_eq!(said.len(), fields.len());
        for (note, field) in said.iter().zip(fields) {
            assert!(note.starts_with(field), "{note}");
        }
        // One of the keys is enough.
        let around = Around {
            memory: false,
            serves: &|model| model == "m",
            has_agent: &|name| name == "other",
            decides: &|name| name == "b",
        };
        assert_eq!(notes(&spec, &around), Vec::<String>::new());
    }
}
