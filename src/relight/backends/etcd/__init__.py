"""Leases in etcd (3.4 or newer). The store is elsewhere: etcd only knows which sessions are alive and own which runs.

Read in this order: `leases` (the port), `keys` (what is stored in etcd, and the transactions), `watch` (orphans,
pushed), `connection` (endpoints, deadlines, errors), `address` (URLs). Needs the extra `relight[etcd]`.
"""

from relight.backends.etcd.address import Tls, parse_etcd_url
from relight.backends.etcd.leases import EtcdLeases

__all__ = ["EtcdLeases", "Tls", "parse_etcd_url"]
