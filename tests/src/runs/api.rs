//! A client of `/api/v1`.

use std::time::Duration;

use serde_json::{Value, json};

use super::Sse;
use crate::client::{Answer, Client};
use crate::eventually;

/// The statuses that end a life.
pub const TERMINAL: [&str; 5] = ["succeeded", "failed", "cancelled", "exhausted", "transferred"];
const WITHIN: Duration = Duration::from_secs(40);

/// One edge's API with one key.
#[derive(Debug, Clone)]
pub struct Api {
    pub client: Client,
}

impl Api {
    /// The same edge with another key.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        Self {
            client: self.client.with_key(key),
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.client.get(&format!("/api/v1{path}")).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.client.post(&format!("/api/v1{path}"), body).await
    }

    /// `GET` of what must be there.
    ///
    /// # Panics
    /// When it is not.
    pub async fn seen(&self, path: &str) -> Value {
        let answer = self.get(path).await;
        assert_eq!(answer.status(), 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// Every item of a list, page by page.
    ///
    /// # Panics
    /// When a page is not answered.
    pub async fn all(&self, path: &str) -> Vec<Value> {
        let mut found = Vec::new();
        let mut after = String::new();
        loop {
            let sign = if path.contains('?') { '&' } else { '?' };
            let page = self.seen(&format!("{path}{sign}limit=200{after}")).await;
            found.extend(page["data"].as_array().cloned().unwrap_or_default());
            if page["has_more"] != true {
                return found;
            }
            let next = page["next_after"].as_str().unwrap().to_owned();
            after = format!("&after={}", encode(&next));
        }
    }

    /// `POST /runs` with headers.
    pub async fn create_with(&self, body: &Value, headers: &[(&str, &str)]) -> Answer {
        let body = body.to_string();
        self.client
            .request("POST", "/api/v1/runs", headers, body.as_bytes())
            .await
    }

    /// Makes a run and gives its id.
    ///
    /// # Panics
    /// When it is not accepted.
    pub async fn run(&self, agent: &str, input: &str) -> String {
        let answer = self.post("/runs", &json!({"agent": agent, "input": input})).await;
        assert_eq!(answer.status(), 202, "{}", answer.text());
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    /// The run object.
    pub async fn seen_run(&self, run: &str) -> Value {
        self.seen(&format!("/runs/{run}")).await
    }

    /// Waits until a run has one of these statuses.
    ///
    /// # Panics
    /// When it does not within 40 s.
    pub async fn until(&self, run: &str, statuses: &[&str]) -> Value {
        eventually(&format!("{run} is {statuses:?}"), WITHIN, || async {
            let seen = self.seen_run(run).await;
            match seen["status"].as_str() {
                Some(status) if statuses.contains(&status) => Ok(seen),
                _ => Err(seen.to_string()),
            }
        })
        .await
    }

    /// Waits until a run is over.
    pub async fn over(&self, run: &str) -> Value {
        self.until(run, &TERMINAL).await
    }

    /// Waits until a run is over, and well.
    ///
    /// # Panics
    /// When it ended in another way.
    pub async fn succeeded(&self, run: &str) -> Value {
        let seen = self.over(run).await;
        assert_eq!(seen["status"], "succeeded", "{seen}");
        seen
    }

    /// Waits until a run has paused on `n` of this kind, and gives what it waits on. No worker holds it then: what
    /// kills the edge finds it waiting, whenever it comes.
    ///
    /// # Panics
    /// When it does not within 40 s.
    pub async fn waits_on(&self, run: &str, kind: &str, n: usize) -> Vec<Value> {
        eventually(&format!("{run} has paused on {n} of {kind}"), WITHIN, || async {
            let seen = self.seen_run(run).await;
            let mut on = seen["waiting_on"].as_array().cloned().unwrap_or_default();
            on.retain(|w| w["kind"] == kind);
            if on.len() == n && seen["status"] != "running" {
                Ok(on)
            } else {
                Err(seen.to_string())
            }
        })
        .await
    }

    /// A decision on an approval as `waiting_on` or a list has it.
    pub async fn decide(&self, run: &str, approval: &Value, decision: &str, id: &str) -> Answer {
        let body = json!({"decision": decision, "decision_id": id,
                          "arguments_digest": approval["arguments_digest"]});
        let approval = approval["id"].as_str().unwrap();
        self.post(&format!("/runs/{run}/approvals/{approval}"), &body)
            .await
    }

    /// Approves what a run waits for, whatever it is called.
    ///
    /// # Panics
    /// When it is not accepted.
    pub async fn approve(&self, run: &str) {
        for approval in self.waits_on(run, "approval", 1).await {
            let answer = self.decide(run, &approval, "approve", "d-1").await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
        }
    }

    /// A resume with the newest token.
    pub async fn resume(&self, run: &str) -> Answer {
        let token = self.seen_run(run).await["resume_token"].clone();
        self.post(&format!("/runs/{run}/resume"), &json!({"resume_token": token}))
            .await
    }

    /// Every stored event.
    ///
    /// # Panics
    /// When a page is not answered.
    pub async fn events(&self, run: &str) -> Vec<Value> {
        let mut found: Vec<Value> = Vec::new();
        loop {
            let after = found.last().map_or(0, |e| e["seq"].as_u64().unwrap());
            let page = self
                .seen(&format!("/runs/{run}/events?after_seq={after}&limit=200"))
                .await;
            found.extend(page["data"].as_array().cloned().unwrap_or_default());
            if page["has_more"] != true {
                return found;
            }
        }
    }

    /// The names of every stored event.
    pub async fn event_names(&self, run: &str) -> Vec<String> {
        let events = self.events(run).await;
        let names = events.iter().filter_map(|e| e["event"].as_str());
        names.map(str::to_owned).collect()
    }

    /// Follows a run from behind an event, 0 being before the first; `None`: what happens from here on.
    pub async fn stream(&self, run: &str, after: Option<u64>) -> Sse {
        let after = after.map(|seq| seq.to_string());
        let mut headers = vec![("accept", "text/event-stream")];
        headers.extend(after.as_ref().map(|seq| ("last-event-id", seq.as_str())));
        let path = format!("/api/v1/runs/{run}/events");
        let conn = self.client.start("GET", &path, &headers, b"").await.unwrap();
        Sse::of(conn).await
    }

    /// The activities of a run.
    pub async fn activities(&self, run: &str) -> Vec<Value> {
        self.all(&format!("/runs/{run}/activities")).await
    }
}

/// Percent-encoded outside what a query may hold as it is.
pub fn encode(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    let one = |b: u8| {
        if plain(b) {
            char::from(b).to_string()
        } else {
            format!("%{b:02X}")
        }
    };
    text.bytes().map(one).collect()
}

/// The ids of what a run waits on.
pub fn waiting_ids(on: &[Value]) -> Vec<String> {
    on.iter()
        .filter_map(|w| w["id"].as_str().map(str::to_owned))
        .collect()
}
