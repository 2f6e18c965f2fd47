"""Group commit: the only way in which the facts of a run reach the store.

This package knows nothing of what a flow does. Read it in this order: writer (one per run: its next commit, and what
the flow is told when that is durable), recorder (one per engine: which drafts go together), lane (one transaction
after the other), batch_size (how many bytes a transaction may carry), broken_batches (a batch that the store cannot
write is divided until the failing commit is alone).
"""
