-- A message makes a run without an owner due, in the transaction that puts it into the inbox: see ports/store.py. This is a
-- trigger because several functions add messages. If one of them forgot to make the run due, the run would wait for ever.
--
-- A transaction that adds messages has the inbox lock exclusively. So either the owner has let go of the run before, and the
-- trigger sees that; or the owner lets go of it later, and finds the message (`heard`, in change_runs). If another transaction
-- claims the run in between, the UPDATE compares the row again and finds an owner. That owner reads the message from the inbox.
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

-- Messages posted before this migration. updated_at lies in the past on every clock.
UPDATE relight.runs AS r SET wake_at = least(r.wake_at, r.updated_at)
WHERE root_id IS NULL AND owner IS NULL AND status = 'waiting'
    AND EXISTS (SELECT FROM relight.inbox AS i WHERE i.run = r.key AND NOT i.consumed AND i.kind <> 'join');
UPDATE relight.runs AS r SET wake_at = r.updated_at, status = 'pending', hold = NULL, reason = ''
WHERE root_id IS NULL AND owner IS NULL AND status = 'paused'
    AND EXISTS (SELECT FROM relight.inbox AS i WHERE i.run = r.key AND NOT i.consumed AND i.kind IN ('resume', 'cancel'));
