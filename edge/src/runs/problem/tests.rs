use std::path::Path;

use super::*;

/// The cells of each row of a table of `docs/errors.md`, from its heading to the next one; code marks are left out.
fn rows(heading: &str) -> Vec<Vec<String>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md");
    let page = std::fs::read_to_string(&file).unwrap();
    let section = page.split_once(&format!("\n{heading}\n")).unwrap().1;
    let section = section.split("\n## ").next().unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.split(" | ")
            .map(|cell| cell.trim_matches(['|', '`', ' ']).to_owned())
            .collect()
    };
    section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(cells)
        .collect()
}

fn sorted(mut all: Vec<Vec<String>>) -> Vec<Vec<String>> {
    all.sort();
    all
}

#[test]
fn every_code_is_explained_once_with_its_status() {
    let explained = rows("## Codes of /api/v1").into_iter().map(|row| {
        assert_eq!(row.len(), 4, "{row:?}");
        row[..2].to_vec()
    });
    let ours = Code::ALL
        .iter()
        .map(|code| vec![code.as_str().to_owned(), code.status().as_u16().to_string()]);
    assert_eq!(sorted(explained.collect()), sorted(ours.collect()));
}

#[test]
fn so_is_every_error_of_the_gateway() {
    let explained = rows("## Codes").into_iter().map(|row| {
        assert_eq!(row.len(), 5, "{row:?}");
        row[..3].to_vec()
    });
    let ours = ErrorKind::ALL
        .iter()
        .filter(|kind| **kind != ErrorKind::ClientClosedRequest)
        .map(|kind| {
            let status = kind.status().as_u16().to_string();
            vec![kind.as_str().to_owned(), status, kind.openai_type().to_owned()]
        });
    assert_eq!(sorted(explained.collect()), sorted(ours.collect()));
}

#[test]
fn what_may_be_asked_again_says_so() {
    for code in Code::ALL {
        let problem = Problem::new(*code, "why");
        assert!(problem.retryable || problem.retry_after.is_none(), "{code}");
        if code.status() == StatusCode::SERVICE_UNAVAILABLE {
            assert!(problem.retryable && problem.retry_after.is_some(), "{code}");
        }
    }
}
