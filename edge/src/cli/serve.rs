//! The process: every listener bound before anything is said to be ready, a drain at the first signal, an end at the
//! second.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use iop_edge::app::App;
use iop_edge::config::Settings;
use iop_edge::drain::Drain;
use iop_edge::http::auth::Keys;
use iop_edge::http::{router, server};
use iop_edge::link::Links;
use iop_edge::metrics::Metrics;
use iop_edge::pool::Pool;
use iop_edge::runs::{Ingredients, Runs};
use iop_shared::config::{LogFormat, TelemetryConfig};
use iop_shared::ids::NodeId;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// For what is cancelled at the end to close its sockets.
const LAST_MOMENT: Duration = Duration::from_millis(500);

pub(super) fn run(config: Option<&Path>) -> ExitCode {
    let settings = match super::chosen(config)
        .map_err(Into::into)
        .and_then(|chosen| chosen.settings())
    {
        Ok(settings) => settings,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let result = start_log(&settings.telemetry).and_then(|()| {
        // More than a few hundred streams need more descriptors than many systems allow at first; less is not fatal.
        if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
        let runtime = iop_node::tasks::runtime()?;
        let served = runtime.block_on(serve(settings));
        runtime.shutdown_timeout(LAST_MOMENT);
        served
    });
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("iop-edge: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn start_log(telemetry: &TelemetryConfig) -> anyhow::Result<()> {
    let filter: EnvFilter = telemetry.log.parse().context("telemetry.log")?;
    // It logs messages of MCP whole: what tools and people said.
    let filter = filter.add_directive("rmcp=off".parse().context("telemetry.log")?);
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let started = match telemetry.log_format {
        LogFormat::Json => log.json().flatten_event(true).try_init(),
        LogFormat::Text => log.try_init(),
    };
    started.map_err(|e| anyhow::anyhow!("cannot start the log: {e}"))
}

async fn serve(mut settings: Settings) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let http = listen("server.listen", settings.server.listen)?;
    let metrics_listener = settings
        .server
        .metrics_listen
        .map(|a| listen("server.metrics_listen", a))
        .transpose()?;
    let link_listener = settings
        .link
        .as_ref()
        .map(|l| listen("link.listen", l.listen))
        .transpose()?;
    let ready = Ready {
        http: http.local_addr()?,
        link: link_listener.as_ref().map(TcpListener::local_addr).transpose()?,
        metrics: metrics_listener
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()?,
    };

    for note in &settings.notes {
        tracing::warn!("{note}");
    }
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let pool = Pool::new(
        std::mem::take(&mut settings.models),
        settings.queue,
        settings.ejection,
        Arc::clone(&metrics),
    );
    let drain = Drain::default();
    let keys = Keys::new(std::mem::take(&mut settings.keys));
    let providers = std::mem::take(&mut settings.providers);
    let link_settings = settings.link.take();
    let options = |tls| server::Options {
        tls,
        write_timeout: settings.gate.client_write_timeout,
    };
    let (main_options, metrics_options) = (options(settings.server.tls.take()), options(None));
    let drain_timeout = settings.server.drain_timeout;
    let is_demo = settings.demo;

    let links = Links::new(Arc::clone(&pool));
    if !providers.is_empty() {
        let node = iop_node::Node::new(NodeId::embedded(), &providers, metrics.registry())
            .context("embedded node")?;
        node.start();
        links.embed(node);
    }
    if let (Some(listener), Some(link)) = (link_listener, link_settings) {
        links.listen(listener, link, drain.clone());
    }
    let runs = runs(&mut settings, &metrics).await?;
    let app = App::new(settings, metrics, pool, keys, drain.clone());
    if let Some(runs) = &runs {
        app.host(Arc::clone(runs));
        runs.start(&app);
    }
    let for_main = Arc::clone(&app);
    let main = server::start(http, main_options, drain.clone(), move |conn, request| {
        router::serve(Arc::clone(&for_main), conn, request)
    });
    if let Some(listener) = metrics_listener {
        server::start(listener, metrics_options, drain.clone(), move |_, request| {
            router::serve_metrics(Arc::clone(&app), request)
        });
    }

    // Whoever started this process may have closed its end; that is no reason to stop.
    let _ = writeln!(std::io::stdout(), "{}", ready.line());
    if is_demo {
        eprintln!("{}", demonstration(ready.http));
    }
    tracing::info!(http = %ready.http, version = env!("CARGO_PKG_VERSION"), "ready");

    signals.next().await;
    tracing::info!(
        timeout_s = drain_timeout.as_secs(),
        "draining: new requests are refused, running ones finish"
    );
    drain.start();
    let finished = async {
        // Runs go back to the queue first: they are requests of this process too.
        if let Some(runs) = &runs {
            runs.stop(drain_timeout).await;
        }
        main.drained().await;
        links.drain().await;
    };
    tokio::select! {
        ended = tokio::time::timeout(drain_timeout, finished) => {
            if ended.is_err() {
                tracing::warn!("the drain timeout is over, what still runs is cut");
            }
            Ok(ExitCode::SUCCESS)
        }
        () = signals.next() => {
            tracing::warn!("second signal: ending at once");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// The durable runtime, where the configuration asks for it.
async fn runs(settings: &mut Settings, metrics: &Arc<Metrics>) -> anyhow::Result<Option<Arc<Runs>>> {
    if !settings.hosts_runs {
        return Ok(None);
    }
    let ingredients = Ingredients {
        settings: settings.runs,
        store: settings.store.clone(),
        agents: std::mem::take(&mut settings.agents),
        prices: std::mem::take(&mut settings.prices),
        metrics: Arc::clone(metrics),
    };
    Runs::open(ingredients).await.map(Some)
}

fn listen(key: &str, addr: SocketAddr) -> anyhow::Result<TcpListener> {
    server::bind(addr).with_context(|| format!("{key}: cannot listen on {addr}"))
}

/// The listeners as bound.
struct Ready {
    http: SocketAddr,
    link: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
}

impl Ready {
    /// The one line of stdout (gateway.md §13).
    fn line(&self) -> String {
        let mut line = format!("iop-edge ready http={}", self.http);
        for (name, addr) in [("link", self.link), ("metrics", self.metrics)] {
            if let Some(addr) = addr {
                // Writing to a string does not fail.
                let _ = write!(line, " {name}={addr}");
            }
        }
        line
    }
}

fn demonstration(http: SocketAddr) -> String {
    format!(
        r#"This is a demonstration with scripted models (demo, demo-tools, demo-slow, demo-busy, demo-recovery) and an agent (deployer),
open on loopback only. A model answers, and a run of the agent waits for a person (docs/tour.md goes on from there):

  curl -N http://{http}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model":"demo","stream":true,"messages":[{{"role":"user","content":"Hello"}}]}}'
  curl 'http://{http}/api/v1/runs?wait=10s' -H 'content-type: application/json' \
    -d '{{"agent":"deployer","input":"Deploy the website."}}'
"#
    )
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_leaves_absent_listeners_out() {
        let addr = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut ready = Ready {
            http: addr(1),
            link: Some(addr(2)),
            metrics: Some(addr(3)),
        };
        assert_eq!(
            ready.line(),
            "iop-edge ready http=127.0.0.1:1 link=127.0.0.1:2 metrics=127.0.0.1:3"
        );
        ready.link = None;
        assert_eq!(
            ready.line(),
            "iop-edge ready http=127.0.0.1:1 metrics=127.0.0.1:3"
        );
        ready.metrics = None;
        assert_eq!(ready.line(), "iop-edge ready http=127.0.0.1:1");
    }

    #[test]
    fn the_demonstration_prints_commands_that_can_be_pasted() {
        let text = demonstration(SocketAddr::from(([127, 0, 0, 1], 8080)));
        for command in [
            "curl -N http://127.0.0.1:8080/v1/chat/completions",
            "curl 'http://127.0.0.1:8080/api/v1/runs?wait=10s'",
        ] {
            assert!(text.contains(command), "{text}");
        }
        let bodies: Vec<&str> = text.split('\'').filter(|part| part.starts_with('{')).collect();
        assert_eq!(bodies.len(), 2, "{text}");
        for body in bodies {
            assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{body}");
        }
    }
}
