//! How the write-ahead log gets into the database. SQLite would copy it within a commit, and all other commits would wait; here a
//! thread with a connection of its own copies beside the writer. What was written meanwhile is left to the writer, between two
//! transactions, after their callers have their answers: only a log that is copied whole is begun anew, and under a constant
//! load nobody else ever finds it whole.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rusqlite::Connection;

use super::connect;

/// A log is copied when it has grown by this many pages of 4 KiB.
const PAGES: u32 = 1000;

/// What the writer copies itself: about a millisecond's work.
const SHORT: u32 = 100;

/// Copies beside the writer before it copies the rest itself, however much: a log must not grow faster than it is copied.
const PASSES: u32 = 4;

thread_local! {
    /// Pages in the log after the last commit of this thread.
    static LENGTH: Cell<u32> = const { Cell::new(0) };
}

/// This connection's commits say how long the log is, and copy nothing.
pub(super) fn watch(conn: &Connection) {
    conn.wal_hook(Some(|_, pages| {
        LENGTH.set(u32::try_from(pages).unwrap_or(0));
        Ok(())
    }));
}

/// What is to be done about the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Nothing,
    /// Beside the writer.
    Copy,
    /// By the writer.
    Finish,
}

/// How far the log is copied. Lengths are pages from its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// Nobody copies; it was this long when it was last seen to.
    Left { at: u32 },
    /// Somebody copies for the `pass`th time in a row. It was `length` long at the beginning, of which `copied` were in the database.
    Copying { pass: u32, length: u32, copied: u32 },
}

impl Progress {
    const NEW: Self = Self::Left { at: 0 };

    /// After a commit that left the log at this length. `copied` when somebody has just ended copying: so many of its pages are
    /// in the database.
    fn next(self, length: u32, copied: Option<u32>) -> (Self, Step) {
        let left = Self::Left { at: length };
        match (self, copied) {
            (Self::Left { at }, _) if length < at => (Self::NEW, Step::Nothing),
            (Self::Left { at }, _) if length - at < PAGES => (self, Step::Nothing),
            (Self::Left { .. }, _) => {
                let pass = 1;
                (
                    Self::Copying {
                        pass,
                        length,
                        copied: 0,
                    },
                    Step::Copy,
                )
            }
            (Self::Copying { .. }, None) => (self, Step::Nothing),
            // It was copied whole in a moment without commits, and begun anew.
            (Self::Copying { length: then, .. }, Some(_)) if length < then => (Self::NEW, Step::Nothing),
            // A reader that began long ago is in the way.
            (Self::Copying { copied: before, .. }, Some(copied)) if copied <= before => (left, Step::Nothing),
            (Self::Copying { pass, .. }, Some(copied)) => {
                if length.saturating_sub(copied) <= SHORT || pass == PASSES {
                    return (left, Step::Finish);
                }
                let pass = pass + 1;
                (Self::Copying { pass, length, copied }, Step::Copy)
            }
        }
    }
}

/// Sees to the log on behalf of the writer.
pub(super) struct Checkpoints {
    progress: Progress,
    /// To the thread that copies, which ends without it.
    wanted: Option<Sender<()>>,
    /// How many pages of the log are in the database, after each copy.
    copied: Receiver<u32>,
    thread: Option<JoinHandle<()>>,
}

impl Checkpoints {
    /// # Errors
    /// No thread can be started.
    pub(super) fn start(path: PathBuf) -> io::Result<Self> {
        let (wanted, asked) = channel();
        let (tell, copied) = channel();
        let thread = std::thread::Builder::new()
            .name("sqlite-copier".to_owned())
            .spawn(move || {
                let mut copier = Copier { path, conn: None };
                while asked.recv().is_ok() && tell.send(copier.copy()).is_ok() {}
            })?;
        Ok(Self {
            progress: Progress::NEW,
            wanted: Some(wanted),
            copied,
            thread: Some(thread),
        })
    }

    /// After a commit of this connection, outside of a transaction.
    pub(super) fn after_commit(&mut self, conn: &Connection) {
        let (progress, step) = self.progress.next(LENGTH.get(), self.copied.try_recv().ok());
        self.progress = progress;
        match (step, &self.wanted) {
            (Step::Copy, Some(wanted)) => {
                // The thread ends after this value only.
                let _ = wanted.send(());
            }
            (Step::Finish, _) => {
                copy(conn);
            }
            (Step::Copy, None) | (Step::Nothing, _) => {}
        }
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        self.wanted.take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the copier of the log did not end in order");
        }
    }
}

struct Copier {
    path: PathBuf,
    conn: Option<Connection>,
}

