//! A flow of ordered steps over an order, and what its tests say again and again.

use std::sync::Arc;

use iop_durable::graph::{GraphBuilder, NoEffect};
use iop_durable::patterns::{Data, State, Step, ordered_steps};
use iop_durable::record::{RetryPolicy, StepStatus};
use iop_durable::runner::{Ctx, RunResult, Runner};
use serde::{Deserialize, Serialize};

use crate::support::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) sku: String,
    pub(crate) done: Vec<String>,
}

pub(crate) fn order() -> Data {
    Data::json(&Order {
        sku: "a-1".to_owned(),
        done: Vec::new(),
    })
    .unwrap()
}

/// Writes its own name into the order.
pub(crate) fn step(name: &str, log: &Log) -> Step {
    let log = log.clone();
    Step::new(name, move |_: Ctx, mut state: State| {
        log.add(state.stage());
        async move {
            let mut order: Order = state.scan()?;
            order.done.push(state.stage().to_owned());
            state.set(&order)?;
            Ok(state)
        }
    })
}

pub(crate) fn flow(retry: Option<&RetryPolicy>, steps: Vec<Step>) -> GraphBuilder<Data> {
    ordered_steps("onboard", 1, retry, steps)
}

pub(crate) fn flows(builder: GraphBuilder<Data>) -> (Room, Runner<Data>) {
    let room = Room::new();
    let runner = room.runner(&Arc::new(builder.compile().unwrap()));
    (room, runner)
}

pub(crate) fn stage(result: &RunResult<Data, NoEffect>) -> String {
    State::of(result).stage().to_owned()
}

pub(crate) async fn steps(room: &Room, result: &RunResult<Data, NoEffect>) -> Vec<(String, StepStatus, u32)> {
    let steps = room.steps(&result.run).await;
    steps
        .into_iter()
        .map(|step| (step.node.to_string(), step.status, step.attempts))
        .collect()
}

pub(crate) fn done(name: &str) -> (String, StepStatus, u32) {
    (name.to_owned(), StepStatus::Done, 1)
}
