"""Whether this process may drive runs, and which processes live: its session, its heartbeats, and those of others.

This package knows nothing of runs, flows and journals. Read it in this order: heartbeats (keeps this process's session
alive, in a thread of its own), lease_listener (what the heartbeat thread reports), liveness (which processes are alive,
according to the lease manager and the store).
"""
