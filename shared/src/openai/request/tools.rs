//! Whether a request may be sent twice (G55): who executes its tools. Pure; asked only after a failure.
//!
//! A tool that the client executes does nothing until the client has seen its call, and an answer nobody saw holds no
//! call that anybody carried out. A tool of the provider's (web search, code, MCP, a hosted shell) may have done its work
//! already. The forms are OpenAI's (`ToolParam` of its SDKs); what is not known to be the client's is the provider's.

use std::ops::ControlFlow;

use super::{Reader, RequestFacts, text};

/// Namespaces nested deeper than this are not looked into.
const MAX_NESTING: u32 = 8;

/// A replay repeats no side effect: every tool is the client's, and no state is kept at a provider (gateway.md §13,
/// Client-executed tools). `body` is the one that `facts` were read from.
pub fn replay_safe(facts: &RequestFacts, body: &[u8]) -> bool {
    if facts.background || facts.state_id.is_some() {
        return false;
    }
    let mut safe = true;
    // Of duplicates each one is judged: readers differ on which one counts.
    let walked = Reader::at(body, facts.open - 1).object(|key, value| {
        safe &= match key {
            "tools" => value == b"null" || client_executes_all(value, 0),
            "web_search_options" => value == b"null",
            "input" => items_bring_no_hosted_tool(value),
            // A stored template of the provider's may bring tools along; `prompt` is a text elsewhere.
            "prompt" => value.first() != Some(&b'{'),
            _ => true,
        }
    });
    walked.is_some() && safe
}

/// `additional_tools` and `tool_search_output` bring tools inside the conversation. What an MCP server listed is in an
/// item's `tools` too, without types.
fn items_bring_no_hosted_tool(input: &[u8]) -> bool {
    if input.first() != Some(&b'[') {
        return true;
    }
    all(input, |item| {
        let mut safe = true;
        if item.first() == Some(&b'{') {
            let walked = Reader::at(item, 0).object(|key, value| {
                safe &= key != "tools" || client_executes_all(value, 0);
            });
            safe &= walked.is_some();
        }
        safe
    })
}

fn client_executes_all(tools: &[u8], depth: u32) -> bool {
    depth <= MAX_NESTING && all(tools, |tool| client_executes(tool, depth))
}

fn client_executes(tool: &[u8], depth: u32) -> bool {
    let Some([kind, execution, environment, tools]) =
        members(tool, ["type", "execution", "environment", "tools"])
    else {
        return false;
    };
    let Some(kind) = kind.and_then(text) else {
        return false;
    };
    match kind.as_str() {
        "function" | "custom" | "local_shell" | "apply_patch" => true,
        "namespace" => tools.is_some_and(|tools| client_executes_all(tools, depth + 1)),
        "shell" => environment
            .and_then(|e| members(e, ["type"]))
            .is_some_and(|[kind]| is(kind, "local")),
        "tool_search" => is(execution, "client"),
        other => other.starts_with("computer"),
    }
}

fn is(value: Option<&[u8]>, wanted: &str) -> bool {
    value.and_then(text).is_some_and(|found| found == wanted)
}

/// An array whose elements all fit.
fn all(array: &[u8], fits: impl Fn(&[u8]) -> bool) -> bool {
    let mut every = true;
    let walked = Reader::at(array, 0).elements(|element| {
        every = fits(element);
        if every {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    walked.is_some() && every
}

/// Members of an object by name; `None`: it is no object, or has one of them twice.
fn members<'a, const N: usize>(object: &'a [u8], names: [&str; N]) -> Option<[Option<&'a [u8]>; N]> {
    let mut found = [None; N];
    let mut twice = false;
    Reader::at(object, 0).object(|key, value| {
        if let Some(slot) = names
            .iter()
            .position(|name| *name == key)
            .and_then(|i| found.get_mut(i))
        {
            twice |= slot.replace(value).is_some();
        }
    })?;
    (!twice).then_some(found)
}

#[cfg(test)]
mod tests;
