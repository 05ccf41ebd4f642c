//! From the file as written to settings: every rule that a type cannot say, at its key.
//!
//! One table's fault hides others of the same table only. Secrets are read last, so that a file can be judged by its own text
//! before the environment is.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use iop_node::ProviderSettings;
use iop_shared::config::{ByteSize, ConfigError, Period, SecretRef, SecretString, Source, TlsConfig};

use super::file::{EdgeFile, EjectionFile, GateFile, LinkFile, QueueFile, ServerFile};
use super::settings::{
    EjectionSettings, GateSettings, KeySettings, LinkSettings, QueueSettings, RunsSettings, ServerSettings,
    Settings, StoreUrl,
};
use super::{Refused, agents, keys, models, runs};
use crate::agents::prices::Prices;
use crate::http::tls::{self, Alpn};
use crate::pool::Model;

/// Where references lead: the environment and the file system of the process, or a test's.
pub struct World<'a> {
    pub env: &'a dyn Fn(&str) -> Option<String>,
    pub file: &'a dyn Fn(&Path) -> std::io::Result<String>,
}

impl World<'static> {
    /// The real one.
    pub fn real() -> Self {
        Self {
            env: &|name| std::env::var(name).ok(),
            file: &|path| std::fs::read_to_string(path),
        }
    }
}

/// What the sections have in common while settings are made.
pub(super) struct Site<'a> {
    pub(super) source: &'a Source,
    pub(super) world: &'a World<'a>,
    /// What was found broken so far.
    faults: RefCell<Vec<ConfigError>>,
}

pub(super) type Checked<T> = Result<T, ConfigError>;

impl<'a> Site<'a> {
    pub(super) fn new(source: &'a Source, world: &'a World<'a>) -> Self {
        Self {
            source,
            world,
            faults: RefCell::default(),
        }
    }

    /// Notes a fault, so that what does not depend on it is judged as well.
    pub(super) fn keep<T>(&self, checked: Checked<T>) -> Option<T> {
        checked.map_err(|fault| self.faults.borrow_mut().push(fault)).ok()
    }

    /// All that was noted.
    ///
    /// # Errors
    /// When there is any.
    fn judge(&self) -> Result<(), Refused> {
        let mut faults = self.faults.take();
        faults.sort_by_key(|fault| fault.line);
        if faults.is_empty() {
            Ok(())
        } else {
            Err(Refused(faults))
        }
    }

    pub(super) fn fail<T>(&self, key: &str, message: impl Into<String>) -> Checked<T> {
        Err(self.source.error(key, message))
    }

    pub(super) fn secret(&self, key: &str, reference: &SecretRef) -> Checked<SecretString> {
        reference
            .resolve(self.world.env, self.world.file)
            .or_else(|e| self.fail(key, e))
    }

    pub(super) fn positive(&self, key: &str, period: Period) -> Checked<Duration> {
        if period.0.is_zero() {
            self.fail(key, "must be longer than zero")
        } else {
            Ok(period.0)
        }
    }

    fn size(&self, key: &str, size: ByteSize, least: ByteSize, words: &str) -> Checked<usize> {
        if size < least {
            self.fail(key, format!("must be at least {words}"))
        } else {
            Ok(size.as_usize())
        }
    }

    fn tls(&self, key: &str, config: &TlsConfig, alpn: Alpn) -> Checked<Arc<rustls::ServerConfig>> {
        let read = |part: &str, path: &Path| {
            (self.world.file)(path).or_else(|e| {
                self.fail(
                    &format!("{key}.{part}"),
                    format!("cannot read {}: {e}", path.display()),
                )
            })
        };
        let cert = read("cert", &config.cert)?;
        let private = read("key", &config.key)?;
        let ca = config
            .client_ca
            .as_deref()
            .map(|path| read("client_ca", path))
            .transpose()?;
        tls::server_config(&cert, &private, ca.as_deref(), alpn)
            .or_else(|e| self.fail(&format!("{key}.{}", e.part()), e.to_string()))
    }
}

/// Makes settings of a parsed file.
///
/// # Errors
/// Every rule broken, at its file, line and key; a table is judged up to its first fault.
pub(super) fn settings(file: EdgeFile, source: &Source, world: &World<'_>) -> Result<Settings, Refused> {
    let site = &Site::new(source, world);
    let mut notes = Vec::new();
    let rules = rules(site, &file, &mut notes);
    site.judge()?;
    let outside = outside(site, &file);
    site.judge()?;
    let (Some(rules), Some(outside)) = (rules, outside) else {
        return Err(source.error("(file)", "cannot be used").into());
    };
    Ok(Settings {
        demo: file.demo,
        server: ServerSettings {
            tls: outside.tls,
            ..rules.server
        },
        link: outside.link,
        keys: outside.keys,
        gate: rules.gate,
        ejection: rules.ejection,
        queue: rules.queue,
        providers: outside.providers,
        models: rules.models,
        runs: rules.runs,
        store: rules.store,
        // A gateway that is told nothing of runs needs no database (D27).
        hosts_runs: file.store.is_some() || file.runs.is_some() || !file.agents.is_empty(),
        agents: file.agents,
        prices: rules.prices,
        telemetry: file.telemetry,
        notes,
    })
}

