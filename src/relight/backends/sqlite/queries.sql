-- Every statement of the SQLite store. `-- name:` gives the name. A query with one `VALUES (?, …)` row is repeated for many
-- rows (see queries.py). The last rows may be all NULL, and must then do nothing. A list of ids comes as one JSON
-- array, so that the statement is the same for any number of ids.

-- name: fence
-- What the fence of a commit compares, for many roots (and the existence of other runs) at once. The result is one row
-- with a JSON array, because each fetched row releases and acquires the interpreter lock.
SELECT json_group_array(json_array(r.id, r.key, r.root_id IS NULL, r.status IN ('completed', 'failed', 'cancelled'),
    r.status = 'cancelled' AND coalesce(r.hold = 'recovery', 0), r.epoch, max(
    coalesce((SELECT max(sequence) FROM journal WHERE run = r.key), 0),
    coalesce((SELECT sequence FROM checkpoints WHERE run = r.key), 0))))
FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value;

-- name: next_key
-- The writer assigns the keys, so that it can write a new run's entries without reading the run's key first.
SELECT coalesce(max(key), 0) + 1 FROM runs;

-- name: insert_runs
INSERT INTO runs (key, id, root_id, parent_id, flow, flow_hash, status, owner, epoch, wake_at, hold, reason, created_at,
    updated_at, input, input_blob, output, output_blob, error)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) AS v WHERE column1 IS NOT NULL;

-- name: append_entries
INSERT INTO journal (run, sequence, event, crc)
SELECT * FROM (VALUES (?, ?, ?, ?)) AS v WHERE column1 IS NOT NULL;

-- name: put_checkpoints
INSERT OR REPLACE INTO checkpoints (run, sequence, state, crc)
SELECT * FROM (VALUES (?, ?, ?, ?)) AS v WHERE column1 IS NOT NULL;

-- name: put_blobs
-- A digest that exists already has the same bytes: blobs are stored by content.
INSERT OR IGNORE INTO blobs (digest, data)
SELECT * FROM (VALUES (?, ?)) AS v WHERE column1 IS NOT NULL;

-- name: put_items
INSERT OR REPLACE INTO items (run_id, key, "index", digest, output, output_blob)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?)) AS v WHERE column1 IS NOT NULL;

-- name: cut_items
-- For each given run, foreach and index: delete the foreach's items from that index on.
DELETE FROM items WHERE (run_id, key, "index") IN (
    SELECT i.run_id, i.key, i."index" FROM json_each(?) AS wanted CROSS JOIN items AS i
        ON i.run_id = wanted.value ->> 0 AND i.key = wanted.value ->> 1 AND i."index" >= wanted.value ->> 2);

-- name: put_log
-- Lines for unknown runs are dropped, and lines that exist already, because a commit may be repeated.
INSERT INTO logs (run, stream, at, token, text)
SELECT r.key, v.column2, v.column3, v.column4, v.column5
FROM (VALUES (?, ?, ?, ?, ?)) AS v CROSS JOIN runs AS r ON r.id = v.column1
WHERE NOT EXISTS (SELECT 1 FROM (SELECT l.at, l.token, l.text FROM logs AS l INDEXED BY logs_order
        WHERE l.run = r.key AND l.stream = v.column2 ORDER BY l.id DESC LIMIT 1000) AS there
    WHERE there.at = v.column3 AND there.token = v.column4 AND there.text = v.column5);

-- name: change_runs
-- New values for rows of one tree. A terminal root is never changed, unless recovery gave up on it and it is reopened.
-- A terminal child run may be changed, because its parent is retried. Rows of other trees are not changed. If a run
-- that leaves memory has a message that it has not received (column13 is the last that it has), it is due at once, and
-- not paused after all.
UPDATE runs SET status = iif(v.woken AND v.column3 = 'paused', 'pending', v.column3), owner = v.column4,
    wake_at = iif(v.woken, v.column11, v.column5), hold = iif(v.woken, NULL, v.column6), reason = iif(v.woken, '', v.column7),
    output = v.column8, output_blob = v.column9, error = v.column10, updated_at = v.column11
