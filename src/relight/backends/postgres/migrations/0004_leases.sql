-- Leases. A run's lease is the owner column of its row, together with a session of that owner that has not lapsed. Only the
-- server's clock counts. Epochs and times of runs are not changed here: a lease is a hint, and the fence is in `heads`.

CREATE FUNCTION relight.clock() RETURNS double precision LANGUAGE sql VOLATILE
RETURN extract(epoch FROM clock_timestamp())::double precision;

-- Begins the session, keeps it, or begins it again if it has lapsed or was ended. Returns whether it began.
CREATE FUNCTION relight.heartbeat(p_owner text, p_process text, p_ttl double precision) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_now double precision := relight.clock();
    v_started double precision;
BEGIN
    INSERT INTO relight.orchestrators AS o (owner, process, started_at, heartbeat_at, expires_at)
    VALUES (p_owner, p_process, v_now, v_now, v_now + p_ttl)
    ON CONFLICT (owner) DO UPDATE SET process = excluded.process, heartbeat_at = excluded.heartbeat_at,
        expires_at = excluded.expires_at,
        started_at = CASE WHEN o.expires_at > v_now THEN o.started_at ELSE excluded.started_at END
    RETURNING o.started_at INTO v_started;
    RETURN v_started = v_now; -- this heartbeat began it
END $$;

-- Acquires the unfinished roots that have no owner or a dead one. Returns the owner of each; NULL: the caller.
-- The first statement locks the roots, in the order of their ids, and the second compares. If one statement did both, it could
-- wait for a lock and then see the new owner's session as it was before the wait. There may have been no session then, and the
-- statement would take the run from an owner that is alive.
CREATE FUNCTION relight.acquire(p_owner text, p_ids text[])
RETURNS TABLE (run_id text, holder text, holder_expires_at double precision) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now double precision;
BEGIN
    PERFORM 1 FROM relight.runs AS r
    WHERE r.id = ANY (p_ids) AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
    ORDER BY r.id FOR NO KEY UPDATE;
    v_now := relight.clock();
    UPDATE relight.runs AS r SET owner = p_owner
    WHERE r.id = ANY (p_ids) AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled')
        AND r.owner IS DISTINCT FROM p_owner
        AND NOT EXISTS (SELECT FROM relight.orchestrators AS o WHERE o.owner = r.owner AND o.expires_at > v_now);
    RETURN QUERY
    SELECT r.id, nullif(r.owner, p_owner), o.expires_at
    FROM relight.runs AS r LEFT JOIN relight.orchestrators AS o ON o.owner = r.owner
    WHERE r.id = ANY (p_ids) AND r.root_id IS NULL AND r.status NOT IN ('completed', 'failed', 'cancelled');
END $$;

-- The run has no owner now, and is due: at its time if it waits for one, else at once. "At once" is updated_at, which lies in the
-- past by the clock of the processes that look for due runs. A paused run with an owner was about to go on, and does.
CREATE FUNCTION relight.release(p_owner text, p_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE relight.runs SET owner = NULL, status = 'pending', hold = NULL, reason = '',
        wake_at = coalesce(wake_at, updated_at)
    WHERE id = p_id AND owner = p_owner AND root_id IS NULL AND status NOT IN ('completed', 'failed', 'cancelled');
    IF FOUND THEN
        PERFORM relight.tell('', 1);
    END IF;
    RETURN FOUND;
END $$;

-- Ends a session and notifies the processes that watch.
CREATE FUNCTION relight.end_session(p_owner text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM relight.orchestrators WHERE owner = p_owner;
    PERFORM pg_notify('relight.sessions', p_owner);
END $$;

-- Ends a session, and releases all runs that it owns.
CREATE FUNCTION relight.release_all(p_owner text) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    UPDATE relight.runs AS r SET owner = NULL, status = 'pending', hold = NULL, reason = '',
        wake_at = coalesce(r.wake_at, r.updated_at)
    FROM (SELECT u.key FROM relight.runs AS u
          WHERE u.owner = p_owner AND u.root_id IS NULL AND u.status IN ('pending', 'running', 'waiting', 'paused')
          ORDER BY u.id FOR NO KEY UPDATE) AS mine
    WHERE r.key = mine.key;
    IF FOUND THEN
        PERFORM relight.tell('', 1);
    END IF;
    PERFORM relight.end_session(p_owner);
END $$;
