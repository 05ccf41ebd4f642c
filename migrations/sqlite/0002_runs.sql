-- Durable runs: one head per run and its rows. Times are milliseconds since 1970-01-01 UTC. What the engine seals or what a host
-- owns is a BLOB, byte for byte; payloads above 4096 bytes are in `blobs` and their column is NULL. A list of words is a chain of
-- ORs, the usual ones first: for an IN of more than two SQLite builds a table each time that a row is written.
CREATE TABLE runs (
    run_id              TEXT    NOT NULL PRIMARY KEY,
    -- The front-end: `graph`, `agent`, `flow`.
    kind                TEXT    NOT NULL,
    definition          TEXT    NOT NULL,
    status              TEXT    NOT NULL CHECK (
        status = 'running' OR status = 'waiting' OR status = 'queued' OR status = 'ambiguous' OR status = 'succeeded'
        OR status = 'failed' OR status = 'cancelled' OR status = 'exhausted' OR status = 'transferred'),
    -- Empty when the run is over.
    cursor              TEXT    NOT NULL,
    activation          INTEGER NOT NULL,
    revision            INTEGER NOT NULL,
    schema_version      INTEGER NOT NULL,
    parent_id           TEXT,
    root_id             TEXT    NOT NULL,
    state               BLOB,
    state_digest        BLOB    NOT NULL,
    budgets             BLOB    NOT NULL,
    outcome             BLOB,
    body                BLOB    NOT NULL,
    seal                BLOB,
    waiting_kind        TEXT    CHECK (
        waiting_kind IS NULL OR waiting_kind = 'approval' OR waiting_kind = 'input' OR waiting_kind = 'event'
        OR waiting_kind = 'timer' OR waiting_kind = 'retry' OR waiting_kind = 'children'
        OR waiting_kind = 'reconciliation' OR waiting_kind = 'resume' OR waiting_kind = 'handoff'),
    -- When the run can be claimed by who finds it unheld; not sealed, derived from the head and the inbox.
    due_at              INTEGER,
    deadline            INTEGER,
    -- The inbox: grows with every change of it.
    signal              INTEGER NOT NULL DEFAULT 0,
    -- JSON: the request to cancel.
    cancel              TEXT,
    cancel_requested_at INTEGER,
    -- Why the run is set aside.
    quarantine          TEXT,
    created_at          INTEGER NOT NULL,
    updated_at          INTEGER NOT NULL
) STRICT;

-- The claim index. What is set aside is not in it.
CREATE INDEX runs_due ON runs (due_at, run_id) WHERE due_at IS NOT NULL AND quarantine IS NULL;
CREATE INDEX runs_created ON runs (created_at, run_id);
CREATE INDEX runs_definition ON runs (kind, definition, created_at, run_id);
CREATE INDEX runs_parent ON runs (parent_id, created_at, run_id) WHERE parent_id IS NOT NULL;
CREATE INDEX runs_waiting ON runs (waiting_kind, created_at, run_id) WHERE waiting_kind IS NOT NULL;

-- The last incarnation of each run id that ever was. A fence without a run is a tombstone.
CREATE TABLE run_fences (
    run_id TEXT    NOT NULL PRIMARY KEY,
    fence  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE run_leases (
    run_id      TEXT    NOT NULL PRIMARY KEY,
    owner       TEXT    NOT NULL,
    incarnation INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One row per revision, never changed but for `pruned`, which takes the state away.
CREATE TABLE checkpoints (
    run_id       TEXT    NOT NULL,
    revision     INTEGER NOT NULL,
    status       TEXT    NOT NULL,
    cursor       TEXT    NOT NULL,
    activation   INTEGER NOT NULL,
    state        BLOB,
    state_digest BLOB    NOT NULL,
    seal         BLOB,
    created_at   INTEGER NOT NULL,
    pruned       INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1)),
    PRIMARY KEY (run_id, revision)
) STRICT;

CREATE TABLE steps (
    run_id     TEXT    NOT NULL,
    activation INTEGER NOT NULL,
    node       TEXT    NOT NULL,
    status     TEXT    NOT NULL CHECK (
        status = 'done' OR status = 'pending' OR status = 'in_progress' OR status = 'waiting' OR status = 'failed'
        OR status = 'cancelled' OR status = 'exhausted' OR status = 'unknown'),
    -- JSON: the whole record.
    body       BLOB    NOT NULL,
    PRIMARY KEY (run_id, activation)
) STRICT;

CREATE TABLE activities (
    run_id        TEXT    NOT NULL,
    activity_id   TEXT    NOT NULL,
    activation    INTEGER NOT NULL,
    state         TEXT    NOT NULL CHECK (
        state = 'running' OR state = 'completed' OR state = 'prepared' OR state = 'failed' OR state = 'unknown'),
    body          BLOB    NOT NULL,
    input         BLOB,
    input_digest  BLOB    NOT NULL,
    output        BLOB,
    -- NULL: there is no output.
    output_digest BLOB,
    seal          BLOB,
    PRIMARY KEY (run_id, activation, activity_id)
) STRICT;

CREATE INDEX activities_open ON activities (run_id) WHERE state <> 'completed' AND state <> 'failed';

CREATE TABLE waits (
    run_id           TEXT    NOT NULL,
    wait_id          TEXT    NOT NULL,
    correlation_id   TEXT    NOT NULL,
    activation       INTEGER NOT NULL,
    status           TEXT    NOT NULL CHECK (
        status = 'armed' OR status = 'delivered' OR status = 'timed_out' OR status = 'cancelled'),
    deadline         INTEGER,
    armed_at         INTEGER NOT NULL,
    body             BLOB    NOT NULL,
    subject          BLOB,
    subject_digest   BLOB    NOT NULL,
    delivered        BLOB,
    -- NULL: nothing was delivered.
    delivered_digest BLOB,
    seal             BLOB,
    PRIMARY KEY (run_id, wait_id)
) STRICT;

CREATE INDEX waits_armed ON waits (correlation_id, armed_at, run_id, wait_id) WHERE status = 'armed';

-- `scope` is `operator`, `cancel` or `wait:` and the wait's id. `content` is SHA-256 of what the decider said.
CREATE TABLE decisions (
    run_id      TEXT    NOT NULL,
    scope       TEXT    NOT NULL,
    decision_id TEXT    NOT NULL,
    content     BLOB    NOT NULL,
    body        BLOB    NOT NULL,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (run_id, scope, decision_id)
) STRICT;

CREATE TABLE events (
    run_id   TEXT    NOT NULL,
    seq      INTEGER NOT NULL,
    life     INTEGER NOT NULL,
    name     TEXT    NOT NULL,
    terminal INTEGER NOT NULL CHECK (terminal IN (0, 1)),
    time     INTEGER NOT NULL,
    data     BLOB    NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT;

-- Each life ends once.
CREATE UNIQUE INDEX events_terminal ON events (run_id, life) WHERE terminal = 1;

-- Payloads that are too long for their row, once per run.
CREATE TABLE blobs (
    run_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    bytes  BLOB NOT NULL,
    PRIMARY KEY (run_id, digest)
) STRICT;

-- The caller's keys of creations; `request` is SHA-256 of what was asked.
CREATE TABLE idempotency_keys (
    scope      TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    request    BLOB    NOT NULL,
    run_id     TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
