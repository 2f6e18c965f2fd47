"""Group commit: the only way in which the facts of a run reach the store.

Knows nothing of what a flow does. To be read in this order: writer (one per run: what its next commit holds, and who is told when
it is durable), recorder (one per engine: one transaction for many runs), batch_size (how many bytes that may carry),
broken_batches (a batch that the store cannot take is divided until the guilty commit is alone).
"""
