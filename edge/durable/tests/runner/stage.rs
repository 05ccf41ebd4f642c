//! One run that does what it is told, on a stage of its own: what the tests of cancellation act on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use iop_durable::graph::{Await, Directive, Graph};
use iop_durable::ids::RunId;
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Effect, Reason, Status, WaitLabels, WaitingKind};
use iop_durable::runner::{CallError, CancelOutcome, Ctx, Resume, Start};

use crate::support::*;

pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// A graph whose node does what the trail's first word says; `door` is what its calls stand before.
fn everything(log: &Log, door: &Door) -> Arc<Graph<Trail>> {
    let (log, door) = (log.clone(), door.clone());
    let labels = WaitLabels {
        matcher: "any".to_owned(),
        payload: "text".to_owned(),
        continuation: "on".to_owned(),
    };
    shared(
        graph("everything")
            .retry("do", policy(3, Duration::from_secs(60)))
            .node("do", move |ctx: Ctx, trail: Trail| {
                let (log, door) = (log.clone(), door.clone());
                async move {
                    let held = |name: &'static str, effect: Effect| {
                        let (log, door) = (log.clone(), door.clone());
                        let activity = ctx.activity(name).effect(effect);
                        async move {
                            let out = activity
                                .run("in", |call| {
                                    log.add(call.key.as_str());
                                    door.answers("out")
                                })
                                .await?;
                            log.add("answered");
                            Ok::<_, iop_durable::runner::ActivityError>(out)
                        }
                    };
                    match trail[0].as_str() {
                        "pure" => {
                            door.pass().await;
                        }
                        "read_only" => {
                            held("c", Effect::ReadOnly).await?;
                        }
                        "idempotent" => {
                            held("c", Effect::Idempotent).await?;
                        }
                        "unsafe" => {
                            held("c", Effect::Unsafe).await?;
                            // Nothing more is dispatched once the run is to end.
                            call(&ctx, "next", Effect::Unsafe, &log).await?;
                        }
                        "mixed" => {
                            let (a, b) = join(held("c", Effect::Unsafe), held("d", Effect::Idempotent)).await;
                            a?;
                            b?;
                        }
                        "gate" => {
                            ctx.gate("g").wait().await?;
                        }
                        "wait" => {
                            let wait = Await {
                                key: key("w"),
                                correlation: correlation("o"),
                                kind: WaitingKind::Event,
                                subject: Payload::new(""),
                                deadline: None,
                                deadline_policy: DeadlinePolicy::Hard,
                            };
                            return Ok((trail, Directive::wait(wait)));
                        }
                        "suspend" => return Ok((trail, Directive::suspend("held"))),
                        "step retry" => return Err(down().into()),
                        "call retry" => {
                            let flaky = ctx.activity("c").effect(Effect::Idempotent);
                            let flaky = flaky.retry(policy(3, Duration::from_secs(60)));
                            flaky.run("in", |_| async { Err(failed(down())) }).await?;
                        }
                        "unknown" => {
                            ctx.activity("c")
                                .run("in", |_| async { Err(CallError::Unknown) })
                                .await?;
                        }
                        other => panic!("{other}"),
                    }
                    Ok((pushed(trail, "done"), Directive::end()))
                }
            })
            .node("on", ends)
            .terminal("do")
            .terminal("on")
            .wait_route("do", labels, "on", "on", |_, _| true, |trail, _| Ok(trail)),
    )
}

pub(crate) struct Stage {
    pub(crate) room: Room,
    pub(crate) log: Log,
    pub(crate) door: Door,
    pub(crate) graph: Arc<Graph<Trail>>,
    pub(crate) runner: Trails,
    pub(crate) run: RunId,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let (room, log, door) = (Room::new(), Log::new(), Door::new());
        let graph = everything(&log, &door);
        let runner = room.runner(&graph);
        Self {
            room,
            log,
            door,
            graph,
            runner,
            run: run_id("r"),
        }
    }

    pub(crate) fn start(&self, what: &str) -> Start<Trail> {
        Start::new(vec![what.to_owned()]).run(self.run.clone())
    }

    /// The run under way in the background.
    pub(crate) fn running(&self, what: &str) -> Running {
        started(&self.runner, self.start(what))
    }

    pub(crate) async fn cancel(&self, id: &str) -> CancelOutcome {
        self.runner
            .operator()
            .cancel(&self.run, &decision(id), "enough", Some("ann"))
            .await
            .unwrap()
            .outcome
    }

    /// That the run was cancelled as asked.
    pub(crate) async fn cancelled(&self, result: &Result) {
        assert_eq!(
            (result.status, result.reason()),
            (Status::Cancelled, Some(Reason::Cancelled))
        );
        let cancel = result.outcome.as_ref().unwrap().cancel.clone().unwrap();
        assert_eq!(
            (cancel.by.as_deref(), cancel.reason.as_str()),
            (Some("ann"), "enough")
        );
        self.room.sound(&self.run).await;
        assert!(self.room.work(&self.runner).await.is_none());
        let token = self.room.token(&self.run).await;
        refused(self.runner.resume(&token, Resume::new()).await, "run_terminal");
        assert_eq!(
            self.cancel("another").await,
            CancelOutcome::Over(Status::Cancelled)
        );
    }

    pub(crate) async fn result(&self) -> Result {
        self.runner.result(&self.run).await.unwrap()
    }
}
