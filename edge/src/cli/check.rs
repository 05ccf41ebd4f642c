//! `iop-edge check`: the same reading as at start, and nothing after it.

use std::path::Path;
use std::process::ExitCode;

use iop_edge::config::Settings;

pub(super) fn run(config: &Path) -> ExitCode {
    match Settings::load(config) {
        Ok(settings) => {
            for note in &settings.notes {
                eprintln!("{}: note: {note}", config.display());
            }
            println!("{}: ok", config.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
