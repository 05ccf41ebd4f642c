//! The README's quick start is run as written, its test command is the one that CI runs, and no link in the
//! documentation leads nowhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use iop_tests::client::sse_data;
use iop_tests::stack::Edge;
use iop_tests::{run, sdk};
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The first block in this language after a marker.
fn block(text: &str, marker: &str, language: &str) -> String {
    let after = text
        .split_once(marker)
        .unwrap_or_else(|| panic!("no {marker:?}"))
        .1;
    let block = after
        .split_once(&format!("```{language}\n"))
        .unwrap_or_else(|| panic!("no {language} after {marker:?}"))
        .1;
    block.split_once("```").unwrap().0.to_owned()
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_quick_start_works_as_written() {
    const MARKER: &str = "<!-- quick start:";
    run(120, async {
        // The demonstration itself, on a free port.
        let demo = read("edge/src/config/demo.toml");
        let listen = "listen = \"127.0.0.1:8080\"";
        assert!(demo.contains(listen));
        let dir = tempfile::tempdir().unwrap();
        let toml = demo.replace(listen, "listen = \"127.0.0.1:0\"");
        let edge = Edge::start(dir.path(), &toml, &[], None).await;
        let readme = read("README.md");
        let here = |text: &str| text.replace("127.0.0.1:8080", &edge.http);
        let commands = here(&block(&readme, MARKER, "sh"));
        let program = here(&block(&readme, MARKER, "python"));
        let answers = tokio::task::spawn_blocking(move || {
            let mut answers: Vec<String> = commands
                .lines()
                .map(|line| output(Command::new("sh").args(["-c", line])))
                .collect();
            assert_eq!(program.lines().count(), 4, "four lines of Python");
            answers.push(output(Command::new(sdk::python()).args(["-c", &program])));
            answers
        })
        .await
        .unwrap();
        let [whole, stream, recovered, said] = &answers[..] else {
            panic!("three commands and a program: {answers:?}")
        };
        assert!(recovered.contains("x-iop-attempts: 2"), "{recovered}");
        assert!(recovered.trim_end().ends_with("data: [DONE]"), "{recovered}");
        let whole: Value = serde_json::from_str(whole).unwrap();
        let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(text.contains("Hello from iop"), "{text}");
        let data = sse_data(stream);
        assert_eq!(data.last().map(String::as_str), Some("[DONE]"));
        let streamed: String = data
            .iter()
            .filter_map(|d| serde_json::from_str::<Value>(d).ok())
            .filter_map(|d| d["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!((streamed.as_str(), said.as_str()), (text, text));
    });
}

#[test]
fn a_sdk_approves_an_agent_as_written() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        // The agent's tool is served by the edge itself, so its address has to be known before.
        let addr = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .to_string();
        let here = |text: &str| text.replace("127.0.0.1:8080", &addr);
        let toml = here(&read("edge/src/config/demo.toml"));
        let edge = Edge::start(dir.path(), &toml, &[], None).await;
        let program = here(&block(&read("docs/agents.md"), "<!-- program:", "python"));
        let said =
            tokio::task::spawn_blocking(move || output(Command::new(sdk::python()).args(["-c", &program])));
        let said = said.await.unwrap();
        let deploys = edge.client().get("/demo/deploys").await.json();
        assert_eq!(deploys["data"][0]["applied"], 1, "{deploys}");
        let mut lines = said.lines();
        assert_eq!(
            lines.next(),
            Some(r#"deploy {"service":"website","region":"eu"}"#)
        );
        assert!(lines.next().unwrap().contains("deployed"), "{said}");
    });
}

#[test]
fn ci_runs_the_test_command_of_the_readme() {
    let command = block(&read("README.md"), "<!-- test command:", "sh");
    assert_eq!(command.lines().count(), 1, "{command}");
    assert!(command.contains("cargo nextest run --workspace"), "{command}");
    let ci = read(".ci/run");
    assert!(ci.contains("<!-- test command:") && ci.contains("eval \"$command\""));
    assert!(!ci.contains("nextest run"), "no second copy");
}

/// The words of a page's code marks.
fn marked(text: &str) -> BTreeSet<&str> {
    let prose = text.split("```").step_by(2);
    prose
        .flat_map(|part| part.split('`').skip(1).step_by(2))
        .flat_map(|code| code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .collect()
}

#[test]
fn every_key_of_a_declaration_is_explained() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let toml = "[server]\nlisten = \"127.0.0.1:0\"\n";
        let edge = Edge::start(dir.path(), toml, &[], None).await;
        let document = edge.client().get("/api/v1/openapi.json").await.json();
        let page = read("docs/agents.md");
        let (marked, mut seen, mut keys) = (marked(&page), BTreeSet::new(), 0);
        let mut schemas = vec!["AgentSpec".to_owned()];
        while let Some(name) = schemas.pop() {
            let schema = &document["components"]["schemas"][&name];
            for (key, _) in schema["properties"].as_object().into_iter().flatten() {
                assert!(
                    marked.contains(key.as_str()),
                    "{name}.{key} is not in docs/agents.md"
                );
                keys += 1;
            }
            for part in schema.to_string().split("#/components/schemas/").skip(1) {
                let next = part.split('"').next().unwrap().to_owned();
                if seen.insert(next.clone()) {
                    schemas.push(next);
                }
            }
        }
        assert!(keys > 40, "{keys} keys in {seen:?}");
    });
}

fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = [root(), root().join("docs"), root().join("dashboards")]
        .iter()
        .flat_map(|dir| std::fs::read_dir(dir).unwrap())
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .collect();
    found.sort();
    found
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    text.lines()
        .filter(|line| {
            fenced ^= line.starts_with("```");
            !fenced && line.starts_with('#')
        })
        .map(|line| {
            line.trim_start_matches('#')
                .trim()
                .to_lowercase()
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let mut wrong = Vec::new();
    for document in documents() {
        let text = std::fs::read_to_string(&document).unwrap();
        for link in text.split("](").skip(1).filter_map(|l| l.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() {
                document.clone()
            } else {
                document.parent().unwrap().join(path)
            };
            let found = target.exists()
                && (anchor.is_empty()
                    || anchors(&std::fs::read_to_string(&target).unwrap()).contains(anchor));
            if !found {
                wrong.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_that_the_documents_name_exist() {
    for document in ["docs/ARCHITECTURE.md", "docs/liveness.md"] {
        let text = read(document);
        let named: BTreeSet<&str> = text
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|word| word.contains('/') && word.ends_with(".rs"))
            .collect();
        assert!(named.len() > 5, "{document}");
        for file in named {
            assert!(root().join(file).is_file(), "{document}: {file}");
        }
    }
}
