-- The group commit, and everything else that must compare and write in one transaction.
--
-- Isolation is READ COMMITTED: each statement of these functions sees what was committed before it began. A lock on a root's
-- row in `heads` makes writers wait for each other. The UPDATE that compares the row takes the lock:
--
--   commit vs claim     Both update the head. The second transaction waits until the first has ended. It then compares the
--                       newest row, not the one of its snapshot. A commit after a claim finds another epoch and writes
--                       nothing. A claim after a commit raises the epoch of a journal that has the commit, and the process
--                       that has claimed reads the journal after that. So no entry with the old epoch is added after a claim.
--   commit vs commit    The same: the second finds another `last`.
--   claim vs claim      The second finds another epoch.
--   ending vs message   See lock_inbox.
--
-- Plans: the few rows of the arrays must be looked up by index, always. On the first day a table is small, so the planner would
-- find that reading the whole table is cheaper. It would keep that plan when the table is large. The settings of each function
-- prevent this.
--
-- Deadlocks: each transaction locks new ids first, then heads in the order of their keys, then the inbox, then the rest, and the
-- log last. It takes the inbox lock at once in the strongest mode that it will need: if two transactions had it in shared mode
-- and both wanted it exclusively, they would wait for each other. In one case this order does not suffice: another process is
-- creating a run with the id of a spawned run at this moment. Then PostgreSQL ends one of the two transactions, and the store
-- repeats it.

