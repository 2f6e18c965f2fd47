"""The PostgreSQL backend: one schema of a database that many processes share.

Read in this order: `store` (the protocol, thin), `commit` and `batch` (the group commit), `migrations/0002_commit.sql`
(its other half), `read` (listings and journals), `options` (of a url), `pool` and `connection` (sessions, errors), `schema`
(migrations), `listen`; `leases` is separate from the others. SQL: `queries.sql` and `migrations/`.

The tables are those of SQLite (see `backends/sqlite`), and one more: `heads`, a narrow row per root with its epoch, its
last sequence and whether it has ended. A commit's fence compares and advances this row, so that a step's commit does
not rewrite the run's wide row with its many indexes.

- Unknown outcomes are resolved by reading. A refused commit is looked up: if the journal has exactly its entries at that
  place, the commit was written and only the answer was lost; it is reported as committed and not applied again. The
  look-up takes a row lock (FOR KEY SHARE), so that it waits for the standby as the lost commit had to: what is visible
  on the primary is not yet durable.
- Claim against commit. Isolation is READ COMMITTED, set by each session. Both update the root's row in `heads`. The
  second waits for the first and then compares the newest version of the row, not that of its snapshot. A commit that
  comes after a claim finds another epoch and writes nothing. A claim that comes after a commit raises the epoch over a
  journal that has the commit, and reads the journal after that. So nothing appears under the old epoch once a claim has
  returned.
- Deadlocks are avoided by order: new ids, then heads by key, then the inbox lock, at once as strong as it will be
  needed, then the rest, the log's lock last. Those that remain, and serialization failures, are tried again, five times
  in all.
- Message ids rise in the order of commits. A transaction that adds messages keeps an advisory lock to its end, so a
  reader that has seen message 7 has seen message 6. A transaction that ends a run shares that lock: a message is either
  there and dropped with the inbox, or its writer sees that the run has ended.
- Failover. Each of several addresses gets its share of the time, and only a server that takes writes is used, for reads
  as well: a standby answers from the past. A connection that finds its server read-only, or silent, closes all others
  to it. The keys of roots are forgotten with every new connection: after a lossy failover they may be another run's.
- Every statement has a deadline (30 s; for leases a third of the ttl). A connection whose statement was interrupted,
  timed out or failed in a way that is not the statement's own is closed.
- `synchronous_commit` is at least `on`: where the database has it off, the session turns it on.
- Connections, resources, operator intervention, read-only servers, disk errors and lock timeouts become
  StoreUnavailableError (may pass). On opening, a refused login, a missing database, and a schema that is another
  program's, newer, or older without `migrate` become StoreFormatError. Anything else is a bug, and is shown as one.
- Migrations are numbered files, applied in one transaction under an advisory lock: of ten processes that start at once
  one migrates.
- `now()` of the server is read at opening and every minute, and the engine's clock follows it (`StoreClock`).
"""

from relight.backends.postgres.leases import PostgresLeases
from relight.backends.postgres.store import PostgresStore

__all__ = ["PostgresLeases", "PostgresStore"]
