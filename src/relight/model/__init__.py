"""Pure data and rules, no I/O.

Knows nothing of what is above it. To be read in this order: run (a run's row, its messages), journal (events), tree (the fold
over them), outcomes (what that keeps of an operation), replay (reading and writing what the fold makes), operations (how people
are shown that), decisions (what recovery does, and why), crashes (deaths without progress), lease (sessions), sharing (who takes
how many of what is due), formats (how two versions share a store), blob, text (texts that every store keeps).
"""
