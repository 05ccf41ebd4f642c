//! What people look at: lists of runs and approvals, and one run.

use jiff::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;

use super::wire::{Page, Run};
use super::{ALL, Ls, Shell, path, print, print_json, render};

/// `show --json`.
#[derive(Serialize)]
struct Shown<'a> {
    run: &'a RawValue,
    turns: &'a [Box<RawValue>],
    steps: &'a [Box<RawValue>],
    activities: &'a [Box<RawValue>],
    approvals: &'a [Box<RawValue>],
}

/// `ls --json`.
#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: &'a [Box<RawValue>],
    has_more: bool,
    next_after: Option<&'a str>,
}

impl Shell {
    pub(super) async fn ls(&self, ls: &Ls) -> anyhow::Result<()> {
        let mut query = Vec::new();
        if ls.approvals {
            query.push(("status", "pending"));
        }
        for (name, value) in [
            ("status", &ls.status),
            ("agent", &ls.agent),
            ("waiting_kind", &ls.waiting),
        ] {
            if let Some(value) = value {
                query.push((name, value));
            }
        }
        // Of approvals the one that has waited longest is first in line; of runs the newest are looked for.
        let (page, older) = if ls.approvals {
            (self.api.list("approvals", &query, ls.limit).await?, 0)
        } else {
            self.api.last("runs", &query, ls.limit).await?
        };
        if self.json {
            print_json(&List {
                object: "list",
                data: &page.data,
                has_more: page.has_more,
                next_after: page.next_after.as_deref(),
            })?;
        } else {
            let now = Timestamp::now();
            if ls.approvals {
                print(&render::approvals(&self.api.items(&page)?, now));
            } else {
                print(&render::runs(&self.api.items(&page)?, now));
            }
        }
        if older > 0 {
            eprintln!("{older} older ones are not shown: --limit {}.", ls.limit);
        }
        if page.has_more {
            eprintln!("There are newer ones: --limit {} was reached.", ls.limit);
        }
        Ok(())
    }

    pub(super) async fn show(&self, run: &str) -> anyhow::Result<()> {
        let path = path(run);
        let answer = self.api.get(&path).await?;
        let [turns, steps, activities, approvals] = [
            self.of(&path, "turns").await?,
            self.of(&path, "steps").await?,
            self.of(&path, "activities").await?,
            self.of(&path, "approvals").await?,
        ];
        if self.json {
            return print_json(&Shown {
                run: self.api.read::<Box<RawValue>>(&answer)?.as_ref(),
                turns: &turns.data,
                steps: &steps.data,
                activities: &activities.data,
                approvals: &approvals.data,
            });
        }
        let run: Run = self.api.read(&answer)?;
        let did = render::Did {
            turns: self.api.items(&turns)?,
            steps: self.api.items(&steps)?,
            activities: self.api.items(&activities)?,
            approvals: self.api.items(&approvals)?,
        };
        print(&render::run(&run, &did, Timestamp::now()));
        Ok(())
    }

    async fn of(&self, run: &str, list: &str) -> anyhow::Result<Page> {
        Ok(self.api.list(&format!("{run}/{list}"), &[], ALL).await?)
    }
}
