//! What people decide about a run: each shows what it is about, sends one request, and says what came of it.

use iop_durable::record::Status;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;

use super::client::{Answer, CallError, segment};
use super::wire::{Activity, Approval, Run};
use super::{ALL, Decide, Reply, Resolve, Shell, fresh, path, pick, print, print_lines, render};

/// Body of a decision.
#[derive(Serialize)]
struct Decision<'a> {
    decision: &'a str,
    decision_id: &'a str,
    arguments_digest: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    edited_arguments: Option<&'a RawValue>,
}

/// Body of an answer to a question.
#[derive(Serialize)]
struct Input<'a> {
    value: &'a RawValue,
    decision_id: &'a str,
}

/// Body of a resolution.
#[derive(Serialize)]
struct Resolution<'a> {
    action: &'a str,
    decision_id: &'a str,
    input_digest: &'a str,
    attempt: u64,
    reason: &'a str,
    evidence: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<&'a RawValue>,
    resume: bool,
}

/// Body of a cancellation.
#[derive(Serialize)]
struct Cancel<'a> {
    cancel_id: &'a str,
    reason: &'a str,
}

/// Body of a resume.
#[derive(Serialize)]
struct Resume<'a> {
    resume_token: &'a str,
}

/// A body without members.
#[derive(Serialize)]
struct Nothing {}

impl Shell {
    pub(super) async fn decide(
        &self,
        what: &Decide,
        decision: &str,
        edited: Option<&RawValue>,
    ) -> anyhow::Result<()> {
        let path = path(&what.run);
        let page = self.api.list(&format!("{path}/approvals"), &[], ALL).await?;
        let all: Vec<Approval> = self.api.items(&page)?;
        let approval = pick::approval(&all, what).map_err(anyhow::Error::msg)?;
        if !self.json {
            print(&render::call(approval));
            if let Some(edited) = edited {
                print(&format!("instead   {}\n", render::json(edited)));
            }
        }
        let decision_id = fresh(what.decision_id.as_deref());
        let body = Decision {
            decision,
            decision_id: &decision_id,
            arguments_digest: &approval.arguments_digest,
            reason: what.reason.as_deref(),
            edited_arguments: edited,
        };
        let asked = self
            .api
            .decide(&format!("{path}/approvals/{}", segment(&approval.id)), &body)
            .await;
        let answer = asked.map_err(|error| open(error, "--decision-id", &decision_id))?;
        if self.json {
            return print_lines(&answer.text());
        }
        let done = match decision {
            "deny" => "denied",
            "edit" => "approved with other arguments",
            _ => "approved",
        };
        print(&format!("{done}{} (decision {decision_id})\n", before(&answer)));
        Ok(())
    }

    pub(super) async fn answer(&self, what: &Reply) -> anyhow::Result<()> {
        let path = path(&what.run);
        let found: Run = self.api.read(&self.api.get(&path).await?)?;
        let (input, asked) = pick::input(&found, what.input.as_deref()).map_err(anyhow::Error::msg)?;
        if let Some(asked) = asked.filter(|_| !self.json) {
            print(&render::question(&found, asked, Timestamp::now()));
        }
        let decision_id = fresh(what.decision_id.as_deref());
        let Some(value) = what.said() else {
            anyhow::bail!("neither --text nor --value was given");
        };
        let body = Input {
            value,
            decision_id: &decision_id,
        };
        let sent = self
            .api
            .decide(&format!("{path}/inputs/{}", segment(input)), &body)
            .await;
        let answer = sent.map_err(|error| {
            open(
                error,
                &format!("{} --decision-id", render::plain(input)),
                &decision_id,
            )
        })?;
        if self.json {
            return print_lines(&answer.text());
        }
        print(&format!("answered{} (decision {decision_id})\n", before(&answer)));
        Ok(())
    }

    pub(super) async fn resolve(&self, what: &Resolve) -> anyhow::Result<()> {
        let (run, path) = (&what.effect.run, path(&what.effect.run));
        let all = self.effects(&path).await?;
        let named = what.effect.activity.as_deref();
        let repeated = what.decision_id.as_deref();
        let found = pick::effect(&all, run, named, repeated).map_err(anyhow::Error::msg)?;
        if !self.json {
            print(&render::effect(found));
        }
        let decision_id = fresh(repeated);
        let body = Resolution {
            action: &what.action,
            decision_id: &decision_id,
            input_digest: &found.input_digest,
            attempt: found.attempt_of(repeated),
            reason: &what.reason,
            evidence: &what.evidence,
            output: what.output.as_deref(),
            resume: what.resume,
        };
        let sent = self
            .api
            .decide(
                &format!("{path}/activities/{}/resolve", segment(&found.id)),
                &body,
            )
            .await;
        let answer = sent.map_err(|error| open(error, "--decision-id", &decision_id))?;
        if self.json {
            return print_lines(&answer.text());
        }
        print(&format!(
            "resolved: {}{} (decision {decision_id})\n",
            what.action,
            before(&answer)
        ));
        self.print_stand(&path).await;
        Ok(())
    }

