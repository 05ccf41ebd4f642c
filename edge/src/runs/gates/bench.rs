//! A run that waits at gates, over a memory store whose clock and faults are a test's.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::graph::{Deadline, Directive, Graph, GraphBuilder};
use iop_durable::ids::{Key, NodeName, Owner, RunId, WaitId};
use iop_durable::record::{DeadlinePolicy, Effect, WaitRecord, WaitingKind};
use iop_durable::runner::{CallError, Ctx, Limits, Operator, Options, Runner, Start};
use iop_durable::store::{Loaded, Store};
use iop_durable::testing::fault::Op;
use iop_durable::testing::{FaultStore, Fixture as _, ManualClock, MemoryFixture};

use crate::agents::journal::{ApprovalSubject, InputSubject, arguments_digest};

/// What the model wrote.
pub(crate) const ARGUMENTS: &str = r#"{"region": "eu"}"#;

/// Keys of the gates: an approval that expires, one that does not, an input, an event, and a call of unknown effect.
pub(crate) const EXPIRES: &str = "call_1.0";
pub(crate) const STAYS: &str = "call_2.1";
pub(crate) const INPUT: &str = "call_3.2";
pub(crate) const EVENT: &str = "call_4.3";
pub(crate) const UNKNOWN: &str = "call_5.4";

/// What the event is about.
pub(crate) const ABOUT: &str = "order/7";

/// Time that a decision may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

pub(crate) struct Bench {
    pub(crate) clock: Arc<ManualClock>,
    /// Counts and fails posts.
    pub(crate) store: Arc<FaultStore>,
    pub(crate) operator: Operator,
    pub(crate) runner: Runner<Vec<String>>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let memory = MemoryFixture::new();
        let clock = Arc::clone(&memory.clock);
        let store = Arc::new(FaultStore::counting(memory.store(), |op| op == Op::Post));
        let shared: Arc<dyn Store> = Arc::clone(&store) as Arc<dyn Store>;
        let owner = Owner::new("edge-1").unwrap();
        let ttl = Duration::from_secs(30);
        let runner = Runner::new(
            Arc::new(graph()),
            Arc::clone(&shared),
            Options::new(owner.clone()),
        )
        .unwrap();
        Self {
            clock,
            store,
            operator: Operator::new(shared, owner, ttl, Limits::default()),
            runner,
        }
    }

    /// A run that waits at these gates.
    pub(crate) async fn begin(&self, run: &str, keys: &[&str]) -> Loaded {
        let id = RunId::new(run).unwrap();
        let keys = keys.iter().map(|key| (*key).to_owned()).collect();
        self.runner.start(Start::new(keys).run(id)).await.unwrap();
        self.load(run).await
    }

    pub(crate) async fn load(&self, run: &str) -> Loaded {
        self.store.load(&RunId::new(run).unwrap()).await.unwrap()
    }

    pub(crate) async fn gate(&self, loaded: &Loaded, key: &str) -> WaitRecord {
        let node = NodeName::new("action").unwrap();
        let id = WaitId::derive(&loaded.head.id, &node, 1, &Key::new(key).unwrap(), 1);
        self.store.wait(&loaded.head.id, &id).await.unwrap().unwrap()
    }
}

pub(crate) fn approval_subject(key: &str) -> ApprovalSubject {
    ApprovalSubject {
        tool: "deploy".to_owned(),
        call_id: key.split('.').next().unwrap().to_owned(),
        ordinal: 0,
        arguments: ARGUMENTS.to_owned(),
        arguments_digest: arguments_digest(ARGUMENTS),
        why: "rule".to_owned(),
    }
}

fn graph() -> Graph<Vec<String>> {
    GraphBuilder::<Vec<String>>::new("gates", 1)
        .node("action", |ctx: Ctx, keys: Vec<String>| async move {
            let waits = keys.iter().map(|key| wait(ctx.clone(), key.clone()));
            futures_util::future::try_join_all(waits).await?;
            Ok((keys, Directive::end()))
        })
        .terminal("action")
        .compile()
        .unwrap()
}

async fn wait(ctx: Ctx, key: String) -> Result<(), iop_durable::graph::NodeError> {
    let gate = ctx.gate(&key);
    let json = |value: Result<Vec<u8>, serde_json::Error>| Bytes::from(value.unwrap());
    let gate = match key.as_str() {
        EXPIRES | STAYS => gate
            .deadline_policy(DeadlinePolicy::Hard)
            .subject(json(serde_json::to_vec(&approval_subject(&key)))),
        INPUT => gate
            .kind(WaitingKind::Input)
            .subject(json(serde_json::to_vec(&InputSubject {
                prompt: "Which region?".to_owned(),
                schema: Some(serde_json::json!({ "type": "string", "maxLength": 2 })),
                call_id: "call_3".to_owned(),
            }))),
        EVENT => gate.kind(WaitingKind::Event).correlation(ABOUT),
        _ => {
            ctx.activity(&key)
                .effect(Effect::Unsafe)
                .run(ARGUMENTS, |_| std::future::ready(Err(CallError::Unknown)))
                .await?;
            return Ok(());
        }
    };
    let gate = if key == EXPIRES {
        gate.deadline(Deadline::In(PATIENCE))
    } else {
        gate
    };
    gate.wait().await?;
    Ok(())
}