impl Copier {
    fn copy(&mut self) -> u32 {
        let conn = match self.conn.take() {
            Some(conn) => conn,
            None => match connect::copier(&self.path) {
                Ok(conn) => conn,
                Err(error) => {
                    tracing::warn!(%error, "the log of the database was not copied");
                    return 0;
                }
            },
        };
        copy(self.conn.insert(conn))
    }
}

/// Copies what no reader needs to find in the log. How many of the log's pages are in the database; none when that failed: what
/// was committed is in the log, and the next copy has it.
fn copy(conn: &Connection) -> u32 {
    let copied = conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get::<_, i64>(2));
    match copied {
        // -1 is said of a log that somebody else copies at this moment.
        Ok(pages) => u32::try_from(pages).unwrap_or(0),
        Err(error) => {
            tracing::warn!(%error, "the log of the database was not copied");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn copying(pass: u32, length: u32, copied: u32) -> Progress {
        Progress::Copying { pass, length, copied }
    }

    const fn left(at: u32) -> Progress {
        Progress::Left { at }
    }

    #[test]
    fn a_log_is_copied_beside_the_writer_and_the_rest_of_it_by_the_writer() {
        let (progress, step) = Progress::NEW.next(PAGES - 1, None);
        assert_eq!((progress, step), (left(0), Step::Nothing));
        let (progress, step) = progress.next(PAGES + 7, None);
        assert_eq!((progress, step), (copying(1, PAGES + 7, 0), Step::Copy));
        let (progress, step) = progress.next(PAGES + 50, None);
        assert_eq!((progress, step), (copying(1, PAGES + 7, 0), Step::Nothing));
        let (progress, step) = progress.next(PAGES + 60, Some(PAGES + 7));
        assert_eq!((progress, step), (left(PAGES + 60), Step::Finish));
        // Begun anew.
        assert_eq!(progress.next(3, None), (left(0), Step::Nothing));
    }

    #[test]
    fn what_is_too_much_for_the_writer_is_copied_again_but_not_for_ever() {
        let mut progress = copying(1, 1000, 0);
        let mut length = 1000;
        for pass in 2..=PASSES {
            let before = length;
            length += SHORT + 1;
            let next = progress.next(length, Some(before));
            assert_eq!(next, (copying(pass, length, before), Step::Copy));
            progress = next.0;
        }
        assert_eq!(
            progress.next(length + 5000, Some(length)),
            (left(length + 5000), Step::Finish)
        );
    }

    #[test]
    fn a_copy_that_gets_nowhere_is_tried_again_when_the_log_has_grown() {
        assert_eq!(
            copying(1, 1000, 0).next(1200, Some(0)),
            (left(1200), Step::Nothing)
        );
        assert_eq!(
            copying(2, 2000, 400).next(2100, Some(400)),
            (left(2100), Step::Nothing)
        );
        assert_eq!(
            left(2100).next(2100 + PAGES - 1, None),
            (left(2100), Step::Nothing)
        );
        assert_eq!(left(2100).next(2100 + PAGES, None).1, Step::Copy);
    }

    #[test]
    fn a_log_that_was_begun_anew_meanwhile_needs_no_end() {
        assert_eq!(copying(1, 1000, 0).next(4, Some(1000)), (left(0), Step::Nothing));
    }

    proptest! {
        /// Against a log as SQLite keeps it: it ends, and never grows beyond what was copied last by more than is allowed.
        #[test]
        fn a_log_is_kept_short_by_whatever_copier(commits in proptest::collection::vec((1u32..40, 0u32..60), 1..2000)) {
            let (mut progress, mut length, mut copied) = (Progress::NEW, 0u32, 0u32);
            // How many pages the copier has still to do, of how many.
            let mut job: Option<(u32, u32)> = None;
            for (pages, speed) in commits {
                if length == copied && job.is_none() {
                    (length, copied) = (0, 0);
                }
                length += pages;
                let mut done = None;
                if let Some((missing, goal)) = job {
                    if missing <= speed {
                        (copied, done, job) = (goal, Some(goal), None);
                    } else {
                        job = Some((missing - speed, goal));
                    }
                }
                let (next, step) = progress.next(length, done);
                progress = next;
                match step {
                    Step::Nothing => {}
                    Step::Copy => {
                        prop_assert!(job.is_none(), "two copies at once");
                        job = Some((length - copied, length));
                    }
                    Step::Finish => {
                        prop_assert!(job.is_none(), "two copies at once");
                        copied = length;
                    }
                }
                prop_assert!(job.is_some() || length - copied <= PAGES + 40);
            }
        }
    }
}
