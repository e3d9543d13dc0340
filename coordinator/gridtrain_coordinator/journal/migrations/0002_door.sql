-- Who may come in: invitations, members' keys, bans and strikes become entries of the journal.
-- SQLite cannot change a CHECK, so the table is copied: order, times and bodies stay as they are.

DROP VIEW terms;
DROP VIEW generations;
DROP TRIGGER journal_is_not_changed;
DROP TRIGGER journal_is_not_shortened;
DROP INDEX one_verdict_a_generation;
ALTER TABLE journal RENAME TO journal_of_version_1;

CREATE TABLE journal (
    id   INTEGER PRIMARY KEY,      -- the order in which things became durable
    at   TEXT NOT NULL,            -- wall clock, UTC, for people only
    kind TEXT NOT NULL CHECK (kind IN (
        'term', 'run', 'generation', 'state',
        'invitation', 'enrolled', 'expelled', 'pardoned', 'strike'
    )),
    body TEXT NOT NULL CHECK (json_valid(body))
);
INSERT INTO journal (id, at, kind, body) SELECT id, at, kind, body FROM journal_of_version_1 ORDER BY id;
DROP TABLE journal_of_version_1;

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

-- The identity of version 1 was 32 random bytes without a secret: nobody can prove to be it.
DROP TABLE identity;

CREATE TABLE coordinator (         -- its PUBLIC key; the secret one lies in coordinator.key
    only INTEGER PRIMARY KEY CHECK (only = 1),
    key  BLOB NOT NULL CHECK (length(key) = 32)
);
CREATE TRIGGER key_is_not_changed BEFORE UPDATE ON coordinator
    BEGIN SELECT RAISE(ABORT, 'workers know the coordinator by its key'); END;
CREATE TRIGGER key_is_not_removed BEFORE DELETE ON coordinator
    BEGIN SELECT RAISE(ABORT, 'workers know the coordinator by its key'); END;
