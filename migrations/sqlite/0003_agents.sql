-- What agents need: names of definitions, gates over all runs, who made a run.

-- The head of each name; its versions are in `definitions`. A withdrawn name starts no run and frees none; its versions stay.
CREATE TABLE definition_names (
    kind      TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    -- Who declared it last.
    origin    TEXT    NOT NULL CHECK (origin = 'config' OR origin = 'api'),
    withdrawn INTEGER NOT NULL DEFAULT 0 CHECK (withdrawn IN (0, 1)),
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

INSERT INTO definition_names (kind, name, origin) SELECT DISTINCT kind, name, 'api' FROM definitions;

-- A copy of what the sealed body says. NULL in rows of the step before, until the index is rebuilt.
ALTER TABLE waits ADD COLUMN kind TEXT CHECK (
    kind IS NULL OR kind = 'approval' OR kind = 'input' OR kind = 'event' OR kind = 'timer' OR kind = 'retry'
    OR kind = 'children' OR kind = 'reconciliation' OR kind = 'resume' OR kind = 'handoff');

-- What is open is few among what is settled: it has an index of its own.
CREATE INDEX waits_kind_armed ON waits (kind, armed_at, run_id, wait_id) WHERE status = 'armed';
CREATE INDEX waits_kind ON waits (kind, armed_at, run_id, wait_id);

-- Who made the run; written once.
ALTER TABLE runs ADD COLUMN owner TEXT;

CREATE INDEX runs_owner ON runs (owner, created_at, run_id) WHERE owner IS NOT NULL;

-- Keys are forgotten from the oldest on.
CREATE INDEX idempotency_keys_created ON idempotency_keys (created_at);

-- Where a delivery went is found by its id. The ledgers of waits alone: `;` is the character after `:`.
CREATE INDEX decisions_of_waits ON decisions (decision_id, scope) WHERE scope >= 'wait:' AND scope < 'wait;';
