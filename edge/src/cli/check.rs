//! `iop-edge check`: the same reading as at start, and nothing after it.

use std::path::Path;
use std::process::ExitCode;

use super::DEFAULT_FILE;

pub(super) fn run(config: Option<&Path>) -> ExitCode {
    let chosen = match super::chosen(config) {
        Ok(chosen) => chosen,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    match chosen.settings() {
        Ok(settings) => {
            for note in &settings.notes {
                eprintln!("{}: note: {note}", chosen.file);
            }
            if chosen.is_demo {
                println!("there is no {DEFAULT_FILE} here: the demonstration would start: ok");
            } else {
                println!("{}: ok", chosen.file);
            }
            ExitCode::SUCCESS
        }
        Err(refused) => {
            eprintln!("{refused}");
            ExitCode::FAILURE
        }
    }
}
