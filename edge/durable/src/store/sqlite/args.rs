//! Parameters of statements that read.

use rusqlite::types::Value;

/// Parameters, in the order of their places.
#[derive(Default)]
pub(super) struct Args(Vec<Value>);

impl Args {
    pub(super) fn put(&mut self, value: impl IntoValue) -> &mut Self {
        self.0.push(value.into_value());
        self
    }

    pub(super) fn into_values(self) -> impl Iterator<Item = Value> {
        self.0.into_iter()
    }
}

/// What may be a parameter.
pub(super) trait IntoValue {
    fn into_value(self) -> Value;
}

impl IntoValue for &str {
    fn into_value(self) -> Value {
        Value::Text(self.to_owned())
    }
}

impl IntoValue for String {
    fn into_value(self) -> Value {
        Value::Text(self)
    }
}

impl IntoValue for i64 {
    fn into_value(self) -> Value {
        Value::Integer(self)
    }
}

/// `None` is NULL.
impl<T: IntoValue> IntoValue for Option<T> {
    fn into_value(self) -> Value {
        self.map_or(Value::Null, T::into_value)
    }
}

/// `args![a, b]`: parameters for one read.
macro_rules! args {
    ($($value:expr),* $(,)?) => {{
        let mut args = $crate::store::sqlite::args::Args::default();
        args$(.put($value))*;
        args
    }};
}
pub(super) use args;