FROM (SELECT v.*, v.column13 IS NOT NULL AND EXISTS (
        SELECT 1 FROM inbox WHERE inbox.run = (SELECT key FROM runs AS told WHERE told.id = v.column1) AND inbox.consumed = 0
            AND inbox.id > v.column13 AND (v.column3 <> 'paused' OR inbox.kind IN ('resume', 'cancel'))) AS woken
    FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) AS v) AS v
WHERE runs.id = v.column1 AND coalesce(runs.root_id, runs.id) = v.column2
    AND (runs.root_id IS NOT NULL OR runs.status NOT IN ('completed', 'failed', 'cancelled')
        OR (v.column12 AND runs.status = 'cancelled' AND runs.hold = 'recovery'));

-- name: put_messages
-- Messages go only into inboxes of unfinished roots. A message whose dedup is already there is not posted again.
INSERT INTO inbox (run, kind, name, payload, payload_blob, dedup, at)
SELECT r.key, v.column2, v.column3, v.column4, v.column5, v.column6, v.column7
FROM (VALUES (?, ?, ?, ?, ?, ?, ?)) AS v CROSS JOIN runs AS r ON r.id = v.column1
WHERE r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
ON CONFLICT (run, dedup) DO NOTHING;

-- name: cancel_spawned
-- One cancel message to each unfinished root that descends from this one by parent_id: spawned by it, by a child run of
-- it, or by such a spawned run, also if that has ended.
WITH RECURSIVE family (id) AS (
    SELECT :root_id UNION
    SELECT r.id FROM family AS each CROSS JOIN runs AS r INDEXED BY runs_by_parent ON r.parent_id = each.id)
INSERT INTO inbox (run, kind, name, payload, payload_blob, dedup, at)
SELECT r.key, 'cancel', '', :payload, '', 'cancel', :at FROM family AS each CROSS JOIN runs AS r ON r.id = each.id
WHERE r.id <> :root_id AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
ON CONFLICT (run, dedup) DO NOTHING;

-- name: consume_messages
-- By pairs of message and root, so that a root consumes only its own messages. The rows stay until the run ends, for
-- `dedup`. Their payloads are not needed any more.
UPDATE inbox SET consumed = 1, payload = x'' FROM json_each(?) AS wanted
WHERE inbox.id = wanted.value ->> 0 AND inbox.run = wanted.value ->> 1 AND inbox.consumed = 0;

-- name: post_ends
-- Post the ends of these roots to the unfinished runs that have joined them.
INSERT INTO inbox (run, kind, name, payload, payload_blob, dedup, at)
SELECT joined.key, 'ended', over.id, CAST('null' AS BLOB), '', 'ended:' || over.id || ':' || over.epoch, ?2
FROM json_each(?1) AS wanted CROSS JOIN inbox AS i ON i.run = wanted.value AND i.kind = 'join'
CROSS JOIN runs AS over ON over.key = i.run CROSS JOIN runs AS joined ON joined.id = i.name
WHERE joined.root_id IS NULL AND joined.status NOT IN ('completed', 'failed', 'cancelled')
ON CONFLICT (run, dedup) DO NOTHING;

-- name: drop_inboxes
DELETE FROM inbox WHERE run IN (SELECT value FROM json_each(?));

-- name: entries_between
SELECT event FROM journal WHERE run = ? AND sequence > ? AND sequence <= ? ORDER BY sequence;

-- name: unfinished
-- Of these pairs of root and epoch, the ids and keys of the unfinished roots that still have that epoch.
SELECT json_group_array(json_array(r.id, r.key))
FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value ->> 0
WHERE r.epoch = wanted.value ->> 1 AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled');

-- name: claim
UPDATE runs SET owner = ?, epoch = epoch + 1, updated_at = ? WHERE key IN (SELECT value FROM json_each(?));

-- name: correct_owner
UPDATE runs SET owner = :owner
WHERE id = :id AND root_id IS NULL AND epoch = :epoch AND owner IS NOT NULL
    AND status NOT IN ('completed', 'failed', 'cancelled')
RETURNING key;