/// What a file says by its text alone.
struct Rules {
    server: ServerSettings,
    gate: GateSettings,
    ejection: EjectionSettings,
    queue: QueueSettings,
    models: Vec<Model>,
    runs: RunsSettings,
    store: StoreUrl,
    prices: Prices,
}

/// Judges a file by its text. `None` where a fault was noted.
fn rules(site: &Site<'_>, file: &EdgeFile, notes: &mut Vec<String>) -> Option<Rules> {
    refuse_what_is_not_there_yet(site, file);
    let server = site.keep(server(site, &file.server));
    site.keep(link_rules(site, file.link.as_ref()));
    let gate = site.keep(gate(site, &file.gate));
    let queue = site.keep(queue(site, &file.queue));
    let ejection = site.keep(ejection(site, file.ejection.as_ref()));
    let runs = site.keep(runs::rules(site, file.runs.as_ref()));
    let store = site.keep(runs::store(site, file));
    provider_rules(site, file);
    let models = models::build(site, &file.models, &file.providers, file.link.is_some(), notes);
    keys::rules(site, &file.auth);
    if file.demo && !file.auth.keys.is_empty() {
        let why = "is for a demonstration without keys: its tool asks for none";
        site.keep::<()>(site.fail("demo", why));
    }
    let prices = agents::rules(site, file);
    if let Some(store) = &store {
        agents::notes(file, store, notes);
    }
    if file.auth.keys.is_empty() {
        loopback_only(site, file);
        notes.push(String::from(
            "no key configured: listens on loopback only, every role is granted",
        ));
    }
    if file.providers.is_empty() && file.link.is_none() {
        notes.push(String::from(
            "no [[providers]] and no [link]: nothing can be served",
        ));
    }
    Some(Rules {
        server: server?,
        gate: gate?,
        ejection: ejection?,
        queue: queue?,
        models,
        runs: runs?,
        store: store?,
        prices: prices?,
    })
}

/// What a file's references lead to.
struct Outside {
    keys: Vec<KeySettings>,
    link: Option<LinkSettings>,
    tls: Option<Arc<rustls::ServerConfig>>,
    providers: Vec<ProviderSettings>,
}

/// Follows every reference. `None` where a fault was noted.
fn outside(site: &Site<'_>, file: &EdgeFile) -> Option<Outside> {
    let keys = keys::build(site, &file.auth);
    agents::secrets(site, &file.agents);
    let link = file.link.as_ref().map(|l| LinkSettings {
        listen: l.listen,
        tokens: tokens(site, l),
        tls: site
            .keep(opt_tls(site, "link.tls", l.tls.as_ref(), Alpn::Upgrade))
            .flatten(),
    });
    let tls = site.keep(opt_tls(site, "server.tls", file.server.tls.as_ref(), Alpn::Http));
    let providers = file.providers.iter().enumerate().map(|(i, config)| {
        let secret = |reference| site.keep(site.secret(&format!("providers[{i}].api_key"), reference));
        ProviderSettings {
            config: config.clone(),
            api_key: config.api_key.as_ref().and_then(secret).map(Arc::new),
        }
    });
    Some(Outside {
        keys,
        link,
        providers: providers.collect(),
        tls: tls?,
    })
}

const LATER: &str = "not available yet";

fn refuse_what_is_not_there_yet(site: &Site<'_>, file: &EdgeFile) {
    let fail = |key, why: &str| site.keep::<()>(site.fail(key, why));
    for (key, value) in [
        ("flows", &file.flows),
        ("triggers", &file.triggers),
        ("nats", &file.nats),
        ("webhooks", &file.webhooks),
    ] {
        if value.is_some() {
            fail(key, LATER);
        }
    }
    if file.telemetry.otlp_endpoint.is_some() {
        fail("telemetry.otlp_endpoint", LATER);
    }
    if file.telemetry.gen_ai_metrics {
        fail("telemetry.gen_ai_metrics", LATER);
    }
    if let Err(e) = file.telemetry.log.parse::<tracing_subscriber::EnvFilter>() {
        fail("telemetry.log", &format!("is no tracing filter: {e}"));
    }
}

