"""The SQLite backend: one file, one writer thread, one reader thread.

Read in this order: `store` (the protocol, thin), `commit` and `writes` (the group commit), `write` and `read`
(everything else), `connection` (opening, migrations, errors), `thread`, `leases`. SQL: `queries.sql` and `migrations/`.
"""

from relight.backends.sqlite.leases import SqliteLeases
from relight.backends.sqlite.store import SqliteStore

__all__ = ["SqliteLeases", "SqliteStore"]
