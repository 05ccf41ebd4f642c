//! `iop-edge db`: what people do to the database that the configuration names (durable-api §9).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use iop_durable::store::sqlite::path_of;
use iop_durable::store::{migrate, upkeep};
use iop_edge::config::StoreUrl;

use super::{Chosen, DEFAULT_FILE};

#[derive(Debug, Args)]
pub(super) struct Db {
    #[command(subcommand)]
    verb: Verb,
    /// The configuration whose `store.url` is meant; without it ./edge.toml, else the demonstration's.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Brings the database to the schema of this program, and makes a SQLite file that is not there. Stop every edge that uses it before.
    Migrate,
    /// Copies a SQLite database into a file that is not there yet; edges may run meanwhile.
    Backup { file: PathBuf },
    /// Looks at every run, derives the indexes anew and sets aside what is corrupt. On SQLite no edge may run meanwhile.
    RebuildIndex,
}

pub(super) fn run(db: &Db) -> ExitCode {
    let chosen = super::chosen(db.config.as_deref());
    let (chosen, store) = match chosen.and_then(|it| StoreUrl::parse(&it.file, &it.text).map(|url| (it, url)))
    {
        Ok(both) => both,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let url = match &store {
        StoreUrl::Sqlite(url) | StoreUrl::Postgres(url) => url,
        StoreUrl::Memory => {
            eprintln!("iop-edge: store.url is memory://: there is no database");
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(work(&db.verb, url, &chosen)));
    match done {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("iop-edge: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// # Errors
/// The file of a SQLite database is not there.
fn is_there(url: &str, chosen: &Chosen) -> anyhow::Result<()> {
    let Some(file) = path_of(url).filter(|file| !file.exists()) else {
        return Ok(());
    };
    let file = std::path::absolute(&file).unwrap_or(file);
    let of = if chosen.is_demo {
        format!("the demonstration, since there is no {DEFAULT_FILE} here")
    } else {
        chosen.file.clone()
    };
    anyhow::bail!("there is no database {} (store.url of {of})", file.display())
}

/// What was done, in a line. The URL may hold a password and is not repeated.
async fn work(verb: &Verb, url: &str, chosen: &Chosen) -> anyhow::Result<String> {
    Ok(match verb {
        Verb::Migrate => {
            let file = path_of(url);
            let absent = file.as_deref().filter(|file| !file.exists());
            migrate::migrate(url).await?;
            match absent {
                // A slip in the URL is told from an upgrade by this word.
                Some(file) => format!("{}: created, with the schema of this program", file.display()),
                None => String::from("the database has the schema of this program"),
            }
        }
        Verb::Backup { file } => {
            is_there(url, chosen)?;
            upkeep::backup(url, file).await?;
            format!("{}: written", file.display())
        }
        Verb::RebuildIndex => {
            is_there(url, chosen)?;
            let rebuilt = upkeep::rebuild_index(url).await?;
            format!(
                "{} runs looked at, {} repaired, {} set aside as corrupt",
                rebuilt.runs, rebuilt.repaired, rebuilt.quarantined
            )
        }
    })
}
