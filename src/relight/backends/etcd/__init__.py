"""Leases in etcd. The store stays where it is: etcd only knows who is alive and who holds which run.

Read in this order: `leases` (the port), `keys` (what stands in etcd, and the transactions), `watch` (orphans, pushed),
`connection` (endpoints, deadlines, errors), `address` (URLs). Needs etcd 3.4 or newer and the extra `relight[etcd]`.
"""

from relight.backends.etcd.address import Tls, parse_etcd_url
from relight.backends.etcd.leases import EtcdLeases

__all__ = ["EtcdLeases", "Tls", "parse_etcd_url"]
