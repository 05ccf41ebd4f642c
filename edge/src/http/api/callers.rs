//! Who asks, and whether this key may ask that at all. Each stands first among a handler's arguments: who may not ask learns nothing
//! else, not even what is wrong with the request (durable-api §1 "Roles", §8 "Access").

use axum::extract::FromRequestParts;
use http::request::Parts;

use super::extract::app;
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::problem::Problem;

/// An authenticated client with any of these roles.
fn with_any(parts: &Parts, roles: &[Role]) -> Result<Caller, Problem> {
    let caller = app(parts)?.keys.authenticate(&parts.headers)?;
    caller.require_any(roles)?;
    Ok(caller)
}

macro_rules! callers {
    ($($(#[$doc:meta])* $name:ident: [$($role:ident),*];)+) => {$(
        $(#[$doc])*
        pub(super) struct $name(pub(super) Caller);

        impl<S: Sync> FromRequestParts<S> for $name {
            type Rejection = Problem;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
                with_any(parts, &[$(Role::$role),*]).map(Self)
            }
        }
    )+};
}

callers! {
    /// Begins runs.
    Beginner: [Inference];
    /// Reads runs: each role that has to do with runs may, of the runs it may see.
    Reader: [Operator, Admin, Inference];
    /// Resumes and cancels runs, and sends them events.
    Steerer: [Operator, Inference];
    /// Decides, answers, resolves, delivers.
    Operator: [Operator];
    /// Reads declarations. They say where secrets stand and whom a tool talks to: they are for who runs the place.
    Overseer: [Admin, Operator];
    /// Declares, withdraws, deletes.
    Admin: [Admin];
}
