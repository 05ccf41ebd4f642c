use std::collections::BTreeMap;

use iop_durable::ids::WaitId;
use iop_durable::record::{Outcome, Reason, Status};
use iop_shared::openai::answer::{Author, Kept};
use serde_json::{Value, json};

use super::*;

fn author() -> Author {
    Author {
        id: uuid::Uuid::from_u128(7),
        model: "agent:ops".to_owned(),
        created: 1,
    }
}

fn run() -> RunId {
    RunId::new("run_7").unwrap()
}

fn chat() -> ChatPen {
    ChatPen::new(ChatAnswer::new(author(), true), run())
}

fn responses() -> ResponsesPen {
    let kept = Kept {
        id: "resp_7_0".to_owned(),
        previous: None,
        metadata: BTreeMap::new(),
    };
    ResponsesPen::new(ResponsesAnswer::kept(author(), kept), "ops".to_owned(), run())
}

fn said(text: &str) -> Vec<News> {
    vec![
        News::Part(Part::Begins),
        News::Part(Part::Says(text.to_owned())),
        News::Part(Part::Ends(text.to_owned())),
    ]
}

fn over(status: Status, output: Option<&str>) -> News {
    let reason = if status == Status::Succeeded {
        Reason::Completed
    } else {
        Reason::Cancelled
    };
    let mut outcome = Outcome::new(status, reason);
    outcome.output = output.map(|text| serde_json::value::to_raw_value(text).unwrap());
    let usage = Usage {
        input: 3,
        output: 2,
        cached: 0,
        reasoning: 0,
    };
    News::End(End::Over(Box::new(outcome)), Some(usage))
}

fn paused() -> News {
    let wait = |n: u32| WaitId::new(&format!("wait_{n}")).unwrap();
    let pending = vec![
        Pending::Approval {
            id: "apr_1".to_owned(),
            wait: wait(1),
            tool: "deploy".to_owned(),
            arguments: "{\"region\": \"eu\"}".to_owned(),
        },
        Pending::Input {
            wait: wait(2),
            prompt: "Which one?".to_owned(),
        },
        Pending::Effect {
            activity: "act_3".to_owned(),
        },
        Pending::Word,
    ];
    News::End(End::Paused(pending), None)
}

fn data(pen: &mut dyn Pen, news: &[News]) -> (Vec<Value>, bool) {
    let mut bytes = pen.opens().to_vec();
    news.iter().for_each(|one| bytes.extend(pen.news(one)));
    let text = String::from_utf8(bytes).unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let done = text.ends_with("data: [DONE]\n\n");
    let events = lines.filter(|line| *line != "[DONE]");
    (
        events.map(|line| serde_json::from_str(line).unwrap()).collect(),
        done,
    )
}

fn whole(news: Vec<News>) -> Answer {
    let mut answer = Answer::default();
    for one in news {
        match one {
            News::Part(part) => answer.take(part),
            News::End(end, usage) => {
                answer.end = Some(end);
                answer.usage = usage;
            }
        }
    }
    answer
}

fn content(chunks: &[Value]) -> String {
    let pieces = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    pieces.collect()
}

#[test]
fn a_chat_stream_has_every_turn_and_a_whole_answer_the_last() {
    let news = || {
        let mut news = said("Let me look.");
        news.extend(said("Done."));
        news.push(over(Status::Succeeded, Some("Done.")));
        news
    };
    let (chunks, done) = data(&mut chat(), &news());
    assert!(done);
    assert_eq!(content(&chunks), "Let me look.\n\nDone.");
    let last = &chunks[chunks.len() - 2];
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 5);
    let completion = chat().whole(&whole(news())).unwrap();
    let completion: Value = serde_json::from_slice(&completion).unwrap();
    assert_eq!(completion["choices"][0]["message"]["content"], "Done.");
    assert_eq!(completion["usage"]["total_tokens"], 5);
}

#[test]
fn a_chat_pause_names_what_is_waited_for_and_where() {
    let mut news = said("Let me.");
    news.push(paused());
    let (chunks, done) = data(&mut chat(), &news);
    assert!(done);
    let streamed = content(&chunks);
    let completion = chat().whole(&whole(vec![paused()])).unwrap();
    let completion: Value = serde_json::from_slice(&completion).unwrap();
    let told = completion["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(streamed, format!("Let me.\n\n{told}"));
    for word in [
        "run_7",
        "apr_1",
        "deploy",
        "/api/v1/runs/run_7/approvals/apr_1",
        "Which one?",
        "/api/v1/runs/run_7/inputs/wait_2",
        "/api/v1/runs/run_7/activities/act_3/resolve",
        "/api/v1/runs/run_7/resume",
    ] {
        assert!(told.contains(word), "{word} in {told}");
    }
    assert_eq!(completion["choices"][0]["finish_reason"], "stop");
}

#[test]
fn an_end_that_is_none_is_an_error_in_each_form() {
    let cancelled = || over(Status::Cancelled, None);
    let (chunks, done) = data(&mut chat(), &[cancelled()]);
    assert!(!done);
    assert_eq!(chunks.last().unwrap()["error"]["code"], "run_cancelled");
    let fault = chat().whole(&whole(vec![cancelled()])).unwrap_err();
    assert_eq!(fault.status.as_u16(), 409);
    let (events, _) = data(&mut responses(), &[cancelled()]);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "run_cancelled");
    let object: Value = serde_json::from_slice(&responses().whole(&whole(vec![cancelled()]))).unwrap();
    assert_eq!(object["status"], "cancelled");
}

#[test]
fn a_response_is_the_same_streamed_and_whole() {
    let news = || {
        let mut news = said("Let me look.");
        news.extend(said("There."));
        news.push(paused());
        news
    };
    let (events, _) = data(&mut responses(), &news());
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], n, "{event}");
    }
    let streamed = &events.last().unwrap()["response"];
    let object: Value = serde_json::from_slice(&responses().whole(&whole(news()))).unwrap();
    assert_eq!(*streamed, object);
    let kinds: Vec<&str> = object["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    let message = "message";
    assert_eq!(
        kinds,
        [
            message,
            message,
            "mcp_approval_request",
            message,
            message,
            message
        ]
    );
    assert_eq!(
        object["output"][2],
        json!({"id": "apr_1", "type": "mcp_approval_request", "name": "deploy",
               "arguments": "{\"region\": \"eu\"}", "server_label": "ops"})
    );
    assert_eq!(object["output"][3]["content"][0]["text"], "Which one?");
    let open: Value = serde_json::from_slice(&responses().whole(&Answer::default())).unwrap();
    assert_eq!(
        (&open["status"], &open["output"]),
        (&json!("in_progress"), &json!([]))
    );
}

#[test]
fn a_message_that_broke_off_is_incomplete() {
    let mut news = vec![
        News::Part(Part::Begins),
        News::Part(Part::Says("ha".to_owned())),
        News::Part(Part::Broken("ha".to_owned())),
    ];
    news.extend(said("whole"));
    news.push(over(Status::Succeeded, Some("whole")));
    let (events, _) = data(&mut responses(), &news);
    let output = &events.last().unwrap()["response"]["output"];
    assert_eq!(
        (&output[0]["status"], &output[1]["status"]),
        (&json!("incomplete"), &json!("completed"))
    );
}
