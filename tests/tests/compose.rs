//! docker-compose.yml without containers: every service of ours is started with exactly the command, configuration
//! and environment that the file names. Only what a container would provide is put in its place: mounted paths,
//! service names, ports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use iop_tests::client::{Client, sse_data};
use iop_tests::postgres::{Options, Postgres};
use iop_tests::process::{Process, binary, finish};
use iop_tests::{eventually, fixtures, run};
use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).unwrap()
}

/// The compose file with every `${NAME:-default}` at its default.
fn compose() -> Value {
    let mut text = String::new();
    let written = read("docker-compose.yml");
    let mut rest = written.as_str();
    while let Some((before, variable)) = rest.split_once("${") {
        let (name, default) = variable.split_once(":-").unwrap();
        assert!(!name.contains('}'), "{name} has no default");
        let (default, after) = default.split_once('}').unwrap();
        text.push_str(before);
        text.push_str(default);
        rest = after;
    }
    text.push_str(rest);
    yaml(&text)
}

fn strings(value: &Value) -> Vec<String> {
    let list = value.as_array().cloned().unwrap_or_default();
    list.iter()
        .map(|v| v.as_str().unwrap_or_else(|| panic!("no string: {v}")).to_owned())
        .collect()
}

/// One service as the file describes it.
struct Service {
    name: String,
    at: Value,
}

impl Service {
    fn of(compose: &Value, name: &str) -> Self {
        let at = compose["services"][name].clone();
        assert!(at.is_object(), "no service {name}");
        Self {
            name: name.to_owned(),
            at,
        }
    }

    /// What has to be there before it: a list of names, or a condition by name.
    fn depends_on(&self) -> Vec<String> {
        match self.at["depends_on"].as_object() {
            None => strings(&self.at["depends_on"]),
            Some(conditions) => conditions
                .iter()
                .inspect(|(_, how)| assert_eq!(how["condition"], "service_healthy"))
                .map(|(name, _)| name.clone())
                .collect(),
        }
    }

    /// Services whose image is built here, each after those it depends on.
    fn ours(compose: &Value) -> Vec<Self> {
        let mut left: Vec<Self> = compose["services"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, s)| s.get("build").is_some())
            .map(|(name, _)| Self::of(compose, name))
            .collect();
        let mut ordered: Vec<Self> = Vec::new();
        while !left.is_empty() {
            let next = left.iter().position(|s| {
                s.depends_on()
                    .iter()
                    .all(|d| !left.iter().any(|other| other.name == *d))
            });
            ordered.push(left.remove(next.expect("no circle of dependencies")));
        }
        ordered
    }

    fn env(&self) -> Vec<(String, String)> {
        let env = self.at["environment"].as_object().cloned().unwrap_or_default();
        env.iter()
            .map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned()))
            .collect()
    }

    /// `(path in the repository, path in the container)`; named volumes are left out.
    fn mounts(&self) -> Vec<(PathBuf, String)> {
        strings(&self.at["volumes"])
            .iter()
            .filter_map(|v| {
                let v = v.strip_prefix("./")?;
                let (host, inside) = v.strip_suffix(":ro").expect("read-only").split_once(':').unwrap();
                let host = root().join(host);
                assert!(host.exists(), "{} is mounted and missing", host.display());
                Some((host, inside.to_owned()))
            })
            .collect()
    }

    /// Where a path in the container stands in the repository.
    fn host_path(&self, inside: &str) -> Option<PathBuf> {
        self.mounts().into_iter().find_map(|(host, mount)| {
            let rest = inside.strip_prefix(&mount)?;
            Some(if rest.is_empty() {
                host
            } else {
                host.join(rest.strip_prefix('/')?)
            })
        })
    }

    /// The lines of this service's stage in the Dockerfile.
    fn stage(&self) -> Vec<String> {
        let target = self.at["build"]["target"].as_str().unwrap();
        stage(target)
    }

    fn program(&self) -> String {
        let stage = self.stage();
        let entry = stage
            .iter()
            .find_map(|l| l.strip_prefix("ENTRYPOINT "))
            .expect("an entry point");
        let entry: Vec<String> = serde_json::from_str(entry).unwrap();
        assert!(
            stage
                .iter()
                .any(|l| l.starts_with("COPY --from=build") && l.ends_with(&entry[0])),
            "{} is not copied into the image",
            entry[0]
        );
        Path::new(&entry[0])
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    }
}

