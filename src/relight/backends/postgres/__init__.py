"""The PostgreSQL backend: one schema of a database that many processes share.

Read in this order: `store` (the protocol, thin), `commit` and `batch` (the group commit), `migrations/0002_commit.sql` (its
other half), `read` (listings and journals), `pool` and `connection` (sessions, errors), `schema` (migrations), `listen`;
`leases` is separate from the others. SQL: `queries.sql` and `migrations/`.
"""

from relight.backends.postgres.leases import PostgresLeases
from relight.backends.postgres.store import PostgresStore

__all__ = ["PostgresLeases", "PostgresStore"]
