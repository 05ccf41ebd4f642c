//! A scripted turn as the events of a normalized run (004 `RunEvent`). Pure.

use iop_shared::execution::RuntimeEventKind;
use iop_shared::wire::event::RunEvent;

use super::plan::{Says, Stream, Turned};
use crate::providers::Piece;

/// Start, deltas, usage. The terminal is not the adapter's to write: it is made where the run ends.
pub(super) fn stream(turned: &Turned<'_>) -> Stream {
    let said: &[&str] = match &turned.says {
        Says::Text(pieces) => pieces,
        // Events carry text only; a script with calls is refused as configuration.
        Says::Calls(_) => &[],
    };
    let deltas = said.iter().map(|piece| RunEvent::delta(*piece));
    Stream {
        preamble: vec![Piece::event(&RunEvent::new(RuntimeEventKind::Start))],
        content: deltas.map(|event| Piece::event(&event)).collect(),
        closing: vec![Piece::event(&RunEvent::usage(turned.usage))],
    }
}
