-- The first schema. A migration is never edited once released: the next change is the next number.
--
-- "relight." stands for the schema's name, whatever it is. Text is compared by its bytes (COLLATE "C"), as in Python. That is
-- faster, and no index breaks when the system's locales are upgraded. Times are seconds since the Unix epoch.

CREATE TABLE relight.runs (
    key         bigint PRIMARY KEY,                    -- assigned by the writers, in blocks of run_keys
    id          text COLLATE "C" NOT NULL UNIQUE,
    root_id     text COLLATE "C",                      -- NULL: the run is itself a root
    parent_id   text COLLATE "C",
    flow        text COLLATE "C" NOT NULL,
    flow_hash   text COLLATE "C" NOT NULL,
    status      text COLLATE "C" NOT NULL,
    owner       text COLLATE "C",
    epoch       bigint NOT NULL,                       -- of a root: the same as heads.epoch
    wake_at     double precision,
    hold        text COLLATE "C",
    reason      text NOT NULL,
    created_at  double precision NOT NULL,
    updated_at  double precision NOT NULL,
    input       bytea NOT NULL,
    input_blob  text COLLATE "C" NOT NULL,
    output      bytea,
    output_blob text COLLATE "C" NOT NULL,
    error       bytea
) WITH (fillfactor = 80);

-- Each writer gets keys in blocks of 1000. So it knows a new run's key, and sends the run's entries together with the run.
CREATE SEQUENCE relight.run_keys INCREMENT BY 1000;

-- Listings, newest first, by each filter. Few runs have the same time of creation, and the query sorts those by id. With the id
-- in each of these indexes, a run's creation and its end would cost a third more. Because of the unary plus, listings with a
-- filter do not use the first index: with it, finding a few failures among a million successes would read a million rows.
CREATE INDEX runs_by_creation ON relight.runs ((+created_at));
CREATE INDEX runs_by_flow ON relight.runs (flow, status, created_at);
CREATE INDEX runs_by_status ON relight.runs (status, created_at);
CREATE INDEX runs_by_parent ON relight.runs (parent_id, created_at) WHERE parent_id IS NOT NULL;

-- Each orchestrator repeats the queries of these indexes. The indexes contain unfinished roots only, so that a million finished
-- runs slow down neither a restart nor a timer.
CREATE INDEX runs_active ON relight.runs (owner, created_at, id)
    WHERE root_id IS NULL AND owner IS NOT NULL AND status IN ('pending', 'running', 'waiting', 'paused');
CREATE INDEX runs_due ON relight.runs (wake_at)
    WHERE root_id IS NULL AND owner IS NULL AND wake_at IS NOT NULL AND status IN ('pending', 'waiting');
CREATE INDEX runs_held ON relight.runs (hold, flow, created_at) WHERE root_id IS NULL AND status = 'paused';

-- What the fence of a commit compares: one narrow row per root. Each commit writes it once. That costs a third of a write to the
-- run's own row, which is wide and has many indexes. Half of each page is free, so that each new version of a row stays in its
-- page (HOT).
CREATE TABLE relight.heads (
    run   bigint PRIMARY KEY,  -- runs.key of the root
    epoch bigint NOT NULL,
    last  integer NOT NULL,    -- the journal's last sequence
    ended smallint NOT NULL    -- 0: no; 1: yes, but `reopen` may bring it back; 2: for good
) WITH (fillfactor = 50);

-- Append-only.
CREATE TABLE relight.journal (
    run      bigint NOT NULL,   -- runs.key of the root
    crc      bigint NOT NULL,   -- crc32 of the event, started with the sequence: also detects rows that changed places
    sequence integer NOT NULL,
    event    bytea NOT NULL,
    PRIMARY KEY (run, sequence)
);

CREATE TABLE relight.checkpoints (
    run      bigint PRIMARY KEY, -- runs.key of the root
    crc      bigint NOT NULL,
    sequence integer NOT NULL,   -- the last entry that the state includes
    state    bytea NOT NULL
);

CREATE TABLE relight.blobs (
    digest text COLLATE "C" PRIMARY KEY, -- SHA-256 of the content
    data   bytea NOT NULL
);

-- Ids grow in the order of commits: see `lock_inbox`.
CREATE TABLE relight.inbox (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run          bigint NOT NULL, -- runs.key of the root
    kind         text NOT NULL,
    name         text NOT NULL,
    payload      bytea NOT NULL,
    payload_blob text NOT NULL,
    dedup        text COLLATE "C",
    at           double precision NOT NULL,
    consumed     boolean NOT NULL DEFAULT false
);
CREATE UNIQUE INDEX inbox_dedup ON relight.inbox (run, dedup); -- NULLs differ from each other: no dedup, no conflict
CREATE INDEX inbox_open ON relight.inbox (run, id) WHERE NOT consumed;
CREATE INDEX inbox_news ON relight.inbox (id) WHERE NOT consumed;

CREATE TABLE relight.items (
    run_id      text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL, -- the foreach's key
    index       integer NOT NULL,
    digest      text NOT NULL,
    output      bytea NOT NULL,
    output_blob text NOT NULL,
    PRIMARY KEY (run_id, key, index)
);

CREATE TABLE relight.log (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run    bigint NOT NULL,  -- runs.key of any run
    stream text COLLATE "C" NOT NULL,
    token  text NOT NULL,
    at     double precision NOT NULL,
    text   text NOT NULL
);
CREATE INDEX log_of_run ON relight.log (run, stream, id);

-- Which orchestrators are alive: one narrow row per session, updated by each heartbeat. All times are by the server's clock.
CREATE TABLE relight.orchestrators (
    owner        text COLLATE "C" PRIMARY KEY,
    process      text NOT NULL, -- JSON
    started_at   double precision NOT NULL,
    heartbeat_at double precision NOT NULL,
    expires_at   double precision NOT NULL
) WITH (fillfactor = 50);

-- ---- The rows of a commit, as the store sends them. `root` is the key of the root that the commit belongs to.

CREATE TYPE relight.new_run AS (
    root bigint, last integer, ended smallint, key bigint, id text, root_id text, parent_id text, flow text, flow_hash text,
    status text, owner text, epoch bigint, wake_at double precision, hold text, reason text, created_at double precision,
    updated_at double precision, input bytea, input_blob text, output bytea, output_blob text, error bytea);
CREATE TYPE relight.new_change AS (
    root bigint, root_id text, run_id text, status text, owner text, wake_at double precision, hold text, reason text,
    output bytea, output_blob text, error bytea, heard bigint);
CREATE TYPE relight.new_entry AS (root bigint, run bigint, sequence integer, event bytea, crc bigint);
CREATE TYPE relight.new_checkpoint AS (root bigint, sequence integer, state bytea, crc bigint);
CREATE TYPE relight.new_blob AS (root bigint, digest text, data bytea);
CREATE TYPE relight.new_item AS (
    root bigint, run_id text, key text, index integer, digest text, output bytea, output_blob text);
CREATE TYPE relight.new_cut AS (root bigint, run_id text, key text, index integer);
CREATE TYPE relight.new_line AS (
    root bigint, run_id text, stream text, token text, at double precision, text text);
CREATE TYPE relight.new_message AS (
    root bigint, run_id text, kind text, name text, payload bytea, payload_blob text, dedup text, at double precision);
CREATE TYPE relight.new_cancel AS (root bigint, root_id text, payload bytea, at double precision);
CREATE TYPE relight.taken_message AS (root bigint, id bigint);
