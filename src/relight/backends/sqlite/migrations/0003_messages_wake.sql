-- A message makes a run without an owner due, in the transaction that puts it into the inbox: see ports/store.py. This is a
-- trigger because several statements add messages. If one of them forgot to make the run due, the run would wait for ever.
CREATE TRIGGER inbox_wakes AFTER INSERT ON inbox WHEN NEW.kind <> 'join'
BEGIN
    UPDATE runs SET wake_at = min(coalesce(wake_at, NEW.at), NEW.at), updated_at = max(updated_at, NEW.at),
        status = iif(status = 'paused', 'pending', status), hold = iif(status = 'paused', NULL, hold),
        reason = iif(status = 'paused', '', reason)
    WHERE key = NEW.run AND root_id IS NULL AND owner IS NULL
        AND (status IN ('waiting', 'pending') OR (status = 'paused' AND NEW.kind IN ('resume', 'cancel')));
END;

-- Messages posted before this migration. updated_at lies in the past on every clock.
UPDATE runs SET wake_at = min(coalesce(wake_at, updated_at), updated_at)
WHERE root_id IS NULL AND owner IS NULL AND status = 'waiting'
    AND EXISTS (SELECT 1 FROM inbox WHERE inbox.run = runs.key AND consumed = 0 AND kind <> 'join');
UPDATE runs SET wake_at = updated_at, status = 'pending', hold = NULL, reason = ''
WHERE root_id IS NULL AND owner IS NULL AND status = 'paused'
    AND EXISTS (SELECT 1 FROM inbox WHERE inbox.run = runs.key AND consumed = 0 AND kind IN ('resume', 'cancel'));
