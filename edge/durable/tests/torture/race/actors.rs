//! Those around a run. Each acts by its own numbers from the seed until the horizon; what it does may fail, and then it looks
//! again or does something else.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::{DecisionId, Owner, Revision};
use iop_durable::machine::wait::Delivery;
use iop_durable::payload::Payload;
use iop_durable::record::{Continuation, Status, WaitRecord, WaitStatus};
use iop_durable::runner::{Resume, RunError, Runner, Start};
use iop_durable::store::{Claim, LeaseRequest};
use iop_durable::token::ResumeToken;
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::driver::{Driver, Mode, is_passing};
use super::super::graph::State;
use super::super::seed::Random;
use super::graph::UNWANTED;
use super::{HORIZON, Scene, TTL, Told};

/// Pauses up to so many milliseconds. False once the time is over.
async fn pause(random: &mut Random, from: Instant, longest: u64) -> bool {
    tokio::time::sleep(Duration::from_millis(random.below(longest))).await;
    from.elapsed() < HORIZON
}

/// What an actor is refused must be a refusal that the situation explains.
fn passing<T>(what: &str, answer: Result<T, RunError>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(RunError::Terminal { .. } | RunError::NotFound) => None,
        Err(error) => {
            assert!(is_passing(&error), "{what}: {error:?}");
            None
        }
    }
}

/// Accepts the run, until that is confirmed.
pub async fn accept(scene: &Scene, random: &mut Random) {
    let runner = scene.runner("front", &scene.store);
    let mut start = Start::new(State::default()).run(scene.run.clone());
    if random.chance(1, 2) {
        start.metadata.insert("patient".to_owned(), String::new());
    }
    loop {
        match runner.accept(start.clone()).await {
            // Its own earlier try landed.
            Ok(_) | Err(RunError::Conflict) => return,
            Err(error) => assert!(is_passing(&error), "accept: {error:?}"),
        }
    }
}

/// Claims and works; sometimes it is lost in the middle, sometimes told to stop.
pub async fn worker(scene: Arc<Scene>, mut random: Random, name: String) {
    let from = Instant::now();
    let mut store = scene.way(&mut random);
    let mut runner = scene.runner(&name, &store);
    while pause(&mut random, from, 700).await {
        let definition = runner.graph().definition();
        let asked = Instant::now();
        let claim = Claim {
            lease: LeaseRequest {
                owner: Owner::new(&name).unwrap(),
                ttl: TTL,
            },
            definitions: vec![(definition.kind.clone(), definition.name.clone())],
            except: Vec::new(),
            limit: 1,
        };
        let Some(claimed) = passing("claim", store.claim(claim).await.map_err(RunError::from)) else {
            continue;
        };
        assert_eq!(claimed.quarantined, []);
        for acquired in claimed.runs {
            let (stop, stopped) = watch::channel(false);
            let work = runner.run_claimed(acquired, asked, stopped);
            tokio::pin!(work);
            let lasts = Duration::from_millis(random.below(900));
            match tokio::time::timeout(lasts, &mut work).await {
                Ok(done) => drop(passing("work", done)),
                Err(_) if random.chance(1, 2) => {
                    // Lost: nothing is told to anybody.
                }
                Err(_) => {
                    if random.chance(1, 3) {
                        stop.send_replace(true);
                    }
                    passing("work", work.await);
                }
            }
        }
        if random.chance(1, 4) {
            store = scene.way(&mut random);
            runner = scene.runner(&name, &store);
        }
    }
}

/// Resumes by token, the newest or one it kept.
pub async fn resumer(scene: Arc<Scene>, mut random: Random) {
    let from = Instant::now();
    let store = scene.way(&mut random);
    let runner = scene.runner("resumer", &store);
    let mut kept: Option<ResumeToken> = None;
    while pause(&mut random, from, 1500).await {
        let Some(loaded) = passing("load", store.load(&scene.run).await.map_err(RunError::from)) else {
            continue;
        };
        let newest = ResumeToken {
            run: scene.run.clone(),
            revision: loaded.head.revision,
        };
        let token = kept.filter(|_| random.chance(1, 3)).unwrap_or(newest);
        let over = loaded.head.status.is_terminal();
        if passing("evaluate", runner.evaluate_resume(&token).await).is_none() {
            kept = Some(token);
            continue;
        }
        let resumed = passing("resume", runner.resume(&token, Resume::new()).await);
        if let Some(result) = resumed
            && !over
        {
            assert_ne!(result.status, Status::Running);
            let revision = token.revision.get();
            scene.tell(Told::Resumed { revision });
        }
        kept = Some(token);
    }
}

