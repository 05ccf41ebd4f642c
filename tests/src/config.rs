//! Builds `edge.toml` and `node.toml` for a test: the documented keys, written out as an operator would.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// One `[[providers]]` table.
#[derive(Debug, Clone)]
pub struct Provider {
    pub id: String,
    pub targets: Vec<String>,
    lines: Vec<String>,
}

impl Provider {
    /// An OpenAI-compatible provider at `base_url` that serves `targets`.
    pub fn openai(id: &str, base_url: &str, targets: &[&str]) -> Self {
        let mut provider = Self::bare(id, "openai", targets);
        provider.lines.push(format!("base_url = {base_url:?}"));
        provider
    }

    /// The provider that needs no model; `script` is the inline table of `script`.
    pub fn scripted(id: &str, targets: &[&str], script: &str) -> Self {
        let mut provider = Self::bare(id, "scripted", targets);
        provider.lines.push(format!("script = {script}"));
        provider
    }

    /// An OpenAI-compatible provider that is asked for its models.
    pub fn auto(id: &str, base_url: &str) -> Self {
        let lines = ["adapter = \"openai\"", "targets = \"auto\""].map(str::to_owned);
        let mut provider = Self {
            id: id.to_owned(),
            targets: Vec::new(),
            lines: lines.to_vec(),
        };
        provider
            .lines
            .push(format!("id = {id:?}\nbase_url = {base_url:?}"));
        provider
    }

    fn bare(id: &str, adapter: &str, targets: &[&str]) -> Self {
        let targets: Vec<String> = targets.iter().map(|t| (*t).to_owned()).collect();
        let lines = vec![
            format!("id = {id:?}"),
            format!("adapter = {adapter:?}"),
            format!("targets = {targets:?}"),
        ];
        Self {
            id: id.to_owned(),
            targets,
            lines,
        }
    }

    /// How many requests the provider takes at once.
    #[must_use]
    pub fn capacity(self, n: usize) -> Self {
        self.line(&format!("capacity = {n}"))
    }

    /// Endpoints, where the adapter's own list is not what is wanted.
    #[must_use]
    pub fn endpoints(self, names: &[&str]) -> Self {
        self.line(&format!("endpoints = {names:?}"))
    }

    /// One more line of the table.
    #[must_use]
    pub fn line(mut self, line: &str) -> Self {
        self.lines.push(line.to_owned());
        self
    }

    fn render(&self) -> String {
        format!("[[providers]]\n{}\n\n", self.lines.join("\n"))
    }
}

/// One `[[models]]` table; candidates name a provider by its own id, the harness adds the node's.
#[derive(Debug, Clone)]
pub struct Model {
    pub name: String,
    candidates: Vec<(String, String)>,
    /// The candidates' own order is their priority.
    ranked: bool,
    lines: Vec<String>,
}

/// What a stack is made of, before its shape is known.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    pub providers: Vec<Provider>,
    pub models: Vec<Model>,
    pub nodes: Vec<String>,
    /// The key that the harness itself uses, when keys are configured; it needs every role.
    pub key: Option<String>,
    pub env: Vec<(String, String)>,
    edge: BTreeMap<String, Vec<String>>,
    node: BTreeMap<String, Vec<String>>,
}

/// One inline table of `[auth] keys`, the secret as its digest; `more` is appended as written.
pub fn key(name: &str, secret: &str, roles: &[&str], more: &str) -> String {
    let digest: String = Sha256::digest(secret.as_bytes())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("{{ name = {name:?}, secret_sha256 = \"{digest}\", roles = {roles:?}{more} }}")
}

impl Setup {
    /// One provider, its targets served under their own names.
    pub fn of(provider: Provider) -> Self {
        Self {
            providers: vec![provider],
            nodes: vec!["n1".to_owned()],
            ..Self::default()
        }
    }

    /// One more provider.
    #[must_use]
    pub fn provider(mut self, provider: Provider) -> Self {
        self.providers.push(provider);
        self
    }

    /// A public model name with one candidate.
    #[must_use]
    pub fn model(mut self, name: &str, provider: &str, target: &str) -> Self {
        self.models.push(Model {
            name: name.to_owned(),
            candidates: vec![(provider.to_owned(), target.to_owned())],
            ranked: false,
            lines: Vec::new(),
        });
        self
    }

    /// A public model name with several candidates, as (provider, target).
    #[must_use]
    pub fn candidates(mut self, name: &str, candidates: &[(&str, &str)]) -> Self {
        let candidates = candidates
            .iter()
            .map(|(p, t)| ((*p).to_owned(), (*t).to_owned()))
            .collect();
        self.models.push(Model {
            name: name.to_owned(),
            candidates,
            ranked: false,
            lines: Vec::new(),
        });
        self
    }

