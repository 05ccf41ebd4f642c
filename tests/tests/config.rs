//! Configuration: a mistake is named by file, line and key, and nothing is half-started; every example works.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use iop_tests::client::Client;
use iop_tests::config::{Provider, Setup};
use iop_tests::process::{Finished, Process, binary, finish};
use iop_tests::stack::{Edge, LINK_TOKEN};
use iop_tests::{fixtures, run};

const PROVIDER: &str = "[[providers]]\nid = \"up\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:9/v1\"\ntargets = [\"m\"]\n";

/// The variables that the configurations of this file refer to.
fn secrets() -> Vec<(String, String)> {
    ["IOP_LINK_TOKEN", "TEST_KEY", "TEST_KEY_2"]
        .map(|name| (name.to_owned(), format!("value of {name}")))
        .to_vec()
}

/// A configuration with one mistake, the line of it, and what the message must name.
struct Mistake {
    program: &'static str,
    toml: String,
    line: usize,
    names: &'static [&'static str],
}

fn mistakes() -> Vec<Mistake> {
    let edge = |toml: String, line, names| Mistake {
        program: "iop-edge",
        toml,
        line,
        names,
    };
    let node = |toml: String, line, names| Mistake {
        program: "iop-node",
        toml,
        line,
        names,
    };
    let node_head = "[node]\nid = \"n1\"\n[[edges]]\nurl = \"http://127.0.0.1:9\"\ntoken = { env = \"IOP_LINK_TOKEN\" }\n";
    let model =
        |candidate: &str| format!("{PROVIDER}[[models]]\nname = \"pub\"\ncandidates = [{candidate}]\n");
    vec![
        edge("[server]\nlisten = \"127.0.0.1:0\"\nlissten = \"x\"\n".into(), 3, &["lissten"]),
        edge("[srever]\nlisten = \"127.0.0.1:0\"\n".into(), 1, &["srever"]),
        edge(format!("{PROVIDER}colour = \"red\"\n"), 6, &["colour"]),
        edge(model("{ provider = \"up\", target = \"m\", wieght = 2 }"), 8, &["wieght"]),
        edge(model("{ provider = \"gone\", target = \"m\" }"), 8, &["gone"]),
        edge(format!("{PROVIDER}{PROVIDER}"), 7, &["up"]),
        edge(format!("{}{}", model("{ provider = \"up\", target = \"m\" }"), "[[models]]\nname = \"pub\"\ncandidates = [{ provider = \"up\", target = \"m\" }]\n"), 10, &["pub"]),
        edge("[gate]\nmax_elapsed = \"10 parsecs\"\n".into(), 2, &["max_elapsed"]),
        edge("[gate]\nmax_elapsed = 600\n".into(), 2, &["max_elapsed"]),
        edge("[server]\nbody_limit = 1024\n".into(), 2, &["body_limit"]),
        edge("[server]\nbody_limit = \"64MoB\"\n".into(), 2, &["body_limit"]),
        edge("[queue]\nmax_depth = -1\n".into(), 2, &["max_depth"]),
        edge("[server]\nlisten = \"not an address\"\n".into(), 2, &["listen"]),
        edge("[server\n".into(), 1, &[]),
        edge(format!("{PROVIDER}response_stall_timeout = \"soon\"\n"), 6, &["response_stall_timeout"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = { env = \"TEST_KEY\" }, roles = [\"inference\"] },\n  { name = \"a\", secret = { env = \"TEST_KEY_2\" }, roles = [\"inference\"] },\n]\n".into(), 4, &["a"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = { env = \"TEST_KEY\" }, roles = [\"king\"] },\n]\n".into(), 3, &["king"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = { env = \"TEST_KEY\" }, roles = [\"inference\"], rpm = 600 },\n]\n".into(), 3, &["rpm", "not available yet"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = { env = \"TEST_KEY\" }, roles = [\"inference\"], tpm = 600 },\n]\n".into(), 3, &["tpm", "not available yet"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = { env = \"IOP_TEST_UNSET\" }, roles = [\"inference\"] },\n]\n".into(), 3, &["IOP_TEST_UNSET"]),
        edge("[auth]\nkeys = [\n  { name = \"a\", secret = \"in clear\", roles = [\"inference\"] },\n]\n".into(), 3, &["secret", "env"]),
        edge(PROVIDER.replace("\"up\"", "\"u p\""), 2, &["id"]),
        edge("[flows.f]\n".into(), 1, &["flows", "not available yet"]),
        edge("[webhooks.w]\n".into(), 1, &["webhooks", "not available yet"]),
        edge("[runs]\nlease_ttl = \"500ms\"\n".into(), 2, &["runs.lease_ttl", "1s"]),
        edge("[store]\nurl = \"memory://\"\n".into(), 2, &["store.url", "dev = true"]),
        edge("[agents.a]\nmodel = \"m\"\n[[agents.a.tools]]\nname = \"t\"\nhttp = { url = \"ftp://t.example/\" }\n".into(), 5, &["agents.a.tools[0].http.url"]),
        edge("[agents.a]\nmodel = \"m\"\n[[agents.a.tools]]\nname = \"t\"\nhttp = { url = \"http://t.example/\" }\nretry = { max_attempts = 3 }\n".into(), 6, &["agents.a.tools[0].retry.max_attempts", "unsafe"]),
        edge("[agents.a]\nmodel = \"m\"\n[[agents.a.tools]]\nname = \"t\"\nhttp = { url = \"http://t.example/\", headers = { x-a = { env = \"IOP_TEST_UNSET\" } } }\n".into(), 5, &["agents.a.tools[0].http.headers.x-a", "IOP_TEST_UNSET"]),
        edge("[agents.a]\nmodel = \"m\"\ndurable = true\napproval_rules = [{ tool = \"*\", when = \"arg.x > 1\" }]\n".into(), 4, &["agents.a.approval_rules[0].when", "args"]),
        edge("[agents.a]\nmodel = \"m\"\nbudgets = { spend = \"1\" }\n".into(), 3, &["agents.a.budgets.spend", "prices"]),
        edge("[prices.\"gpt-4.1\"]\ninput = \"1e3\"\noutput = \"1\"\n".into(), 2, &["prices.gpt-4.1.input"]),
        edge(PROVIDER.replace("\"openai\"", "\"openia\""), 3, &["openia"]),
        node(format!("{node_head}{PROVIDER}colour = \"red\"\n"), 11, &["colour"]),
        node(format!("{node_head}{PROVIDER}{PROVIDER}"), 12, &["up"]),
        node(format!("{node_head}{PROVIDER}response_stall_timeout = 300\n"), 11, &["response_stall_timeout"]),
        node(node_head.replace("\"n1\"", "\"embedded\""), 2, &["reserved"]),
        node(node_head.replace("\"n1\"", "\"a b\""), 2, &["id"]),
        node(node_head.replace("id = \"n1\"", "idd = \"n1\""), 2, &["idd"]),
        node(format!("{}{PROVIDER}", node_head.replace("http://", "ftp://")), 4, &["url"]),
    ]
}

fn assert_refused(mistake: &Mistake, how: &str, finished: &Finished) {
    let Mistake {
        program,
        toml,
        line,
        names,
    } = mistake;
    let context = format!(
        "{program} {how}:\n{toml}\n--- said ---\n{}{}",
        finished.stdout, finished.stderr
    );
    assert!(
        finished.code.is_some_and(|c| c != 0),
        "exit code {:?}: {context}",
        finished.code
    );
    assert!(!finished.stdout.contains(" ready "), "half-started: {context}");
    assert!(!finished.stderr.contains("panicked"), "{context}");
    let said = format!("{}{}", finished.stdout, finished.stderr);
    assert!(said.contains("mistake.toml"), "no file: {context}");
    assert!(
        said.contains(&format!(":{line}")) || said.contains(&format!("line {line}")),
        "no line {line}: {context}"
    );
    for name in *names {
        assert!(said.contains(name), "no {name:?}: {context}");
    }
}

#[test]
fn a_mistake_is_named_by_file_line_and_key() {
    run(180, async {
        let mut wrong = Vec::new();
        for mistake in mistakes() {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("mistake.toml"), &mistake.toml).unwrap();
            let check = finish(
                mistake.program,
                &["check", "--config", "mistake.toml"],
                &secrets(),
                dir.path(),
            )
            .await;
            let start = finish(
                mistake.program,
                &["--config", "mistake.toml"],
                &secrets(),
                dir.path(),
            )
            .await;
            for (how, finished) in [("check", check), ("start", start)] {
                let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    assert_refused(&mistake, how, &finished);
                }));
                if let Err(reason) = judged {
                    wrong.push(reason.downcast_ref::<String>().cloned().unwrap_or_default());
                }
            }
            let left: Vec<_> = std::fs::read_dir(dir.path())
                .unwrap()
                .filter_map(|f| Some(f.ok()?.file_name()))
                .collect();
            assert_eq!(left, ["mistake.toml"], "something was left behind");
        }
        assert!(
            wrong.is_empty(),
            "{} wrong:\n{}",
            wrong.len(),
            wrong.join("\n=====\n")
        );
    });
}

#[test]
fn a_missing_file_and_a_taken_port_are_said_plainly() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        for program in ["iop-edge", "iop-node"] {
            for args in [
                vec!["--config", "absent.toml"],
                vec!["check", "--config", "absent.toml"],
            ] {
                let finished = finish(program, &args, &[], dir.path()).await;
                assert!(finished.code.is_some_and(|c| c != 0));
                assert!(
                    finished.stderr.contains("absent.toml"),
                    "{program}: {}",
                    finished.stderr
                );
            }
        }
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = taken.local_addr().unwrap();
        for section in ["server", "link"] {
            let other = if section == "link" {
                "[server]\nlisten = \"127.0.0.1:0\"\n"
            } else {
                ""
            };
            let tokens = if section == "link" {
                "tokens = [{ env = \"IOP_LINK_TOKEN\" }]\n"
            } else {
                ""
            };
            std::fs::write(
                dir.path().join("edge.toml"),
                format!("{other}[{section}]\nlisten = \"{addr}\"\n{tokens}{PROVIDER}"),
            )
            .unwrap();
            let finished = finish("iop-edge", &["--config", "edge.toml"], &secrets(), dir.path()).await;
            assert!(finished.code.is_some_and(|c| c != 0));
            assert!(
                !finished.stdout.contains(" ready "),
                "half-started: {}",
                finished.stdout
            );
            assert!(finished.stderr.contains(&addr.to_string()), "{}", finished.stderr);
        }
    });
}

#[test]
fn a_good_file_passes_and_a_usage_error_is_2() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let setup =
            Setup::of(Provider::openai("up", "http://127.0.0.1:9/v1", &["m"])).model("pub", "up", "m");
        std::fs::write(dir.path().join("edge.toml"), setup.edge_toml(false)).unwrap();
        std::fs::write(
            dir.path().join("node.toml"),
            setup.node_toml("n1", "http://127.0.0.1:9"),
        )
        .unwrap();
        let env = [("IOP_LINK_TOKEN".to_owned(), "t".to_owned())];
        for program in ["iop-edge", "iop-node"] {
            let file = format!("{}.toml", &program[4..]);
            let finished = finish(program, &["check", "--config", &file], &env, dir.path()).await;
            assert_eq!(finished.code, Some(0), "{}", finished.stderr);
            let finished = finish(program, &["--no-such-flag"], &env, dir.path()).await;
            assert_eq!(finished.code, Some(2), "{}", finished.stderr);
        }
    });
}

