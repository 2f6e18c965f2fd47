"""Describing work: what users write, and how it is named, typed and fingerprinted.

Knows nothing of how anything is driven or stored. To be read in this order: definitions (`@flow`, `@step`), function_checks (what
can be one), operations (`sleep`, `wait_for`, `foreach`, …), retry, registry (names to flows), scope (keys of operations), call
(an operation that is not awaited yet), call_types (what a type checker sees of that), signatures, payloads with jsonform and
survival (values to JSON and back), changed_arguments (which one is another on replay), error_records (exceptions as data),
fingerprint (whether code has changed), run_logger (log lines that appear once), user_threads (threads that flow code starts),
garbage (code that the garbage collector runs).
"""
