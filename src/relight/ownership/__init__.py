"""Whether this process may drive runs, and which processes live: its session, its heartbeats, and those of others.

Knows nothing of runs, flows and journals. To be read in this order: heartbeats (keeps this process's session alive, in a thread
of its own), lease_listener (who is told what became of the lease), liveness (who lives, by the lease manager and by the store).
"""
