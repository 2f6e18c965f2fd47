-- compatible since 0004
-- Two versions of Relight share a file while one replaces the other. `compatible` says, for each migration, with which version of
-- the schema a process can still go on after it. See model/formats.py.
CREATE TABLE schema_versions (
    version    INTEGER PRIMARY KEY,
    compatible INTEGER NOT NULL
) STRICT;
