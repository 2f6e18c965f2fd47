-- compatible since 0008
-- A person has resumed a pending run, and its owner releases it before the flow was called: then the run keeps its reason. While
-- recovery is off, only that reason lets another process take the run up.

CREATE FUNCTION relight.reason_when_released(p_status text, p_reason text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_status = 'pending' AND p_reason = 'resumed by hand' THEN p_reason ELSE '' END
$$;

CREATE OR REPLACE FUNCTION relight.release(p_owner text, p_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM relight.lock_inbox(false);
    UPDATE relight.runs SET owner = NULL, status = 'pending', hold = NULL, reason = relight.reason_when_released(status, reason),
        wake_at = relight.due_when_released(key, wake_at, updated_at)
    WHERE id = p_id AND owner = p_owner AND root_id IS NULL AND status NOT IN ('completed', 'failed', 'cancelled');
    IF FOUND THEN
        PERFORM relight.tell('', 1);
        RETURN true;
    END IF;
    RETURN false;
END $$;

CREATE OR REPLACE FUNCTION relight.release_all(p_owner text) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    PERFORM relight.lock_inbox(false);
    UPDATE relight.runs AS r SET owner = NULL, status = 'pending', hold = NULL,
        reason = relight.reason_when_released(r.status, r.reason),
        wake_at = relight.due_when_released(r.key, r.wake_at, r.updated_at)
    FROM (SELECT u.key FROM relight.runs AS u
          WHERE u.owner = p_owner AND u.root_id IS NULL AND u.status IN ('pending', 'running', 'waiting', 'paused')
          ORDER BY u.id FOR NO KEY UPDATE) AS mine
    WHERE r.key = mine.key;
    IF FOUND THEN
        PERFORM relight.tell('', 1);
    END IF;
    PERFORM relight.end_session(p_owner);
    PERFORM relight.forget_session(p_owner);
END $$;