#[test]
fn a_new_key_works_as_printed() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let made = finish("iop-edge", &["keys", "new", "ci-1"], &[], dir.path()).await;
        assert_eq!(made.code, Some(0), "{}", made.stderr);
        let line = made
            .stdout
            .lines()
            .find(|l| l.contains("secret_sha256"))
            .unwrap_or_else(|| panic!("{}", made.stdout));
        assert!(line.contains("ci-1"), "{line}");
        let line = line.trim().trim_end_matches(',');
        let inner = line.trim_start_matches(|c| c != '{');
        let digest = inner
            .split("secret_sha256 = \"")
            .nth(1)
            .and_then(|r| r.split('"').next())
            .unwrap();
        let secret = made
            .stdout
            .split_ascii_whitespace()
            .map(|w| {
                w.trim_matches(|c: char| c == '"' || c == '`' || c == ',')
                    .rsplit('=')
                    .next()
                    .unwrap_or(w)
            })
            .find(|w| sha256_hex(w) == digest)
            .unwrap_or_else(|| panic!("no word of the output has the digest {digest}: {}", made.stdout))
            .to_owned();
        assert!(secret.len() >= 32, "a secret worth its name: {secret}");
        let again = finish("iop-edge", &["keys", "new", "ci-1"], &[], dir.path()).await;
        assert!(!again.stdout.contains(&secret), "each secret is new");

        let script = r#"{ "m" = { reply = "hello" } }"#;
        let setup = Setup::of(Provider::scripted("demo", &["m"], script)).keys(&[inner.to_owned()], &secret);
        let edge = Edge::start(dir.path(), &setup.edge_toml(false), &[], Some(secret.clone())).await;
        let body = fixtures::chat("m", "hi", false);
        let answer = edge.client().post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        for key in [None, Some("sk-wrong".to_owned()), Some(digest.to_owned())] {
            let client = Client {
                addr: edge.http.clone(),
                key,
            };
            client
                .post("/v1/chat/completions", &body)
                .await
                .assert_error(401, "invalid_api_key");
        }
        assert!(!edge.process.log().contains(&secret), "the secret is in the log");
    });
}