    /// A question to the callee: asked twice it is answered twice.
    pub(super) async fn reconcile(&self, run: &str, activity: Option<&str>) -> anyhow::Result<()> {
        let path = path(run);
        let all = self.effects(&path).await?;
        let found = pick::effect(&all, run, activity, None).map_err(anyhow::Error::msg)?;
        if !self.json {
            print(&render::effect(found));
        }
        let url = format!("{path}/activities/{}/reconcile", segment(&found.id));
        let answer = self.api.decide(&url, &Nothing {}).await?;
        if self.json {
            return print_lines(&answer.text());
        }
        let now: Activity = self.api.read(&answer)?;
        if now.is_unknown() {
            print("nothing was found: the effect is as unknown as before\n");
        } else {
            print(&format!(
                "reconciled{}: {}\n",
                before(&answer),
                render::state(&now)
            ));
        }
        self.print_stand(&path).await;
        Ok(())
    }

    async fn effects(&self, path: &str) -> anyhow::Result<Vec<Activity>> {
        let page = self.api.list(&format!("{path}/activities"), &[], ALL).await?;
        Ok(self.api.items(&page)?)
    }

    /// Sent once: the token admits one resume, so a second try could not tell its own success from somebody else's.
    pub(super) async fn resume(&self, run: &str) -> anyhow::Result<()> {
        let path = path(run);
        let answer = self.api.get(&path).await?;
        let found: Run = self.api.read(&answer)?;
        let Some(token) = &found.resume_token else {
            anyhow::bail!("run {run} has no resume token: {}", render::status(&found));
        };
        let asked = self
            .api
            .post(&format!("{path}/resume"), &Resume { resume_token: token })
            .await;
        let answer = asked.map_err(|error| {
            if error.is_open() {
                anyhow::anyhow!("{error}\nWhether it was resumed is not known: iop-edge runs show {run}")
            } else {
                error.into()
            }
        })?;
        if self.json {
            return print_lines(&answer.text());
        }
        let run: Run = self.api.read(&answer)?;
        print(&render::runs(&[run], Timestamp::now()));
        Ok(())
    }

    pub(super) async fn cancel(
        &self,
        run: &str,
        reason: &str,
        cancel_id: Option<&str>,
    ) -> anyhow::Result<()> {
        let cancel_id = fresh(cancel_id);
        let body = Cancel {
            cancel_id: &cancel_id,
            reason,
        };
        let asked = self.api.decide(&format!("{}/cancel", path(run)), &body).await;
        let answer = asked.map_err(|error| open(error, "--cancel-id", &cancel_id))?;
        if self.json {
            return print_lines(&answer.text());
        }
        let found: Run = self.api.read(&answer)?;
        let mut text = render::runs(std::slice::from_ref(&found), Timestamp::now());
        match Status::parse(&found.status) {
            Some(Status::Cancelled) => text.push_str(&render::end("outcome", &found)),
            Some(status) if status.is_terminal() => {
                text.push_str(&render::end("not cancelled, it was over before", &found));
            }
            Some(_) | None => {
                text.push_str(
                    "\nIts end was asked for; it is not over yet: what it waits for comes first.\n",
                );
            }
        }
        print(&text);
        Ok(())
    }

    /// Where the run is after what was decided. That is done, whether this can be told or not.
    async fn print_stand(&self, path: &str) {
        if let Ok(answer) = self.api.get(path).await
            && let Ok(run) = self.api.read::<Run>(&answer)
        {
            print(&render::runs(&[run], Timestamp::now()));
        }
    }
}

fn before(answer: &Answer) -> &'static str {
    if answer.replayed { ", as before" } else { "" }
}

/// How to ask again when it is not known whether something was done.
fn open(error: CallError, option: &str, id: &str) -> anyhow::Error {
    if error.is_open() {
        anyhow::anyhow!("{error}\nWhether it was done is not known. The same again, safely: {option} {id}")
    } else {
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::object;
    use super::*;

    #[test]
    fn edited_arguments_are_sent_as_they_were_typed() {
        let typed = r#"{"amount": 10000000000000000000.10, "a": 1, "a": 2}"#;
        let edited = object(typed).unwrap();
        let body = Decision {
            decision: "edit",
            decision_id: "d",
            arguments_digest: "sha256:0",
            reason: None,
            edited_arguments: Some(&edited),
        };
        assert_eq!(
            serde_json::to_string(&body).unwrap(),
            format!(
                r#"{{"decision":"edit","decision_id":"d","arguments_digest":"sha256:0","edited_arguments":{typed}}}"#
            )
        );
        for bad in ["[]", "\"{}\"", "{", "{} {}", ""] {
            assert!(object(bad).is_err(), "{bad}");
        }
    }
}
