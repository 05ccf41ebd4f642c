//! Responses that are there already: `GET`, `DELETE`, cancel and input items. All of it is read from the run.

use std::sync::Arc;

use http::Method;
use iop_durable::ids::WaitId;
use iop_durable::record::{WaitRecord, WaitStatus, WaitingKind};
use iop_durable::store::Store;
use serde_json::{Value, json};

use super::fault::Fault;
use super::go_on::begins;
use super::id::ResponseId;
use super::reader::{Reader, output, pauses, stored};
use super::{Ask, Reply, is_agent, pen};
use crate::agents::journal::{ApprovalAnswer, ApprovalDecision, INPUT, approval_id};
use crate::agents::transcript::conversation;
use crate::runs::problem::{Code, Problem};
use crate::runs::steer::Cancel;
use crate::runs::{Runs, Seen};

const FIELD: &str = "response_id";
/// Items of a page, and the most.
const ITEMS: usize = 20;
const ITEMS_MAX: usize = 100;

pub(super) async fn reply(runs: &Arc<Runs>, ask: &Ask) -> Result<Reply, Fault> {
    let absent = || Fault::no_response(FIELD);
    let id = ask
        .response
        .as_deref()
        .and_then(ResponseId::parse)
        .ok_or_else(absent)?;
    let see = || runs.see(&ask.caller, id.run.as_str());
    let found = |problem: Problem| Fault::unseen(problem, FIELD);
    let Seen { engine, loaded } = see().await.map_err(found)?;
    if !is_agent(&loaded.head) || !begins(&engine.store, &id).await? {
        return Err(absent());
    }
    let rest = ask.uri.path().rsplit_once('/').map_or("", |(_, rest)| rest);
    if rest == "input_items" {
        let items = input_items(&engine.store, &id).await?;
        let page = page(items, ask.uri.query().unwrap_or_default())?;
        return Ok(Reply::Whole(page.to_string().into(), id.run));
    }
    if ask.method == Method::DELETE {
        runs.delete(&ask.caller, id.run.as_str()).await?;
        let gone = json!({"id": id.to_string(), "object": "response", "deleted": true});
        return Ok(Reply::Whole(gone.to_string().into(), id.run));
    }
    let mut seen = Seen { engine, loaded };
    if ask.method == Method::POST {
        let why = "Cancelled at its response.".to_owned();
        let cancel = Cancel::new(&format!("{id}.cancel"), why)?;
        runs.cancel(&ask.caller, id.run.as_str(), &cancel).await?;
        seen = see().await.map_err(found)?;
    }
    let Seen { engine, loaded } = &seen;
    let pen = pen(engine, loaded, &id).await?;
    if ask.stream {
        if query(ask.uri.query().unwrap_or_default(), "starting_after").is_some() {
            let why = "A response of an agent is streamed from its start.";
            return Err(Fault::invalid("starting_after", why));
        }
        return Ok(Reply::Responses(Reader::new(engine, &id.run, id.after), pen));
    }
    let answer = stored(&engine.store, &id).await?;
    Ok(Reply::Whole(pen.whole(&answer), id.run))
}

/// What was sent for a response: the run's input, or what was said to the pause it begins behind.
async fn input_items(store: &Arc<dyn Store>, id: &ResponseId) -> Result<Vec<Value>, Fault> {
    if id.after == 0 {
        let Some(input) = output(store, &id.run, 1, INPUT).await? else {
            return Ok(Vec::new());
        };
        let corrupt =
            || Problem::new(Code::RunCorrupt, "The run's input cannot be read.").of(id.run.as_str());
        let input: Box<serde_json::value::RawValue> =
            serde_json::from_slice(&input).map_err(|_| corrupt())?;
        let messages = conversation(&input).map_err(|_| corrupt())?;
        let messages = messages.iter().enumerate();
        let items = messages
            .filter_map(|(n, message)| message_item(id, n, &serde_json::from_str(message.get()).ok()?));
        return Ok(items.collect());
    }
    let mut items = Vec::new();
    for (seq, on) in pauses(store, &id.run, id.after - 1).await? {
        if seq != id.after {
            continue;
        }
        for on in on {
            let Ok(wait) = WaitId::new(&on.id) else { continue };
            let wait = store.wait(&id.run, &wait).await.map_err(Problem::from)?;
            items.extend(wait.and_then(|wait| word_item(id, items.len(), &wait)));
        }
    }
    Ok(items)
}

