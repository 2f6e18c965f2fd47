"""Which runs are in memory in this process: how they come in, how they are woken, how messages reach them, who waits for them.

Knows nothing of how a flow goes on, and of which backend it is on. To be read in this order: start (a run is accepted), fork
(with another run's past), orchestrator (how runs come in and leave), memory (which are here, and the room for more), waking (what
makes it look at the store, and what it takes up then), delivery (messages), uncertain_runs (runs that may be ours in the store),
claimed_elsewhere (runs here that others have claimed), watchers and row_reads (who waits for news of a run), health (how this
process is).
"""
