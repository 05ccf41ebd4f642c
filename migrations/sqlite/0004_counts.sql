-- What waits is counted from the indexes that list it, without a look at the rows.

DROP INDEX runs_waiting;
CREATE INDEX runs_waiting ON runs (waiting_kind, created_at, run_id, status, quarantine) WHERE waiting_kind IS NOT NULL;

DROP INDEX waits_kind_armed;
CREATE INDEX waits_kind_armed ON waits (kind, armed_at, run_id, wait_id, status) WHERE status = 'armed';
