-- compatible since 0008
-- Claims runs that have no owner and are due, earliest first. No two callers get the same run. Runs that fell due after p_since
-- are shared between the sessions that are alive (by the rule of relight/model/sharing.py): this caller leaves the rest of them to
-- the others for a moment. The heads are locked first, as everywhere, and heads that another transaction has locked are skipped.
CREATE FUNCTION relight.claim_due(p_owner text, p_now double precision, p_since double precision, p_limit integer, p_not text[])
RETURNS SETOF relight.runs LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_alive text[];
    v_living integer;
    v_old integer;
    v_recent integer := 0;
    v_active integer := 0;
    v_mine integer := 0;
    v_share integer;
    v_keys bigint[];
BEGIN
    SELECT array_agg(o.owner) INTO v_alive FROM relight.orchestrators AS o WHERE o.expires_at > relight.clock();
    v_living := greatest(coalesce(cardinality(v_alive), 0), 1);
    IF v_living > 1 THEN
        SELECT count(*) INTO v_old FROM (
            SELECT FROM relight.runs AS r
            WHERE r.root_id IS NULL AND r.owner IS NULL AND r.wake_at IS NOT NULL AND r.status IN ('pending', 'waiting')
                AND r.wake_at <= least(p_since, p_now) AND r.id <> ALL (p_not) LIMIT p_limit) AS d;
        SELECT count(*) INTO v_recent FROM (
            SELECT FROM relight.runs AS r
            WHERE r.root_id IS NULL AND r.owner IS NULL AND r.wake_at IS NOT NULL AND r.status IN ('pending', 'waiting')
                AND r.wake_at > p_since AND r.wake_at <= p_now AND r.id <> ALL (p_not) LIMIT p_limit * v_living) AS d;
        SELECT count(*), count(*) FILTER (WHERE r.owner = p_owner) INTO v_active, v_mine FROM relight.runs AS r
        WHERE r.root_id IS NULL AND r.owner = ANY (v_alive) AND r.status IN ('pending', 'running', 'waiting', 'paused');
        v_share := greatest(
            least(ceil((v_active + v_recent)::numeric / v_living)::integer - v_mine, v_recent),
            CASE WHEN v_mine * v_living <= v_active + 4 * v_living THEN least(v_recent, 1) ELSE 0 END);
        p_limit := least(p_limit, v_old + v_share);
    END IF;
    SELECT array_agg(l.run) INTO v_keys FROM (
        SELECT h.run FROM relight.runs AS r JOIN relight.heads AS h ON h.run = r.key
        WHERE r.root_id IS NULL AND r.owner IS NULL AND r.wake_at IS NOT NULL AND r.status IN ('pending', 'waiting')
            AND r.wake_at <= p_now AND r.id <> ALL (p_not) AND h.ended = 0
        ORDER BY r.wake_at LIMIT p_limit FOR UPDATE OF h SKIP LOCKED) AS l;
    -- A separate statement sees the rows as they are now, after their heads are locked.
    SELECT array_agg(r.key) INTO v_keys FROM relight.runs AS r
    WHERE r.key = ANY (v_keys) AND r.owner IS NULL AND r.status IN ('pending', 'waiting') AND r.wake_at <= p_now;
    UPDATE relight.heads AS h SET epoch = h.epoch + 1 WHERE h.run = ANY (v_keys);
    RETURN QUERY
    UPDATE relight.runs AS r SET owner = p_owner, epoch = r.epoch + 1, updated_at = p_now
    FROM (SELECT u.key FROM relight.runs AS u WHERE u.key = ANY (v_keys) ORDER BY u.id) AS g
    WHERE r.key = g.key
    RETURNING r.*;
END $$;
