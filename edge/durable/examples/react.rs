//! An agent that buys things: a loop of reasoning and acting with tools, an approval, budgets and typed effects.
//!
//! The model is a script, so that the example needs nothing outside; everything else is as with a real one. Every turn of the
//! model and every tool is an activity: what it answered is stored, and is not asked again after a crash. A purchase waits for
//! an approval of exactly that call; meanwhile the run holds neither worker nor lease, and the operator who decides needs no
//! graph. Four runs end as a success, as a success after a denial, and twice as `exhausted`.
//!
//! `cargo run -p iop-durable --example react`

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, NodeError, NodeResult};
use iop_durable::host::{Host, HostOptions, Registry};
use iop_durable::ids::{DecisionId, Owner, RunId, WaitId};
use iop_durable::machine::wait::{Delivery, Verdict};
use iop_durable::patterns::{TURNS, react};
use iop_durable::payload::Payload;
use iop_durable::record::{Effect, Status, WaitingKind};
use iop_durable::runner::{Answer, Bindings, Ctx, Operator, Options, RunResult, Runner, Start};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::time::HostClock;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// What the agent carries from step to step.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Chat {
    messages: Vec<String>,
    /// What the model asked for and nobody has done yet.
    pending: Vec<Tool>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Tool {
    Look { sku: String },
    Buy { sku: String, price: u64 },
}

/// What one turn of the model says.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Said {
    text: String,
    tools: Vec<Tool>,
}

/// Told once, with the step in which it happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Told {
    Looked { sku: String },
    Bought { sku: String, price: u64 },
    Denied { sku: String },
}

/// The world outside: it remembers what was asked of it.
#[derive(Default)]
struct World {
    model_turns: Mutex<u32>,
    /// Idempotency key and purchase.
    purchases: Mutex<Vec<(String, Bytes)>>,
}

/// The model: it looks a lamp up, buys it, and says what became of it. When it is told to dither, it only ever looks again.
fn model(messages: &[String]) -> Said {
    let said = |text: &str, tools| Said {
        text: text.to_owned(),
        tools,
    };
    let sku = || "lamp".to_owned();
    let looked = messages.iter().any(|m| m == "lamp costs 140");
    let dithers = messages.first().is_some_and(|m| m.contains("dither"));
    match messages.last().map(String::as_str) {
        Some("bought lamp") => said("It is ordered.", vec![]),
        Some("lamp was refused") => said("Then not.", vec![]),
        _ if looked && !dithers => said(
            "I buy it.",
            vec![Tool::Buy {
                sku: sku(),
                price: 140,
            }],
        ),
        _ => said("I look it up.", vec![Tool::Look { sku: sku() }]),
    }
}

fn world(ctx: &Ctx) -> Result<Arc<World>, NodeError> {
    let missing = || Failure::new(FailureKind::Configuration, "no world is bound");
    ctx.binding::<World>().ok_or_else(|| missing().into())
}

/// One turn: the model's answer is recorded before anything is done with it.
async fn reason(ctx: Ctx, mut chat: Chat) -> NodeResult<Chat, Told> {
    let world = world(&ctx)?;
    let said: Said = ctx
        .activity("model")
        .effect(Effect::ReadOnly)
        .run_json(&chat.messages, |call| {
            *world.model_turns.lock() += 1;
            async move {
                let messages: Vec<String> = serde_json::from_slice(&call.input)
                    .map_err(|e| Failure::new(FailureKind::InvalidInput, e.to_string()))?;
                Ok(model(&messages))
            }
        })
        .await?;
    chat.messages.push(said.text.clone());
    chat.pending = said.tools;
    Ok((chat, Directive::completed().result(said.text)))
}

/// Does what is pending, each tool as an activity of its own.
async fn act(ctx: Ctx, mut chat: Chat) -> NodeResult<Chat, Told> {
    let world = world(&ctx)?;
    let mut directive = Directive::completed();
    for (n, tool) in std::mem::take(&mut chat.pending).into_iter().enumerate() {
        match tool {
            Tool::Look { sku } => {
                let price: u64 = ctx
                    .activity(&format!("look.{n}"))
                    .effect(Effect::ReadOnly)
                    .run_json(&sku, |_| async { Ok(140) })
                    .await?;
                chat.messages.push(format!("{sku} costs {price}"));
                directive = directive.effect(Told::Looked { sku });
            }
            Tool::Buy { sku, price } => {
                // What is shown for approval is what is sent.
                let purchase = serde_json::to_vec(&Tool::Buy {
                    sku: sku.clone(),
                    price,
                })
                .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))?;
                let answer = ctx
                    .gate(&format!("approve.{n}"))
                    .subject(purchase.clone())
                    .wait()
                    .await?;
                if answer != Answer::Delivered(Bytes::from_static(b"approve")) {
                    chat.messages.push(format!("{sku} was refused"));
                    directive = directive.effect(Told::Denied { sku });
                    continue;
                }
                // Refused before anything is bought.
                ctx.use_budget("spend", price)?;
                ctx.activity(&format!("buy.{n}"))
                    .effect(Effect::Idempotent)
                    .run(purchase, |call| {
                        world.purchases.lock().push((call.idempotency_key, call.input));
                        async { Ok(Bytes::from_static(b"ok")) }
                    })
                    .await?;
                chat.messages.push(format!("bought {sku}"));
                directive = directive.effect(Told::Bought { sku, price });
            }
        }
    }
    Ok((chat, directive))
}

