//! `iop-edge runs`: what people do with runs, over REST (design §5). The edge decides; this shows and asks.

mod client;
mod render;
mod wire;

use std::io::Write as _;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use iop_durable::record::{Status, WaitingKind};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;

use self::client::{Api, Base, CallError, id, segment};
use self::wire::{Approval, Page, Run, Step, Turn};

/// More of a run's approvals, steps or turns than anybody reads.
const ALL: u32 = 10_000;

/// Exit status of a wrong use, as clap has it.
const USAGE: u8 = 2;

#[derive(Debug, Args)]
pub(super) struct Runs {
    #[command(subcommand)]
    verb: Verb,
    /// The edge; else the variable IOP_URL, else http://127.0.0.1:8080. The variable IOP_API_KEY has the key for it.
    #[arg(long, global = true, value_parser = Base::parse)]
    url: Option<Base>,
    /// Prints what the edge answered, as JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Lists the newest runs, the newest last, or the pending approvals, the oldest first.
    Ls(Ls),
    /// Shows a run: where it stands, what it waits for, its turns and steps.
    Show {
        #[arg(value_parser = id)]
        run: String,
    },
    /// Approves the call that a run waits with, after showing it.
    Approve {
        #[command(flatten)]
        what: Decide,
        /// Other arguments for the call, a JSON object.
        #[arg(long, value_name = "JSON", value_parser = object)]
        edit: Option<Box<RawValue>>,
    },
    /// Denies the call that a run waits with, after showing it.
    Deny(Decide),
    /// Lets a run go on that failed in a way that may pass, or whose unknown effect was resolved.
    Resume {
        #[arg(value_parser = id)]
        run: String,
    },
    /// Ends a run.
    Cancel {
        #[arg(value_parser = id)]
        run: String,
        /// Kept with the run.
        #[arg(long, default_value = "cancelled from the command line")]
        reason: String,
        /// Repeats an earlier cancellation instead of making a new one.
        #[arg(long, value_name = "ID")]
        cancel_id: Option<String>,
    },
}

#[derive(Debug, Args)]
struct Ls {
    #[arg(long, value_parser = words(Status::ALL, Status::as_str))]
    status: Option<String>,
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Only runs that wait for this.
    #[arg(long, value_name = "KIND", value_parser = words(WaitingKind::ALL, WaitingKind::as_str))]
    waiting: Option<String>,
    /// Pending approvals instead of runs, with the exact calls.
    #[arg(long, conflicts_with_all = ["status", "waiting"])]
    approvals: bool,
    /// How many at most: the newest runs, or the oldest approvals.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

#[derive(Debug, Args)]
struct Decide {
    #[arg(value_parser = id)]
    run: String,
    /// Which one; may be left out while only one is pending.
    #[arg(value_parser = id)]
    approval: Option<String>,
    /// Kept with the decision.
    #[arg(long)]
    reason: Option<String>,
    /// Repeats an earlier decision instead of making a new one.
    #[arg(long, value_name = "ID")]
    decision_id: Option<String>,
}

fn words<T: Copy>(all: &[T], word: fn(T) -> &'static str) -> PossibleValuesParser {
    PossibleValuesParser::new(all.iter().map(|one| word(*one)))
}

fn object(text: &str) -> Result<Box<RawValue>, String> {
    let raw: Box<RawValue> = serde_json::from_str(text).map_err(|e| format!("is no JSON: {e}"))?;
    if raw.get().starts_with('{') {
        Ok(raw)
    } else {
        Err(String::from("must be a JSON object"))
    }
}

pub(super) fn run(runs: Runs) -> ExitCode {
    let variable = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    let url = match runs
        .url
        .map_or_else(|| Base::or_default(variable("IOP_URL").as_deref()), Ok)
    {
        Ok(url) => url,
        Err(why) => {
            eprintln!("iop-edge: IOP_URL: {why}");
            return ExitCode::from(USAGE);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let shell = Shell {
            api: Api::new(url, variable("IOP_API_KEY").as_deref())?,
            json: runs.json,
        };
        runtime.block_on(shell.run(runs.verb))
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("iop-edge: {e:#}");
            ExitCode::FAILURE
        }
    }
}

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

/// `show --json`.
#[derive(Serialize)]
struct Shown<'a> {
    run: &'a RawValue,
    turns: &'a [Box<RawValue>],
    steps: &'a [Box<RawValue>],
}

/// `ls --json`.
#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: &'a [Box<RawValue>],
    has_more: bool,
    next_after: Option<&'a str>,
}

struct Shell {
    api: Api,
    json: bool,
}

impl Shell {
    async fn run(&self, verb: Verb) -> anyhow::Result<()> {
        match verb {
            Verb::Ls(ls) => self.ls(&ls).await,
            Verb::Show { run } => self.show(&run).await,
            Verb::Approve { what, edit: None } => self.decide(&what, "approve", None).await,
            Verb::Approve { what, edit } => self.decide(&what, "edit", edit.as_deref()).await,
            Verb::Deny(what) => self.decide(&what, "deny", None).await,
            Verb::Resume { run } => self.resume(&run).await,
            Verb::Cancel {
                run,
                reason,
                cancel_id,
            } => self.cancel(&run, &reason, cancel_id.as_deref()).await,
        }
    }

