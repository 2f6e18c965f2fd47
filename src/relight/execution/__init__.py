"""Where code runs: the event loop of one run, the tasks of step bodies, and the threads of sync code.

Knows nothing of journals, stores and leases. To be read in this order: run_loop (the event loop that a flow lives on),
running_loop (which loop is the running one), refused_calls (what a flow may not do on its loop), body_tasks (step bodies on the
program's loop), thread_pool (threads for sync code), blocking_watch (flow code that blocks everybody), background_tasks (tasks
that nobody awaits), idle (nothing can happen before time passes).
"""
