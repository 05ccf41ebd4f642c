//! Pages whose commands are run as written, in one shell, against the demonstration: each shell block that is marked is followed by
//! what it prints, `…` standing for whatever differs.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use iop_tests::process::bin_dir;
use iop_tests::run;
use iop_tests::stack::Edge;
use serde_json::json;

const MARKER: &str = "<!-- run -->\n```sh\n";
/// Stands between the outputs of two blocks.
const NEXT: &str = "-- next block --";
const WITHIN: Duration = Duration::from_secs(100);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Commands, and the lines that they print.
#[derive(Debug)]
struct Block {
    commands: String,
    prints: Vec<String>,
}

fn blocks(page: &str) -> Vec<Block> {
    page.split(MARKER)
        .skip(1)
        .map(|part| {
            let (commands, after) = part.split_once("```").unwrap();
            let printed = after
                .trim_start()
                .strip_prefix("```text\n")
                .unwrap_or_else(|| panic!("nothing is said of what this prints:\n{commands}"));
            Block {
                commands: commands.to_owned(),
                prints: printed
                    .split("```")
                    .next()
                    .unwrap()
                    .lines()
                    .map(str::to_owned)
                    .collect(),
            }
        })
        .collect()
}

/// What of these lines is not in the output, in this order.
fn missing<'a>(prints: &'a [String], mut output: &str) -> Option<&'a str> {
    for part in prints.iter().flat_map(|line| line.split('…')) {
        match output.find(part) {
            Some(at) => output = &output[at + part.len()..],
            None => return Some(part),
        }
    }
    None
}

/// Runs commands in one shell, in an empty directory with the demonstration on a free port; gives all that they print.
fn shell(commands: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    // Bound and given back: the address is part of the demonstration's text.
    let addr = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let here = |text: &str| text.replace("127.0.0.1:8080", &addr);
    let demo = here(&read("edge/src/config/demo.toml"));
    std::fs::write(dir.path().join("edge.toml"), demo).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().to_ascii_lowercase();
        if text.starts_with("iop_") || text.ends_with("_proxy") || text == "rust_log" {
            command.env_remove(&name);
        }
    }
    let output = std::fs::File::create(dir.path().join("output")).unwrap();
    let mut child = command
        .args(["-c", &here(commands)])
        .env("PATH", format!("{}:{path}", bin_dir().display()))
        .env("IOP_URL", format!("http://{addr}"))
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .process_group(0)
        .spawn()
        .unwrap();
    let started = Instant::now();
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if started.elapsed() > WITHIN => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // What the commands left in the background is in the shell's own group.
    let group = format!("-{}", child.id());
    let _ = Command::new("kill")
        .args(["-9", "--", &group])
        .stderr(Stdio::null())
        .status();
    let _ = child.wait();
    let said = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap_or_default();
    let output = said("output");
    assert!(
        ended.is_some(),
        "not done after {WITHIN:?}:\n{output}\n{}",
        said("edge.log")
    );
    output
}

/// Runs all marked blocks of a page after `before`, and finds in their output what the page shows.
#[track_caller]
fn runs_as_written(page: &str, least: usize, before: &str) {
    let blocks = blocks(&read(page));
    assert!(blocks.len() >= least, "{page}: {}", blocks.len());
    let commands: Vec<&str> = blocks.iter().map(|block| block.commands.as_str()).collect();
    let output = shell(&format!(
        "{before}\n{}",
        commands.join(&format!("echo; echo '{NEXT}'\n"))
    ));
    let printed: Vec<&str> = output.split(NEXT).collect();
    assert_eq!(printed.len(), blocks.len(), "{page}: {output}");
    for (block, printed) in blocks.iter().zip(printed) {
        if let Some(part) = missing(&block.prints, printed) {
            panic!("{page} shows {part:?}, but\n{}printed\n{printed}", block.commands);
        }
    }
}

#[test]
fn the_tour_works_as_written() {
    runs_as_written("docs/tour.md", 5, "");
}

#[test]
fn the_readme_approves_an_agent_from_the_shell() {
    // The page has the edge in another shell.
    let before = "iop-edge >edge.log 2>&1 &\n\
                  curl -s -o ready --retry 20 --retry-delay 1 --retry-connrefused http://127.0.0.1:8080/readyz";
    runs_as_written("README.md", 1, before);
}

#[test]
fn the_tool_of_the_demonstration_is_there_and_nowhere_else() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let server = "[server]\nlisten = \"127.0.0.1:0\"\n";
        let plain = Edge::start(dir.path(), server, &[], None).await;
        plain
            .client()
            .get("/demo/deploys")
            .await
            .assert_error(404, "not_found");

        let edge = Edge::start(dir.path(), &format!("demo = true\n{server}"), &[], None).await;
        let client = edge.client();
        let body = r#"{"service":"website","region":"eu"}"#;
        let wrong = client.request("POST", "/demo/deploy", &[], body.as_bytes()).await;
        wrong.assert_error(400, "invalid_request_error");
        assert!(wrong.text().contains("Idempotency-Key"), "{}", wrong.text());
        let with_key = |body: &'static str| {
            let headers = [("idempotency-key", "k/1")];
            let client = edge.client();
            async move {
                client
                    .request("POST", "/demo/deploy", &headers, body.as_bytes())
                    .await
            }
        };
        for wrong in ["{}", r#"{"service":"website","region":"eu","x":1}"#, "no json"] {
            with_key(wrong).await.assert_error(400, "invalid_request_error");
        }
        client
            .get("/demo/deploy")
            .await
            .assert_error(405, "method_not_allowed");
        client.get("/demo/other").await.assert_error(404, "not_found");
        assert_eq!(client.get("/demo/deploys").await.json()["data"], json!([]));

        let (first, second) = tokio::join!(with_key(body), with_key(body));
        assert_eq!((first.status(), first.json()), (200, second.json()));
        let all = client.get("/demo/deploys").await.json();
        assert_eq!(all["data"][0]["requests"], 2, "{all}");
        assert_eq!(all["data"][0]["applied"], 1, "{all}");
    });
}

#[test]
fn what_a_page_shows_is_looked_for_in_order() {
    let lines = |text: &str| -> Vec<String> { text.lines().map(str::to_owned).collect() };
    assert_eq!(missing(&lines("a…c\nd"), "x a b c\nd e"), None);
    assert_eq!(missing(&lines("c…a"), "a b c"), Some("a"));
    assert_eq!(missing(&lines("a\na"), "a"), Some("a"));
    let page = "text\n<!-- run -->\n```sh\none\n```\n\n```text\ntwo\n```\n```sh\nnot run\n```\n";
    let found = blocks(page);
    assert_eq!((found.len(), found[0].commands.as_str()), (1, "one\n"));
    assert_eq!(found[0].prints, ["two"]);
}
