"""Describing work: what users write, and how it is named, typed and fingerprinted.

Knows nothing of how anything is driven or stored. To be read in this order: definitions (`@flow`, `@step`), operations (`sleep`,
`wait_for`, `foreach`, …), retry, registry (names to flows), scope (the keys of operations), call (an operation that is not
awaited yet), call_types (what a type checker sees of that), signatures, payloads with jsonform and survival (values to JSON and
back), error_records (exceptions as data), fingerprint (whether code has changed), user_threads (threads that flow code starts),
garbage (code that the garbage collector runs).
"""
