//! What a flow carries from step to step.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::{Failure, FailureKind};
use crate::graph::Codec;
use crate::runner::RunResult;

/// Bytes that are kept as they are (D259). JSON goes in by `json` and out by `scan`; anything else by `From`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Data(Bytes);

impl Data {
    /// The JSON of a value.
    ///
    /// # Errors
    /// `invalid_input` when it has none.
    pub fn json(value: &impl Serialize) -> Result<Self, Failure> {
        serde_json::to_vec(value)
            .map(|json| Self(Bytes::from(json)))
            .map_err(|e| {
                Failure::new(
                    FailureKind::InvalidInput,
                    format!("the data cannot be encoded: {e}"),
                )
            })
    }

    /// The value of the JSON.
    ///
    /// # Errors
    /// `invalid_input` when it is none, or of another type.
    pub fn scan<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.0)
            .map_err(|e| Failure::new(FailureKind::InvalidInput, format!("the data cannot be read: {e}")))
    }

    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

impl<T: Into<Bytes>> From<T> for Data {
    fn from(bytes: T) -> Self {
        Self(bytes.into())
    }
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Data({} bytes)", self.0.len())
    }
}

/// Stores data byte by byte.
pub(super) struct Opaque;

impl Codec<Data> for Opaque {
    fn label(&self) -> &'static str {
        "bytes"
    }

    fn encode(&self, data: &Data) -> Result<Bytes, String> {
        Ok(data.0.clone())
    }

    fn decode(&self, bytes: &[u8]) -> Result<Data, String> {
        Ok(Data(Bytes::copy_from_slice(bytes)))
    }
}

/// Where a flow is, and with what (D34).
///
/// The stage is not stored a second time: it is the run's cursor, so the two cannot disagree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    stage: String,
    data: Data,
}

impl State {
    pub(super) fn at(stage: &str, data: Data) -> Self {
        Self {
            stage: stage.to_owned(),
            data,
        }
    }

    /// Of a flow as it is stored. The stage is the step that runs or would run next; of a run that failed or is exhausted, the
    /// step where that happened; empty when it finished or was cancelled.
    pub fn of<E>(result: &RunResult<Data, E>) -> Self {
        let failed = result.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
        let stage = match &result.cursor {
            Some(cursor) => Some(cursor.as_str()),
            None => failed.and_then(|error| error.step.as_deref()),
        };
        Self::at(stage.unwrap_or_default(), result.state.clone())
    }

    /// The name of the step; empty when the flow is over.
    pub fn stage(&self) -> &str {
        &self.stage
    }

    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Replaces the data with the JSON of a value.
    ///
    /// # Errors
    /// As `Data::json`; the data is as it was.
    pub fn set(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        self.data = Data::json(value)?;
        Ok(())
    }

    /// Replaces the data with bytes.
    pub fn replace(&mut self, data: impl Into<Data>) {
        self.data = data.into();
    }

    /// The value of the data's JSON.
    ///
    /// # Errors
    /// As `Data::scan`.
    pub fn scan<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        self.data.scan()
    }

    pub(super) fn into_data(self) -> Data {
        self.data
    }
}