fn sha256_hex(text: &str) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(text.as_bytes())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

#[test]
fn without_keys_only_loopback_is_served() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("edge.toml"),
            format!("[server]\nlisten = \"0.0.0.0:0\"\n{PROVIDER}"),
        )
        .unwrap();
        let mut process = Process::spawn(
            "iop-edge",
            &binary("iop-edge"),
            &["--config", "edge.toml"],
            &[],
            dir.path(),
        );
        // Either it refuses to start, or it starts on loopback alone; both say so.
        if process.ready_or_ended().await.is_some() {
            let listening = process.listening();
            assert!(
                listening.iter().all(|a| a.starts_with("0100007F:")),
                "{listening:?}"
            );
        }
        process.says("loopback").await;
    });
}

/// Every `.toml` configuration and every ```toml block of the repository, with the program that it is for.
fn examples() -> Vec<(String, &'static str, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    walk(root, &mut files);
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let name = file.strip_prefix(root).unwrap().display().to_string();
        match file.extension().and_then(|e| e.to_str()) {
            Some("toml") => {
                if let Some(program) = program_of(&text) {
                    found.push((name, program, text));
                }
            }
            Some("md") => {
                for (n, block) in text.split("```toml\n").skip(1).enumerate() {
                    let block = block.split("```").next().unwrap_or_default().to_owned();
                    if let Some(program) = program_of(&block) {
                        found.push((format!("{name} block {}", n + 1), program, block));
                    }
                }
            }
            _ => {}
        }
    }
    found
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if !name.starts_with("target") && name != "node_modules" && name != ".git" && name != ".venv" {
                walk(&entry.path(), files);
            }
        } else {
            files.push(entry.path());
        }
    }
}

