//! The command line (design §5): what was asked for, and which configuration is meant. Exit 0 done, 1 refused, 2 usage.

mod check;
mod db;
mod keys;
mod runs;
mod serve;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use iop_edge::config::{self, DEMO, Refused, Settings, World};
use iop_shared::config::ConfigError;

/// Read when `--config` is not given and it is there.
const DEFAULT_FILE: &str = "edge.toml";

/// One URL in front of every model: OpenAI's API for clients, nodes that dial in behind it.
///
/// Without a command it serves: the file given, else ./edge.toml, else a demonstration with scripted models.
#[derive(Debug, Parser)]
#[command(name = "iop-edge", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Says whether a configuration would start, without starting anything; which one, as without a command.
    Check {
        /// The configuration.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Makes API keys.
    #[command(subcommand)]
    Keys(keys::Keys),
    /// Keeps the database of runs in order.
    Db(db::Db),
    /// Looks at runs and decides what they wait for, at a running edge.
    Runs(runs::Runs),
}

/// Does what the command line says.
pub(crate) fn run() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Some(Command::Check { config }) => check::run(config.as_deref()),
        Some(Command::Keys(keys)) => keys::run(&keys),
        Some(Command::Db(db)) => db::run(&db),
        Some(Command::Runs(runs)) => runs::run(runs),
        None => serve::run(cli.config.as_deref()),
    }
}

/// A configuration.
struct Chosen {
    /// What its errors call it.
    file: String,
    text: String,
    is_demo: bool,
}

/// The configuration that is meant: the file given, else ./edge.toml, else the demonstration's.
fn chosen(config: Option<&Path>) -> Result<Chosen, ConfigError> {
    let default = Path::new(DEFAULT_FILE);
    Ok(match config.or_else(|| default.exists().then_some(default)) {
        Some(path) => Chosen {
            file: path.display().to_string(),
            text: config::read(path)?,
            is_demo: false,
        },
        None => Chosen {
            file: String::from("demo.toml"),
            text: DEMO.to_owned(),
            is_demo: true,
        },
    })
}

impl Chosen {
    /// Its settings, with every reference followed.
    fn settings(&self) -> Result<Settings, Refused> {
        Settings::parse(&self.file, &self.text, &World::real())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
        let parse = |args: &[&str]| Cli::try_parse_from(std::iter::once(&"iop-edge").chain(args));
        assert!(parse(&[]).is_ok_and(|c| c.config.is_none() && c.command.is_none()));
        assert!(parse(&["--config", "a"]).is_ok_and(|c| c.config.as_deref() == Some(Path::new("a"))));
        assert!(parse(&["check"]).is_ok());
        assert!(parse(&["check", "--config", "a"]).is_ok());
        assert!(parse(&["keys", "new", "ci", "--roles", "inference,metrics"]).is_ok());
        assert!(parse(&["db", "migrate", "--config", "a"]).is_ok());
        assert!(parse(&["db", "--config", "a", "backup", "copy.db"]).is_ok());
        assert!(parse(&["db", "rebuild-index"]).is_ok());
        for runs in [
            &[
                "ls",
                "--status",
                "waiting",
                "--agent",
                "a",
                "--waiting",
                "approval",
                "--limit",
                "3",
            ][..],
            &["ls", "--approvals", "--json"],
            &["--url", "https://edge", "show", "run_1"],
            &["approve", "run_1"],
            &[
                "approve",
                "run_1",
                "apr_1",
                "--edit",
                "{\"n\": 1}",
                "--reason",
                "less",
                "--decision-id",
                "d",
            ],
            &["deny", "run_1", "--reason", "no", "--url", "https://edge"],
            &["answer", "run_1", "--text", "blue"],
            &[
                "answer",
                "run_1",
                "wait_1",
                "--value",
                "[1]",
                "--decision-id",
                "d",
            ],
            &["reconcile", "run_1"],
            &["reconcile", "run_1", "act_1"],
            &[
                "resolve",
                "run_1",
                "--action",
                "fail",
                "--reason",
                "r",
                "--evidence",
                "e",
            ],
            &[
                "resolve",
                "run_1",
                "act_1",
                "--action",
                "complete",
                "--output",
                "\"done\"",
                "--reason",
                "r",
                "--evidence",
                "e",
                "--resume",
                "--decision-id",
                "d",
            ],
            &["resume", "run_1"],
            &["cancel", "run_1", "--reason", "enough", "--cancel-id", "c"],
        ] {
            let all: Vec<&str> = std::iter::once("runs").chain(runs.iter().copied()).collect();
            assert!(parse(&all).is_ok(), "{runs:?}");
        }
        for bad in [
            &["runs"][..],
            &["db"],
            &["db", "backup"],
            &["db", "migrate", "now"],
            &["runs", "ls", "--status", "idle"],
            &["runs", "ls", "--limit", "0"],
            &["runs", "ls", "--approvals", "--waiting", "input"],
            &["runs", "show"],
            &["runs", "show", ".."],
            &["runs", "ls", "--url", "edge:8080"],
            &["runs", "approve", "run_1", "--edit", "[1]"],
            &["runs", "approve", "run_1", "--edit", "{"],
            &["runs", "deny", "run_1", "--edit", "{}"],
            &["runs", "answer", "run_1"],
            &["runs", "answer", "run_1", "--text", "a", "--value", "1"],
            &["runs", "answer", "run_1", "--value", "blue"],
            &["runs", "answer", "run_1", "--text", "a", "--decision-id", "d"],
            &[
                "runs",
                "resolve",
                "run_1",
                "--action",
                "undo",
                "--reason",
                "r",
                "--evidence",
                "e",
            ],
            &["runs", "resolve", "run_1", "--action", "fail", "--reason", "r"],
            &[
                "runs",
                "resolve",
                "run_1",
                "--action",
                "complete",
                "--reason",
                "r",
                "--evidence",
                "e",
            ],
            &["keys"],
            &["keys", "new"],
            &["keys", "new", "a b"],
            &["keys", "new", "a", "--roles", "king"],
            &["--port", "1"],
        ] {
            let e = parse(bad).unwrap_err();
            assert!(
                e.exit_code() == 2 || e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
                "{bad:?}"
            );
        }
    }
}