/// A chat message as an input item.
fn message_item(id: &ResponseId, n: usize, message: &Value) -> Option<Value> {
    let role = message.get("role")?.as_str()?.to_owned();
    let kind = if role == "assistant" {
        "output_text"
    } else {
        "input_text"
    };
    let text = |text: &str| match kind {
        "output_text" => json!({"type": kind, "text": text, "annotations": []}),
        _ => json!({"type": kind, "text": text}),
    };
    let content = match message.get("content") {
        Some(Value::String(said)) => vec![text(said)],
        Some(Value::Array(parts)) => parts
            .iter()
            .filter_map(|part| match part.get("type")?.as_str()? {
                "text" => Some(text(part.get("text")?.as_str()?)),
                "image_url" => {
                    let image = part.get("image_url")?;
                    Some(json!({"type": "input_image", "image_url": image.get("url")?,
                                "detail": image.get("detail").cloned().unwrap_or_else(|| json!("auto"))}))
                }
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    let stem = id.to_string();
    let stem = stem.strip_prefix("resp_").unwrap_or(&stem).to_owned();
    Some(
        json!({"id": format!("msg_in_{stem}_{n}"), "type": "message", "status": "completed", "role": role,
                "content": content}),
    )
}

/// What was said to a wait, when something was.
fn word_item(id: &ResponseId, n: usize, wait: &WaitRecord) -> Option<Value> {
    if wait.status != WaitStatus::Delivered {
        return None;
    }
    let payload = wait.settled.as_ref()?.payload.as_ref()?.bytes();
    match wait.kind {
        WaitingKind::Approval => {
            let answer: ApprovalAnswer = serde_json::from_slice(payload).ok()?;
            let approval = approval_id(&wait.id);
            Some(
                json!({"id": format!("mcpr_{}", approval.trim_start_matches("apr_")), "type": "mcp_approval_response",
                        "approval_request_id": approval, "approve": answer.decision != ApprovalDecision::Deny,
                        "reason": answer.reason}),
            )
        }
        WaitingKind::Input => {
            let value: Value = serde_json::from_slice(payload).ok()?;
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            message_item(id, n, &json!({"role": "user", "content": text}))
        }
        WaitingKind::Event
        | WaitingKind::Timer
        | WaitingKind::Retry
        | WaitingKind::Children
        | WaitingKind::Reconciliation
        | WaitingKind::Resume
        | WaitingKind::Handoff => None,
    }
}

/// A page of items, the newest first unless the query says otherwise.
fn page(mut items: Vec<Value>, sent: &str) -> Result<Value, Fault> {
    match query(sent, "order") {
        Some("asc") => {}
        Some("desc") | None => items.reverse(),
        Some(_) => return Err(Fault::invalid("order", "`order` must be asc or desc.")),
    }
    let limit = match query(sent, "limit").map(str::parse::<usize>) {
        None => ITEMS,
        Some(Ok(limit)) if (1..=ITEMS_MAX).contains(&limit) => limit,
        Some(_) => return Err(Fault::invalid("limit", "`limit` must be from 1 to 100.")),
    };
    if let Some(after) = query(sent, "after") {
        let at = items.iter().position(|item| item["id"] == after);
        let at = at.ok_or_else(|| Fault::invalid("after", "There is no item of this id."))?;
        items.drain(..=at);
    }
    let more = items.len() > limit;
    items.truncate(limit);
    let end = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (end(items.first()), end(items.last()));
    Ok(json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more}))
}

/// A member of a query, as it stands there: the values that are known need no decoding.
fn query<'q>(query: &'q str, name: &str) -> Option<&'q str> {
    query
        .split('&')
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ResponseId {
        ResponseId::parse("resp_0123456789abcdef0123456789abcdef_0").unwrap()
    }

    #[test]
    fn messages_are_told_as_items() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]);
        let item = message_item(&id(), 1, &json!({"role": "user", "content": parts})).unwrap();
        assert_eq!(
            item["content"],
            json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u", "detail": "auto"}])
        );
        let item = message_item(&id(), 2, &json!({"role": "assistant", "content": "b"})).unwrap();
        assert_eq!(item["content"][0]["type"], "output_text");
        assert_eq!(item["id"], "msg_in_0123456789abcdef0123456789abcdef_0_2");
        assert_eq!(message_item(&id(), 3, &json!("x")), None);
    }

    #[test]
    fn items_are_paged() {
        let items = |n: usize| -> Vec<Value> { (0..n).map(|n| json!({"id": n.to_string()})).collect() };
        let first = page(items(30), "").unwrap();
        assert_eq!(
            (&first["first_id"], &first["last_id"], &first["has_more"]),
            (&json!("29"), &json!("10"), &json!(true))
        );
        let next = page(items(30), "limit=20&after=10").unwrap();
        assert_eq!(
            (&next["first_id"], &next["last_id"], &next["has_more"]),
            (&json!("9"), &json!("0"), &json!(false))
        );
        let all = page(items(3), "order=asc").unwrap();
        assert_eq!(all["first_id"], "0");
        for (sent, at) in [("limit=0", "limit"), ("order=x", "order"), ("after=7", "after")] {
            assert_eq!(page(items(3), sent).unwrap_err().param.as_deref(), Some(at));
        }
    }
}
