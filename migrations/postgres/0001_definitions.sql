-- Agents, flows and triggers as runs are pinned to them: one row per version, never changed once written.
-- A version is the caller's next number under its name; the digest is SHA-256 of the body, lower-case hex.
CREATE TABLE definitions (
    kind       text   NOT NULL CHECK (kind IN ('agent', 'flow', 'trigger')),
    name       text   NOT NULL CHECK (length(name) BETWEEN 1 AND 256),
    version    bigint NOT NULL CHECK (version >= 1),
    digest     text   NOT NULL CHECK (digest ~ '^[0-9a-f]{64}$'),
    -- Not jsonb: the digest is over these very bytes.
    body       json   NOT NULL,
    -- Milliseconds since 1970-01-01 UTC, as in SQLite.
    created_at bigint NOT NULL CHECK (created_at >= 0),
    PRIMARY KEY (kind, name, version)
);

CREATE FUNCTION definitions_are_immutable() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a definition is immutable: write the next version';
END
$$;

CREATE TRIGGER definitions_are_immutable
BEFORE UPDATE ON definitions
FOR EACH ROW EXECUTE FUNCTION definitions_are_immutable();
