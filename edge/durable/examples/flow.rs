//! A flow of ordered steps: a retry that parks the run, a wait for an event, and the events of the run as a stream.
//!
//! Four steps set up a workspace. The second is a call to a service that is down at first: the run is parked until the next
//! attempt is due, no worker sleeps, and every attempt carries the same idempotency key. The third waits for an event of the
//! billing system. The state is the data that each step hands to the next, and the stage is where the run stands.
//!
//! `cargo run -p iop-durable --example flow`

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Await, Deadline, Graph, NodeError};
use iop_durable::host::{Host, HostOptions, Registry};
use iop_durable::ids::{CorrelationId, DecisionId, Key, Owner};
use iop_durable::machine::wait::{Delivery, Verdict};
use iop_durable::patterns::{Data, Retry, State, Step, attempts, call, ordered_steps};
use iop_durable::payload::Payload;
use iop_durable::record::{DeadlinePolicy, Effect, Status, StepStatus, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Options, Resume, Runner, Start, StreamEvent};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::time::HostClock;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The developer's own data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Onboarding {
    email: String,
    workspace: Option<String>,
    paid_with: Option<String>,
    welcomed: bool,
}

/// A service that answers at the third attempt, and the keys it was called with.
#[derive(Default)]
struct Service(Mutex<Vec<String>>);

impl Service {
    fn create(&self, key: String, input: &Bytes) -> Result<Bytes, CallError> {
        let mut keys = self.0.lock();
        keys.push(key);
        if keys.len() < 3 {
            return Err(Failure::new(FailureKind::Unavailable, "the service restarts").into());
        }
        let broken = |e: serde_json::Error| Failure::new(FailureKind::InvalidInput, e.to_string());
        let mut onboarding: Onboarding = serde_json::from_slice(input).map_err(broken)?;
        onboarding.workspace = Some("ws-1".to_owned());
        let output = serde_json::to_vec(&onboarding).map_err(broken)?;
        Ok(Bytes::from(output))
    }
}

/// The correlation id that the billing system knows.
fn invoice(state: &State) -> Result<String, Failure> {
    let onboarding: Onboarding = state.scan()?;
    let workspace = onboarding.workspace.unwrap_or_default();
    Ok(format!("invoice of {workspace}"))
}

fn flow(service: &Arc<Service>) -> Result<Graph<Data>, Box<dyn Error>> {
    let service = Arc::clone(service);
    let steps = vec![
        Step::new("plan", |_: Ctx, state: State| async move {
            // Repeatable: it computes and reads, nothing else.
            let onboarding: Onboarding = state.scan()?;
            if onboarding.email.contains('@') {
                return Ok(state);
            }
            Err(Failure::new(FailureKind::InvalidInput, "no address").into())
        }),
        Step::new(
            "workspace",
            call("workspaces/1", Effect::Idempotent, move |call| {
                let answer = service.create(call.idempotency_key, &call.input);
                async move { answer }
            }),
        )
        .retry(Retry::Policy(attempts(3, Duration::from_millis(100)))),
        Step::wait("payment", "remind", |_, state| {
            let invalid = |e: iop_durable::ids::InvalidId| {
                NodeError::from(Failure::new(FailureKind::InvalidInput, e.to_string()))
            };
            Ok(Await {
                key: Key::new("invoice").map_err(invalid)?,
                correlation: CorrelationId::new(&invoice(state)?).map_err(invalid)?,
                kind: WaitingKind::Event,
                subject: Payload::new("waiting for the invoice to be paid"),
                deadline: Some(Deadline::In(Duration::from_hours(48))),
                deadline_policy: DeadlinePolicy::FirstCommitted,
            })
        }),
        Step::new("welcome", |_: Ctx, mut state: State| async move {
            let mut onboarding: Onboarding = state.scan()?;
            onboarding.welcomed = true;
            state.set(&onboarding)?;
            Ok(state)
        })
        .ends(),
        Step::new("remind", |_: Ctx, state: State| async move { Ok(state) }),
    ];
    // Steps without a retry of their own are tried twice.
    let default = attempts(2, Duration::from_secs(1));
    Ok(ordered_steps("onboard", 1, Some(&default), steps).compile()?)
}