-- name: drop_entries
DELETE FROM journal WHERE run = ? AND sequence <= ?;

-- The next generations of roots come as JSON: the root's key, its id, the prefix of its children's ids, and the last
-- sequence of the generation that has ended. Ids that begin with "a/b/" are between "a/b/" and "a/b0": the digit 0
-- follows the slash.

-- name: drop_generation_entries
DELETE FROM journal WHERE id IN (
    SELECT j.id FROM json_each(?) AS wanted CROSS JOIN journal AS j INDEXED BY journal_order
        ON j.run = wanted.value ->> 0 AND j.sequence <= wanted.value ->> 3);

-- name: drop_generation_items
-- The items of the root and of its child runs. Runs that it has spawned have such ids, too: root_id excludes them.
DELETE FROM items WHERE (run_id, key, "index") IN (
    SELECT i.run_id, i.key, i."index" FROM (
        SELECT wanted.value ->> 1 AS id FROM json_each(?1) AS wanted UNION ALL
        SELECT r.id FROM json_each(?1) AS wanted CROSS JOIN runs AS r
            ON r.id > wanted.value ->> 2 AND r.id < rtrim(wanted.value ->> 2, '/') || '0' AND r.root_id = wanted.value ->> 1) AS each
    CROSS JOIN items AS i ON i.run_id = each.id);

-- name: drop_generation_logs
DELETE FROM logs WHERE id IN (
    SELECT l.id FROM json_each(?) AS wanted CROSS JOIN runs AS r
        ON r.id > wanted.value ->> 2 AND r.id < rtrim(wanted.value ->> 2, '/') || '0' AND r.root_id = wanted.value ->> 1
    CROSS JOIN logs AS l INDEXED BY logs_order ON l.run = r.key);

-- name: drop_generation_runs
DELETE FROM runs WHERE key IN (
    SELECT r.key FROM json_each(?) AS wanted CROSS JOIN runs AS r
        ON r.id > wanted.value ->> 2 AND r.id < rtrim(wanted.value ->> 2, '/') || '0' AND r.root_id = wanted.value ->> 1);

