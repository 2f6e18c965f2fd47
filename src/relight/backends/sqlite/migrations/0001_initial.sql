-- The first schema. A migration is never edited once released: the next change is the next number.
--
-- Journals and inboxes refer to their run by the integer runs.key. With the text id instead, each journal entry would write
-- two to four times as much into the WAL.

CREATE TABLE runs (
    key         INTEGER PRIMARY KEY,
    id          TEXT NOT NULL UNIQUE,
    root_id     TEXT,            -- NULL: the run is itself a root
    parent_id   TEXT,
    flow        TEXT NOT NULL,
    flow_hash   TEXT NOT NULL,
    status      TEXT NOT NULL,
    owner       TEXT,
    epoch       INTEGER NOT NULL,
    wake_at     REAL,
    hold        TEXT,
    reason      TEXT NOT NULL,
    created_at  REAL NOT NULL,
    updated_at  REAL NOT NULL,
    input       BLOB NOT NULL,
    input_blob  TEXT NOT NULL,
    output      BLOB,
    output_blob TEXT NOT NULL,
    error       BLOB
) STRICT;

-- Listings, newest first, by each filter. root_id is the last column, so that a listing skips child runs by the index alone.
CREATE INDEX runs_by_creation ON runs (created_at, id, root_id);
CREATE INDEX runs_by_flow ON runs (flow, status, created_at, id);
CREATE INDEX runs_by_status ON runs (status, created_at, id);
CREATE INDEX runs_by_parent ON runs (parent_id, created_at, id) WHERE parent_id IS NOT NULL;

-- Each orchestrator repeats the queries of these indexes. The indexes contain unfinished roots only, so that a million finished
-- runs slow down neither a restart nor a timer.
CREATE INDEX runs_active ON runs (created_at, id)
    WHERE root_id IS NULL AND status IN ('pending', 'running', 'waiting') AND owner IS NOT NULL;
CREATE INDEX runs_due ON runs (wake_at)
    WHERE root_id IS NULL AND status IN ('waiting', 'pending') AND owner IS NULL AND wake_at IS NOT NULL;
CREATE INDEX runs_held ON runs (hold, flow, created_at)
    WHERE root_id IS NULL AND status = 'paused';

-- Append-only. Rows of all runs go to the end of the table, so that a batch with entries of many runs changes few pages.
CREATE TABLE journal (
    id       INTEGER PRIMARY KEY,
    run      INTEGER NOT NULL,   -- runs.key of the root
    sequence INTEGER NOT NULL,
    event    BLOB NOT NULL,
    crc      INTEGER NOT NULL    -- crc32 of the event, started with the sequence: also detects rows that changed places
) STRICT;
CREATE UNIQUE INDEX journal_order ON journal (run, sequence);

CREATE TABLE checkpoints (
    run      INTEGER PRIMARY KEY, -- runs.key of the root
    sequence INTEGER NOT NULL,    -- the last entry that the state includes
    state    BLOB NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;

CREATE TABLE blobs (
    digest TEXT PRIMARY KEY,      -- SHA-256 of the content
    data   BLOB NOT NULL
) STRICT;

-- AUTOINCREMENT: an id is never used twice. Otherwise a reader that has seen message 7 would miss the next message 7.
CREATE TABLE inbox (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    run          INTEGER NOT NULL,  -- runs.key of the root
    kind         TEXT NOT NULL,
    name         TEXT NOT NULL,
    payload      BLOB NOT NULL,
    payload_blob TEXT NOT NULL,
    dedup        TEXT,
    at           REAL NOT NULL,
    consumed     INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE UNIQUE INDEX inbox_dedup ON inbox (run, dedup); -- NULLs differ from each other: no dedup, no conflict
CREATE INDEX inbox_open ON inbox (run, id) WHERE consumed = 0;
CREATE INDEX inbox_news ON inbox (id) WHERE consumed = 0;

CREATE TABLE items (
    run_id      TEXT NOT NULL,
    key         TEXT NOT NULL,    -- the foreach's key
    "index"     INTEGER NOT NULL,
    digest      TEXT NOT NULL,
    output      BLOB NOT NULL,
    output_blob TEXT NOT NULL,
    PRIMARY KEY (run_id, key, "index")
) STRICT, WITHOUT ROWID;
