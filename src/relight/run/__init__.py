"""One run in memory: from the first call of its flow until the run ends or leaves memory.

This package knows nothing of other runs in memory, of how a run comes into memory, or of who owns which run. Read it in
this order:

    live_run        LiveRun: in which order the flow goes on, live and on replay alike; services: what a run is given
    phase           how far a run has come: driven, leaving memory, ended
    execute         calls the flow function, retries it, times it out, ends the run; arguments: a run's id and input
    requests        the operations that flow code may ask for; operation: one of them, until its outcome is told
    steps           steps, as the flow sees them; step_bodies: attempts and back-off; long_steps: announces long steps
    waits           waits for a time or a message; alarms: the times; inbox: how the run receives messages
    fanout          foreach and parallel; children, spawned: child runs and spawned runs; values: now, random, uuid
    sync_flows      flows that are plain functions, in threads
    recording       how operations write and read the journal; checkpoint: folds a long journal
    replaying       the flow is told the outcomes of its journal; replay_order: in which order
    at_rest         the flow has done all it can: blocked, deadlocked, or spinning
    cancel          cancelling; leaving: parking, pausing, holding, and the end; parking: when a run that waits is parked;
                    next_generation: continue_as
"""