/// Sends answers and events, some twice, some unwanted, some under an id that was used for something else.
pub async fn sender(scene: Arc<Scene>, mut random: Random) {
    let from = Instant::now();
    let store = scene.way(&mut random);
    let runner = scene.runner("sender", &store);
    while pause(&mut random, from, 1200).await {
        let Ok(waits) = store.waits(&scene.run).await else {
            continue;
        };
        let Some(wait) = waits.get(random.below(waits.len().max(1) as u64) as usize) else {
            continue;
        };
        let decision = format!("d{}", random.below(6));
        let payload = ["yes", "go", UNWANTED][random.below(3) as usize];
        deliver(&scene, &runner, wait, &decision, payload).await;
    }
}

/// Answers a wait the moment it is armed: before the run is parked.
pub async fn eager(scene: Arc<Scene>, mut random: Random) {
    if !random.chance(1, 2) {
        return;
    }
    let from = Instant::now();
    let runner = scene.runner("eager", &scene.store);
    let mut sent = 0;
    while sent < 2 && pause(&mut random, from, 12).await {
        let waits = scene.memory.waits(&scene.run).await.unwrap();
        let Some(wait) = waits.iter().find(|wait| wait.status == WaitStatus::Armed) else {
            continue;
        };
        deliver(&scene, &runner, wait, &format!("e{sent}"), "at once").await;
        sent += 1;
    }
}

async fn deliver(
    scene: &Scene,
    runner: &Runner<State, String>,
    wait: &WaitRecord,
    decision: &str,
    payload: &str,
) {
    let delivery = Delivery {
        id: DecisionId::new(decision).unwrap(),
        correlation: wait.correlation.clone(),
        generation: None,
        labels: None,
        payload: Payload::new(payload.to_owned()),
        by: None,
        revision: Revision::FIRST,
    };
    let answer = match wait.continuation {
        Continuation::Gate => {
            let operator = runner.operator();
            operator.deliver_to_gate(&scene.run, &wait.id, &delivery).await
        }
        Continuation::Nodes { .. } => runner.deliver(&scene.run, &wait.id, &delivery).await,
    };
    if let Err(error) = &answer {
        let told = matches!(error, RunError::DeliveryConflict(_)) || is_passing(error);
        assert!(told, "{decision} {payload}: {error:?}");
    }
    scene.tell(Told::Delivery {
        wait: wait.id.clone(),
        decision: decision.to_owned(),
        answer: answer.map(|told| (told.verdict, told.replayed)),
    });
}

/// Asks for the end of the run, in some of the schedules; sometimes twice. Some wait for the run to come to a node and ask
/// then.
pub async fn canceller(scene: Arc<Scene>, mut random: Random) {
    if !random.chance(1, 2) {
        return;
    }
    let store = scene.way(&mut random);
    let operator = scene.runner("canceller", &store).operator();
    let id = DecisionId::new("cancel").unwrap();
    let node = ["ask", "hear", "missed", "after"][random.below(4) as usize];
    if random.chance(1, 2) {
        let from = Instant::now();
        while pause(&mut random, from, 25).await {
            let cursor = scene.memory.load(&scene.run).await.unwrap().head.cursor;
            if cursor.is_none_or(|cursor| cursor.as_str() == node) {
                break;
            }
        }
    }
    for _ in 0..=random.below(2) {
        let longest = if random.chance(1, 2) { 60 } else { 5000 };
        tokio::time::sleep(Duration::from_millis(random.below(longest))).await;
        let answer = operator.cancel(&scene.run, &id, "enough", Some("somebody")).await;
        if let Err(error) = &answer {
            assert!(is_passing(error), "cancel: {error:?}");
        }
        scene.tell(Told::Cancel(answer.map(|cancelled| cancelled.outcome)));
    }
}

/// Resolves what is ambiguous, when no service is still at it.
pub async fn operator(scene: Arc<Scene>, mut random: Random) {
    let from = Instant::now();
    let mode = [Mode::Claims, Mode::Resumes][random.below(2) as usize];
    let store = scene.way(&mut random);
    let driver = Driver::new(&scene.graph, &store, &scene.world, &scene.run, mode, TTL);
    while pause(&mut random, from, 2000).await {
        if let Ok(loaded) = store.load(&scene.run).await
            && loaded.head.status == Status::Ambiguous
            && loaded.lease.is_none()
        {
            match driver.resolve(&loaded).await {
                // Somebody was faster.
                Err(RunError::ActivityConflict(_)) => {}
                answer => drop(passing("resolve", answer)),
            }
        }
    }
}
