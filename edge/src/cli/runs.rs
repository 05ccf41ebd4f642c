//! `iop-edge runs`: what people do with runs, over REST (design §5). The edge decides; this shows and asks.

mod act;
mod client;
mod look;
mod pick;
mod render;
mod wire;

use std::io::Write as _;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args, Subcommand};
use iop_durable::record::{Status, WaitingKind};
use serde::Serialize;
use serde_json::value::RawValue;

use self::client::{Api, Base, id, segment};

/// More of a run's approvals, calls, steps or turns than anybody reads.
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
    /// Shows a run: where it stands, what it waits for, what was decided, its turns, calls and steps.
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
    /// Answers what a run asks a person, after showing it.
    #[command(after_help = ANSWER)]
    Answer(Reply),
    /// Asks the service of a call of unknown effect whether it was carried out, as its tool declares.
    #[command(after_help = RECONCILE)]
    Reconcile(Effect),
    /// Says what became of a call of unknown effect, after showing it. For who has looked.
    #[command(after_help = RESOLVE)]
    Resolve(Resolve),
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

/// An answer to an input.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("said").required(true).args(["text", "value"]))]
struct Reply {
    #[arg(value_parser = id)]
    run: String,
    /// Which one; may be left out while the run asks one thing only.
    #[arg(value_parser = id)]
    input: Option<String>,
    /// The answer, a text.
    #[arg(long, value_parser = text)]
    text: Option<Box<RawValue>>,
    /// The answer, any JSON.
    #[arg(long, value_name = "JSON", value_parser = json)]
    value: Option<Box<RawValue>>,
    /// Repeats an earlier answer to INPUT instead of making a new one.
    #[arg(long, value_name = "ID", requires = "input")]
    decision_id: Option<String>,
}

impl Reply {
    fn said(&self) -> Option<&RawValue> {
        self.text.as_deref().or(self.value.as_deref())
    }
}

/// A call of unknown effect.
#[derive(Debug, Args)]
struct Effect {
    #[arg(value_parser = id)]
    run: String,
    /// Which one; may be left out while there is one only.
    #[arg(value_parser = id)]
    activity: Option<String>,
}

#[derive(Debug, Args)]
struct Resolve {
    #[command(flatten)]
    effect: Effect,
    /// complete: it was carried out and gave OUTPUT; fail: it was not, and the model is told so; retry: it is made again.
    #[arg(long, value_parser = PossibleValuesParser::new(["complete", "fail", "retry"]))]
    action: String,
    /// What the call gave, with complete: any JSON; a text stands in quotes of its own.
    #[arg(long, value_name = "JSON", value_parser = json, required_if_eq("action", "complete"))]
    output: Option<Box<RawValue>>,
    /// Why; kept with the decision, and with fail told to the model.
    #[arg(long)]
    reason: String,
    /// What it rests on, such as a ticket or an entry of a log; kept with the decision.
    #[arg(long)]
    evidence: String,
    /// Lets the run go on at once; else it waits for its resume.
    #[arg(long)]
    resume: bool,
    /// Repeats an earlier decision instead of making a new one.
    #[arg(long, value_name = "ID")]
    decision_id: Option<String>,
}

const ANSWER: &str = "\
Examples:
  iop-edge runs answer run_1 --text \"the blue one\"
  iop-edge runs answer run_1 wait_5 --value '{\"size\": 3}'";

const RECONCILE: &str = "\
Example:
  iop-edge runs reconcile run_1";

const RESOLVE: &str = "\
Examples:
  iop-edge runs resolve run_1 --action complete --output '{\"id\": \"d-7\"}' --reason \"it is there\" --evidence \"ticket 7\" --resume
  iop-edge runs resolve run_1 act_5 --action retry --reason \"the service was down\" --evidence \"its log\"";

fn words<T: Copy>(all: &[T], word: fn(T) -> &'static str) -> PossibleValuesParser {
    PossibleValuesParser::new(all.iter().map(|one| word(*one)))
}

fn json(text: &str) -> Result<Box<RawValue>, String> {
    serde_json::from_str(text)
        .map_err(|e| format!("is no JSON: {e}; a text needs quotes of its own: '\"…\"'"))
}

fn text(text: &str) -> Result<Box<RawValue>, String> {
    serde_json::value::to_raw_value(text).map_err(|e| e.to_string())
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
            Verb::Answer(what) => self.answer(&what).await,
            Verb::Reconcile(Effect { run, activity }) => self.reconcile(&run, activity.as_deref()).await,
            Verb::Resolve(what) => self.resolve(&what).await,
            Verb::Resume { run } => self.resume(&run).await,
            Verb::Cancel {
                run,
                reason,
                cancel_id,
            } => self.cancel(&run, &reason, cancel_id.as_deref()).await,
        }
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
