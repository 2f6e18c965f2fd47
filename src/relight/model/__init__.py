"""Pure data and rules, no I/O.

This package knows nothing of the packages above it. Read it in this order: run (a run's row, its messages), journal
(events), tree (the fold over the events), outcomes (what the fold keeps of an operation), replay (reading and writing
the folded state), operations (how people are shown that state), decisions (what recovery does, and why), crashes
(deaths without progress), lease (sessions), sharing (how many due runs each orchestrator claims), formats (how two
versions share a store), blob, text (texts that every store keeps).
"""
