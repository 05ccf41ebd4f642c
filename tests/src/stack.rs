//! The product as an operator runs it: an edge alone, or an edge with nodes that dialed in.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::config::Setup;
use crate::metrics::Page;
use crate::process::{Process, binary};
use crate::{eventually, fixtures};

/// The token that nodes and edge share in tests.
pub const LINK_TOKEN: &str = "link-token-of-the-tests";

/// The two ways to run providers; the same promises hold in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The edge runs its own `[[providers]]`.
    Embedded,
    /// The providers run in an `iop-node` that dialed the edge.
    Linked,
}

impl Shape {
    /// Both.
    pub const ALL: [Shape; 2] = [Shape::Embedded, Shape::Linked];
}

/// A running edge.
pub struct Edge {
    pub process: Process,
    pub http: String,
    pub link: Option<String>,
    pub metrics: Option<String>,
    key: Option<String>,
}

/// A running node.
pub struct Node {
    pub process: Process,
    pub id: String,
    pub metrics: Option<String>,
}

/// Edge and nodes together.
pub struct Stack {
    pub shape: Shape,
    pub edge: Edge,
    pub nodes: Vec<Node>,
    pub setup: Setup,
    pub dir: TempDir,
}

impl Edge {
    /// Starts an edge with this configuration text.
    pub async fn start(dir: &Path, toml: &str, env: &[(String, String)], key: Option<String>) -> Self {
        let file = dir.join("edge.toml");
        fs::write(&file, toml).unwrap();
        let path = file.to_str().unwrap().to_owned();
        let mut process = Process::spawn(
            "iop-edge",
            &binary("iop-edge"),
            &["--config", &path],
            &with_token(env),
            dir,
        );
        let ready = process.ready().await;
        Self {
            process,
            http: ready.get("http").cloned().unwrap_or_default(),
            link: ready.get("link").cloned(),
            metrics: ready.get("metrics").cloned(),
            key,
        }
    }

    /// A client with the harness's own key, if keys are configured.
    pub fn client(&self) -> Client {
        Client {
            addr: self.http.clone(),
            key: self.key.clone(),
        }
    }

    /// The link URL for a node.
    ///
    /// # Panics
    /// When the edge has no link.
    pub fn link_url(&self) -> String {
        format!("http://{}", self.link.as_ref().unwrap())
    }

    /// One scrape.
    pub async fn scrape(&self) -> Page {
        let answer = match &self.metrics {
            Some(addr) => Client::new(addr).get("/metrics").await,
            None => self.client().get("/metrics").await,
        };
        assert_eq!(answer.status(), 200, "{}", answer.text());
        Page::parse(&answer.text())
    }

    /// The names in `/v1/models`.
    pub async fn models(&self) -> Vec<String> {
        let answer = self.client().get("/v1/models").await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        ids(&answer.json())
    }

