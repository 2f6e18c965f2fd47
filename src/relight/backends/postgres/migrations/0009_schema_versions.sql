-- compatible since 0008
-- Two versions of Relight share a schema while one replaces the other. `compatible` says, for each migration, with which version of
-- the schema a process can still go on after it. NULL: only with that migration's own version. See model/formats.py.
ALTER TABLE relight.relight_schema ADD COLUMN compatible integer;
