-- compatible since 0004
-- Two versions of Relight share a file while one replaces the other: with which version of the schema a process can go on after
-- each migration. See model/formats.py.
CREATE TABLE schema_versions (
    version    INTEGER PRIMARY KEY,
    compatible INTEGER NOT NULL
) STRICT;
