//! The contract of `/api/v1` read sentence by sentence: what a client may send besides what is meant, and what it is told.

use iop_tests::run;
use iop_tests::runs::agents::all;
use iop_tests::runs::{Api, BOSS, Db, OWNER, World};

/// What a key without the role sends: nothing of it would be taken from anybody.
const WRONG: [&[u8]; 4] = [b"", b"{", b"\xff", b"{\"x\":1}"];

async fn send(api: &Api, method: &str, path: &str, body: &[u8]) -> iop_tests::client::Answer {
    let path = format!("/api/v1{path}");
    api.client.request(method, &path, &[], body).await
}

#[test]
fn who_may_not_ask_is_told_that_and_nothing_of_what_was_asked() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (owner, boss) = (world.api().with_key(OWNER), world.api().with_key(BOSS));
        let cases = [
            (&owner, "PUT", "/agents/x"),
            (&owner, "PUT", "/agents/x%20y"),
            (&boss, "PUT", "/agents/x"),
            (&owner, "DELETE", "/agents/absent"),
            (&owner, "GET", "/agents/absent"),
            (&owner, "GET", "/agents?limit=0"),
            (&owner, "GET", "/nodes?x=1"),
            (&boss, "POST", "/runs"),
            (&boss, "POST", "/runs?wait=soon"),
            (&owner, "POST", "/runs/absent/approvals/absent"),
            (&owner, "POST", "/runs/absent/inputs/absent"),
            (&owner, "POST", "/runs/absent/waits/absent/deliveries"),
            (&owner, "POST", "/runs/absent/waits/absent/cancel"),
            (&owner, "POST", "/runs/absent/activities/absent/reconcile"),
            (&owner, "POST", "/runs/absent/activities/absent/resolve"),
            (&owner, "DELETE", "/runs/absent"),
            (&boss, "DELETE", "/runs/absent"),
        ];
        for (api, method, path) in cases {
            for body in WRONG {
                let answer = send(api, method, path, body).await;
                assert_eq!(answer.status(), 403, "{method} {path}: {}", answer.text());
                assert_eq!(answer.json()["error"]["code"], "permission_denied");
            }
        }
        let nobody = world.api().with_key("sk-nobody");
        for (_, method, path) in cases {
            let answer = send(&nobody, method, path, b"{").await;
            answer.assert_error(401, "invalid_api_key");
        }
    });
}
