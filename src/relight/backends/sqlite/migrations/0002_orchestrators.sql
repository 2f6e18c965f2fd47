-- Many orchestrators on one file: which of them are alive, which runs each owns, and what happened to the runs.

-- An orchestrator looks for its own runs, and for the runs of one that died, among the runs of all.
DROP INDEX runs_active;
CREATE INDEX runs_owned ON runs (owner, created_at, id)
    WHERE root_id IS NULL AND status IN ('pending', 'running', 'waiting', 'paused') AND owner IS NOT NULL;

-- One row per session, so that a heartbeat writes one row for any number of runs. Times are by SQLite's clock.
CREATE TABLE orchestrators (
    owner        TEXT PRIMARY KEY,
    process      TEXT NOT NULL,     -- JSON: machine, pid, …
    started_at   REAL NOT NULL,
    heartbeat_at REAL NOT NULL,
    expires_at   REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- AUTOINCREMENT: a reader that follows a log asks for the lines after the last id that it has seen.
CREATE TABLE logs (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    run    INTEGER NOT NULL,        -- runs.key
    stream TEXT NOT NULL,
    at     REAL NOT NULL,
    token  TEXT NOT NULL,
    text   TEXT NOT NULL
) STRICT;
CREATE INDEX logs_order ON logs (run, stream, id);
