-- Runs that wait are counted from the index that lists them, without a look at the runs.

DROP INDEX runs_waiting;
CREATE INDEX runs_waiting ON runs (waiting_kind, created_at, run_id, status, quarantine) WHERE waiting_kind IS NOT NULL;
