-- A line that is there already is not added again: a process that gets no answer sends the same commit again. A commit without
-- entries cannot be recognised by its entries.
CREATE OR REPLACE FUNCTION relight.add_log(p_log relight.new_line[]) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(1382370420, 'relight.log'::regclass::oid::integer);
    INSERT INTO relight.log (run, stream, token, at, text)
    SELECT r.key, l.stream, l.token, l.at, l.text
    FROM unnest(p_log) WITH ORDINALITY AS l JOIN relight.runs AS r ON r.id = l.run_id
    WHERE NOT EXISTS (SELECT FROM (SELECT k.at, k.token, k.text FROM relight.log AS k
            WHERE k.run = r.key AND k.stream = l.stream ORDER BY k.id DESC LIMIT 1000) AS there
        WHERE there.at = l.at AND there.token = l.token AND there.text = l.text)
    ORDER BY l.ordinality;
END $$;
