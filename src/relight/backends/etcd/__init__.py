"""Leases in etcd (3.4 or newer). The store is elsewhere: etcd only knows which sessions are alive and own which runs.

Read in this order: `leases` (the port), `keys` (what is stored in etcd, and the transactions), `watch` (orphans,
pushed), `connection` (endpoints, deadlines, errors), `address` (URLs). Needs the extra `relight[etcd]`.

- Acquiring is a transaction that takes a key if no session has it, a hundred runs at a time.
- Every call has a deadline (at most three seconds, and three tenths of the ttl), shared between the members. It tries
  the next endpoint when one does not answer, and again during an election. A member that is cut off from its leader
  refuses, and does not answer from the past.
- A new leader gives every lease its whole ttl again.
- etcd has no clock that can be read: times are the seconds that are left of a lease, added to the store's clock.
- etcd forgets a session with its end. A process that saw the end remembers it, and lists the session as lapsed at that
  moment. The last heartbeat is in the store.
- gRPC loses a cancellation that comes together with the end of a call, so errors are looked at twice
  (`raise_if_cancelled`).
"""

from relight.backends.etcd.address import Tls, parse_etcd_url
from relight.backends.etcd.leases import EtcdLeases

__all__ = ["EtcdLeases", "Tls", "parse_etcd_url"]