-- name: trim_inbox
-- Delete joins of ended runs, and consumed messages, except the newest signals: their dedup shows a repeated signal.
DELETE FROM inbox WHERE run = :run AND (
    consumed = 1 AND (kind <> 'signal' OR dedup IS NULL OR id NOT IN (
        SELECT id FROM inbox WHERE run = :run AND consumed = 1 AND kind = 'signal' AND dedup IS NOT NULL
        ORDER BY id DESC LIMIT :kept))
    OR kind = 'join' AND NOT EXISTS (SELECT 1 FROM runs AS r
        WHERE r.id = inbox.name AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')));

-- name: post_message
INSERT INTO inbox (run, kind, name, payload, payload_blob, dedup, at)
SELECT key, ?2, ?3, ?4, ?5, ?6, ?7 FROM runs
WHERE id = ?1 AND root_id IS NULL AND status NOT IN ('completed', 'failed', 'cancelled')
ON CONFLICT (run, dedup) DO NOTHING
RETURNING id;

-- name: posted_before
SELECT i.id FROM runs AS r JOIN inbox AS i ON i.run = r.key WHERE r.id = ? AND i.dedup = ?;

-- name: get_runs
SELECT r.* FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value;

-- name: newer_statuses
-- The statuses of newer versions, which begin with a number (model/formats.py). The index leads from one to the next.
WITH RECURSIVE each (status) AS (
    SELECT min(status) FROM runs WHERE status < ':'
    UNION ALL
    SELECT (SELECT min(r.status) FROM runs AS r WHERE r.status > each.status AND r.status < ':') FROM each
    WHERE each.status IS NOT NULL)
SELECT status FROM each WHERE status IS NOT NULL;

-- name: list_runs
SELECT * FROM runs
WHERE (created_at, id) < (:cursor_at, :cursor_id) AND created_at >= :since AND (NOT :roots_only OR root_id IS NULL)
ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: list_runs_by_status
SELECT * FROM runs
WHERE status = :status AND (created_at, id) < (:cursor_at, :cursor_id) AND created_at >= :since
    AND (NOT :roots_only OR root_id IS NULL)
ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: list_runs_by_flow
-- Of one status, like list_runs_by_status: so a flow's few failures are found quickly among its million successes.
SELECT * FROM runs
WHERE flow = :flow AND status = :status AND (created_at, id) < (:cursor_at, :cursor_id) AND created_at >= :since
    AND (NOT :roots_only OR root_id IS NULL)
ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: list_runs_by_parent
SELECT * FROM runs INDEXED BY runs_by_parent
WHERE parent_id = :parent_id AND (created_at, id) < (:cursor_at, :cursor_id) AND created_at >= :since
    AND (NOT :roots_only OR root_id IS NULL) AND (:status IS NULL OR status = :status)
    AND (:flow IS NULL OR flow = :flow)
ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: active_roots
-- A page after the run :after. If that run is gone, the listing starts over, which repeats runs but misses none.
SELECT * FROM runs INDEXED BY runs_owned
WHERE owner = :owner AND root_id IS NULL AND owner IS NOT NULL AND status IN ('pending', 'running', 'waiting', 'paused')
    AND (created_at, id) > (coalesce((SELECT created_at FROM runs WHERE id = :after), -9e999), :after)
ORDER BY created_at, id LIMIT :limit;

-- name: owners
-- The index leads from one owner to the next: the cost is one step per owner, however many runs it owns.
WITH RECURSIVE each (owner) AS (
    SELECT min(owner) FROM runs INDEXED BY runs_owned
    WHERE root_id IS NULL AND owner IS NOT NULL AND status IN ('pending', 'running', 'waiting', 'paused')
    UNION ALL
    SELECT (SELECT min(r.owner) FROM runs AS r INDEXED BY runs_owned
        WHERE r.owner > each.owner AND r.root_id IS NULL AND r.owner IS NOT NULL
            AND r.status IN ('pending', 'running', 'waiting', 'paused'))
    FROM each WHERE each.owner IS NOT NULL)
SELECT owner FROM each WHERE owner IS NOT NULL;

-- name: due
SELECT * FROM runs INDEXED BY runs_due
WHERE root_id IS NULL AND status IN ('waiting', 'pending') AND owner IS NULL AND wake_at IS NOT NULL AND wake_at <= ?
ORDER BY wake_at LIMIT ?;

-- name: due_freed
-- Those due runs that a person has resumed or cancelled.
SELECT * FROM runs INDEXED BY runs_due
WHERE root_id IS NULL AND status IN ('waiting', 'pending') AND owner IS NULL AND wake_at IS NOT NULL AND wake_at <= ?
    AND (reason = 'resumed by hand' OR EXISTS (
        SELECT 1 FROM inbox INDEXED BY inbox_open WHERE inbox.run = runs.key AND consumed = 0 AND kind IN ('resume', 'cancel')))
ORDER BY wake_at LIMIT ?;

-- name: living
SELECT count(*) FROM orchestrators WHERE expires_at > unixepoch('subsec');

-- name: to_share
-- How many runs have just fallen due, how many runs all live owners have, and how many this owner has.
SELECT (SELECT count(*) FROM (SELECT 1 FROM runs INDEXED BY runs_due
            WHERE root_id IS NULL AND status IN ('waiting', 'pending') AND owner IS NULL AND wake_at IS NOT NULL
                AND wake_at > :since AND wake_at <= :now LIMIT :limit) AS each),
    count(r.key), count(r.key) FILTER (WHERE r.owner = :owner)
FROM orchestrators LEFT JOIN runs AS r INDEXED BY runs_owned ON r.owner = orchestrators.owner AND r.owner IS NOT NULL
    AND r.root_id IS NULL AND r.status IN ('pending', 'running', 'waiting', 'paused')
WHERE expires_at > unixepoch('subsec');

-- name: next_due
SELECT min(wake_at) FROM runs INDEXED BY runs_due
WHERE root_id IS NULL AND status IN ('waiting', 'pending') AND owner IS NULL AND wake_at IS NOT NULL;

-- name: held
SELECT runs.* FROM runs INDEXED BY runs_held
WHERE root_id IS NULL AND status = 'paused' AND owner IS NULL AND hold = ? AND flow IN (SELECT value FROM json_each(?)) LIMIT ?;

-- name: inbox
SELECT i.id, r.id, i.kind, i.name, i.payload, i.payload_blob, i.dedup, i.at
FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value
CROSS JOIN inbox AS i INDEXED BY inbox_open ON i.run = r.key AND i.consumed = 0
ORDER BY i.id;

-- name: newest_message
SELECT max(id) FROM inbox;

-- name: messages_after
SELECT i.id, r.id, i.kind, i.name, i.payload, i.payload_blob, i.dedup, i.at
FROM inbox AS i INDEXED BY inbox_news CROSS JOIN runs AS r ON r.key = i.run
WHERE i.consumed = 0 AND i.id > ? ORDER BY i.id LIMIT ?;

-- name: read_log
SELECT l.id, r.id, l.stream, l.at, l.token, l.text
FROM runs AS r CROSS JOIN logs AS l INDEXED BY logs_order ON l.run = r.key AND l.stream = ?2 AND l.id > ?3
WHERE r.id = ?1 ORDER BY l.id LIMIT ?4;

-- name: read_newest_log
-- The newest first.
SELECT l.id, r.id, l.stream, l.at, l.token, l.text
FROM runs AS r CROSS JOIN logs AS l INDEXED BY logs_order ON l.run = r.key AND l.stream = ?2 AND l.id > ?3
WHERE r.id = ?1 ORDER BY l.id DESC LIMIT ?4;

-- name: items
SELECT run_id, key, "index", digest, output, output_blob FROM items
WHERE run_id = ?1 AND key = ?2 AND "index" >= 0 ORDER BY key, "index";

-- name: all_items
SELECT run_id, key, "index", digest, output, output_blob FROM items
WHERE run_id = ?1 AND "index" >= 0 ORDER BY key, "index";

-- name: foreach_progress
-- A key with a bracket after the prefix belongs to a foreach inside an item of another foreach.
SELECT key, count(*) FILTER (WHERE "index" >= 0), max(output) FILTER (WHERE "index" = -1) FROM items
WHERE run_id = ?1 GROUP BY key HAVING instr(substr(key, length(?2) + 1), '[') = 0 ORDER BY key;

-- name: journal_bytes
SELECT coalesce((SELECT length(state) FROM checkpoints WHERE run = r.key), 0)
    + coalesce((SELECT sum(length(event)) FROM journal WHERE run = r.key), 0)
FROM runs AS r WHERE r.id = ?;

-- name: get_blob
SELECT data FROM blobs WHERE digest = ?;

-- name: root
-- One root's key, epoch, checkpoint and last sequence.
SELECT r.key, r.epoch, coalesce(c.sequence, 0), max(coalesce(c.sequence, 0),
    coalesce((SELECT max(sequence) FROM journal WHERE run = r.key), 0))
FROM runs AS r LEFT JOIN checkpoints AS c ON c.run = r.key WHERE r.id = ? AND r.root_id IS NULL;

-- name: read_entries
SELECT sequence, event, crc FROM journal WHERE run = ? AND sequence > ? ORDER BY sequence LIMIT ?;

-- name: tails
-- The entries after the checkpoint, of many roots: their places (position of the root, sequence, length, checksum) as a
-- JSON array and their bytes end to end. Fetched one by one, each row might have to wait for a busy event loop.
SELECT json_group_array(json_array(wanted.key, j.sequence, length(j.event), j.crc)),
    CAST(group_concat(CAST(j.event AS TEXT), '') AS BLOB)
FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value AND r.root_id IS NULL
LEFT JOIN checkpoints AS c ON c.run = r.key
CROSS JOIN journal AS j ON j.run = r.key AND j.sequence > coalesce(c.sequence, 0);

-- name: checkpoints
SELECT wanted.key, c.sequence, c.state, c.crc
FROM json_each(?) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value AND r.root_id IS NULL
CROSS JOIN checkpoints AS c ON c.run = r.key;

-- name: read_checkpoint
SELECT sequence, state, crc FROM checkpoints WHERE run = ?;

-- The leases (see leases.py). An owner without a row here, or with an expired row, is dead. SQLite's clock decides.

-- name: clock
SELECT unixepoch('subsec');

-- name: heartbeat
-- A session that has lapsed begins again. Within one statement the clock stands still.
INSERT INTO orchestrators (owner, process, started_at, heartbeat_at, expires_at)
VALUES (:owner, :process, unixepoch('subsec'), unixepoch('subsec'), unixepoch('subsec') + :ttl)
ON CONFLICT (owner) DO UPDATE SET process = excluded.process, heartbeat_at = excluded.heartbeat_at,
    expires_at = excluded.expires_at,
    started_at = iif(expires_at > excluded.heartbeat_at, started_at, excluded.started_at);

-- name: is_fresh
SELECT expires_at > unixepoch('subsec') FROM orchestrators WHERE owner = ?;

-- name: end_session
-- Let the session lapse. Its row stays, because its last heartbeat is needed as long as it owns runs.
UPDATE orchestrators SET expires_at = min(expires_at, unixepoch('subsec')) WHERE owner = ?;

-- name: forget_session
DELETE FROM orchestrators WHERE owner = ? AND expires_at <= unixepoch('subsec');

-- name: lease_manager
SELECT value FROM settings WHERE name = 'leases';

-- name: set_lease_manager
INSERT INTO settings (name, value) VALUES ('leases', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: sessions
-- Few rows, one per orchestrator, each with the present time of SQLite's clock.
SELECT owner, process, started_at, heartbeat_at, expires_at, unixepoch('subsec') FROM orchestrators ORDER BY owner;

-- name: acquire
-- Acquire those of these unfinished roots that have no owner, or a dead one. Roots of this owner stay as they are.
UPDATE runs SET owner = :owner WHERE key IN (
    SELECT r.key FROM json_each(:ids) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value
    LEFT JOIN orchestrators AS o ON o.owner = r.owner AND o.expires_at > :now
    WHERE r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
        AND r.owner IS NOT :owner AND o.owner IS NULL);

-- name: holders
-- Those of these roots that are unfinished, with their owners. If an owner is not alive, its session's end is NULL.
SELECT r.id, r.owner, o.expires_at FROM json_each(:ids) AS wanted CROSS JOIN runs AS r ON r.id = wanted.value
LEFT JOIN orchestrators AS o ON o.owner = r.owner AND o.expires_at > :now
WHERE r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled');

-- name: release
-- The run has no owner now, and is due: at its time if it waits for one, else at once. "At once" is updated_at, which
-- has passed by the clock that decides what is due; that need not be the clock of this file. A paused run with an owner
-- was about to go on, and does. A run with a message is due at once, because it is not known which messages its owner
-- had received. A run that was resumed by hand, and not driven since, keeps that reason: see `due_freed`.
UPDATE runs SET owner = NULL, status = 'pending', hold = NULL,
    reason = iif(status = 'pending' AND reason = 'resumed by hand', reason, ''),
    wake_at = iif(EXISTS (SELECT 1 FROM inbox WHERE inbox.run = runs.key AND consumed = 0 AND kind <> 'join'),
        min(coalesce(wake_at, updated_at), updated_at), coalesce(wake_at, updated_at))
WHERE id = :id AND owner = :owner AND root_id IS NULL AND status NOT IN ('completed', 'failed', 'cancelled')
RETURNING key;

-- name: release_all
UPDATE runs INDEXED BY runs_owned SET owner = NULL, status = 'pending', hold = NULL,
    reason = iif(status = 'pending' AND reason = 'resumed by hand', reason, ''),
    wake_at = iif(EXISTS (SELECT 1 FROM inbox WHERE inbox.run = runs.key AND consumed = 0 AND kind <> 'join'),
        min(coalesce(wake_at, updated_at), updated_at), coalesce(wake_at, updated_at))
WHERE owner = ? AND root_id IS NULL AND owner IS NOT NULL AND status IN ('pending', 'running', 'waiting', 'paused');
