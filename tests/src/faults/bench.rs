//! A stack whose models have a first provider that misbehaves and a second one.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answers::Api;
use super::front::Front;
use super::provider::Faulty;
use super::script::{Act, Script};
use super::verdict::{PRIMARY, SECOND};
use crate::client::{Answer, Client};
use crate::config::{Provider, Setup};
use crate::stack::{Shape, Stack};
use crate::within;

/// Cells that run at once: many waits overlap, and two cores still answer in time.
const AT_ONCE: usize = 16;
/// No request of these tests may take longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// One model in four cells, with providers of its own.
#[derive(Debug, Clone)]
pub struct Route {
    pub name: &'static str,
    primary: Script,
    primary_refused: bool,
    second: Option<Script>,
    second_refused: bool,
    one_model: bool,
    primary_lines: Vec<String>,
    second_lines: Vec<String>,
    model_lines: Vec<String>,
    cells: fn(Api, bool) -> bool,
}

impl Route {
    /// The first provider does `act` for ever, the second one is good.
    pub fn new(name: &'static str, act: Act) -> Self {
        Self::scripted(name, Script::always(act))
    }

    /// The first provider does `act` once.
    pub fn once(name: &'static str, act: Act) -> Self {
        Self::scripted(name, Script::once(act))
    }

    pub fn scripted(name: &'static str, script: Script) -> Self {
        Self {
            name,
            primary: script,
            primary_refused: false,
            second: Some(Script::good()),
            second_refused: false,
            one_model: false,
            primary_lines: Vec::new(),
            second_lines: Vec::new(),
            model_lines: Vec::new(),
            cells: |_, _| true,
        }
    }

    /// The first provider is behind [`Bench::front`], and good when that is up.
    pub fn refused(name: &'static str) -> Self {
        let mut route = Self::scripted(name, Script::good());
        route.primary_refused = true;
        route
    }

    /// What the second provider does for ever.
    #[must_use]
    pub fn then(mut self, act: Act) -> Self {
        self.second = Some(Script::always(act));
        self
    }

    /// What the second provider does, attempt by attempt.
    #[must_use]
    pub fn then_script(mut self, script: Script) -> Self {
        self.second = Some(script);
        self
    }

    /// Nobody listens at the second provider's address.
    #[must_use]
    pub fn then_refused(mut self) -> Self {
        self.second_refused = true;
        self
    }

    /// One model and one target for all cells: what a provider did to one of them counts for the others.
    #[must_use]
    pub fn one_model(mut self) -> Self {
        self.one_model = true;
        self
    }

    /// There is no second provider.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.second = None;
        self
    }

    /// Only the cells of which this is true.
    #[must_use]
    pub fn only(mut self, cells: fn(Api, bool) -> bool) -> Self {
        self.cells = cells;
        self
    }

    /// Streams only.
    #[must_use]
    pub fn streams(self) -> Self {
        self.only(|_, stream| stream)
    }

    /// One more line in the table of the first provider.
    #[must_use]
    pub fn line(mut self, line: &str) -> Self {
        self.primary_lines.push(line.to_owned());
        self
    }

    /// One more line in the table of the second provider.
    #[must_use]
    pub fn second_line(mut self, line: &str) -> Self {
        self.second_lines.push(line.to_owned());
        self
    }

    /// One more line in the table of the model.
    #[must_use]
    pub fn model_line(mut self, line: &str) -> Self {
        self.model_lines.push(line.to_owned());
        self
    }

    /// A first provider that stalls after a second of silence.
    #[must_use]
    pub fn stalls(self) -> Self {
        self.line("response_stall_timeout = \"1s\"")
    }

    fn all_cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for api in Api::ALL {
            for stream in [false, true] {
                if (self.cells)(api, stream) {
                    cells.push(Cell {
                        route: self.name,
                        one_model: self.one_model,
                        api,
                        stream,
                    });
                }
            }
        }
        cells
    }
}

/// One way to ask for the model of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub route: &'static str,
    one_model: bool,
    pub api: Api,
    pub stream: bool,
}

impl Cell {
    /// What a client asks for.
    pub fn model(&self) -> String {
        if self.one_model {
            return self.route.to_owned();
        }
        let kind = if self.stream { "stream" } else { "whole" };
        format!("{}.{}.{kind}", self.route, self.api.name())
    }

    /// What both providers call it.
    pub fn target(&self) -> String {
        format!("{}.t", self.model())
    }
}

/// What a client saw, and how long it took.
#[derive(Debug)]
pub struct Seen {
    pub answer: Answer,
    pub elapsed: Duration,
}

/// A running stack with both providers.
pub struct Bench {
    pub stack: Stack,
    pub primary: Faulty,
    pub second: Faulty,
    pub routes: Vec<Route>,
    /// Where refused providers are: down until the test says otherwise, the first provider behind it.
    pub front: Front,
}

