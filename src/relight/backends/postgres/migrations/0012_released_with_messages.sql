-- compatible since 0008
-- A run that is released while it has a message is due at once: it is unknown which messages its owner had received. Because of the
-- inbox lock, no message is added between this check and the end of the transaction. A message added later finds a run without an
-- owner.
CREATE FUNCTION relight.due_when_released(p_run bigint, p_wake_at double precision, p_updated_at double precision)
RETURNS double precision LANGUAGE sql AS $$
    SELECT CASE WHEN EXISTS (SELECT FROM relight.inbox AS i WHERE i.run = p_run AND NOT i.consumed AND i.kind <> 'join')
        THEN least(p_wake_at, p_updated_at) ELSE coalesce(p_wake_at, p_updated_at) END
$$;

CREATE OR REPLACE FUNCTION relight.release(p_owner text, p_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM relight.lock_inbox(false);
    UPDATE relight.runs SET owner = NULL, status = 'pending', hold = NULL, reason = '',
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
    UPDATE relight.runs AS r SET owner = NULL, status = 'pending', hold = NULL, reason = '',
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
