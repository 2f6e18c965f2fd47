"""Public: tools for the tests of users and of authors of backends.

A clock to advance (clock), crash points (crashpoints, with crashing_store, crashing_leases, trials, life and forkserver), a
ledger of effects (ledger), and conformance suites for stores and lease managers (conformance).
"""