fn stage(name: &str) -> Vec<String> {
    let dockerfile = read("Dockerfile");
    let lines = dockerfile.lines().map(str::trim);
    let mut found: Vec<String> = lines
        .skip_while(|l| !l.ends_with(&format!(" AS {name}")))
        .enumerate()
        .take_while(|(n, l)| *n == 0 || !l.starts_with("FROM "))
        .map(|(_, l)| l.to_owned())
        .collect();
    assert!(!found.is_empty(), "no stage {name} in the Dockerfile");
    let base = found[0].split_ascii_whitespace().nth(1).unwrap().to_owned();
    if !base.contains(':') {
        found.splice(0..1, stage(&base));
    }
    found
}

/// The running stack.
struct Running {
    dir: TempDir,
    services: Vec<(Service, Process)>,
    database: Database,
    /// `service:port` of the file, to the address where it really listens.
    listens: BTreeMap<String, String>,
    /// The same, for listeners that serve metrics alone.
    metrics: Vec<String>,
}

/// Which part of the ready line a `listen` key means.
fn listener(section: &str, key: &str) -> Option<&'static str> {
    match (section, key) {
        ("[server]", "listen") => Some("http"),
        ("[link]", "listen") => Some("link"),
        ("[server]" | "[node]", "metrics_listen") => Some("metrics"),
        _ => None,
    }
}

impl Running {
    async fn start() -> Self {
        let compose = compose();
        let database = Database::start(&Service::of(&compose, "postgres")).await;
        let listens = BTreeMap::from([("postgres:5432".to_owned(), database.address())]);
        let mut running = Self {
            dir: tempfile::tempdir().unwrap(),
            services: Vec::new(),
            database,
            listens,
            metrics: Vec::new(),
        };
        for service in Service::ours(&compose) {
            running.add(service).await;
        }
        running
    }

    /// Puts the real addresses in place of `service:port`.
    fn rewritten(&self, text: &str) -> String {
        self.listens.iter().fold(text.to_owned(), |text, (name, real)| {
            text.replace(name.as_str(), real)
        })
    }

    async fn add(&mut self, service: Service) {
        let program = service.program();
        let mut command = Vec::new();
        let mut asked: Vec<(&str, String)> = Vec::new();
        for word in strings(&service.at["command"]) {
            let Some(file) = service.host_path(&word) else {
                command.push(word);
                continue;
            };
            let written = std::fs::read_to_string(&file).unwrap();
            check(&program, &file, &service.env()).await;
            let mut section = "";
            for line in written.lines().map(str::trim) {
                if line.starts_with('[') {
                    section = line;
                }
                if let Some((key, value)) = line.split_once(" = ")
                    && let Some(what) = listener(section, key)
                {
                    let port = value
                        .trim_start_matches('"')
                        .strip_prefix("0.0.0.0:")
                        .expect("reachable from other containers");
                    asked.push((what, port.split('"').next().unwrap().to_owned()));
                }
            }
            let mut text = self.rewritten(&written);
            for (_, port) in &asked {
                text = text.replace(&format!("0.0.0.0:{port}"), "127.0.0.1:0");
            }
            let copy = self.dir.path().join(format!("{}.toml", service.name));
            std::fs::write(&copy, text).unwrap();
            command.push(copy.to_str().unwrap().to_owned());
        }
        let args: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut process = Process::spawn(
            &program,
            &binary(&program),
            &args,
            &service.env(),
            self.dir.path(),
        );
        let ready = process.ready().await;
        assert_eq!(
            ready.keys().filter(|k| *k != "id").count(),
            asked.len(),
            "{ready:?} {asked:?}"
        );
        for (what, port) in asked {
            let name = format!("{}:{port}", service.name);
            if what == "metrics" {
                self.metrics.push(name.clone());
            }
            self.listens.insert(name, ready[what].clone());
        }
        self.services.push((service, process));
    }

