"""Where code runs: the event loop of one run, the tasks of step bodies, and the threads of sync code.

This package knows nothing of journals, stores and leases. Read it in this order: run_loop (the event loop that a flow
lives on), running_loop (which loop is the running one), refused_calls (what a flow must not do on its loop), body_tasks
(step bodies on the program's loop), thread_pool (threads for sync code), blocking_watch (flow code that blocks the
process), background_tasks (tasks that nothing awaits), idle (nothing can happen before time passes).
"""
