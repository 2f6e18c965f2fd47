"""One run in memory, from its flow's first call to its end, or until it leaves memory.

Knows nothing of other runs in memory, of how it came there, or of who owns what. To be read in this order:

    live_run        LiveRun: in which order the flow goes on, live and on replay alike; services: what it is given
    phase           how far a run has come: driven, leaving memory, ended
    execute         the flow function: called, retried, timed out, ended; arguments: what it is called with
    requests        what flow code may ask of its run; operation: what it has asked for, until it is told the outcome
    steps           step_bodies: attempts and back-off; long_steps: those that take long are announced
    waits           everything that waits for a time or a message; alarms: its times; inbox: how the run hears messages
    fanout          foreach and parallel; children, spawned: child runs and spawned runs; values: now, random, uuid
    sync_flows      flows that are plain functions, in threads
    recording       what operations do with the journal; checkpoint: a long journal is folded
    replaying       the flow is told what its journal holds; replay_order: in which order
    at_rest         the flow has done all it can: blocked, deadlocked, or spinning
    cancel          cancelling; leaving: parking, pausing, holding, and the end; next_generation: continue_as
"""
