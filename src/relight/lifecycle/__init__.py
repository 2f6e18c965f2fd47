"""A run's life, to be read in this order: start, execute, steps, waits, record, checkpoint, hold, recover."""