impl Bench {
    /// Starts everything; `more` adds to the configuration.
    pub async fn start(shape: Shape, routes: Vec<Route>, more: impl FnOnce(Setup) -> Setup) -> Arc<Self> {
        Self::build(shape, routes, ["", ""], more).await
    }

    /// The same behind two nodes: the first providers are asked on `n1`, the second ones on `n2`.
    pub async fn start_nodes(routes: Vec<Route>, more: impl FnOnce(Setup) -> Setup) -> Arc<Self> {
        let more = |setup: Setup| more(setup.nodes(&["n1", "n2"]));
        Self::build(Shape::Linked, routes, ["n1/", "n2/"], more).await
    }

    async fn build(
        shape: Shape,
        routes: Vec<Route>,
        places: [&str; 2],
        more: impl FnOnce(Setup) -> Setup,
    ) -> Arc<Self> {
        let (primary, second) = (Faulty::start(PRIMARY).await, Faulty::start(SECOND).await);
        let front = Front::of(&primary.stub.addr);
        let metrics = "metrics_listen = \"127.0.0.1:0\"";
        let mut setup = Setup::default().nodes(&["n1"]).node("node", metrics);
        for route in &routes {
            let cells = route.all_cells();
            let mut targets: Vec<String> = cells.iter().map(Cell::target).collect();
            targets.dedup();
            let mut add = |id: String, faulty: &Faulty, script: &Script, refused: bool, lines: &[String]| {
                for target in &targets {
                    faulty.script(target, script.clone());
                }
                let url = if refused { front.url() } else { faulty.stub.url() };
                let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
                let provider = Provider::openai(&id, &url, &targets);
                let provider = lines.iter().fold(provider, |p, line| p.line(line));
                setup.providers.push(provider);
                id
            };
            let a = format!("a-{}", route.name);
            let a = add(
                a,
                &primary,
                &route.primary,
                route.primary_refused,
                &route.primary_lines,
            );
            let mut ids = vec![format!("{}{a}", places[0])];
            if let Some(script) = &route.second {
                let b = format!("b-{}", route.name);
                let b = add(b, &second, script, route.second_refused, &route.second_lines);
                ids.push(format!("{}{b}", places[1]));
            }
            let mut models: Vec<(String, String)> = cells.iter().map(|c| (c.model(), c.target())).collect();
            models.dedup();
            for (model, target) in &models {
                let candidates: Vec<(&str, &str)> =
                    ids.iter().map(|id| (id.as_str(), target.as_str())).collect();
                setup = setup.ranked(model, &candidates);
                setup = route.model_lines.iter().fold(setup, |s, line| s.model_line(line));
            }
        }
        let stack = Stack::start(shape, more(setup)).await;
        Arc::new(Self {
            stack,
            primary,
            second,
            routes,
            front,
        })
    }

    /// The cells of all routes.
    pub fn cells(&self) -> Vec<Cell> {
        self.routes.iter().flat_map(Route::all_cells).collect()
    }

    /// The cells of one route.
    pub fn cells_of(&self, route: &str) -> Vec<Cell> {
        self.cells().into_iter().filter(|c| c.route == route).collect()
    }

    /// One request of a cell.
    pub async fn ask(&self, cell: Cell) -> Seen {
        ask(&self.stack.client(), cell).await
    }

    /// Nothing is in flight any more, every capacity is whole, and no provider was asked for anything odd.
    pub async fn done(&self) {
        self.stack.settled(Duration::from_secs(5)).await;
        for provider in [&self.primary, &self.second] {
            assert_eq!(provider.strays(), Vec::<String>::new(), "{}", provider.name);
            provider.stub.idle(Duration::from_secs(2)).await;
        }
    }
}

/// One request of a cell.
pub async fn ask(client: &Client, cell: Cell) -> Seen {
    let body = cell.api.request(&cell.model(), cell.stream);
    let started = Instant::now();
    let answer = within(
        &format!("{cell:?}"),
        ANSWER_WITHIN,
        client.post(cell.api.path(), &body),
    )
    .await;
    Seen {
        answer,
        elapsed: started.elapsed(),
    }
}

/// Runs a check for each cell, several at once, and names all cells that failed at the end.
///
/// # Panics
/// When one did.
pub async fn failures<F, Fut>(cells: Vec<Cell>, check: F)
where
    F: Fn(Cell) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    assert!(!cells.is_empty(), "no cell at all");
    let places = Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
    let mut running = Vec::new();
    for cell in cells {
        let (places, work) = (Arc::clone(&places), check(cell));
        let task = tokio::spawn(async move {
            let _place = places.acquire_owned().await;
            work.await;
        });
        running.push((cell, task));
    }
    let mut failed = Vec::new();
    for (cell, task) in running {
        if task.await.is_err() {
            failed.push(cell.model());
        }
    }
    assert!(failed.is_empty(), "{} cells failed: {failed:#?}", failed.len());
}
