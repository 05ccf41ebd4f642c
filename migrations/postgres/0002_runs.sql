-- Durable runs: one head per run and its rows. Times are milliseconds since 1970-01-01 UTC. What the engine seals or what a host
-- owns is bytea, byte for byte; payloads above 4096 bytes are in `blobs` and their column is NULL. Text compares by its bytes, as
-- in SQLite. Room is left in the pages of heads and leases: an update that changes no indexed column stays in its page.
-- Lists of words are checked by an expression: a list would be parsed word by word with every statement, an eighth of a step.
CREATE TABLE runs (
    run_id              text COLLATE "C" NOT NULL PRIMARY KEY,
    -- The front-end: `graph`, `agent`, `flow`.
    kind                text COLLATE "C" NOT NULL,
    definition          text COLLATE "C" NOT NULL,
    status              text COLLATE "C" NOT NULL CHECK (status ~
        '^(queued|running|waiting|ambiguous|succeeded|failed|cancelled|exhausted|transferred)$'),
    -- Empty when the run is over.
    cursor              text COLLATE "C" NOT NULL,
    activation          bigint NOT NULL,
    revision            bigint NOT NULL,
    schema_version      bigint NOT NULL,
    parent_id           text COLLATE "C",
    root_id             text COLLATE "C" NOT NULL,
    state               bytea,
    state_digest        bytea  NOT NULL,
    budgets             bytea  NOT NULL,
    outcome             bytea,
    body                bytea  NOT NULL,
    seal                bytea,
    waiting_kind        text COLLATE "C" CHECK (waiting_kind ~
        '^(approval|input|event|timer|retry|children|reconciliation|resume|handoff)$'),
    -- When the run can be claimed by who finds it unheld; not sealed, derived from the head and the inbox.
    due_at              bigint,
    deadline            bigint,
    -- The inbox: grows with every change of it.
    signal              bigint NOT NULL DEFAULT 0,
    -- JSON: the request to cancel.
    cancel              text,
    cancel_requested_at bigint,
    -- Why the run is set aside.
    quarantine          text,
    created_at          bigint NOT NULL,
    updated_at          bigint NOT NULL
) WITH (fillfactor = 50);

-- The claim index. What is set aside is not in it.
CREATE INDEX runs_due ON runs (due_at, run_id) WHERE due_at IS NOT NULL AND quarantine IS NULL;
CREATE INDEX runs_created ON runs (created_at, run_id);
CREATE INDEX runs_status ON runs (status, created_at, run_id);
CREATE INDEX runs_definition ON runs (kind, definition, created_at, run_id);
CREATE INDEX runs_parent ON runs (parent_id, created_at, run_id) WHERE parent_id IS NOT NULL;
CREATE INDEX runs_waiting ON runs (waiting_kind, created_at, run_id) WHERE waiting_kind IS NOT NULL;

-- The last incarnation of each run id that ever was. A fence without a run is a tombstone.
CREATE TABLE run_fences (
    run_id text COLLATE "C" NOT NULL PRIMARY KEY,
    fence  bigint NOT NULL
) WITH (fillfactor = 80);

-- One row per run, from its creation to its deletion: a row that is always there can always be locked, and what is locked is read
-- as it is and not as it was. It is held while `expires_at` is ahead of the clock; giving it back sets that to 0.
CREATE TABLE run_leases (
    run_id      text COLLATE "C" NOT NULL PRIMARY KEY,
    owner       text   NOT NULL,
    incarnation bigint NOT NULL,
    expires_at  bigint NOT NULL
) WITH (fillfactor = 50);

-- One row per revision, never changed but for `pruned`, which takes the state away.
CREATE TABLE checkpoints (
    run_id       text COLLATE "C" NOT NULL,
    revision     bigint NOT NULL,
    status       text   NOT NULL,
    cursor       text   NOT NULL,
    activation   bigint NOT NULL,
    state        bytea,
    state_digest bytea  NOT NULL,
    seal         bytea,
    created_at   bigint NOT NULL,
    pruned       boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, revision)
);

CREATE TABLE steps (
    run_id     text COLLATE "C" NOT NULL,
    activation bigint NOT NULL,
    node       text   NOT NULL,
    status     text   NOT NULL CHECK (status ~
        '^(pending|in_progress|waiting|done|failed|cancelled|exhausted|unknown)$'),
    -- JSON: the whole record.
    body       bytea  NOT NULL,
    PRIMARY KEY (run_id, activation)
);

CREATE TABLE activities (
    run_id        text COLLATE "C" NOT NULL,
    activity_id   text COLLATE "C" NOT NULL,
    activation    bigint NOT NULL,
    state         text   NOT NULL CHECK (state ~ '^(prepared|running|completed|failed|unknown)$'),
    body          bytea  NOT NULL,
    input         bytea,
    input_digest  bytea  NOT NULL,
    output        bytea,
    -- NULL: there is no output.
    output_digest bytea,
    seal          bytea,
    PRIMARY KEY (run_id, activation, activity_id)
);

CREATE INDEX activities_open ON activities (run_id) WHERE state IN ('prepared', 'running', 'unknown');

CREATE TABLE waits (
    run_id           text COLLATE "C" NOT NULL,
    wait_id          text COLLATE "C" NOT NULL,
    correlation_id   text COLLATE "C" NOT NULL,
    activation       bigint NOT NULL,
    status           text   NOT NULL CHECK (status ~ '^(armed|delivered|timed_out|cancelled)$'),
    deadline         bigint,
    armed_at         bigint NOT NULL,
    body             bytea  NOT NULL,
    subject          bytea,
    subject_digest   bytea  NOT NULL,
    delivered        bytea,
    -- NULL: nothing was delivered.
    delivered_digest bytea,
    seal             bytea,
    PRIMARY KEY (run_id, wait_id)
);

CREATE INDEX waits_armed ON waits (correlation_id, armed_at, run_id, wait_id) WHERE status = 'armed';

-- `scope` is `operator`, `cancel` or `wait:` and the wait's id. `content` is SHA-256 of what the decider said.
CREATE TABLE decisions (
    run_id      text COLLATE "C" NOT NULL,
    scope       text COLLATE "C" NOT NULL,
    decision_id text COLLATE "C" NOT NULL,
    content     bytea  NOT NULL,
    body        bytea  NOT NULL,
    created_at  bigint NOT NULL,
    PRIMARY KEY (run_id, scope, decision_id)
);

CREATE TABLE events (
    run_id   text COLLATE "C" NOT NULL,
    seq      bigint  NOT NULL,
    life     bigint  NOT NULL,
    name     text    NOT NULL,
    terminal boolean NOT NULL,
    time     bigint  NOT NULL,
    data     bytea   NOT NULL,
    PRIMARY KEY (run_id, seq)
);

-- Each life ends once.
CREATE UNIQUE INDEX events_terminal ON events (run_id, life) WHERE terminal;

-- Payloads that are too long for their row, once per run. Stored as they are: no time is spent on compressing them.
CREATE TABLE blobs (
    run_id text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,
    bytes  bytea NOT NULL,
    PRIMARY KEY (run_id, digest)
);
ALTER TABLE blobs ALTER COLUMN bytes SET STORAGE EXTERNAL;

-- The caller's keys of creations; `request` is SHA-256 of what was asked.
CREATE TABLE idempotency_keys (
    scope      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    request    bytea  NOT NULL,
    run_id     text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    PRIMARY KEY (scope, key)
);
