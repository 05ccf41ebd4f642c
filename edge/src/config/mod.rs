//! `edge.toml`: strict parsing, validation, and the runtime settings made of it (design §4).
//!
//! One rule broken refuses the whole file, with file, line and key; nothing is half-started. What is accepted without
//! effect is said in `Settings::notes`.

mod agents;
mod build;
mod file;
mod keys;
mod models;
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

impl Settings {
    /// Makes settings of a file's text.
    ///
    /// # Errors
    /// The first rule broken.
    pub fn parse(file: &str, text: &str, world: &World<'_>) -> Result<Self, ConfigError> {
        let (parsed, source) = Source::parse::<file::EdgeFile>(file, text)?;
        build::settings(parsed, &source, world)
    }

    /// Reads and parses a file, its references resolved in the real world.
    ///
    /// # Errors
    /// Unreadable, or the first rule broken.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ConfigError {
            file: file.clone(),
            line: 1,
            key: String::from("(file)"),
            message: format!("cannot be read: {e}"),
        })?;
        Self::parse(&file, &text, &World::real())
    }
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
