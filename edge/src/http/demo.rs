//! The tool of the demonstration: a deployment that takes a moment and is made once per `Idempotency-Key`.
//!
//! Served only where the configuration says `demo = true`, which admits no keys and so no address but loopback. What was asked for
//! is kept in a file of the working directory: a service outlives the gateway that calls it.

use std::io::ErrorKind as Io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Request};
use http_body::Body;
use serde::{Deserialize, Serialize};
use tokio::fs;
use tokio::io::AsyncWriteExt;
use tokio::sync::Mutex;

use super::answer::{self, Answer};
use super::payload;
use crate::app::App;
use crate::error::{ApiError, ErrorKind};

/// What was asked of the tool, one JSON object a line.
const FILE: &str = "iop-demo.jsonl";
/// How long a deployment takes: enough to kill the edge in the middle of one.
const TAKES: Duration = Duration::from_secs(3);
/// Bytes of a body.
const BODY_MAX: usize = 16 << 10;

/// Who asks first for a key, deploys.
static TURN: Mutex<()> = Mutex::const_new(());

/// What the model asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Deploy {
    service: String,
    region: String,
}

/// One request, as it is kept.
#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    idempotency_key: String,
    /// Whether it deploys, or repeats a request that does.
    deploys: bool,
    #[serde(flatten)]
    deploy: Deploy,
}

/// What became of the requests with one key.
#[derive(Debug, PartialEq, Serialize)]
struct Deployment {
    idempotency_key: String,
    #[serde(flatten)]
    deploy: Deploy,
    requests: u64,
    /// How often it was deployed.
    applied: u64,
}

/// The answer to each request with a key, the first and the others.
#[derive(Serialize)]
struct Deployed {
    status: &'static str,
    #[serde(flatten)]
    deploy: Deploy,
}

/// `GET /demo/deploys`.
#[derive(Serialize)]
struct Deployments {
    object: &'static str,
    data: Vec<Deployment>,
}

/// Answers below `/demo/`.
pub(super) async fn serve<B>(app: &App, request: Request<B>) -> Answer
where
    B: Body<Data = Bytes> + Unpin,
{
    let path = request.uri().path();
    let wrong = |allow| answer::with_allow(answer::method_not_allowed(path).into_response(), allow);
    let answered = match (path, request.method()) {
        ("/demo/deploy", &Method::POST) => deploy(app, request).await,
        ("/demo/deploys", &Method::GET) => deploys().await,
        ("/demo/deploy", _) => return wrong("POST"),
        ("/demo/deploys", _) => return wrong("GET"),
        _ => Err(answer::not_found(path)),
    };
    answered.unwrap_or_else(ApiError::into_response)
}

async fn deploy<B>(app: &App, request: Request<B>) -> Result<Answer, ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (parts, body) = request.into_parts();
    let idempotency_key = key(&parts.headers)?;
    let idle = app.settings.gate.client_write_timeout;
    let (body, _held) = payload::read(&parts.headers, body, BODY_MAX, idle, &app.body_memory).await?;
    let deploy: Deploy = serde_json::from_slice(&body).map_err(|e| {
        ApiError::new(
            ErrorKind::InvalidRequest,
            format!("The body is no deployment: {e}"),
        )
    })?;
    if admit(Path::new(FILE), idempotency_key, deploy.clone())
        .await
        .map_err(|e| broken(&e))?
    {
        tokio::time::sleep(TAKES).await;
    }
    Ok(answer::json(&Deployed {
        status: "deployed",
        deploy,
    }))
}

async fn deploys() -> Result<Answer, ApiError> {
    let text = kept(Path::new(FILE)).await.map_err(|e| broken(&e))?;
    Ok(answer::json(&Deployments {
        object: "list",
        data: deployments(&text),
    }))
}

/// Keeps a request; whether it is the first with its key.
async fn admit(file: &Path, idempotency_key: String, deploy: Deploy) -> std::io::Result<bool> {
    let _turn = TURN.lock().await;
    let mut known = deployments(&kept(file).await?).into_iter();
    let first = !known.any(|it| it.idempotency_key == idempotency_key);
    let asked = Asked {
        idempotency_key,
        deploys: first,
        deploy,
    };
    let mut line = serde_json::to_vec(&asked)?;
    line.push(b'\n');
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .await?;
    file.write_all(&line).await?;
    file.flush().await?;
    Ok(first)
}

async fn kept(file: &Path) -> std::io::Result<String> {
    match fs::read_to_string(file).await {
        Err(e) if e.kind() == Io::NotFound => Ok(String::new()),
        read => read,
    }
}

/// The deployments of a file, in the order in which they were asked for. Pure.
fn deployments(text: &str) -> Vec<Deployment> {
    let mut all: Vec<Deployment> = Vec::new();
    for asked in text
        .lines()
        .filter_map(|line| serde_json::from_str::<Asked>(line).ok())
    {
        let known = all
            .iter_mut()
            .find(|it| it.idempotency_key == asked.idempotency_key);
        match known {
            Some(known) => {
                known.requests += 1;
                known.applied += u64::from(asked.deploys);
            }
            None => all.push(Deployment {
                idempotency_key: asked.idempotency_key,
                deploy: asked.deploy,
                requests: 1,
                applied: u64::from(asked.deploys),
            }),
        }
    }
    all
}

fn key(headers: &HeaderMap) -> Result<String, ApiError> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    key.map(str::to_owned).ok_or_else(|| {
        ApiError::new(
            ErrorKind::InvalidRequest,
            "A deployment needs an Idempotency-Key in its headers.",
        )
    })
}

fn broken(error: &std::io::Error) -> ApiError {
    tracing::error!(%error, file = FILE, "the demonstration's file cannot be used");
    ApiError::new(
        ErrorKind::InternalError,
        "The file of the demonstration cannot be used.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn website(region: &str) -> Deploy {
        Deploy {
            service: "website".to_owned(),
            region: region.to_owned(),
        }
    }

    #[tokio::test]
    async fn a_key_deploys_once_whoever_keeps_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        assert_eq!(kept(&file).await.unwrap(), "");
        for (key, region, first) in [
            ("a", "eu", true),
            ("b", "eu", true),
            ("a", "us", false),
            ("a", "eu", false),
        ] {
            let admitted = admit(&file, key.to_owned(), website(region)).await.unwrap();
            assert_eq!(admitted, first, "{key}");
        }
        let of = |key: &str, requests| Deployment {
            idempotency_key: key.to_owned(),
            deploy: website("eu"),
            requests,
            applied: 1,
        };
        assert_eq!(deployments(&kept(&file).await.unwrap()), [of("a", 3), of("b", 1)]);
    }

    #[tokio::test]
    async fn of_many_at_once_with_one_key_one_deploys() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        let all = (0..20).map(|_| admit(&file, "a".to_owned(), website("eu")));
        let all = futures_util::future::join_all(all).await;
        assert_eq!(
            all.into_iter().filter(|first| *first.as_ref().unwrap()).count(),
            1
        );
        let known = deployments(&kept(&file).await.unwrap());
        assert_eq!((known[0].requests, known[0].applied), (20, 1));
    }

    #[test]
    fn a_key_is_required() {
        let with = |value: &'static str| {
            key(&HeaderMap::from_iter([(
                http::header::HeaderName::from_static("idempotency-key"),
                http::HeaderValue::from_static(value),
            )]))
        };
        assert_eq!(with("run/turn-1/2/call.0").unwrap(), "run/turn-1/2/call.0");
        assert_eq!(
            key(&HeaderMap::new()).unwrap_err().kind,
            ErrorKind::InvalidRequest
        );
    }
}
