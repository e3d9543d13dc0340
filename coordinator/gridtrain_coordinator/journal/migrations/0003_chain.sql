-- Each entry carries a digest over itself and the digest before it: a flipped bit does not become a verdict.
-- Entries of older versions have none, and are taken as they are.

ALTER TABLE journal ADD COLUMN chain BLOB CHECK (chain IS NULL OR length(chain) = 16);
