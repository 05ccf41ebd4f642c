//! A provider that does for each attempt what a script says.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::answers::{Answers, Api, Events};
use super::script::{Act, Script, Then, WORDS};
use crate::fixtures;
use crate::provider::{Exchange, Stub};

#[derive(Default)]
struct Desk {
    scripts: BTreeMap<String, Script>,
    attempts: BTreeMap<String, usize>,
    /// Requests for something else than a scripted target.
    strays: Vec<String>,
}

/// A running provider. `GET /v1/models` names its targets, whatever else it does.
pub struct Faulty {
    pub name: String,
    pub stub: Stub,
    desk: Arc<Mutex<Desk>>,
}

impl Faulty {
    /// Starts it without a target.
    pub async fn start(name: &str) -> Self {
        let desk = Arc::new(Mutex::new(Desk::default()));
        let stub = Stub::start({
            let (desk, name) = (Arc::clone(&desk), name.to_owned());
            move |ex| serve(ex, name.clone(), Arc::clone(&desk))
        })
        .await;
        Self {
            name: name.to_owned(),
            stub,
            desk,
        }
    }

    /// What attempts on this target meet from now on; the count of attempts goes on.
    pub fn script(&self, target: &str, script: Script) {
        self.desk.lock().scripts.insert(target.to_owned(), script);
    }

    /// Attempts on this target so far.
    pub fn attempts(&self, target: &str) -> usize {
        self.desk.lock().attempts.get(target).copied().unwrap_or(0)
    }

    /// Attempts on all targets so far.
    pub fn all_attempts(&self) -> usize {
        self.desk.lock().attempts.values().sum()
    }

    /// Requests that asked for nothing that this provider was told of.
    pub fn strays(&self) -> Vec<String> {
        self.desk.lock().strays.clone()
    }

    /// The good answers to a target.
    pub fn answers(&self, api: Api, target: &str) -> Answers {
        Answers {
            api,
            provider: self.name.clone(),
            target: target.to_owned(),
        }
    }
}

async fn serve(mut ex: Exchange, name: String, desk: Arc<Mutex<Desk>>) -> io::Result<()> {
    if ex.method == "GET" && ex.path == "/v1/models" {
        let targets: Vec<Value> = {
            let desk = desk.lock();
            let model = |t: &String| json!({"id": t, "object": "model", "created": 1, "owned_by": "x"});
            desk.scripts.keys().map(model).collect()
        };
        return ex
            .json_reply(200, &json!({"object": "list", "data": targets}))
            .await;
    }
    let body = ex.json();
    let target = body["model"].as_str().unwrap_or_default().to_owned();
    let act = {
        let mut desk = desk.lock();
        let attempt = desk.attempts.get(&target).copied().unwrap_or(0);
        desk.scripts.get(&target).map(|s| s.act(attempt)).inspect(|_| {
            desk.attempts.insert(target.clone(), attempt + 1);
        })
    };
    let (Some(act), Some(api)) = (act, Api::of_path(&ex.path)) else {
        desk.lock()
            .strays
            .push(format!("{} {} {body}", ex.method, ex.path));
        return ex.json_reply(404, &json!({"error": {"message": "stray"}})).await;
    };
    let answers = Answers {
        api,
        provider: name,
        target,
    };
    Answering {
        ex,
        stream: body["stream"] == true,
        answers,
    }
    .play(act)
    .await
}

/// One attempt being answered.
struct Answering {
    ex: Exchange,
    stream: bool,
    answers: Answers,
}

impl Answering {
    async fn play(mut self, act: Act) -> io::Result<()> {
        match act {
            Act::After(later, act) => {
                self.ex.until(tokio::time::sleep(later)).await?;
                Box::pin(self.play(*act)).await
            }
            Act::Good if !self.stream => {
                let body = self.answers.whole();
                let marks = self.marks();
                let headers = headers(&marks, Some("application/json"));
                self.ex.reply(200, &headers, &body).await
            }
            Act::Good => {
                self.head().await?;
                for event in self.answers.stream(WORDS).all() {
                    self.ex.chunk(&event).await?;
                }
                self.ex.end().await
            }
            Act::Status(reply) => {
                let marks = self.marks();
                let mut all = headers(&marks, None);
                all.extend(reply.headers.iter().map(|(k, v)| (k.as_str(), v.as_str())));
                let body = reply.body_of(&self.answers.provider);
                self.ex.reply(reply.status, &all, body.as_bytes()).await
            }
            Act::StatusThen(status, then) => {
                let marks = self.marks();
                let headers = headers(&marks, Some("application/json"));
                self.ex.head(status, &headers).await?;
                self.then(then, 0).await
            }
            Act::Reset => {
                self.ex.cut(true);
                Ok(())
            }
            Act::HangUp => {
                self.ex.cut(false);
                Ok(())
            }
            Act::Silence => {
                self.ex.gone().await;
                Ok(())
            }
            Act::Head(then) => {
                self.head().await?;
                self.then(then, 0).await
            }
            Act::Preamble(then) => {
                let sent = self.preamble(then).await?;
                self.then(then, sent).await
            }
            Act::Large(then) => {
                self.head().await?;
                let large = large(&self.answers, self.stream);
                self.ex.chunk(&large).await?;
                self.then(then, 1).await
            }
            Act::Content(n, then) => {
                let sent = self.preamble(then).await?;
                let content = self.answers.stream(WORDS).content;
                for event in &content[..n] {
                    self.ex.chunk(event).await?;
                }
                self.then(then, sent + n).await
            }
            Act::Malformed(n) => {
                self.head().await?;
                for event in malformed(&self.answers, n) {
                    self.ex.chunk(&event).await?;
                }
                self.ex.end().await
            }
            Act::NoTerminal => {
                self.head().await?;
                let Events {
                    preamble,
                    content,
                    finish,
                    ..
                } = self.answers.stream(WORDS);
                for event in preamble.iter().chain(&content).chain(&finish) {
                    self.ex.chunk(event).await?;
                }
                self.ex.end().await
            }
            Act::Comments(interval) => {
                self.head().await?;
                let nothing: &[u8] = if self.stream { b": ping\n\n" } else { b" " };
                let mut pace = tokio::time::interval(interval);
                loop {
                    self.ex.until(pace.tick()).await?;
                    self.ex.chunk(nothing).await?;
                }
            }
            Act::Paced { first, .. } if !self.stream => {
                self.ex.until(tokio::time::sleep(first)).await?;
                let (body, marks) = (self.answers.whole(), self.marks());
                let headers = headers(&marks, Some("application/json"));
                self.ex.reply(200, &headers, &body).await
            }
            Act::Paced { words, first, gap } => {
                self.head().await?;
                let events = self.answers.stream(words);
                for event in &events.preamble {
                    self.ex.chunk(event).await?;
                }
                self.ex.until(tokio::time::sleep(first)).await?;
                for event in &events.content {
                    self.ex.chunk(event).await?;
                    self.ex.until(tokio::time::sleep(gap)).await?;
                }
                for event in events.finish.iter().chain(&events.terminal) {
                    self.ex.chunk(event).await?;
                }
                self.ex.end().await
            }
        }
    }

