-- Agents, flows and triggers as runs are pinned to them: one row per version, never changed once written.
-- A version is the caller's next number under its name; the digest is SHA-256 of the body, lower-case hex.
CREATE TABLE definitions (
    kind       TEXT    NOT NULL CHECK (kind IN ('agent', 'flow', 'trigger')),
    name       TEXT    NOT NULL CHECK (length(name) BETWEEN 1 AND 256),
    version    INTEGER NOT NULL CHECK (version >= 1),
    digest     TEXT    NOT NULL CHECK (length(digest) = 64 AND digest NOT GLOB '*[^0-9a-f]*'),
    body       TEXT    NOT NULL CHECK (json_valid(body)),
    -- Milliseconds since 1970-01-01 UTC.
    created_at INTEGER NOT NULL CHECK (created_at >= 0),
    PRIMARY KEY (kind, name, version)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER definitions_are_immutable
BEFORE UPDATE ON definitions
BEGIN
    SELECT RAISE(ABORT, 'a definition is immutable: write the next version');
END;