    /// The same, the first of them asked first: the others are for when it cannot take a request.
    #[must_use]
    pub fn ranked(self, name: &str, candidates: &[(&str, &str)]) -> Self {
        let mut setup = self.candidates(name, candidates);
        if let Some(model) = setup.models.last_mut() {
            model.ranked = true;
        }
        setup
    }

    /// One more line of the table of the model that was named last.
    ///
    /// # Panics
    /// When none was.
    #[must_use]
    pub fn model_line(mut self, line: &str) -> Self {
        self.models.last_mut().unwrap().lines.push(line.to_owned());
        self
    }

    /// A line in a section of edge.toml.
    #[must_use]
    pub fn edge(mut self, section: &str, line: &str) -> Self {
        self.edge
            .entry(section.to_owned())
            .or_default()
            .push(line.to_owned());
        self
    }

    /// A line in a section of node.toml.
    #[must_use]
    pub fn node(mut self, section: &str, line: &str) -> Self {
        self.node
            .entry(section.to_owned())
            .or_default()
            .push(line.to_owned());
        self
    }

    /// The ids of the nodes in the linked shape (default: one, `n1`).
    #[must_use]
    pub fn nodes(mut self, ids: &[&str]) -> Self {
        self.nodes = ids.iter().map(|i| (*i).to_owned()).collect();
        self
    }

    /// `[auth] keys`: lines of inline tables, and the key that the harness uses for its own requests.
    #[must_use]
    pub fn keys(mut self, tables: &[String], own: &str) -> Self {
        self.key = Some(own.to_owned());
        let line = format!("keys = [\n  {}\n]", tables.join(",\n  "));
        self.edge("auth", &line)
    }

    /// A variable for every process.
    #[must_use]
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.env.push((key.to_owned(), value.to_owned()));
        self
    }

    /// The model names that `/v1/models` will list once the stack is up.
    pub fn expected_models(&self) -> Vec<String> {
        if self.models.is_empty() {
            self.providers.iter().flat_map(|p| p.targets.clone()).collect()
        } else {
            self.models.iter().map(|m| m.name.clone()).collect()
        }
    }

    /// edge.toml; `node_prefix` is the node whose providers the candidates mean, `None` for embedded ones.
    pub fn edge_toml(&self, linked: bool) -> String {
        let mut sections = self.edge.clone();
        default_line(&mut sections, "server", "listen", r#""127.0.0.1:0""#);
        if linked {
            default_line(&mut sections, "link", "listen", r#""127.0.0.1:0""#);
            default_line(&mut sections, "link", "tokens", r#"[{ env = "IOP_LINK_TOKEN" }]"#);
        }
        let mut text = render(&sections);
        if !linked {
            self.providers.iter().for_each(|p| text.push_str(&p.render()));
        }
        for model in &self.models {
            let mut candidates = Vec::new();
            for (i, (provider, target)) in model.candidates.iter().enumerate() {
                let priority = if model.ranked { i } else { 0 };
                // `NODE/ID` is one node's alone.
                let named = provider.contains('/');
                let nodes: &[String] = if linked && !named { &self.nodes } else { &[] };
                let mut ids: Vec<String> = nodes.iter().map(|node| format!("{node}/{provider}")).collect();
                if !linked || named {
                    ids.push(provider.clone());
                }
                candidates.extend(ids.iter().map(|id| {
                    format!("{{ provider = {id:?}, target = {target:?}, priority = {priority} }}")
                }));
            }
            let _ = writeln!(
                text,
                "[[models]]\nname = {:?}\ncandidates = [{}]\n{}\n",
                model.name,
                candidates.join(", "),
                model.lines.join("\n")
            );
        }
        text
    }

    /// node.toml of node `id`, dialing `edge_url`.
    pub fn node_toml(&self, id: &str, edge_url: &str) -> String {
        let mut sections = self.node.clone();
        sections
            .entry("node".to_owned())
            .or_default()
            .insert(0, format!("id = {id:?}"));
        let mut text = render(&sections);
        let _ = writeln!(
            text,
            "[[edges]]\nurl = {edge_url:?}\ntoken = {{ env = \"IOP_LINK_TOKEN\" }}\n"
        );
        self.providers.iter().for_each(|p| text.push_str(&p.render()));
        text
    }
}

fn default_line(sections: &mut BTreeMap<String, Vec<String>>, section: &str, key: &str, value: &str) {
    let lines = sections.entry(section.to_owned()).or_default();
    if !lines.iter().any(|l| l.starts_with(key)) {
        lines.insert(0, format!("{key} = {value}"));
    }
}

fn render(sections: &BTreeMap<String, Vec<String>>) -> String {
    sections
        .iter()
        .map(|(name, lines)| format!("[{name}]\n{}\n\n", lines.join("\n")))
        .collect()
}
