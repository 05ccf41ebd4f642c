//! `edge.toml`: strict parsing, validation, and the runtime settings made of it (design §4).
//!
//! One rule broken refuses the whole file, with file, line and key; nothing is half-started. Rules that are independent are all
//! judged, so that one reading names all that is broken. What is accepted without effect is said in `Settings::notes`.

mod agents;
mod build;
mod file;
mod keys;
mod models;
mod runs;
mod settings;

use std::path::Path;

use iop_shared::config::{ConfigError, Source};

pub use build::World;
pub(crate) use keys::from_hex;
pub use keys::{digest, hex, is_key_name};
pub use settings::{
    Digest, EjectionSettings, GateSettings, KeySettings, LinkSettings, ModelFilter, ModelPattern, OnNodeLost,
    Priority, QueueSettings, Role, Roles, RunsSettings, ServerSettings, Settings, StoreUrl,
};

/// The configuration of an edge that was told nothing: scripted models on loopback.
pub const DEMO: &str = include_str!("demo.toml");

/// Why a configuration is refused: every fault that was found, in the order of the file.
#[derive(Debug, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct Refused(Vec<ConfigError>);

impl Refused {
    /// At least one.
    pub fn faults(&self) -> &[ConfigError] {
        &self.0
    }
}

impl From<ConfigError> for Refused {
    fn from(fault: ConfigError) -> Self {
        Self(vec![fault])
    }
}

fn lines(faults: &[ConfigError]) -> String {
    let lines: Vec<String> = faults.iter().map(ConfigError::to_string).collect();
    lines.join("\n")
}

impl Settings {
    /// Makes settings of a file's text.
    ///
    /// # Errors
    /// The first thing that cannot be read; else every rule broken by the text; else every reference that leads nowhere.
    pub fn parse(file: &str, text: &str, world: &World<'_>) -> Result<Self, Refused> {
        let (parsed, source) = Source::parse::<file::EdgeFile>(file, text)?;
        build::settings(parsed, &source, world)
    }
}

impl StoreUrl {
    /// What a file's text says of the store. Nothing else of it is judged, and no reference is followed: who looks after a database
    /// need not have the secrets of the edge.
    ///
    /// # Errors
    /// The first thing that cannot be read, or the store's own fault.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        let (parsed, source) = Source::parse::<file::EdgeFile>(file, text)?;
        runs::store_of(&parsed, &source)
    }
}

/// The text of a file.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|e| ConfigError {
        file: path.display().to_string(),
        line: 1,
        key: String::from("(file)"),
        message: format!("cannot be read: {e}"),
    })
}

/// Settings of a text in a world without files, where every variable holds its own name.
///
/// # Panics
/// When the text is refused, with the reason.
#[cfg(test)]
pub(crate) fn settings_of(toml: &str) -> Settings {
    let world = World {
        env: &|name| Some(name.to_owned()),
        file: &|_| Err(std::io::ErrorKind::NotFound.into()),
    };
    match Settings::parse("edge.toml", toml, &world) {
        Ok(settings) => settings,
        Err(e) => panic!("{e}\n{toml}"),
    }
}

#[cfg(test)]
mod tests;