    async fn ls(&self, ls: &Ls) -> anyhow::Result<()> {
        let mut query = Vec::new();
        if ls.approvals {
            query.push(("status", "pending"));
        }
        for (name, value) in [
            ("status", &ls.status),
            ("agent", &ls.agent),
            ("waiting_kind", &ls.waiting),
        ] {
            if let Some(value) = value {
                query.push((name, value));
            }
        }
        // Of approvals the one that has waited longest is first in line; of runs the newest are looked for.
        let (page, older) = if ls.approvals {
            (self.api.list("approvals", &query, ls.limit).await?, 0)
        } else {
            self.api.last("runs", &query, ls.limit).await?
        };
        if self.json {
            print_json(&List {
                object: "list",
                data: &page.data,
                has_more: page.has_more,
                next_after: page.next_after.as_deref(),
            })?;
        } else {
            let now = Timestamp::now();
            if ls.approvals {
                print(&render::approvals(&self.api.items(&page)?, now));
            } else {
                print(&render::runs(&self.api.items(&page)?, now));
            }
        }
        if older > 0 {
            eprintln!("{older} older ones are not shown: --limit {}.", ls.limit);
        }
        if page.has_more {
            eprintln!("There are newer ones: --limit {} was reached.", ls.limit);
        }
        Ok(())
    }

    async fn show(&self, run: &str) -> anyhow::Result<()> {
        let path = path(run);
        let answer = self.api.get(&path).await?;
        let turns = self.api.list(&format!("{path}/turns"), &[], ALL).await?;
        let steps = self.api.list(&format!("{path}/steps"), &[], ALL).await?;
        if self.json {
            return print_json(&Shown {
                run: self.api.read::<Box<RawValue>>(&answer)?.as_ref(),
                turns: &turns.data,
                steps: &steps.data,
            });
        }
        let run: Run = self.api.read(&answer)?;
        let turns: Vec<Turn> = self.api.items(&turns)?;
        let steps: Vec<Step> = self.api.items(&steps)?;
        print(&render::run(&run, &steps, &turns, Timestamp::now()));
        Ok(())
    }

    async fn decide(&self, what: &Decide, decision: &str, edited: Option<&RawValue>) -> anyhow::Result<()> {
        let path = path(&what.run);
        let page: Page = self.api.list(&format!("{path}/approvals"), &[], ALL).await?;
        let all: Vec<Approval> = self.api.items(&page)?;
        let approval = pick(&all, what).map_err(anyhow::Error::msg)?;
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
        let before = if answer.replayed { ", as before" } else { "" };
        print(&format!("{done}{before} (decision {decision_id})\n"));
        Ok(())
    }

    /// Sent once: the token admits one resume, so a second try could not tell its own success from somebody else's.
    async fn resume(&self, run: &str) -> anyhow::Result<()> {
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
        self.print_run(&answer)
    }

    async fn cancel(&self, run: &str, reason: &str, cancel_id: Option<&str>) -> anyhow::Result<()> {
        let cancel_id = fresh(cancel_id);
        let body = Cancel {
            cancel_id: &cancel_id,
            reason,
        };
        let asked = self.api.decide(&format!("{}/cancel", path(run)), &body).await;
        let answer = asked.map_err(|error| open(error, "--cancel-id", &cancel_id))?;
        self.print_run(&answer)
    }

    /// The run as it stands.
    fn print_run(&self, answer: &client::Answer) -> anyhow::Result<()> {
        if self.json {
            return print_lines(&answer.text());
        }
        let run: Run = self.api.read(answer)?;
        print(&render::runs(&[run], Timestamp::now()));
        Ok(())
    }
}

/// The approval that is meant, whatever its status when it was named: the edge says what is wrong with deciding it.
fn pick<'a>(all: &'a [Approval], what: &Decide) -> Result<&'a Approval, String> {
    let run = render::plain(&what.run);
    if let Some(named) = &what.approval {
        let found = all.iter().find(|approval| approval.id == *named);
        return found.ok_or_else(|| {
            format!(
                "approval_not_found: run {run} has no approval {}",
                render::plain(named)
            )
        });
    }
    let repeated =
        |approval: &&Approval| what.decision_id.is_some() && approval.decision_id == what.decision_id;
    if let Some(decided) = all.iter().find(repeated) {
        return Ok(decided);
    }
    let pending: Vec<&Approval> = all.iter().filter(|approval| approval.is_pending()).collect();
    match *pending {
        [] => Err(format!(
            "run_not_waiting: no call of run {run} waits for an approval"
        )),
        [one] => Ok(one),
        _ => {
            let calls: Vec<String> = pending
                .iter()
                .map(|approval| {
                    let arguments = approval
                        .arguments
                        .as_deref()
                        .map_or_else(String::new, render::json);
                    format!(
                        "\n  {} {} {arguments}",
                        render::plain(&approval.id),
                        render::plain(&approval.tool)
                    )
                })
                .collect();
            Err(format!(
                "run {run} waits with {} calls: name the approval that is meant:{}",
                pending.len(),
                calls.concat()
            ))
        }
    }
}

/// How to ask again when it is not known whether something was done.
fn open(error: CallError, option: &str, id: &str) -> anyhow::Error {
    if error.is_open() {
        anyhow::anyhow!("{error}\nWhether it was done is not known. The same again, safely: {option} {id}")
    } else {
        error.into()
    }
}

fn path(run: &str) -> String {
    format!("runs/{}", segment(run))
}

fn fresh(given: Option<&str>) -> String {
    given.map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print_lines(&serde_json::to_string(value)?)
}

fn print_lines(text: &str) -> anyhow::Result<()> {
    print(&format!("{}\n", text.trim_end()));
    Ok(())
}

fn print(text: &str) {
    // Whoever reads may have closed its end; what was asked for is done all the same.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests;