fn show(event: &StreamEvent) {
    let mut data = String::from_utf8_lossy(&event.data).into_owned();
    if data.len() > 90 {
        data.truncate(data.floor_char_boundary(90));
        data.push('…');
    }
    println!("  {:>2} {:<18} {data}", event.seq, event.name);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = Arc::new(Service::default());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(HostClock::new())));
    let owner = Owner::new("example")?;
    let graph = Arc::new(flow(&service)?);
    let runner = Runner::new(graph, Arc::clone(&store), Options::new(owner.clone()))?;

    println!("started, to the first pause");
    let input = Onboarding {
        email: "ada@example.com".to_owned(),
        ..Onboarding::default()
    };
    let mut stream = runner.start_stream(Start::new(Data::json(&input)?));
    let run = stream.run().clone();
    let mut seen = 0;
    while let Some(event) = stream.next().await? {
        show(&event);
        seen += 1;
        assert_eq!(event.seq, seen, "events are numbered without gaps");
    }
    let parked = stream.wait_result().await?;
    let waiting = parked.waiting.as_ref().ok_or("it does not wait")?;
    assert_eq!(
        (parked.status, waiting.kind()),
        (Status::Waiting, Some(WaitingKind::Retry))
    );
    assert_eq!(State::of(&parked).stage(), "workspace");
    assert_eq!(service.0.lock().len(), 1);

    println!("a host tries again when it is due");
    let registry = Registry::default();
    registry.add(runner.clone());
    let mut workers = HostOptions::new(owner);
    workers.poll_interval = Duration::from_millis(20);
    let host = Host::start(Arc::clone(&store), registry, workers);
    let correlation = CorrelationId::new("invoice of ws-1")?;
    // The event system looks for who waits for its event.
    let armed = async {
        loop {
            if let Some(wait) = store.armed(&correlation, 1).await?.pop() {
                return Ok::<_, Box<dyn Error>>(wait);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let wait = tokio::time::timeout(Duration::from_secs(10), armed).await??;
    let key = format!("{run}/workspace/2/call");
    assert_eq!(
        *service.0.lock(),
        [key.clone(), key.clone(), key],
        "three attempts, one key"
    );
    for event in store.events(&run, seen, 100).await? {
        show(&event);
    }
    assert!(host.stop(Duration::from_secs(5)).await);

    println!("the invoice is paid");
    let parked = runner.result(&run).await?;
    assert_eq!(State::of(&parked).stage(), "payment");
    let mut paid: Onboarding = State::of(&parked).scan()?;
    assert_eq!(paid.workspace.as_deref(), Some("ws-1"));
    paid.paid_with = Some("card".to_owned());
    let delivery = Delivery {
        id: DecisionId::new("payment-77")?,
        correlation,
        generation: None,
        labels: Some(wait.labels.clone()),
        payload: Payload::new(serde_json::to_vec(&paid)?),
        by: Some("billing".to_owned()),
        revision: parked.token.revision,
    };
    let taken = runner.deliver(&run, &wait.id, &delivery).await?;
    assert_eq!(taken.verdict, Verdict::Accepted);
    // Delivered twice, as such systems do: answered the same, and nothing happens.
    assert!(runner.deliver(&run, &wait.id, &delivery).await?.replayed);
    let moved = runner.result(&run).await?;
    assert_eq!(
        (moved.status, State::of(&moved).stage()),
        (Status::Queued, "welcome")
    );

    let stream = runner.resume_stream(&moved.token, Resume::new()).await?;
    let (events, done) = stream.collect().await?;
    events.iter().for_each(show);
    let last = events.last().ok_or("no events")?;
    assert!(last.terminal);
    assert_eq!((done.status, State::of(&done).stage()), (Status::Succeeded, ""));
    let outcome = store.load(&run).await?.head.outcome.ok_or("it is not over")?;
    assert_eq!(
        last.data,
        [&b"{\"outcome\":"[..], &outcome, b"}"].concat(),
        "the terminal event is the outcome"
    );

    let onboarding: Onboarding = State::of(&done).scan()?;
    println!("  {onboarding:?}");
    paid.welcomed = true;
    assert_eq!(onboarding, paid);
    let steps = store.steps(&run, 0, 100).await?;
    let names: Vec<_> = steps
        .iter()
        .map(|s| (s.node.as_str(), s.status, s.attempts))
        .collect();
    let ok = StepStatus::Done;
    assert_eq!(
        names,
        [
            ("plan", ok, 1),
            ("workspace", ok, 3),
            ("payment", ok, 1),
            ("welcome", ok, 1)
        ]
    );
    Ok(())
}
