-- Every statement of the PostgreSQL store. The migrations make the functions that it calls. `-- name:` gives the name, and
-- "relight." is replaced by the schema's name. Many values come as arrays: one statement for any number of values.

-- name: append_batch
SELECT relight.append_batch($1, $2, $3, $4, $5);

-- name: commit_batch
SELECT relight.commit_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
    $22, $23, $24, $25);

-- name: next_keys
-- The first of a block of keys that no other process gets.
SELECT nextval('relight.run_keys');

-- name: root_keys
SELECT id, key FROM relight.runs WHERE id = ANY ($1::text[]) AND root_id IS NULL;

-- name: refused
-- What is stored for a refused commit: the run, and the journal's last sequence. The lock makes this query a commit.
-- With synchronous replication it is therefore answered only when the standby has everything before it: what a
-- restarted primary has on its own disk only must not be treated as committed.
SELECT r.*, h.last FROM relight.runs AS r LEFT JOIN relight.heads AS h ON h.run = r.key WHERE r.id = ANY ($1::text[])
FOR KEY SHARE OF r;

-- name: entries_between
-- For each of many journals: the events of a range, in order.
SELECT w.key, ARRAY(SELECT event FROM relight.journal WHERE run = w.key AND sequence > w.after AND sequence <= w.until
    ORDER BY sequence)
FROM unnest($1::bigint[], $2::integer[], $3::integer[]) AS w (key, after, until);

-- name: states
SELECT run, sequence, state FROM relight.checkpoints WHERE run = ANY ($1::bigint[]);

-- name: claim
SELECT * FROM relight.claim($1, $2, $3, $4);

-- name: correct_owner
UPDATE relight.runs SET owner = $3
WHERE id = $1 AND epoch = $2 AND root_id IS NULL AND owner IS NOT NULL
    AND status NOT IN ('completed', 'failed', 'cancelled')
RETURNING key;

-- name: hold
SELECT relight.hold($1, $2, $3, $4, $5, $6, $7);

-- name: checkpoint
SELECT relight.checkpoint_and_trim($1, $2, $3, $4, $5, $6);

-- name: begin_generations
SELECT relight.begin_generations($1, $2, $3, $4, $5, $6, $7, $8);

-- name: post
SELECT relight.post($1, $2);

-- name: append_log
SELECT relight.add_log($1);

-- name: put_blob
INSERT INTO relight.blobs (digest, data) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: now
SELECT extract(epoch FROM clock_timestamp())::double precision;

-- name: get_runs
SELECT * FROM relight.runs WHERE id = ANY ($1::text[]);

-- name: newer_statuses
-- The statuses of newer versions, which begin with a number (model/formats.py). The index leads from one to the next.
WITH RECURSIVE each (status) AS (
    SELECT min(status) FROM relight.runs WHERE status < ':'
    UNION ALL
    SELECT (SELECT min(r.status) FROM relight.runs AS r WHERE r.status > each.status AND r.status < ':') FROM each
    WHERE each.status IS NOT NULL)
SELECT status FROM each WHERE status IS NOT NULL;

-- name: list_runs
-- This query's index is on the expression with the unary plus. Queries without the plus do not use that index.
SELECT * FROM relight.runs
WHERE (+created_at, id) < ($1::double precision, $2::text) AND +created_at >= $3::double precision
    AND (NOT $4::boolean OR root_id IS NULL)
ORDER BY +created_at DESC, id DESC LIMIT $5;

-- name: list_runs_by_status
-- One search per status, merged: the index has the runs of each status in order, not of several together.
SELECT r.* FROM unnest($6::text[]) AS wanted (status) CROSS JOIN LATERAL (
    SELECT * FROM relight.runs
    WHERE status = wanted.status AND (created_at, id) < ($1::double precision, $2::text) AND created_at >= $3::double precision
        AND (NOT $4::boolean OR root_id IS NULL)
    ORDER BY created_at DESC, id DESC LIMIT $5
) AS r
ORDER BY r.created_at DESC, r.id DESC LIMIT $5;

