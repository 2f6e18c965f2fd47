-- Many orchestrators on one file: who is alive, who holds which runs, and what they saw happen to them.

-- Each looks for its own runs, and for those of one that died, among all others'.
DROP INDEX runs_active;
CREATE INDEX runs_owned ON runs (owner, created_at, id)
    WHERE root_id IS NULL AND status IN ('pending', 'running', 'waiting', 'paused') AND owner IS NOT NULL;

-- One row per session, so that a heartbeat writes one row whatever the number of runs. By SQLite's clock.
CREATE TABLE orchestrators (
    owner        TEXT PRIMARY KEY,
    process      TEXT NOT NULL,     -- JSON: machine, pid, …
    started_at   REAL NOT NULL,
    heartbeat_at REAL NOT NULL,
    expires_at   REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- AUTOINCREMENT: a reader that follows a log asks for what came after the last id it saw.
CREATE TABLE logs (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    run    INTEGER NOT NULL,        -- runs.key
    stream TEXT NOT NULL,
    at     REAL NOT NULL,
    token  TEXT NOT NULL,
    text   TEXT NOT NULL
) STRICT;
CREATE INDEX logs_order ON logs (run, stream, id);