fn server(site: &Site<'_>, file: &ServerFile) -> Checked<ServerSettings> {
    let body_limit = site.size("server.body_limit", file.body_limit, ByteSize::kib(1), "1KiB")?;
    let body_memory = file.body_memory.as_usize();
    if body_limit > body_memory {
        return site.fail(
            "server.body_limit",
            "must not be above server.body_memory: no body of that size could be read",
        );
    }
    if file.tls.as_ref().is_some_and(|t| t.client_ca.is_some()) {
        return site.fail(
            "server.tls.client_ca",
            "is for [link] only: clients of [server] show keys",
        );
    }
    Ok(ServerSettings {
        listen: file.listen,
        metrics_listen: file.metrics_listen,
        body_limit,
        body_memory,
        drain_timeout: file.drain_timeout.0,
        tls: None,
    })
}

fn link_rules(site: &Site<'_>, file: Option<&LinkFile>) -> Checked<()> {
    if file.is_some_and(|link| link.tokens.is_empty()) {
        return site.fail(
            "link.tokens",
            "must name at least one token: nodes authenticate with it",
        );
    }
    Ok(())
}

fn tokens(site: &Site<'_>, file: &LinkFile) -> Vec<SecretString> {
    let tokens = file.tokens.iter().enumerate();
    tokens
        .filter_map(|(i, t)| site.keep(site.secret(&format!("link.tokens[{i}]"), t)))
        .collect()
}

fn opt_tls(
    site: &Site<'_>,
    key: &str,
    config: Option<&TlsConfig>,
    alpn: Alpn,
) -> Checked<Option<Arc<rustls::ServerConfig>>> {
    config.map(|c| site.tls(key, c, alpn)).transpose()
}

/// Without keys everybody who reaches a listener may do everything (G70).
fn loopback_only(site: &Site<'_>, file: &EdgeFile) {
    let listeners = [
        ("server.listen", Some(file.server.listen)),
        ("server.metrics_listen", file.server.metrics_listen),
        ("link.listen", file.link.as_ref().map(|l| l.listen)),
    ];
    for (key, listen) in listeners {
        if listen.is_some_and(|a| !a.ip().to_canonical().is_loopback()) {
            site.keep::<()>(site.fail(
                key,
                "no key configured: listens on loopback only; add [auth] keys to listen elsewhere",
            ));
        }
    }
}

fn gate(site: &Site<'_>, file: &GateFile) -> Checked<GateSettings> {
    if file.max_attempts == 0 {
        return site.fail(
            "gate.max_attempts",
            "must be at least 1: the first dispatch counts",
        );
    }
    let unless_zero = |p: Period| (!p.0.is_zero()).then_some(p.0);
    Ok(GateSettings {
        max_attempts: file.max_attempts,
        max_elapsed: site.positive("gate.max_elapsed", file.max_elapsed)?,
        hold_bytes: site.size("gate.hold_bytes", file.hold_bytes, ByteSize::kib(1), "1KiB")?,
        keepalive_open_after: unless_zero(file.keepalive_open_after),
        keepalive_interval: unless_zero(file.keepalive_interval),
        on_node_lost: file.on_node_lost,
        client_write_timeout: site.positive("gate.client_write_timeout", file.client_write_timeout)?,
        snapshot_bytes: file.snapshot_bytes.as_usize(),
    })
}

fn queue(site: &Site<'_>, file: &QueueFile) -> Checked<QueueSettings> {
    const MOST: usize = 1_000_000;
    if file.max_depth > MOST {
        return site.fail("queue.max_depth", format!("must be at most {MOST}"));
    }
    Ok(QueueSettings {
        max_depth: file.max_depth,
        max_wait: file.max_wait.0,
    })
}

fn ejection(site: &Site<'_>, file: Option<&EjectionFile>) -> Checked<EjectionSettings> {
    let default = EjectionFile::default();
    let file = file.unwrap_or(&default);
    if file.consecutive == 0 {
        return site.fail("ejection.consecutive", "must be at least 1");
    }
    let base = site.positive("ejection.base", file.base)?;
    if file.max < file.base {
        return site.fail("ejection.max", "must not be below ejection.base");
    }
    Ok(EjectionSettings {
        consecutive: file.consecutive,
        base,
        max: file.max.0,
    })
}

fn provider_rules(site: &Site<'_>, file: &EdgeFile) {
    for (i, provider) in file.providers.iter().enumerate() {
        let key = format!("providers[{i}]");
        if file.providers[..i].iter().any(|p| p.id == provider.id) {
            site.keep::<()>(site.fail(
                &format!("{key}.id"),
                format!("provider {:?} is defined twice", provider.id),
            ));
        }
        site.keep(provider.validate(site.source, &key));
    }
}
