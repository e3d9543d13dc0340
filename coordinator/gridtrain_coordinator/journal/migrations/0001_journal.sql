-- What the coordinator must not forget.  Append-only: a journalled verdict never changes (commit rule 7).

CREATE TABLE identity (            -- the coordinator's key: workers recognise it after a restart
    only INTEGER PRIMARY KEY CHECK (only = 1),
    peer BLOB NOT NULL CHECK (length(peer) = 32)
);

CREATE TABLE journal (
    id   INTEGER PRIMARY KEY,      -- the order in which things became durable
    at   TEXT NOT NULL,            -- wall clock, UTC, for people only
    kind TEXT NOT NULL CHECK (kind IN ('term', 'run', 'generation', 'state')),
    body TEXT NOT NULL CHECK (json_valid(body))
);

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
