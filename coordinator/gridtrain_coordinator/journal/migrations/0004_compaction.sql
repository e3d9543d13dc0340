-- A compacted journal begins with an entry 0 of the kind 'compacted' (decision 0100).
-- SQLite cannot change a CHECK, so the table is copied: order, times, bodies and digests stay as they are.

DROP VIEW terms;
DROP VIEW generations;
DROP TRIGGER journal_is_not_changed;
DROP TRIGGER journal_is_not_shortened;
DROP INDEX one_verdict_a_generation;
ALTER TABLE journal RENAME TO journal_of_version_3;

CREATE TABLE journal (
    id    INTEGER PRIMARY KEY,     -- the order in which the entries became durable
    at    TEXT NOT NULL,           -- wall clock, UTC, for people only
    kind  TEXT NOT NULL CHECK (kind IN (
        'term', 'run', 'generation', 'state',
        'invitation', 'enrolled', 'expelled', 'pardoned', 'strike',
        'compacted'
    )),
    body  TEXT NOT NULL CHECK (json_valid(body)),
    chain BLOB CHECK (chain IS NULL OR length(chain) = 16)
);
INSERT INTO journal (id, at, kind, body, chain)
    SELECT id, at, kind, body, chain FROM journal_of_version_3 ORDER BY id;
DROP TABLE journal_of_version_3;

CREATE UNIQUE INDEX one_verdict_a_generation
    ON journal (json_extract(body, '$.term'), json_extract(body, '$.generation'))
    WHERE kind = 'generation';

CREATE TRIGGER journal_is_not_changed BEFORE UPDATE ON journal
    BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER journal_is_not_shortened BEFORE DELETE ON journal
    BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;

CREATE VIEW terms AS
    SELECT json_extract(body, '$.term') AS term, min(at) AS at
    FROM journal WHERE kind = 'term' GROUP BY 1;

CREATE VIEW generations AS
    SELECT json_extract(body, '$.term')       AS term,
           json_extract(body, '$.generation') AS generation,
           json_extract(body, '$.step')       AS step,
           json_extract(body, '$.verdict')    AS verdict,
           json_extract(body, '$.digest')     AS digest,
           json_extract(body, '$.members')    AS members,
           json_extract(body, '$.ledger')     AS ledger,
           at
    FROM journal WHERE kind = 'generation';
