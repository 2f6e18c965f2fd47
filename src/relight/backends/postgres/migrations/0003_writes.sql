-- The parts of a group commit, and all other writes.

-- Inserts new runs, and the heads of the roots among them. Returns the keys of the runs whose ids exist already. The order is
-- that of the ids, so that two processes that create the same runs wait for each other in the same order.
CREATE FUNCTION relight.create_runs(p_created relight.new_run[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_inserted bigint[];
    v_refused bigint[] := '{}';
BEGIN
    WITH inserted AS (
        INSERT INTO relight.runs (key, id, root_id, parent_id, flow, flow_hash, status, owner, epoch, wake_at, hold, reason,
            created_at, updated_at, input, input_blob, output, output_blob, error)
        SELECT n.key, n.id, n.root_id, n.parent_id, n.flow, n.flow_hash, n.status, n.owner, n.epoch, n.wake_at, n.hold, n.reason,
            n.created_at, n.updated_at, n.input, n.input_blob, n.output, n.output_blob, n.error
        FROM unnest(p_created) AS n ORDER BY n.id
        ON CONFLICT DO NOTHING
        RETURNING key
    )
    SELECT array_agg(key) INTO v_inserted FROM inserted;
    IF coalesce(cardinality(v_inserted), 0) < cardinality(p_created) THEN
        v_refused := ARRAY(SELECT n.key FROM unnest(p_created) AS n EXCEPT SELECT unnest(v_inserted));
    END IF;
    INSERT INTO relight.heads (run, epoch, last, ended)
    SELECT n.key, n.epoch, n.last, n.ended FROM unnest(p_created) AS n
    WHERE n.root_id IS NULL AND n.key <> ALL (v_refused);
    RETURN v_refused;
END $$;

-- Inserts child runs, and spawned roots with their first entries. Runs whose ids exist already are left out.
CREATE FUNCTION relight.add_runs(p_runs relight.new_run[], p_spawned relight.new_entry[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_known bigint[] := relight.create_runs(p_runs);
    v_roots bigint[] := ARRAY(SELECT r.key FROM unnest(p_runs) AS r WHERE r.key <> ALL (v_known));
BEGIN
    INSERT INTO relight.journal (run, sequence, event, crc)
    SELECT s.run, s.sequence, s.event, s.crc FROM unnest(p_spawned) AS s WHERE s.run = ANY (v_roots);
END $$;

-- New values for rows of a tree. The caller has locked the tree's head, and rows of other trees are not changed.
-- Returns the news that only the old row shows: a run is no longer paused. If a run that leaves memory has a message that it has
-- not received (`heard` is the last that it has), it is due at once, and not paused after all. Because of the inbox lock, no
-- message is added between this check and the end of the transaction.
CREATE FUNCTION relight.change_runs(p_changes relight.new_change[], p_now double precision) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_news integer;
BEGIN
    SELECT CASE WHEN bool_or(r.status = 'paused' AND c.status <> 'paused') THEN 4 ELSE 0 END INTO v_news
    FROM unnest(p_changes) AS c JOIN relight.runs AS r ON r.id = c.run_id WHERE c.run_id = c.root_id;
    IF EXISTS (SELECT 1 FROM unnest(p_changes) AS c WHERE c.heard IS NOT NULL) THEN
        PERFORM relight.lock_inbox(false);
    END IF;
    WITH changed AS (
        UPDATE relight.runs AS r SET status = CASE WHEN c.woken AND c.status = 'paused' THEN 'pending' ELSE c.status END,
            owner = c.owner, wake_at = CASE WHEN c.woken THEN p_now ELSE c.wake_at END,
            hold = CASE WHEN c.woken THEN NULL ELSE c.hold END, reason = CASE WHEN c.woken THEN '' ELSE c.reason END,
            output = c.output, output_blob = c.output_blob, error = c.error, updated_at = p_now
        FROM (SELECT u.*, u.heard IS NOT NULL AND EXISTS (
                  SELECT 1 FROM relight.inbox AS i WHERE i.run = u.root AND NOT i.consumed AND i.id > u.heard
                      AND (u.status <> 'paused' OR i.kind IN ('resume', 'cancel'))) AS woken
              FROM unnest(p_changes) AS u ORDER BY u.run_id) AS c
        WHERE r.id = c.run_id AND coalesce(r.root_id, r.id) = c.root_id
        RETURNING c.woken
    )
    SELECT v_news | CASE WHEN bool_or(woken) THEN 1 ELSE 0 END INTO v_news FROM changed;
    RETURN v_news;
END $$;

-- Adds messages to inboxes of unfinished roots. A message with a dedup that exists already is not added. Returns the news.
CREATE FUNCTION relight.add_messages(p_messages relight.new_message[], p_cancels relight.new_cancel[])
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_told integer;
    v_cancelled integer := 0;
BEGIN
    PERFORM relight.lock_inbox(true);
    INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
    SELECT h.run, m.kind, m.name, m.payload, m.payload_blob, m.dedup, m.at
    FROM unnest(p_messages) WITH ORDINALITY AS m
    JOIN relight.runs AS r ON r.id = m.run_id JOIN relight.heads AS h ON h.run = r.key AND h.ended = 0
    ORDER BY m.ordinality
    ON CONFLICT (run, dedup) DO NOTHING;
    GET DIAGNOSTICS v_told = ROW_COUNT;
    IF cardinality(p_cancels) > 0 THEN
        -- To each unfinished root that this tree has spawned: by the root, or by a child run under it.
        INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
        SELECT h.run, 'cancel', '', c.payload, '', 'cancel', c.at
        FROM unnest(p_cancels) AS c
        CROSS JOIN LATERAL (
            SELECT key FROM relight.runs WHERE parent_id = c.root_id
            UNION ALL
            SELECT key FROM relight.runs WHERE parent_id >= c.root_id || '/' AND parent_id < c.root_id || '0'
        ) AS r
        JOIN relight.heads AS h ON h.run = r.key AND h.ended = 0
        ON CONFLICT (run, dedup) DO NOTHING;
        GET DIAGNOSTICS v_cancelled = ROW_COUNT;
    END IF;
    RETURN CASE WHEN v_told + v_cancelled > 0 THEN 2 ELSE 0 END;
END $$;

-- For roots that have ended. Their heads say so already. Runs that have joined them get a message, and their inboxes are deleted,
-- except the inboxes of runs that may be reopened. Returns the news.
CREATE FUNCTION relight.end_runs(p_runs bigint[], p_now double precision) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_told integer := 0;
BEGIN
    PERFORM relight.lock_inbox(relight.joined(p_runs));
    IF relight.joined(p_runs) THEN
        PERFORM relight.lock_inbox(true); -- a run may have joined while this waited for the lock in shared mode
        INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
        SELECT h.run, 'ended', over.id, 'null', '', 'ended:' || over.id || ':' || over.epoch, p_now
        FROM relight.inbox AS i JOIN relight.runs AS over ON over.key = i.run
        JOIN relight.runs AS joined ON joined.id = i.name JOIN relight.heads AS h ON h.run = joined.key AND h.ended = 0
        WHERE i.run = ANY (p_runs) AND i.kind = 'join'
        ON CONFLICT (run, dedup) DO NOTHING;
        GET DIAGNOSTICS v_told = ROW_COUNT;
    END IF;
    DELETE FROM relight.inbox AS i USING relight.heads AS h WHERE i.run = ANY (p_runs) AND h.run = i.run AND h.ended = 2;
    RETURN CASE WHEN v_told > 0 THEN 2 ELSE 0 END;
END $$;

-- Adds the messages one by one, because the caller needs the id of each. NULL: the run is terminal or unknown.
CREATE FUNCTION relight.post(p_sender text, p_messages relight.new_message[]) RETURNS bigint[] LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_message relight.new_message;
    v_run bigint;
    v_id bigint;
    v_ids bigint[] := '{}';
    v_news integer := 0;
BEGIN
    PERFORM relight.lock_inbox(true);
    FOREACH v_message IN ARRAY p_messages LOOP
        v_id := NULL;
        SELECT h.run INTO v_run FROM relight.runs AS r JOIN relight.heads AS h ON h.run = r.key AND h.ended = 0
        WHERE r.id = v_message.run_id;
        IF FOUND THEN
            INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
            VALUES (v_run, v_message.kind, v_message.name, v_message.payload, v_message.payload_blob, v_message.dedup, v_message.at)
            ON CONFLICT (run, dedup) DO NOTHING
            RETURNING id INTO v_id;
            IF FOUND THEN
                v_news := 2;
            ELSE
                -- The lock makes this a commit as well: it waits until the standby has what an earlier call has written.
                SELECT id INTO v_id FROM relight.inbox WHERE run = v_run AND dedup = v_message.dedup FOR KEY SHARE;
            END IF;
        END IF;
        v_ids := v_ids || v_id;
    END LOOP;
    PERFORM relight.tell(p_sender, v_news);
    RETURN v_ids;
END $$;

-- Lines for unknown runs are dropped. Only one transaction writes at a time: a reader that has seen line 7 has seen line 6.
CREATE FUNCTION relight.add_log(p_log relight.new_line[]) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(1382370420, 'relight.log'::regclass::oid::integer);
    INSERT INTO relight.log (run, stream, token, at, text)
    SELECT r.key, l.stream, l.token, l.at, l.text
    FROM unnest(p_log) WITH ORDINALITY AS l JOIN relight.runs AS r ON r.id = l.run_id
    ORDER BY l.ordinality;
END $$;

-- For each unfinished root that still has the given epoch: raises the epoch, and makes p_owner the owner.
CREATE FUNCTION relight.claim(p_ids text[], p_epochs bigint[], p_owner text, p_now double precision)
RETURNS TABLE (claimed_id text, claimed_key bigint, new_epoch bigint) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_keys bigint[];
BEGIN
    WITH moved AS (
        UPDATE relight.heads AS h SET epoch = h.epoch + 1
        FROM (SELECT r.key, u.epoch FROM unnest(p_ids, p_epochs) AS u (id, epoch) JOIN relight.runs AS r ON r.id = u.id
              ORDER BY r.key) AS g
        WHERE h.run = g.key AND h.epoch = g.epoch AND h.ended = 0
        RETURNING h.run
    )
    SELECT array_agg(run) INTO v_keys FROM moved;
    RETURN QUERY
    UPDATE relight.runs AS r SET owner = p_owner, epoch = r.epoch + 1, updated_at = p_now
    FROM (SELECT u.key FROM relight.runs AS u WHERE u.key = ANY (v_keys) ORDER BY u.id) AS g
    WHERE r.key = g.key
    RETURNING r.id, r.key, r.epoch;
END $$;

-- Changes the rows, not the journals, of the unfinished roots that still have these epochs. p_ended is the heads' new value.
CREATE FUNCTION relight.hold(p_sender text, p_news integer, p_now double precision, p_ids text[], p_epochs bigint[],
    p_change relight.new_change, p_ended smallint)
RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_keys bigint[];
BEGIN
    WITH moved AS (
        UPDATE relight.heads AS h SET ended = p_ended
        FROM (SELECT r.key, u.epoch FROM unnest(p_ids, p_epochs) AS u (id, epoch) JOIN relight.runs AS r ON r.id = u.id
              ORDER BY r.key) AS g
        WHERE h.run = g.key AND h.epoch = g.epoch AND h.ended = 0
        RETURNING h.run
    )
    SELECT array_agg(run) INTO v_keys FROM moved;
    IF v_keys IS NULL THEN
        RETURN;
    END IF;
    p_news := p_news | relight.change_runs(ARRAY(
        SELECT ROW(r.key, r.id, r.id, p_change.status, p_change.owner, p_change.wake_at, p_change.hold, p_change.reason,
            p_change.output, p_change.output_blob, p_change.error, p_change.heard)::relight.new_change
        FROM relight.runs AS r WHERE r.key = ANY (v_keys)), p_now);
    IF p_ended > 0 THEN
        p_news := p_news | relight.end_runs(v_keys, p_now);
    END IF;
    PERFORM relight.tell(p_sender, p_news);
END $$;

-- Stores a checkpoint, and returns true. False: it is fenced, not newer than the last checkpoint, or beyond the journal.
CREATE FUNCTION relight.checkpoint(p_id text, p_epoch bigint, p_sequence integer, p_state bytea, p_crc bigint)
RETURNS boolean LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_run bigint;
BEGIN
    SELECT h.run INTO v_run FROM relight.runs AS r JOIN relight.heads AS h ON h.run = r.key
    WHERE r.id = p_id AND h.epoch = p_epoch AND h.last >= p_sequence AND p_sequence > 0 FOR UPDATE OF h;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO relight.checkpoints AS c (run, sequence, state, crc) VALUES (v_run, p_sequence, p_state, p_crc)
    ON CONFLICT (run) DO UPDATE SET sequence = excluded.sequence, state = excluded.state, crc = excluded.crc
    WHERE c.sequence < excluded.sequence;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM relight.journal WHERE run = v_run AND sequence <= p_sequence;
    RETURN true;
END $$;
