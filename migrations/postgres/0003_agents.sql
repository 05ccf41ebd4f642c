-- What agents need: names of definitions, gates over all runs, who made a run.

-- Names compare by their bytes, as everywhere else.
ALTER TABLE definitions ALTER COLUMN kind TYPE text COLLATE "C", ALTER COLUMN name TYPE text COLLATE "C";

-- The head of each name; its versions are in `definitions`. A withdrawn name starts no run and frees none; its versions stay.
CREATE TABLE definition_names (
    kind      text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    -- Who declared it last.
    origin    text    NOT NULL CHECK (origin ~ '^(config|api)$'),
    withdrawn boolean NOT NULL DEFAULT false,
    PRIMARY KEY (kind, name)
);

INSERT INTO definition_names (kind, name, origin) SELECT DISTINCT kind, name, 'api' FROM definitions;

-- A copy of what the sealed body says. NULL in rows of the step before, until the index is rebuilt.
ALTER TABLE waits ADD COLUMN kind text COLLATE "C" CHECK (kind ~
    '^(approval|input|event|timer|retry|children|reconciliation|resume|handoff)$');

-- What is open is few among what is settled: it has an index of its own.
CREATE INDEX waits_kind_armed ON waits (kind, armed_at, run_id, wait_id) WHERE status = 'armed';
CREATE INDEX waits_kind ON waits (kind, armed_at, run_id, wait_id);

-- What is set aside is few and not counted.
CREATE INDEX runs_aside ON runs (status) WHERE quarantine IS NOT NULL;

-- Who made the run; written once.
ALTER TABLE runs ADD COLUMN owner text COLLATE "C";

CREATE INDEX runs_owner ON runs (owner, created_at, run_id) WHERE owner IS NOT NULL;

-- Keys are forgotten from the oldest on.
CREATE INDEX idempotency_keys_created ON idempotency_keys (created_at);

-- Where a delivery went is found by its id. The ledgers of waits alone: `;` is the character after `:`.
CREATE INDEX decisions_of_waits ON decisions (decision_id, scope) WHERE scope >= 'wait:' AND scope < 'wait;';
