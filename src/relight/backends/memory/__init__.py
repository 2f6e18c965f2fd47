"""The memory backend: plain dicts, for tests and for flows that need not outlive the process.

Read in this order: `rows` (a tree's journal and inbox), `data` (all the data, and the fenced write), `store` (the
protocol, thin), `leases`.
"""

from relight.backends.memory.leases import MemoryLeases
from relight.backends.memory.store import MemoryStore

__all__ = ["MemoryLeases", "MemoryStore"]