    fn edge(&self) -> Client {
        let (service, _) = self
            .services
            .iter()
            .find(|(s, _)| s.program() == "iop-edge")
            .unwrap();
        let env = service.env();
        let (_, key) = env.iter().find(|(k, _)| k == "IOP_KEY_DEMO").unwrap();
        Client::new(&self.listens["edge:8080"]).with_key(key)
    }

    /// Waits until the nodes have dialed in.
    async fn serves(&self) {
        let edge = self.edge();
        eventually("both nodes dialed in", Duration::from_secs(10), || async {
            let nodes = edge.get("/api/v1/nodes").await.json();
            let live = nodes["data"]
                .as_array()
                .map_or(0, |d| d.iter().filter(|n| n["state"] == "live").count());
            if live == 2 { Ok(()) } else { Err(nodes.to_string()) }
        })
        .await;
    }

    /// Runs a service's health check as the container engine would.
    fn healthy(&self, service: &Service) -> Result<(), String> {
        let test = strings(&service.at["healthcheck"]["test"]);
        assert_eq!(test[0], "CMD");
        let mut command = std::process::Command::new(&test[1]);
        for word in &test[2..] {
            let local: String = self.listens.iter().fold(word.clone(), |word, (name, real)| {
                let Some(port) = name.strip_prefix(&format!("{}:", service.name)) else {
                    return word;
                };
                word.replace(
                    &format!("/127.0.0.1/{port};"),
                    &format!("/{};", real.replace(':', "/")),
                )
            });
            command.arg(local);
        }
        let output = command.output().unwrap();
        if output.status.success() {
            Ok(())
        } else {
            Err(format!(
                "{command:?}: {} {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ))
        }
    }
}

/// The PostgreSQL of the file: its user, its database and its password, asked for as the image asks for it.
struct Database {
    server: Postgres,
    user: String,
    name: String,
    password: String,
}

impl Database {
    async fn start(service: &Service) -> Self {
        let env: BTreeMap<String, String> = service.env().into_iter().collect();
        let options = Options {
            tcp: true,
            ..Options::default()
        };
        let server = Postgres::with(options).await;
        let (user, password) = (env["POSTGRES_USER"].clone(), env["POSTGRES_PASSWORD"].clone());
        let name = env["POSTGRES_DB"].clone();
        server.sql(&format!("CREATE DATABASE {name}")).unwrap();
        // The last words that the server takes without a password.
        let rule = "host all all all scram-sha-256";
        server
            .sql(&format!(
                "ALTER ROLE {user} PASSWORD '{password}'; \
                 DO $$ BEGIN EXECUTE format('COPY (SELECT %L) TO %L', '{rule}', current_setting('hba_file')); END $$; \
                 SELECT pg_reload_conf()"
            ))
            .unwrap();
        let database = Self {
            server,
            user,
            name,
            password,
        };
        eventually("a password is asked for", Duration::from_secs(10), || async {
            match database.psql("wrong", "SELECT 1") {
                Ok(answer) => Err(answer),
                Err(_) => database.psql(&database.password, "SELECT 1"),
            }
        })
        .await;
        database
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.server.port().unwrap())
    }

    fn psql(&self, password: &str, sql: &str) -> Result<String, String> {
        let output = std::process::Command::new("psql")
            .args([
                "-X",
                "-q",
                "-A",
                "-t",
                "-w",
                "-v",
                "ON_ERROR_STOP=1",
                "-c",
                sql,
                "-d",
            ])
            .arg(format!(
                "postgres://{}@{}/{}",
                self.user,
                self.address(),
                self.name
            ))
            .env("PGPASSWORD", password)
            .output()
            .unwrap();
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    fn sql(&self, sql: &str) -> String {
        self.psql(&self.password, sql).unwrap()
    }
}

/// The file as it is, listening everywhere, is accepted with the service's environment.
async fn check(program: &str, file: &Path, env: &[(String, String)]) {
    let finished = finish(
        program,
        &["check", "--config", file.to_str().unwrap()],
        env,
        &root(),
    )
    .await;
    assert_eq!(finished.code, Some(0), "{}{}", finished.stdout, finished.stderr);
}

#[test]
fn the_composed_stack_answers_from_both_nodes_and_leaves_in_time() {
    run(120, async {
        let mut stack = Running::start().await;
        stack.serves().await;
        for (service, _) in &stack.services {
            eventually(
                &format!("{} is healthy", service.name),
                Duration::from_secs(10),
                || async { stack.healthy(service) },
            )
            .await;
        }
        let edge = stack.edge();
        let models = edge.get("/v1/models").await.json();
        assert_eq!(models["data"][0]["id"], "demo", "{models}");
        // Both are idle at each request, so they take turns.
        let mut seen = std::collections::BTreeSet::new();
        for n in 0..20 {
            let stream = n % 2 == 0;
            let answer = edge
                .post("/v1/chat/completions", &fixtures::chat("demo", "hi", stream))
                .await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            assert!(answer.complete);
            let text: String = if stream {
                let data = sse_data(&answer.text());
                assert_eq!(data.last().map(String::as_str), Some("[DONE]"));
                data.iter()
                    .filter_map(|d| serde_json::from_str::<Value>(d).ok())
                    .filter_map(|d| d["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
                    .collect()
            } else {
                answer.json()["choices"][0]["message"]["content"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            };
            seen.extend(
                ["node-1", "node-2"]
                    .into_iter()
                    .filter(|node| text.contains(node)),
            );
        }
        assert_eq!(seen.len(), 2, "{seen:?}");
        Client::new(&edge.addr)
            .post("/v1/chat/completions", &fixtures::chat("demo", "hi", false))
            .await
            .assert_error(401, "invalid_api_key");
        // The nodes first, as the engine does it: dependants before what they depend on.
        for (service, process) in stack.services.iter_mut().rev() {
            let grace = service.at["stop_grace_period"].as_str().unwrap();
            let grace: u64 = grace.strip_suffix('s').unwrap().parse().unwrap();
            process.signal("TERM");
            let status = process.exit(Duration::from_secs(grace)).await;
            assert!(status.success(), "{}: {status}", service.name);
        }
    });
}

/// The edge keeps its runs where the file says, with the password of the environment.
#[test]
fn runs_of_the_composed_stack_are_kept_in_postgres() {
    run(120, async {
        let stack = Running::start().await;
        stack.serves().await;
        let edge = stack.edge();
        let body = serde_json::json!({"agent": "greeter", "input": "hi"});
        let answer = edge.post("/api/v1/runs?wait=30s", &body).await;
        let ended = answer.json();
        assert_eq!(
            (answer.status(), &ended["status"]),
            (200, &"succeeded".into()),
            "{ended}"
        );
        let output = ended["outcome"]["output"].as_str().unwrap();
        assert!(output.starts_with("Hello from node-"), "{output}");
        let id = ended["id"].as_str().unwrap();
        assert_eq!(
            stack
                .database
                .sql(&format!("SELECT status FROM runs WHERE run_id = '{id}'")),
            "succeeded"
        );
    });
}

#[test]
fn the_database_is_pinned_checked_kept_and_published_nowhere() {
    let compose = compose();
    let postgres = Service::of(&compose, "postgres");
    let image = postgres.at["image"].as_str().unwrap();
    assert!(image.starts_with("postgres:17."), "{image}");
    assert!(postgres.at.get("ports").is_none());
    let kept = &strings(&postgres.at["volumes"])[0];
    let (volume, place) = kept.split_once(':').unwrap();
    assert!(compose["volumes"].get(volume).is_some(), "{kept}");
    assert_eq!(
        place, "/var/lib/postgresql/data",
        "where this image keeps its data"
    );
    let test = strings(&postgres.at["healthcheck"]["test"]);
    assert_eq!(test[..2], ["CMD", "pg_isready"]);
    let edge = Service::of(&compose, "edge");
    assert_eq!(edge.depends_on(), ["postgres"]);
    let password = |service: &Service, name: &str| {
        let env: BTreeMap<String, String> = service.env().into_iter().collect();
        env[name].clone()
    };
    assert_eq!(
        password(&edge, "PGPASSWORD"),
        password(&postgres, "POSTGRES_PASSWORD")
    );
    assert!(!read("deploy/edge.toml").contains(&password(&edge, "PGPASSWORD")));
}

#[test]
fn published_ports_are_served_and_only_on_loopback() {
    run(60, async {
        let stack = Running::start().await;
        let compose = compose();
        for name in compose["services"].as_object().unwrap().keys() {
            let service = Service::of(&compose, name);
            for published in strings(&service.at["ports"]) {
                let inside = published
                    .strip_prefix("127.0.0.1:")
                    .unwrap_or_else(|| panic!("{published}: the file's secrets are known to everybody"));
                let inside = inside.split_once(':').unwrap().1;
                if service.at.get("build").is_some() {
                    assert!(
                        stack.listens.contains_key(&format!("{name}:{inside}")),
                        "{published}"
                    );
                }
            }
        }
        for (service, _) in &stack.services {
            let stage = service.stage();
            let exposed = stage.iter().find_map(|l| l.strip_prefix("EXPOSE ")).unwrap();
            let exposed: Vec<&str> = exposed.split(' ').collect();
            for name in stack.listens.keys() {
                if let Some(port) = name.strip_prefix(&format!("{}:", service.name)) {
                    assert!(exposed.contains(&port), "{name} is not exposed");
                }
            }
            let user = stage.iter().rev().find_map(|l| l.strip_prefix("USER "));
            assert_eq!(user, Some("10001:10001"), "never root");
        }
    });
}

#[test]
fn every_variable_of_the_stack_is_in_the_env_example() {
    let example = read(".env.example");
    let example: BTreeMap<&str, &str> = example.lines().filter_map(|l| l.split_once('=')).collect();
    let compose = read("docker-compose.yml");
    let used: BTreeMap<&str, &str> = compose
        .split("${")
        .skip(1)
        .filter_map(|v| v.split('}').next()?.split_once(":-"))
        .collect();
    assert_eq!(example, used, "names and demo values agree");
}

#[test]
fn prometheus_scrapes_every_listener_of_ours() {
    run(90, async {
        let stack = Running::start().await;
        let compose = compose();
        let prometheus = Service::of(&compose, "prometheus");
        let flag = |name: &str| {
            strings(&prometheus.at["command"])
                .iter()
                .find_map(|w| w.strip_prefix(&format!("--{name}=")).map(str::to_owned))
        };
        let file = prometheus.host_path(&flag("config.file").unwrap()).unwrap();
        let written = std::fs::read_to_string(file).unwrap();
        let config = yaml(&written);
        let mut targets: Vec<String> = config["scrape_configs"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|job| strings(&job["static_configs"][0]["targets"]))
            .collect();
        targets.sort();
        let mut expected = stack.metrics.clone();
        expected.sort();
        assert_eq!(targets, expected);
        // The files that it names are mounted; then the whole is checked by Prometheus' own tool.
        let mut text = stack.rewritten(&written);
        for rules in strings(&config["rule_files"]) {
            let host = prometheus
                .host_path(&rules)
                .unwrap_or_else(|| panic!("{rules} is not mounted"));
            text = text.replace(&rules, host.to_str().unwrap());
        }
        let copy = stack.dir.path().join("prometheus.yml");
        std::fs::write(&copy, text).unwrap();
        let copy = copy.to_str().unwrap();
        let checked = std::process::Command::new("promtool")
            .args(["check", "config", copy])
            .output()
            .expect("promtool is installed (Debian: prometheus)");
        assert!(
            checked.status.success(),
            "{}{}",
            String::from_utf8_lossy(&checked.stdout),
            String::from_utf8_lossy(&checked.stderr)
        );
        // And a real Prometheus finds every target up.
        let (api, _server) = start_prometheus(copy, stack.dir.path()).await;
        eventually("every target is up", Duration::from_secs(30), || async {
            let answer = api.get("/api/v1/query?query=up").await.text();
            let up: Value = serde_json::from_str(&answer).map_err(|_| answer.clone())?;
            let found = up["data"]["result"].as_array().cloned().unwrap_or_default();
            let ones = found.iter().filter(|r| r["value"][1] == "1").count();
            if ones == expected.len() {
                Ok(())
            } else {
                Err(answer)
            }
        })
        .await;
        let rules = api.get("/api/v1/rules").await.json();
        assert!(!rules["data"]["groups"].as_array().unwrap().is_empty());
    });
}

/// Starts Prometheus. It cannot be asked for any free port, so one that was free a moment ago is tried.
async fn start_prometheus(config: &str, dir: &Path) -> (Client, Process) {
    for attempt in 0..5 {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let storage = dir.join(format!("tsdb-{attempt}"));
        let args = [
            format!("--config.file={config}"),
            format!("--storage.tsdb.path={}", storage.display()),
            format!("--web.listen-address={port}"),
        ];
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut process = Process::spawn("prometheus", Path::new("/usr/bin/prometheus"), &args, &[], dir);
        let api = Client::new(&port.to_string());
        let ready = eventually("Prometheus is ready", Duration::from_secs(20), || {
            let running = process.running();
            let api = &api;
            async move {
                match api.try_request("GET", "/-/ready", &[], b"").await {
                    Ok(answer) if running && answer.status() == 200 => Ok(true),
                    // Somebody else took the port.
                    _ if !running => Ok(false),
                    Ok(answer) => Err(answer.text()),
                    Err(e) => Err(e.to_string()),
                }
            }
        })
        .await;
        if ready {
            return (api, process);
        }
    }
    panic!("Prometheus did not start");
}

#[test]
fn grafana_finds_its_data_source_and_dashboards() {
    let compose = compose();
    let grafana = Service::of(&compose, "grafana");
    let inside = |path: &str| {
        grafana
            .host_path(path)
            .unwrap_or_else(|| panic!("{path} is not mounted"))
    };
    let provisioning = inside("/etc/grafana/provisioning");
    let sources = yaml(&std::fs::read_to_string(provisioning.join("datasources/prometheus.yml")).unwrap());
    let source = &sources["datasources"][0];
    assert_eq!(
        (source["type"].as_str(), source["isDefault"].as_bool()),
        (Some("prometheus"), Some(true))
    );
    let url = source["url"].as_str().unwrap();
    let (host, port) = url.strip_prefix("http://").unwrap().split_once(':').unwrap();
    assert_eq!(port, "9090", "where Prometheus listens by default");
    assert!(
        Service::of(&compose, host).at["image"]
            .as_str()
            .unwrap()
            .starts_with("prom/prometheus:")
    );
    let providers = yaml(&std::fs::read_to_string(provisioning.join("dashboards/iop.yml")).unwrap());
    let folder = inside(providers["providers"][0]["options"]["path"].as_str().unwrap());
    assert_eq!(folder, root().join("dashboards"));
    let uid = source["uid"].as_str().unwrap();
    let mut found = 0;
    for file in std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()) {
        if file.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let variable = &dashboard["templating"]["list"][0];
        assert_eq!(
            (variable["type"].as_str(), variable["current"]["value"].as_str()),
            (Some("datasource"), Some(uid))
        );
        found += 1;
    }
    assert!(found > 0);
    let env = grafana.env();
    let home = env
        .iter()
        .find(|(k, _)| k == "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH")
        .unwrap();
    assert!(inside(&home.1).is_file());
}