-- name: list_runs_by_flow
-- By each status, like list_runs_by_status: so a flow's few failures are found quickly among its million successes.
SELECT r.* FROM unnest($6::text[]) AS wanted (status) CROSS JOIN LATERAL (
    SELECT * FROM relight.runs
    WHERE flow = $7 AND status = wanted.status AND (created_at, id) < ($1::double precision, $2::text)
        AND created_at >= $3::double precision AND (NOT $4::boolean OR root_id IS NULL)
    ORDER BY created_at DESC, id DESC LIMIT $5
) AS r
ORDER BY r.created_at DESC, r.id DESC LIMIT $5;

-- name: list_runs_by_parent
SELECT * FROM relight.runs
WHERE parent_id = $8 AND (created_at, id) < ($1::double precision, $2::text) AND created_at >= $3::double precision
    AND (NOT $4::boolean OR root_id IS NULL) AND status = ANY ($6::text[]) AND ($7::text IS NULL OR flow = $7)
ORDER BY created_at DESC, id DESC LIMIT $5;

-- name: active_roots
-- A page after the run $2. If that run is gone, the listing starts over, which repeats runs but misses none.
SELECT * FROM relight.runs
WHERE root_id IS NULL AND owner = $1 AND status IN ('pending', 'running', 'waiting', 'paused')
    AND (created_at, id) > (coalesce((SELECT created_at FROM relight.runs WHERE id = $2), '-infinity'), $2::text)
ORDER BY created_at, id LIMIT $3;

