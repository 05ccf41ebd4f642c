-- One transition of a run as one statement: SQLite writes it whole or not at all, and the driver is asked once. These live in the
-- write connection only; an INSERT into `transition` stores nothing but what the trigger writes.
CREATE TEMP VIEW transition AS SELECT
    -- The guard. No `incarnation`: on nobody's authority, while nobody holds the run. No `seen`: whatever the inbox has.
    NULL AS run_id, NULL AS found, NULL AS incarnation, NULL AS seen, NULL AS now,
    -- The head.
    NULL AS kind, NULL AS definition, NULL AS status, NULL AS cursor, NULL AS activation, NULL AS schema_version,
    NULL AS parent_id, NULL AS root_id, NULL AS state, NULL AS state_digest, NULL AS budgets, NULL AS outcome,
    NULL AS body, NULL AS seal, NULL AS waiting_kind, NULL AS due_at, NULL AS deadline, NULL AS created_at,
    NULL AS updated_at,
    -- Of the head's checkpoint.
    NULL AS checkpoint_seal,
    -- Whether the lease goes in the same commit.
    NULL AS release,
    -- The rows that most transitions have. Where there is none, its first column is NULL.
    NULL AS activity_id, NULL AS activity_activation, NULL AS activity_state, NULL AS activity_body,
    NULL AS activity_input, NULL AS activity_input_digest, NULL AS activity_output, NULL AS activity_output_digest,
    NULL AS activity_seal,
    NULL AS step_activation, NULL AS step_node, NULL AS step_status, NULL AS step_body,
    NULL AS event_seq, NULL AS event_life, NULL AS event_name, NULL AS event_terminal, NULL AS event_time,
    NULL AS event_data,
    NULL AS next_seq, NULL AS next_life, NULL AS next_name, NULL AS next_terminal, NULL AS next_time,
    NULL AS next_data;

CREATE TEMP TRIGGER transition_is_written INSTEAD OF INSERT ON transition
BEGIN
    UPDATE runs SET
        status = NEW.status, cursor = NEW.cursor, activation = NEW.activation, revision = revision + 1,
        schema_version = NEW.schema_version, root_id = NEW.root_id, state = NEW.state,
        state_digest = NEW.state_digest, budgets = NEW.budgets, outcome = NEW.outcome, body = NEW.body,
        seal = NEW.seal, waiting_kind = NEW.waiting_kind, due_at = NEW.due_at, deadline = NEW.deadline,
        updated_at = NEW.updated_at
    WHERE run_id = NEW.run_id AND revision = NEW.found AND (NEW.seen IS NULL OR signal = NEW.seen)
        AND CASE WHEN NEW.incarnation IS NULL
            THEN NOT EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = NEW.run_id AND l.expires_at > NEW.now)
            ELSE EXISTS (SELECT 1 FROM run_leases l WHERE l.run_id = NEW.run_id
                AND l.incarnation = NEW.incarnation AND l.expires_at > NEW.now)
        END;
    SELECT RAISE(ABORT, 'guard') WHERE changes() = 0;

    -- What identifies a run is indexed and hardly ever changes: the indexes are left alone unless it does.
    UPDATE runs SET
        kind = NEW.kind, definition = NEW.definition, parent_id = NEW.parent_id, created_at = NEW.created_at
    WHERE run_id = NEW.run_id AND (kind IS NOT NEW.kind OR definition IS NOT NEW.definition
        OR parent_id IS NOT NEW.parent_id OR created_at IS NOT NEW.created_at);

    INSERT INTO checkpoints (run_id, revision, status, cursor, activation, state, state_digest, seal, created_at)
    VALUES (NEW.run_id, NEW.found + 1, NEW.status, NEW.cursor, NEW.activation, NEW.state, NEW.state_digest,
        NEW.checkpoint_seal, NEW.updated_at);

    INSERT INTO activities (run_id, activity_id, activation, state, body, input, input_digest, output,
        output_digest, seal)
    SELECT NEW.run_id, NEW.activity_id, NEW.activity_activation, NEW.activity_state, NEW.activity_body,
        NEW.activity_input, NEW.activity_input_digest, NEW.activity_output, NEW.activity_output_digest,
        NEW.activity_seal
    WHERE NEW.activity_id IS NOT NULL
    ON CONFLICT (run_id, activation, activity_id) DO UPDATE SET state = excluded.state, body = excluded.body,
        input = excluded.input, input_digest = excluded.input_digest, output = excluded.output,
        output_digest = excluded.output_digest, seal = excluded.seal;

    INSERT INTO steps (run_id, activation, node, status, body)
    SELECT NEW.run_id, NEW.step_activation, NEW.step_node, NEW.step_status, NEW.step_body
    WHERE NEW.step_activation IS NOT NULL
    ON CONFLICT (run_id, activation) DO UPDATE SET node = excluded.node, status = excluded.status,
        body = excluded.body;

    SELECT RAISE(ABORT, 'gap') WHERE NEW.event_seq > 1
        AND NOT EXISTS (SELECT 1 FROM events WHERE run_id = NEW.run_id AND seq = NEW.event_seq - 1);
    INSERT INTO events (run_id, seq, life, name, terminal, time, data)
    SELECT NEW.run_id, NEW.event_seq, NEW.event_life, NEW.event_name, NEW.event_terminal, NEW.event_time,
        NEW.event_data
    WHERE NEW.event_seq IS NOT NULL;
    INSERT INTO events (run_id, seq, life, name, terminal, time, data)
    SELECT NEW.run_id, NEW.next_seq, NEW.next_life, NEW.next_name, NEW.next_terminal, NEW.next_time,
        NEW.next_data
    WHERE NEW.next_seq IS NOT NULL;

    DELETE FROM run_leases WHERE NEW.release AND run_id = NEW.run_id;
END;
