//! Real clients: the official SDKs, Codex and schemathesis, installed once from their registries into the target directory.
//!
//! What cannot be installed fails the test with the installer's own words; nothing is skipped.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::config::{Provider, Setup};
use crate::openai_like;
use crate::process::bin_dir;
use crate::provider::Stub;
use crate::stack::{Shape, Stack};

const SCRIPT_WITHIN: Duration = Duration::from_secs(90);

/// The folder of the scripts and pins.
pub fn source_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("sdk")
}

/// A Python with the pinned `openai` package.
///
/// # Panics
/// When it cannot be installed.
pub fn python() -> PathBuf {
    venv("python", "requirements.txt").join("python")
}

/// The pinned `schemathesis`.
///
/// # Panics
/// When it cannot be installed.
pub fn fuzzer() -> PathBuf {
    venv("fuzzer", "fuzz.txt").join("schemathesis")
}

/// Where the programs are of a Python with the packages of a file in `tests/sdk`.
fn venv(name: &str, pins: &str) -> PathBuf {
    let pins = source_dir().join(pins);
    let dir = install(name, &[&pins], |dir| {
        let venv = dir.join("venv");
        must(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        must(
            Command::new(venv.join("bin/python"))
                .args([
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    "-r",
                ])
                .arg(&pins),
        );
    });
    dir.join("venv/bin")
}

/// A folder with `node_modules` as pinned in `tests/<package>/package-lock.json`.
///
/// # Panics
/// When it cannot be installed.
pub fn node_modules(package: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(package);
    let files = [source.join("package.json"), source.join("package-lock.json")];
    install(package, &[&files[0], &files[1]], |dir| {
        for file in &files {
            std::fs::copy(file, dir.join(file.file_name().unwrap())).unwrap();
        }
        must(
            Command::new("npm")
                .args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"])
                .current_dir(dir),
        );
    })
}

/// Runs a script of `tests/sdk` under Python; its last line of output is JSON.
pub async fn run_python(script: &str, args: &[&str]) -> Value {
    let python = tokio::task::spawn_blocking(python).await.unwrap();
    let mut command = tokio::process::Command::new(python);
    command.arg(source_dir().join(script)).args(args);
    json_of(script, command).await
}

/// Runs a script of `tests/sdk` under Node.js; its last line of output is JSON.
pub async fn run_node(script: &str, args: &[&str]) -> Value {
    let dir = tokio::task::spawn_blocking(|| node_modules("sdk")).await.unwrap();
    // Modules are looked up from the script's own folder.
    let place = tempfile::tempdir_in(&dir).unwrap();
    let copy = place.path().join(script);
    std::fs::copy(source_dir().join(script), &copy).unwrap();
    let mut command = tokio::process::Command::new("node");
    command.arg(copy).args(args);
    json_of(script, command).await
}

async fn json_of(script: &str, mut command: tokio::process::Command) -> Value {
    command.kill_on_drop(true);
    for key in [
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ] {
        command.env_remove(key);
    }
    let output = tokio::time::timeout(SCRIPT_WITHIN, command.output()).await;
    let Ok(output) = output else {
        panic!("{script}: not done within {SCRIPT_WITHIN:?}")
    };
    let output = output.unwrap_or_else(|e| panic!("{script}: {e}"));
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{script} {}: {err}\n{out}",
        output.status
    );
    let line = out.trim_end().lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{script}: {e} in {out}\n{err}"))
}

/// Installs once per content of the pin files, also when several test processes ask at once.
fn install(name: &str, pins: &[&Path], work: impl FnOnce(&Path)) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    for pin in pins {
        let bytes = std::fs::read(pin).unwrap_or_else(|e| panic!("{}: {e}", pin.display()));
        bytes.hash(&mut hasher);
    }
    let root = bin_dir().parent().unwrap().join("sdk");
    let dir = root.join(format!("{name}-{:016x}", hasher.finish()));
    std::fs::create_dir_all(&dir).unwrap();
    let lock = File::create(dir.join("lock")).unwrap();
    lock.lock().unwrap();
    let done = dir.join("installed");
    if !done.exists() {
        work(&dir);
        File::create(done).unwrap();
    }
    dir
}

fn must(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e} (is it installed?)"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs a script against the provider itself and against the gateway in both shapes, and compares what it saw.
///
/// # Panics
/// When a promise is seen differently, or already fails at the provider itself.
pub async fn compared(script: &str, stub: &Stub, never: &[&str]) {
    let control = format!("{}/control", stub.url());
    let run = async |base: &str| {
        let args = [base, openai_like::KEY, &control];
        if script.ends_with(".py") {
            run_python(script, &args).await
        } else {
            run_node(script, &args).await
        }
    };
    let direct = run(&stub.url()).await;
    for (promise, seen) in direct.as_object().unwrap() {
        for word in never {
            assert!(
                seen.get(word).is_none(),
                "{script} {promise} fails at the provider itself: {seen}"
            );
        }
    }
    let mut different = String::new();
    for shape in Shape::ALL {
        let provider =
            Provider::openai("up", &stub.url(), &["gpt-test"]).line("api_key = { env = \"PROVIDER_KEY\" }");
        let own =
            r#"{ name = "sdk", secret = { env = "SDK_KEY" }, roles = ["inference", "operator", "metrics"] }"#;
        let setup = Setup::of(provider)
            .env("PROVIDER_KEY", openai_like::KEY)
            .env("SDK_KEY", openai_like::KEY)
            .keys(&[own.to_owned()], openai_like::KEY)
            .edge("server", "body_limit = \"1MiB\"");
        let stack = Stack::start(shape, setup).await;
        let through = run(&format!("http://{}/v1", stack.edge.http)).await;
        for (promise, expected) in direct.as_object().unwrap() {
            if through[promise] != *expected {
                different.push_str(&format!(
                    "\n{shape:?} {promise}:\n  provider: {expected}\n  gateway:  {}",
                    through[promise]
                ));
            }
        }
        stack.settled(Duration::from_secs(2)).await;
    }
    assert!(different.is_empty(), "{script} sees a difference:{different}");
}