-- name: owners
-- The index leads from one owner to the next: the cost is one step per owner, however many runs it owns.
WITH RECURSIVE found (owner) AS (
    (SELECT owner FROM relight.runs
     WHERE root_id IS NULL AND owner IS NOT NULL AND status IN ('pending', 'running', 'waiting', 'paused')
     ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT (SELECT r.owner FROM relight.runs AS r
        WHERE r.root_id IS NULL AND r.owner IS NOT NULL AND r.status IN ('pending', 'running', 'waiting', 'paused')
            AND r.owner > found.owner ORDER BY r.owner LIMIT 1)
    FROM found WHERE found.owner IS NOT NULL
)
SELECT owner FROM found WHERE owner IS NOT NULL;

-- name: due
SELECT * FROM relight.runs
WHERE root_id IS NULL AND owner IS NULL AND wake_at IS NOT NULL AND status IN ('pending', 'waiting') AND wake_at <= $1
ORDER BY wake_at LIMIT $2;

-- name: due_freed
-- Those due runs that a person has resumed or cancelled.
SELECT * FROM relight.runs AS r
WHERE root_id IS NULL AND owner IS NULL AND wake_at IS NOT NULL AND status IN ('pending', 'waiting') AND wake_at <= $1
    AND (reason = 'resumed by hand' OR EXISTS (
        SELECT FROM relight.inbox AS i WHERE i.run = r.key AND NOT i.consumed AND i.kind IN ('resume', 'cancel')))
ORDER BY wake_at LIMIT $2;

-- name: claim_due
SELECT * FROM relight.claim_due($1, $2, $3, $4, $5);

-- name: next_due
SELECT min(wake_at) FROM relight.runs
WHERE root_id IS NULL AND owner IS NULL AND wake_at IS NOT NULL AND status IN ('pending', 'waiting');

-- name: held
SELECT * FROM relight.runs
WHERE root_id IS NULL AND status = 'paused' AND owner IS NULL AND hold = $1 AND flow = ANY ($2::text[]) LIMIT $3;

-- name: inbox
SELECT i.id, r.id, i.kind, i.name, i.payload, i.payload_blob, i.dedup, i.at
FROM relight.runs AS r JOIN relight.inbox AS i ON i.run = r.key AND NOT i.consumed
WHERE r.id = ANY ($1::text[]) ORDER BY i.id;

-- name: newest_message
SELECT coalesce(max(id), 0) FROM relight.inbox;

-- name: messages_after
SELECT i.id, r.id, i.kind, i.name, i.payload, i.payload_blob, i.dedup, i.at
FROM relight.inbox AS i JOIN relight.runs AS r ON r.key = i.run
WHERE NOT i.consumed AND i.id > $1 ORDER BY i.id LIMIT $2;

-- name: read_log
SELECT l.id, l.stream, l.token, l.at, l.text
FROM relight.runs AS r JOIN relight.log AS l ON l.run = r.key AND l.stream = $2 AND l.id > $3
WHERE r.id = $1 ORDER BY l.id LIMIT $4;

-- name: read_newest_log
-- The newest first.
SELECT l.id, l.stream, l.token, l.at, l.text
FROM relight.runs AS r JOIN relight.log AS l ON l.run = r.key AND l.stream = $2 AND l.id > $3
WHERE r.id = $1 ORDER BY l.id DESC LIMIT $4;

-- name: items
SELECT run_id, key, index, digest, output, output_blob FROM relight.items
WHERE run_id = $1 AND ($2::text IS NULL OR key = $2) AND index >= 0 ORDER BY key, index;

-- name: foreach_progress
-- A key with a bracket after the prefix belongs to a foreach inside an item of another. Only the index is read to
-- count.
WITH done AS (
    SELECT key, count(*) AS items FROM relight.items WHERE run_id = $1 AND index >= 0
    GROUP BY key HAVING strpos(substr(key, length($2::text) + 1), '[') = 0),
totals AS (
    SELECT key, output FROM relight.items
    WHERE run_id = $1 AND index = -1 AND strpos(substr(key, length($2::text) + 1), '[') = 0)
SELECT key, coalesce(done.items, 0), totals.output FROM totals FULL JOIN done USING (key) ORDER BY key;

-- name: journal_bytes
SELECT coalesce((SELECT octet_length(state) FROM relight.checkpoints WHERE run = r.key), 0)
    + coalesce((SELECT sum(octet_length(event)) FROM relight.journal WHERE run = r.key), 0)::bigint
FROM relight.runs AS r WHERE r.id = $1;

-- name: get_blob
SELECT data FROM relight.blobs WHERE digest = $1;

-- name: read_entries
SELECT j.sequence, j.event, j.crc FROM relight.runs AS r JOIN relight.journal AS j ON j.run = r.key
WHERE r.id = $1 AND j.sequence > $2 ORDER BY j.sequence LIMIT $3;

-- name: journals
-- Checkpoint and tail of many roots, by one statement: a checkpoint stored between two statements would delete entries
-- of a tail that is not read yet.
SELECT r.id, c.sequence, c.state, c.crc, t.sequences, t.events, t.crcs
FROM relight.runs AS r LEFT JOIN relight.checkpoints AS c ON c.run = r.key
CROSS JOIN LATERAL (
    SELECT array_agg(j.sequence) AS sequences, array_agg(j.event) AS events, array_agg(j.crc) AS crcs
    FROM (SELECT sequence, event, crc FROM relight.journal
          WHERE run = r.key AND sequence > coalesce(c.sequence, 0) ORDER BY sequence) AS j
) AS t
WHERE r.id = ANY ($1::text[]) AND r.root_id IS NULL;

-- name: latest_sequence
SELECT h.last FROM relight.runs AS r JOIN relight.heads AS h ON h.run = r.key WHERE r.id = $1;

-- name: checkpoint_sequence
SELECT c.sequence FROM relight.runs AS r JOIN relight.checkpoints AS c ON c.run = r.key WHERE r.id = $1;

-- ---- leases

-- name: heartbeat
SELECT relight.heartbeat($1, $2, $3);

-- name: end_session
SELECT relight.end_session($1);

-- name: forget_session
SELECT relight.forget_session($1);

-- name: lease_manager
SELECT value FROM relight.settings WHERE name = 'leases';

-- name: set_lease_manager
-- Returns a row if it was set: the stored value was still $2, or there was none.
INSERT INTO relight.settings AS s (name, value) VALUES ('leases', $1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE s.value = $2::text
RETURNING value;

-- name: sessions
-- Few rows, one per orchestrator, each with the present time of the server's clock.
SELECT o.owner, o.process, o.started_at, o.heartbeat_at, o.expires_at, c.now
FROM relight.orchestrators AS o, relight.clock() AS c (now) ORDER BY o.owner;

-- name: acquire
SELECT * FROM relight.acquire($1, $2);

-- name: release
SELECT relight.release($1, $2);

-- name: release_all
SELECT relight.release_all($1);

-- name: get_lease
SELECT r.owner, o.expires_at FROM relight.runs AS r JOIN relight.orchestrators AS o ON o.owner = r.owner
WHERE r.id = $1 AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
    AND o.expires_at > (SELECT relight.clock());
