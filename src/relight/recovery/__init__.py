"""Runs whose owner has died, or that are due: found, claimed, restored, judged and resumed; and what people ask about that.

Decides nothing by itself: `model/decisions.py` does, from facts. To be read in this order: orphans (find what died), take_up
(lease, claim, restore, decide, resume), memory (what this needs of the orchestrator), facts (what decisions are made from),
trials (suspects are tried apart), unreadable (journals that cannot be read), upgrades (runs of a newer version), plan, explain,
resume (by hand).
"""