    /// `data` of an admin list.
    pub async fn admin(&self, what: &str) -> Vec<Value> {
        let answer = self.client().get(&format!("/api/v1/{what}")).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        answer.json()["data"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until every one of these models is listed.
    pub async fn lists(&self, models: &[String], bound: Duration) {
        eventually("models listed", bound, || async {
            let seen = self.models().await;
            if models.iter().all(|m| seen.contains(m)) {
                Ok(())
            } else {
                Err(format!("{seen:?}, not {models:?}"))
            }
        })
        .await;
    }

    /// Waits until no in-flight figure of the edge says that anything is going on.
    pub async fn quiet(&self, bound: Duration) {
        eventually("in-flight figures of the edge at zero", bound, || async {
            let busy = self.scrape().await.busy();
            if !busy.is_empty() {
                return Err(format!("{busy:?}"));
            }
            for provider in self.admin("providers").await {
                if provider["in_flight"] != 0 || provider["queued"] != 0 {
                    return Err(provider.to_string());
                }
                if provider["effective_capacity"] != provider["capacity"] {
                    return Err(format!("capacity is not whole: {provider}"));
                }
            }
            Ok(())
        })
        .await;
    }
}

impl Node {
    /// Starts a node with this configuration text.
    pub async fn start(dir: &Path, id: &str, toml: &str, env: &[(String, String)]) -> Self {
        let file = dir.join(format!("node-{id}.toml"));
        fs::write(&file, toml).unwrap();
        let path = file.to_str().unwrap().to_owned();
        let mut process = Process::spawn(
            "iop-node",
            &binary("iop-node"),
            &["--config", &path],
            &with_token(env),
            dir,
        );
        let ready = process.ready().await;
        assert_eq!(ready.get("id").map(String::as_str), Some(id));
        Self {
            process,
            id: id.to_owned(),
            metrics: ready.get("metrics").cloned(),
        }
    }

    /// One scrape, when the node has a metrics listener.
    pub async fn scrape(&self) -> Option<Page> {
        let addr = self.metrics.as_ref()?;
        let answer = Client::new(addr).get("/metrics").await;
        assert_eq!(answer.status(), 200);
        Some(Page::parse(&answer.text()))
    }
}

impl Stack {
    /// Starts the edge alone; nodes are up to the test.
    pub async fn start_empty(shape: Shape, setup: Setup) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let toml = setup.edge_toml(shape == Shape::Linked);
        let edge = Edge::start(dir.path(), &toml, &setup.env, setup.key.clone()).await;
        Self {
            shape,
            edge,
            nodes: Vec::new(),
            setup,
            dir,
        }
    }

    /// Starts everything and waits until the models are listed.
    pub async fn start(shape: Shape, setup: Setup) -> Self {
        let mut stack = Self::start_empty(shape, setup).await;
        if shape == Shape::Linked {
            let url = stack.edge.link_url();
            for id in stack.setup.nodes.clone() {
                let node = stack.start_node(&id, &url).await;
                stack.nodes.push(node);
            }
            let nodes = stack.setup.nodes.len();
            eventually("nodes admitted", Duration::from_secs(10), || async {
                let live = stack.edge.admin("nodes").await;
                let live = live.iter().filter(|n| n["embedded"] == false).count();
                if live == nodes {
                    Ok(())
                } else {
                    Err(format!("{live} of {nodes}"))
                }
            })
            .await;
        }
        stack
            .edge
            .lists(&stack.setup.expected_models(), Duration::from_secs(10))
            .await;
        stack
    }

    /// Starts one more node, dialing `url`.
    pub async fn start_node(&self, id: &str, url: &str) -> Node {
        Node::start(
            self.dir.path(),
            id,
            &self.setup.node_toml(id, url),
            &self.setup.env,
        )
        .await
    }

    /// A client of the edge.
    pub fn client(&self) -> Client {
        self.edge.client()
    }

    /// Waits until edge and nodes are quiet, then checks that a request still works.
    pub async fn settled(&self, bound: Duration) {
        self.edge.quiet(bound).await;
        for node in &self.nodes {
            eventually("in-flight figures of the node at zero", bound, || async {
                match node.scrape().await.map(|p| p.busy()) {
                    Some(busy) if !busy.is_empty() => Err(format!("{busy:?}")),
                    _ => Ok(()),
                }
            })
            .await;
        }
    }

    /// One plain Chat request.
    pub async fn chat(&self, model: &str, text: &str) -> crate::client::Answer {
        self.client()
            .post("/v1/chat/completions", &fixtures::chat(model, text, false))
            .await
    }
}

/// The ids of a list object.
pub fn ids(list: &Value) -> Vec<String> {
    list["data"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|m| m["id"].as_str().map(str::to_owned))
        .collect()
}

fn with_token(env: &[(String, String)]) -> Vec<(String, String)> {
    let mut env = env.to_vec();
    if !env.iter().any(|(k, _)| k == "IOP_LINK_TOKEN") {
        env.push(("IOP_LINK_TOKEN".to_owned(), LINK_TOKEN.to_owned()));
    }
    env
}
