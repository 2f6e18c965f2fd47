-- compatible since 0008
-- Two versions of Relight share a schema while one replaces the other: with which version of it a process can go on after each
-- migration. NULL: only with that one. See model/formats.py.
ALTER TABLE relight.relight_schema ADD COLUMN compatible integer;
