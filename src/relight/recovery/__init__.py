"""Recovery: finds runs whose owner has died, claims, restores and resumes them, and explains what it does.

This package decides nothing by itself: `model/decisions.py` does, from facts. Read it in this order: orphans (finds the
runs of dead owners), take_up (lease, claim, restore, decide, resume), run_leases, memory (what recovery needs of the
orchestrator), facts (what decisions are made from), trials (suspects are tried apart), unreadable (journals that cannot be read),
upgrades (runs of a newer version), plan, explain, resume (by hand).
"""