/// Which program reads this text; other TOML (manifests, lints) belongs to none.
fn program_of(text: &str) -> Option<&'static str> {
    let has = |section: &str| text.lines().any(|l| l.trim_start().starts_with(section));
    if has("[node]") || has("[[edges]]") {
        return Some("iop-node");
    }
    let edge = [
        "[server]",
        "[link]",
        "[auth]",
        "[gate]",
        "[queue]",
        "[store]",
        "[ejection]",
        "[telemetry]",
        "[[providers]]",
        "[[models]]",
        "[runs]",
        "[prices.",
        "[agents.",
    ];
    edge.iter().any(|s| has(s)).then_some("iop-edge")
}

#[test]
fn every_example_of_the_repository_is_accepted() {
    run(120, async {
        let examples = examples();
        assert!(
            examples.iter().any(|(name, ..)| name.starts_with("README.md")),
            "the README has examples"
        );
        let dir = tempfile::tempdir().unwrap();
        let mut wrong = Vec::new();
        for (name, program, text) in &examples {
            std::fs::write(dir.path().join("example.toml"), text).unwrap();
            // Secrets by reference: whatever they are called, they are set.
            let mut env = vec![("IOP_LINK_TOKEN".to_owned(), LINK_TOKEN.to_owned())];
            env.extend(
                text.split("env = \"")
                    .skip(1)
                    .filter_map(|r| r.split('"').next())
                    .map(|v| (v.to_owned(), "a-secret-value".to_owned())),
            );
            let finished = finish(program, &["check", "--config", "example.toml"], &env, dir.path()).await;
            if finished.code != Some(0) {
                wrong.push(format!(
                    "{name} ({program}):\n{text}\n--- said ---\n{}{}",
                    finished.stdout, finished.stderr
                ));
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {} refused:\n{}",
            wrong.len(),
            examples.len(),
            wrong.join("\n=====\n")
        );
    });
}