-- The lock is held until the transaction ends. A transaction that adds messages takes it exclusively, before it assigns ids.
-- So ids become visible in their order: a reader that has seen message 7 has seen message 6. A transaction that ends a run takes
-- it in shared mode, after it has marked the head and before it deletes the inbox. So either the message was there already and is
-- deleted, or its writer sees that the run has ended.
CREATE FUNCTION relight.lock_inbox(p_alone boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_alone THEN
        PERFORM pg_advisory_xact_lock(1382370420, 'relight.inbox'::regclass::oid::integer);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(1382370420, 'relight.inbox'::regclass::oid::integer);
    END IF;
END $$;

-- Whether any run waits for the end of one of these roots.
CREATE FUNCTION relight.joined(p_runs bigint[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT FROM relight.inbox WHERE run = ANY (p_runs) AND NOT consumed AND kind = 'join');
END $$;

-- Wakes other processes. p_news has a bit for each flag of relight.model.run.News. By its token the sender recognises its own news.
CREATE FUNCTION relight.tell(p_sender text, p_news integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_news <> 0 THEN
        PERFORM pg_notify('relight.news', p_sender || ' ' || p_news);
    END IF;
END $$;

-- The fast path: every commit is one entry and nothing else. All or nothing: if one commit is fenced, the statement fails
-- (RL001). The store then gives the same batch to commit_batch, which returns the commits that were refused.
-- The plan is a nested loop from the sorted commits to the heads, so the heads are locked in this order.
CREATE FUNCTION relight.append_batch(p_keys bigint[], p_epochs bigint[], p_sequences integer[], p_events bytea[], p_crcs bigint[])
RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_moved integer;
BEGIN
    UPDATE relight.heads AS h SET last = g.sequence
    FROM (SELECT * FROM unnest(p_keys, p_epochs, p_sequences) AS u (key, epoch, sequence) ORDER BY u.key) AS g
    WHERE h.run = g.key AND h.epoch = g.epoch AND h.last = g.sequence - 1 AND h.ended = 0;
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    IF v_moved < cardinality(p_keys) THEN
        RAISE EXCEPTION 'a commit is fenced' USING ERRCODE = 'RL001';
    END IF;
    INSERT INTO relight.journal (run, sequence, event, crc) SELECT * FROM unnest(p_keys, p_sequences, p_events, p_crcs);
END $$;

-- Compares and advances heads. Returns the keys of the commits that are fenced. p_ended: NULL leaves the value as it is.
CREATE FUNCTION relight.fence(p_keys bigint[], p_epochs bigint[], p_afters integer[], p_lasts integer[], p_ended smallint[],
    p_reopen boolean[])
RETURNS bigint[] LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_moved bigint[];
BEGIN
    WITH moved AS (
        UPDATE relight.heads AS h SET last = g.last, ended = coalesce(g.ended, h.ended)
        FROM (SELECT * FROM unnest(p_keys, p_epochs, p_afters, p_lasts, p_ended, p_reopen)
              AS u (key, epoch, after, last, ended, reopen) ORDER BY u.key) AS g
        WHERE h.run = g.key AND h.epoch = g.epoch AND h.last = g.after AND (h.ended = 0 OR (h.ended = 1 AND g.reopen))
        RETURNING h.run
    )
    SELECT array_agg(run) INTO v_moved FROM moved;
    IF coalesce(cardinality(v_moved), 0) = cardinality(p_keys) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(SELECT unnest(p_keys) EXCEPT SELECT unnest(v_moved));
END $$;

-- A batch with at most one commit per root. Returns the keys of the commits that were refused: they have written nothing. Heads
-- and entries come as columns, because nearly every commit has them, and everything else as rows. A statement without rows is not
-- executed. p_news is what the caller knows to be news (see `tell`). It may have too many flags.
CREATE FUNCTION relight.commit_batch(
    p_sender text, p_news integer, p_now double precision,
    p_keys bigint[], p_epochs bigint[], p_afters integer[], p_lasts integer[], p_ended smallint[], p_reopen boolean[],
    e_keys bigint[], e_sequences integer[], e_events bytea[], e_crcs bigint[],
    p_created relight.new_run[], p_states relight.new_checkpoint[], p_runs relight.new_run[], p_spawned relight.new_entry[],
    p_changes relight.new_change[], p_blobs relight.new_blob[], p_cuts relight.new_cut[], p_items relight.new_item[],
    p_log relight.new_line[], p_messages relight.new_message[], p_cancels relight.new_cancel[], p_taken relight.taken_message[]
) RETURNS bigint[] LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_refused bigint[] := '{}';
    v_news integer := p_news;
    v_over bigint[] := '{}';
BEGIN
    IF cardinality(p_created) > 0 THEN
        v_refused := relight.create_runs(p_created);
    END IF;
    IF cardinality(p_keys) > 0 THEN
        v_refused := v_refused || relight.fence(p_keys, p_epochs, p_afters, p_lasts, p_ended, p_reopen);
    END IF;
    IF cardinality(v_refused) > 0 THEN
        p_states := ARRAY(SELECT x FROM unnest(p_states) AS x WHERE x.root <> ALL (v_refused));
        p_runs := ARRAY(SELECT x FROM unnest(p_runs) AS x WHERE x.root <> ALL (v_refused));
        p_changes := ARRAY(SELECT x FROM unnest(p_changes) AS x WHERE x.root <> ALL (v_refused));
        p_blobs := ARRAY(SELECT x FROM unnest(p_blobs) AS x WHERE x.root <> ALL (v_refused));
        p_cuts := ARRAY(SELECT x FROM unnest(p_cuts) AS x WHERE x.root <> ALL (v_refused));
        p_items := ARRAY(SELECT x FROM unnest(p_items) AS x WHERE x.root <> ALL (v_refused));
        p_log := ARRAY(SELECT x FROM unnest(p_log) AS x WHERE x.root <> ALL (v_refused));
        p_messages := ARRAY(SELECT x FROM unnest(p_messages) AS x WHERE x.root <> ALL (v_refused));
        p_cancels := ARRAY(SELECT x FROM unnest(p_cancels) AS x WHERE x.root <> ALL (v_refused));
        p_taken := ARRAY(SELECT x FROM unnest(p_taken) AS x WHERE x.root <> ALL (v_refused));
    END IF;

    INSERT INTO relight.journal (run, sequence, event, crc)
    SELECT * FROM unnest(e_keys, e_sequences, e_events, e_crcs) AS e (key) WHERE e.key <> ALL (v_refused);
    IF cardinality(p_states) > 0 THEN
        INSERT INTO relight.checkpoints (run, sequence, state, crc)
        SELECT x.root, x.sequence, x.state, x.crc FROM unnest(p_states) AS x;
    END IF;
    IF cardinality(p_runs) > 0 THEN
        PERFORM relight.add_runs(p_runs, p_spawned);
    END IF;
    v_over := ARRAY(SELECT c.root FROM unnest(p_changes) AS c
        WHERE c.run_id = c.root_id AND c.status IN ('completed', 'failed', 'cancelled'));
    IF cardinality(p_messages) + cardinality(p_cancels) > 0 OR relight.joined(v_over) THEN
        PERFORM relight.lock_inbox(true);
    ELSIF cardinality(v_over) > 0 OR EXISTS (SELECT FROM unnest(p_changes) AS c WHERE c.heard IS NOT NULL) THEN
        PERFORM relight.lock_inbox(false);
    END IF;
    IF cardinality(p_changes) > 0 THEN
        v_news := v_news | relight.change_runs(p_changes, p_now);
    END IF;
    IF cardinality(p_blobs) > 0 THEN
        INSERT INTO relight.blobs (digest, data)
        SELECT b.digest, b.data FROM unnest(p_blobs) AS b ORDER BY b.digest
        ON CONFLICT DO NOTHING;
    END IF;
    IF cardinality(p_cuts) > 0 THEN
        DELETE FROM relight.items AS i USING unnest(p_cuts) AS c
        WHERE i.run_id = c.run_id AND i.key = c.key AND i.index >= c.index;
    END IF;
    IF cardinality(p_items) > 0 THEN
        INSERT INTO relight.items (run_id, key, index, digest, output, output_blob)
        SELECT i.run_id, i.key, i.index, i.digest, i.output, i.output_blob FROM unnest(p_items) AS i
        ON CONFLICT (run_id, key, index) DO UPDATE
        SET digest = excluded.digest, output = excluded.output, output_blob = excluded.output_blob;
    END IF;
    IF cardinality(p_log) > 0 THEN
        PERFORM relight.add_log(p_log);
    END IF;
    IF cardinality(p_messages) + cardinality(p_cancels) > 0 THEN
        v_news := v_news | relight.add_messages(p_messages, p_cancels);
    END IF;
    IF cardinality(p_taken) > 0 THEN -- the rows stay until the run ends, for `dedup`; their payloads are not needed
        UPDATE relight.inbox AS i SET consumed = true, payload = ''
        FROM unnest(p_taken) AS t WHERE i.id = t.id AND i.run = t.root AND NOT i.consumed;
    END IF;
    IF cardinality(v_over) > 0 THEN
        v_news := v_news | relight.end_runs(v_over, p_now);
    END IF;
    PERFORM relight.tell(p_sender, v_news);
    RETURN v_refused;
END $$;
