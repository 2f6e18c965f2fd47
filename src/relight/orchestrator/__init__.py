"""Which runs are in memory in this process: how they come in, are woken, receive messages, and who waits for their end.

This package knows nothing of how a flow goes on, nor which backend stores the runs. Read it in this order: start (a run
is accepted), fork (a run that begins with another run's past), orchestrator (how runs come in and leave), memory (which
runs are here, and the room for more), waking (when the orchestrator reads the store, and which runs it takes up then),
delivery (messages), uncertain_runs (runs that this process may own), claimed_elsewhere (runs here that other processes
have claimed), watchers and row_reads (callers that wait for news of a run), health (the state of this process).
"""
