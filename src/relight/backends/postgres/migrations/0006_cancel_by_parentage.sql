-- Cancelling a root reaches each unfinished root that descends from it by parent_id: spawned by it, by a child run under it, or by
-- such a spawned run, also if that has ended. Before, it went by the prefix of ids: whether it reached a grandchild depended on
-- how the ids were given.
CREATE OR REPLACE FUNCTION relight.add_messages(p_messages relight.new_message[], p_cancels relight.new_cancel[])
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_told integer;
    v_cancelled integer := 0;
BEGIN
    PERFORM relight.lock_inbox(true);
    INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
    SELECT h.run, m.kind, m.name, m.payload, m.payload_blob, m.dedup, m.at
    FROM unnest(p_messages) WITH ORDINALITY AS m
    JOIN relight.runs AS r ON r.id = m.run_id JOIN relight.heads AS h ON h.run = r.key AND h.ended = 0
    ORDER BY m.ordinality
    ON CONFLICT (run, dedup) DO NOTHING;
    GET DIAGNOSTICS v_told = ROW_COUNT;
    IF cardinality(p_cancels) > 0 THEN
        INSERT INTO relight.inbox (run, kind, name, payload, payload_blob, dedup, at)
        SELECT h.run, 'cancel', '', c.payload, '', 'cancel', c.at
        FROM unnest(p_cancels) AS c
        CROSS JOIN LATERAL (
            WITH RECURSIVE family (key, id) AS (
                SELECT r.key, r.id FROM relight.runs AS r WHERE r.parent_id = c.root_id
                UNION
                SELECT r.key, r.id FROM family AS f JOIN relight.runs AS r ON r.parent_id = f.id
            )
            SELECT key FROM family
        ) AS r
        JOIN relight.heads AS h ON h.run = r.key AND h.ended = 0
        ON CONFLICT (run, dedup) DO NOTHING;
        GET DIAGNOSTICS v_cancelled = ROW_COUNT;
    END IF;
    RETURN CASE WHEN v_told + v_cancelled > 0 THEN 2 ELSE 0 END;
END $$;
