"""Public: what users and those who write backends test with.

A clock to advance (clock), crash points (crashpoints, with crashing_store, crashing_leases, trials, life and forkserver), a
ledger of what really happened (ledger), and conformance suites for stores and lease managers (conformance).
"""
