-- Settings that all processes share: which manager keeps the leases.
CREATE TABLE relight.settings (
    name  text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);

-- Ends a session, as if it had lapsed, and notifies the processes that watch. The row stays, because its last heartbeat is needed
-- as long as the session owns runs.
CREATE OR REPLACE FUNCTION relight.end_session(p_owner text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE relight.orchestrators SET expires_at = least(expires_at, relight.clock()) WHERE owner = p_owner;
    PERFORM pg_notify('relight.sessions', p_owner);
END $$;

-- Deletes a session that has lapsed.
CREATE FUNCTION relight.forget_session(p_owner text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM relight.orchestrators WHERE owner = p_owner AND expires_at <= relight.clock();
END $$;

-- Ends a session, and releases all runs that it owns. Its row is not needed after that, and is deleted.
CREATE OR REPLACE FUNCTION relight.release_all(p_owner text) RETURNS void LANGUAGE plpgsql
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
    PERFORM relight.forget_session(p_owner);
END $$;
