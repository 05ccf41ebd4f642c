//! `iop-node`: reads `node.toml`, dials its edges, serves them until told to leave.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use iop_node::config::{ProcessResolver, Settings};
use iop_node::link::{self, Links, PreparedEdge};
use iop_node::metrics::NodeMetrics;
use iop_node::tasks::{self, Kind};
use iop_node::{Node, admin};
use iop_shared::config::{LogFormat, TelemetryConfig};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// After the last request ended, links get this long to say goodbye.
const GOODBYE: Duration = Duration::from_secs(5);

/// Serves local model providers to iop-edge, which it dials.
#[derive(Debug, Parser)]
#[command(name = "iop-node", version)]
struct Cli {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = "./node.toml", global = true)]
    config: PathBuf,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Checks the configuration and leaves.
    Check,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Some(Command::Check) => read(&cli.config).map(|_| println!("{}: ok", cli.config.display())),
        None => read(&cli.config).and_then(|(settings, edges)| serve(settings, edges)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The configuration, and everything that it names read too: nothing is half-started on a bad one.
fn read(path: &Path) -> anyhow::Result<(Settings, Vec<PreparedEdge>)> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {file}"))?;
    let mut settings = Settings::parse(&file, &text, &ProcessResolver)?;
    let edges =
        link::prepare(std::mem::take(&mut settings.edges)).map_err(|e| anyhow::anyhow!("{file}: {e}"))?;
    Ok((settings, edges))
}

fn log(telemetry: &TelemetryConfig) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(&telemetry.log)?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match telemetry.log_format {
        LogFormat::Json => logs
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .init(),
        LogFormat::Text => logs.with_ansi(false).init(),
    }
    Ok(())
}

fn serve(settings: Settings, edges: Vec<PreparedEdge>) -> anyhow::Result<()> {
    log(&settings.telemetry)?;
    let runtime = tasks::runtime()?;
    let served = runtime.block_on(run(settings, edges));
    // Whatever is left has had its time.
    runtime.shutdown_background();
    served
}

async fn run(settings: Settings, edges: Vec<PreparedEdge>) -> anyhow::Result<()> {
    // Installed first, so that a signal during the start is not the default end.
    let mut signals = Signals::new()?;
    let registry = prometheus::Registry::new();
    NodeMetrics::register_process(&registry)?;
    let node = Node::new(settings.id, &settings.providers, &registry)?;
    let mut ready = format!("iop-node ready id={}", node.id());
    if let Some(addr) = settings.metrics_listen {
        let listener = TcpListener::bind(addr)
            .await
            .with_context(|| format!("cannot listen on {addr}"))?;
        ready.push_str(&format!(" metrics={}", listener.local_addr()?));
        tasks::spawn(
            Kind::Service,
            "metrics listener",
            admin::serve(node.clone(), listener),
        );
    }
    node.start();
    let links = Links::start(&node, edges);
    say(&ready);

    signals.next().await;
    tracing::info!(in_flight = node.in_flight(), "draining");
    node.set_draining(true);
    let leave = async {
        match tokio::time::timeout(settings.drain_timeout, node.drained()).await {
            Ok(()) => links.close(GOODBYE).await,
            Err(_) => tracing::warn!(
                in_flight = node.in_flight(),
                "drain_timeout is over; the rest is cut"
            ),
        }
    };
    tokio::select! {
        () = leave => Ok(()),
        () = signals.next() => anyhow::bail!("a second signal: leaving at once"),
    }
}

/// The ready line is for whoever started the process; when nobody reads it, that is no reason to stop.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

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