    /// Headers in which the provider's name stands.
    fn marks(&self) -> Vec<(String, String)> {
        let name = &self.answers.provider;
        vec![
            ("x-request-id".to_owned(), format!("req-{name}")),
            ("x-provider".to_owned(), name.clone()),
            ("openai-version".to_owned(), format!("of-{name}")),
        ]
    }

    async fn head(&mut self) -> io::Result<()> {
        let media = if self.stream {
            "text/event-stream"
        } else {
            "application/json"
        };
        let marks = self.marks();
        self.ex.head(200, &headers(&marks, Some(media))).await
    }

    /// Sends what comes before content; the value is how many events that were.
    async fn preamble(&mut self, then: Then) -> io::Result<usize> {
        self.head().await?;
        if self.stream {
            let preamble = self.answers.stream(WORDS).preamble;
            for event in &preamble {
                self.ex.chunk(event).await?;
            }
            return Ok(preamble.len());
        }
        if !matches!(then, Then::Error | Then::Failed) {
            let body = self.answers.whole();
            self.ex.chunk(&body[..body.len() / 2]).await?;
        }
        Ok(0)
    }

    /// `sent` events came before.
    async fn then(&mut self, then: Then, sent: usize) -> io::Result<()> {
        match then {
            Then::Silence => {
                self.ex.gone().await;
                Ok(())
            }
            Then::Cut => {
                self.ex.cut(false);
                Ok(())
            }
            Then::End => self.ex.end().await,
            Then::Error | Then::Failed => {
                let error = error_event(&self.answers, self.stream, then, sent);
                self.ex.chunk(&error).await?;
                self.ex.end().await
            }
        }
    }
}

/// What [`Act::Large`] sends: one event of a preamble, or the beginning of a whole answer, of more than 512 KiB.
pub fn large(answers: &Answers, stream: bool) -> Vec<u8> {
    let padding = "x".repeat(512 * 1024);
    if !stream {
        let mut body = answers.whole();
        body.pop();
        body.extend_from_slice(format!(",\"padding\":\"{padding}").as_bytes());
        return body;
    }
    // The object that the event is made of gets one more member at its end.
    let mut event = answers.stream(1).preamble.swap_remove(0);
    event.truncate(event.len() - b"}\n\n".len());
    event.extend_from_slice(format!(",\"padding\":\"{padding}\"}}\n\n").as_bytes());
    event
}

/// The stream of [`Act::Malformed`] in its events.
pub fn malformed(answers: &Answers, n: usize) -> Vec<Vec<u8>> {
    let mut events = answers.stream(WORDS);
    events.content[n] = match answers.api {
        Api::Chat => b"data: {this is no json\n\n".to_vec(),
        Api::Responses => b"event: response.output_text.delta\ndata: {this is no json\n\n".to_vec(),
    };
    events.all()
}

/// An error of the provider inside its 200.
fn error_event(answers: &Answers, stream: bool, then: Then, number: usize) -> Vec<u8> {
    let message = format!("in band of {}", answers.provider);
    let error = json!({"message": message, "type": "server_error", "param": null, "code": "server_error"});
    match (stream, answers.api, then) {
        (false, ..) => json!({"error": error}).to_string().into_bytes(),
        (true, Api::Chat, _) => format!("data: {}\n\n", json!({"error": error})).into_bytes(),
        (true, Api::Responses, Then::Failed) => {
            let mut response =
                fixtures::response_object(&answers.id(), &answers.target, "failed", &json!([]));
            response["error"] = json!({"code": "server_error", "message": message});
            fixtures::named_event(
                &json!({"type": "response.failed", "sequence_number": number, "response": response}),
            )
        }
        (true, Api::Responses, _) => fixtures::named_event(
            &json!({"type": "error", "sequence_number": number, "code": "server_error",
                    "message": message, "param": null}),
        ),
    }
}

fn headers<'a>(marks: &'a [(String, String)], media: Option<&'a str>) -> Vec<(&'a str, &'a str)> {
    let mut all: Vec<(&str, &str)> = marks.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    all.extend(media.map(|m| ("content-type", m)));
    all
}
