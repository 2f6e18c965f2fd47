-- A message makes a run that nobody holds due, in the transaction that puts it into the inbox: see ports/store.py. A trigger,
-- because messages are put there by several functions, and a run that one of them forgot would wait for ever.
--
-- Whoever adds messages holds the inbox lock alone. So either the run's owner has let go of it before, which this sees, or it
-- lets go of it after, and finds the message (`heard`, in change_runs). A claim that comes in between raises the epoch and
-- becomes the owner; the rows are compared again then, and that owner reads the message from the inbox.
CREATE FUNCTION relight.wake_told() RETURNS trigger LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    UPDATE relight.runs AS r SET wake_at = least(r.wake_at, g.at), updated_at = greatest(r.updated_at, g.at),
        status = CASE WHEN r.status = 'paused' THEN 'pending' ELSE r.status END,
        hold = CASE WHEN r.status = 'paused' THEN NULL ELSE r.hold END,
        reason = CASE WHEN r.status = 'paused' THEN '' ELSE r.reason END
    FROM (SELECT u.key, min(t.at) AS at FROM told AS t JOIN relight.runs AS u ON u.key = t.run
          WHERE t.kind <> 'join' AND u.root_id IS NULL AND u.owner IS NULL
              AND (u.status IN ('waiting', 'pending') OR (u.status = 'paused' AND t.kind IN ('resume', 'cancel')))
          GROUP BY u.key, u.id ORDER BY u.id) AS g
    WHERE r.key = g.key AND r.owner IS NULL AND r.status IN ('waiting', 'pending', 'paused');
    RETURN NULL;
END $$;

CREATE TRIGGER inbox_wakes AFTER INSERT ON relight.inbox REFERENCING NEW TABLE AS told
FOR EACH STATEMENT EXECUTE FUNCTION relight.wake_told();

-- What was told before this was so. updated_at has passed by any clock.
UPDATE relight.runs AS r SET wake_at = least(r.wake_at, r.updated_at)
WHERE root_id IS NULL AND owner IS NULL AND status = 'waiting'
    AND EXISTS (SELECT FROM relight.inbox AS i WHERE i.run = r.key AND NOT i.consumed AND i.kind <> 'join');
UPDATE relight.runs AS r SET wake_at = r.updated_at, status = 'pending', hold = NULL, reason = ''
WHERE root_id IS NULL AND owner IS NULL AND status = 'paused'
    AND EXISTS (SELECT FROM relight.inbox AS i WHERE i.run = r.key AND NOT i.consumed AND i.kind IN ('resume', 'cancel'));