/// Asks until the run stands like this, for ten seconds.
async fn until(
    runner: &Runner<Chat, Told>,
    run: &RunId,
    status: Status,
) -> Result<RunResult<Chat, Told>, Box<dyn Error>> {
    let look = async {
        loop {
            let result = runner.result(run).await?;
            if result.status == status {
                return Ok(result);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), look).await?
}

/// Decides about the one approval the run waits for. Returns what was shown.
async fn decide(
    operator: &Operator,
    waiting: &RunResult<Chat, Told>,
    decision: &'static str,
) -> Result<Bytes, Box<dyn Error>> {
    let on = &waiting.waiting.as_ref().ok_or("the run does not wait")?.on[0];
    assert_eq!(on.kind, WaitingKind::Approval);
    let id = WaitId::new(&on.id)?;
    let gate = operator
        .store()
        .wait(&waiting.run, &id)
        .await?
        .ok_or("no such wait")?;
    println!(
        "  waits for an approval of {}",
        String::from_utf8_lossy(gate.subject.bytes())
    );
    let delivery = Delivery {
        id: DecisionId::new("decision-1")?,
        correlation: gate.correlation.clone(),
        generation: None,
        labels: None,
        payload: Payload::new(decision),
        by: Some("operator".to_owned()),
        revision: waiting.token.revision,
    };
    let first = operator.deliver_to_gate(&waiting.run, &id, &delivery).await?;
    assert_eq!((first.verdict, first.replayed), (Verdict::Accepted, false));
    // The same decision again, as after a lost answer: the same verdict, nothing happens twice.
    let again = operator.deliver_to_gate(&waiting.run, &id, &delivery).await?;
    assert_eq!((again.verdict, again.replayed), (Verdict::Accepted, true));
    println!("  decided: {decision}");
    Ok(gate.subject.bytes().clone())
}

fn ask(text: &str) -> Start<Chat> {
    Start::new(Chat {
        messages: vec![text.to_owned()],
        pending: Vec::new(),
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let graph = react(
        "shopper",
        1,
        reason,
        act,
        |chat: &Chat| !chat.pending.is_empty(),
        4,
    )
    .kind("agent")
    .budget("spend", 200)
    .compile()?;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(HostClock::new())));
    let owner = Owner::new("example")?;
    let mut options = Options::new(owner.clone());
    options.bindings = Bindings::default().with(World::default());
    let world = options.bindings.get::<World>().ok_or("no world")?;
    let runner = Runner::new(Arc::new(graph), Arc::clone(&store), options)?;
    let registry = Registry::default();
    registry.add(runner.clone());
    let mut workers = HostOptions::new(owner);
    workers.poll_interval = Duration::from_millis(20);
    let host = Host::start(store, registry, workers);
    let operator = runner.operator();

    println!("a purchase that is approved");
    let run = runner.accept(ask("buy a lamp")).await?.run;
    let waiting = until(&runner, &run, Status::Waiting).await?;
    let lease = runner.store().load(&run).await?.lease;
    assert_eq!(lease, None, "nobody works on a run that waits");
    assert!(
        world.purchases.lock().is_empty(),
        "nothing is bought before the approval"
    );
    let shown = decide(&operator, &waiting, "approve").await?;
    let done = until(&runner, &run, Status::Succeeded).await?;
    println!("  {}", done.state.messages.join(" / "));
    println!("  effects: {:?}", done.effects);
    let sku = || "lamp".to_owned();
    assert_eq!(
        done.effects,
        [
            Told::Looked { sku: sku() },
            Told::Bought {
                sku: sku(),
                price: 140
            }
        ]
    );
    let key = format!("{run}/action/4/buy.0");
    assert_eq!(
        *world.purchases.lock(),
        [(key, shown)],
        "once, exactly what was approved"
    );
    assert_eq!(
        *world.model_turns.lock(),
        3,
        "entering a step again asks the model nothing"
    );
    assert_eq!((done.budgets[TURNS].used, done.budgets["spend"].used), (3, 140));

    println!("a purchase that is denied");
    let run = runner.accept(ask("buy a lamp")).await?.run;
    decide(&operator, &until(&runner, &run, Status::Waiting).await?, "deny").await?;
    let done = until(&runner, &run, Status::Succeeded).await?;
    println!("  {}", done.state.messages.join(" / "));
    assert_eq!(done.effects.last(), Some(&Told::Denied { sku: sku() }));
    assert_eq!(world.purchases.lock().len(), 1, "a denied call is never made");
    assert_eq!(done.budgets["spend"].used, 0);

    println!("an agent that does not come to an end");
    let run = runner.accept(ask("dither about a lamp")).await?.run;
    let over = until(&runner, &run, Status::Exhausted).await?;
    let exhausted = over
        .outcome
        .and_then(|outcome| outcome.exhausted)
        .ok_or("nothing ran out")?;
    println!(
        "  exhausted: {} of {} {}",
        exhausted.used, exhausted.limit, exhausted.budget
    );
    assert_eq!(
        (exhausted.budget.as_str(), exhausted.used, exhausted.limit),
        (TURNS, 4, 4)
    );

    println!("a purchase that costs more than is left");
    let mut start = ask("buy a lamp");
    start.budgets.insert("spend".to_owned(), 100);
    let run = runner.accept(start).await?.run;
    decide(
        &operator,
        &until(&runner, &run, Status::Waiting).await?,
        "approve",
    )
    .await?;
    let over = until(&runner, &run, Status::Exhausted).await?;
    let exhausted = over
        .outcome
        .and_then(|outcome| outcome.exhausted)
        .ok_or("nothing ran out")?;
    println!(
        "  exhausted: of the budget {} {} of {} are used, the lamp costs 140",
        exhausted.budget, exhausted.used, exhausted.limit
    );
    assert_eq!(exhausted.budget, "spend");
    assert_eq!(world.purchases.lock().len(), 1, "refused before it was bought");

    assert!(host.stop(Duration::from_secs(5)).await);
    Ok(())
}
