"""The SQLite backend: one file, one writer thread, one reader thread.

Read in this order: `store` (the protocol, thin), `commit` and `writes` (the group commit), `write` and `read`
(everything else), `connection` (opening, migrations, errors), `thread`, `leases`. SQL: `queries.sql` and `migrations/`.

One file (and its `-wal` and `-shm`), one writer thread and one reader thread, each with its own connection; a whole job
per hop. WAL, `synchronous=FULL`.

    runs           a row per run, root or child; an integer `key` that the other tables use. Partial indexes cover
                   unfinished roots only (active, due, held), so that a million finished runs cost a restart nothing
    journal        (run, sequence) → event, with a checksum that is started with the sequence
    checkpoints    the latest state of a root, and the sequence that it stands for
    blobs          by SHA-256
    inbox          messages. Ids are never reused. Consumed messages stay for `dedup`, until the run ends or a
                   checkpoint drops all but the newest
    items          finished `foreach` items, and a row per `foreach` with its totals, for progress
    orchestrators  a row per session, rewritten by its heartbeats; or noted there, where etcd keeps the leases
    settings       who keeps the leases
    logs           what happened to runs, for people

- The commit is a handful of statements, however many runs are in it: one fence query for the roots that the process
  does not know, one multi-row statement per table. Between transactions it remembers the epochs and sequences of its
  roots. It trusts that memory only while `PRAGMA data_version` says, inside the transaction, that no other connection
  has written.
- Several processes: every write begins with BEGIN IMMEDIATE and waits for its turn, for up to two minutes. So "database
  is locked" never comes in the middle of a transaction.
- Closing does not wait as long: after two seconds, a job that still waits for its turn is broken off and writes
  nothing. A thread whose disk hangs is left behind a second later.
- News of other processes: an idle writer thread reads `data_version` every 0.1 s; a busy one notices it with its
  commits.
- Errors of SQLite become StoreUnavailableError (may pass) or, on opening, StoreFormatError (will not). After repeated
  errors the connection is made anew.
- `user_version` counts migrations, each applied in a transaction; `application_id` marks the file as Relight's. Newer,
  foreign and read-only files are refused.
- A new file is readable by its owner only, and SQLite gives the same permissions to `-wal` and `-shm`. An existing
  file's are left alone.
"""

from relight.backends.sqlite.leases import SqliteLeases
from relight.backends.sqlite.store import SqliteStore

__all__ = ["SqliteLeases", "SqliteStore"]
