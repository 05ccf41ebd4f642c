//! Definitions and their names.

use super::tables::{NameRow, Now, Tables, VersionRow};
use crate::store::{Define, Defined, Definition, StoreError, check};

/// A kind and a name.
type Key = (String, String);

impl Tables {
    pub(super) fn define(&mut self, now: Now, define: Define) -> Result<Defined, StoreError> {
        check::define(&define)?;
        let name = self
            .definitions
            .entry((define.kind, define.name))
            .or_insert_with(|| NameRow {
                origin: define.origin,
                withdrawn: false,
                versions: Default::default(),
            });
        name.origin = define.origin;
        name.withdrawn = false;
        let newest = name.versions.last_key_value();
        if let Some((version, row)) = newest
            && row.digest == define.digest
        {
            return Ok(Defined::Same { version: *version });
        }
        let version = newest.map_or(0, |(version, _)| *version) + 1;
        let row = VersionRow {
            digest: define.digest,
            body: define.body,
            created_at: now.wall,
        };
        name.versions.insert(version, row);
        Ok(Defined::New { version })
    }

    pub(super) fn definition(
        &self,
        key: &Key,
        version: Option<u64>,
    ) -> Result<Option<Definition>, StoreError> {
        let Some(name) = self.definitions.get(key) else {
            return Ok(None);
        };
        let found = match version {
            Some(version) => name.versions.get_key_value(&version),
            None => name.versions.last_key_value(),
        };
        found
            .map(|(version, row)| name.open(key, *version, row))
            .transpose()
    }

    pub(super) fn definitions(&self, kind: String, after: Option<String>, limit: u32) -> Vec<Definition> {
        let after = (kind, after.unwrap_or_default());
        self.definitions
            .range(after.clone()..)
            .take_while(|(key, _)| key.0 == after.0)
            .filter(|(key, _)| **key != after)
            .filter_map(|(key, name)| {
                let (version, row) = name.versions.last_key_value()?;
                name.open(key, *version, row).ok()
            })
            .take(limit as usize)
            .collect()
    }

    pub(super) fn versions(&self, key: &Key, after: u64, limit: u32) -> Vec<Definition> {
        let Some(name) = self.definitions.get(key) else {
            return Vec::new();
        };
        name.versions
            .range(after.saturating_add(1)..)
            .filter_map(|(version, row)| name.open(key, *version, row).ok())
            .take(limit as usize)
            .collect()
    }

    pub(super) fn withdraw(&mut self, key: &Key) -> bool {
        match self.definitions.get_mut(key) {
            Some(name) => !std::mem::replace(&mut name.withdrawn, true),
            None => false,
        }
    }
}

impl NameRow {
    fn open(&self, key: &Key, version: u64, row: &VersionRow) -> Result<Definition, StoreError> {
        Definition {
            kind: key.0.clone(),
            name: key.1.clone(),
            version,
            digest: row.digest.clone(),
            body: row.body.clone(),
            origin: self.origin,
            withdrawn: self.withdrawn,
            created_at: row.created_at,
        }
        .verified()
    }
}
