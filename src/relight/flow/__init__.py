"""Describing work: what users write, and how it is named, typed and fingerprinted.

This package does not know how runs are driven or stored. Read it in this order: definitions (`@flow`, `@step`),
function_checks (which functions can be one), operations (`sleep`, `wait_for`, `foreach`, …), retry, registry (names to
flows), scope (keys of operations), call (an operation that is not awaited yet), call_types (its type, for type
checkers), signatures, payloads with jsonform and survival (values to JSON and back), changed_arguments (which arguments
differ on replay), error_records (exceptions as data), fingerprint (whether code has changed), run_logger (log lines
that appear once), user_threads (threads that flow code starts), garbage (code that the garbage collector runs).
"""
