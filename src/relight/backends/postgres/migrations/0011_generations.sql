-- compatible since 0008
-- Runs that live for ever: see NextGeneration in relight/ports/store.py.

-- Deletes what is kept of a root's consumed messages, except the newest signals: their dedup shows a repeated signal. Also deletes
-- joins of runs that have ended.
CREATE FUNCTION relight.trim_inbox(p_run bigint, p_kept integer) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    DELETE FROM relight.inbox AS i WHERE i.run = p_run AND i.consumed AND (i.kind <> 'signal' OR i.dedup IS NULL OR i.id <= (
        SELECT k.id FROM relight.inbox AS k WHERE k.run = p_run AND k.consumed AND k.kind = 'signal' AND k.dedup IS NOT NULL
        ORDER BY k.id DESC OFFSET p_kept LIMIT 1));
    DELETE FROM relight.inbox AS i WHERE i.run = p_run AND i.kind = 'join' AND NOT EXISTS (
        SELECT FROM relight.runs AS r
        WHERE r.id = i.name AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled'));
END $$;

-- Begins the next generation of these roots after these sequences. The same transaction has set their heads to them. Ids that
-- begin with "a/b/" are between "a/b/" and "a/b0": the digit 0 follows the slash. Runs that a root has spawned have such ids, too:
-- root_id excludes them.
CREATE FUNCTION relight.begin_generations(p_keys bigint[], p_ids text[], p_children text[], p_sequences integer[],
    p_states bytea[], p_crcs bigint[], p_trim boolean[], p_kept integer)
RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_gone bigint[];
    v_ids text[];
BEGIN
    INSERT INTO relight.checkpoints (run, sequence, state, crc) SELECT * FROM unnest(p_keys, p_sequences, p_states, p_crcs)
    ON CONFLICT (run) DO UPDATE SET sequence = excluded.sequence, state = excluded.state, crc = excluded.crc;
    DELETE FROM relight.journal AS j USING unnest(p_keys, p_sequences) AS g (key, sequence)
    WHERE j.run = g.key AND j.sequence <= g.sequence;
    SELECT array_agg(r.key), array_agg(r.id) INTO v_gone, v_ids
    FROM unnest(p_ids, p_children) AS g (id, children) JOIN relight.runs AS r
        ON r.id > g.children AND r.id < rtrim(g.children, '/') || '0' AND r.root_id = g.id;
    DELETE FROM relight.items WHERE run_id = ANY (p_ids || v_ids);
    IF v_gone IS NOT NULL THEN
        DELETE FROM relight.log WHERE run = ANY (v_gone);
        DELETE FROM relight.runs WHERE key = ANY (v_gone);
    END IF;
    PERFORM relight.trim_inbox(g.key, p_kept) FROM unnest(p_keys, p_trim) AS g (key, trimmed) WHERE g.trimmed;
END $$;

-- Stores a checkpoint, and trims the inbox.
CREATE FUNCTION relight.checkpoint_and_trim(p_id text, p_epoch bigint, p_sequence integer, p_state bytea, p_crc bigint, p_kept integer)
RETURNS boolean LANGUAGE plpgsql
AS $$
BEGIN
    IF NOT relight.checkpoint(p_id, p_epoch, p_sequence, p_state, p_crc) THEN
        RETURN false;
    END IF;
    PERFORM relight.trim_inbox(r.key, p_kept) FROM relight.runs AS r WHERE r.id = p_id;
    RETURN true;
END $$;
