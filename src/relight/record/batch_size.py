"""How many bytes one transaction may carry."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.ports.store import Commit, Store

# Payload per transaction; the last root may exceed it. PostgreSQL accepts no message over 1 GB.
MAX_BATCH_BYTES = 64_000_000


def fitting(sizes: Sequence[int], size: int) -> tuple[int, int]:
    """How many of these sizes, from the first on, use up `size` bytes; and how many bytes are left."""
    if sum(sizes) < size:  # nearly always
        return len(sizes), size - sum(sizes)
    count = 0
    while count < len(sizes) and size > 0:
        size -= sizes[count]
        count += 1
    return count, size


async def put_large_blobs(store: Store, commits: Sequence[Commit]) -> None:
    """The next commit of one run alone may be larger than a batch may be: a hundred branches, each with a large result.
    Then its blobs are stored first, one by one. If this process dies before the commit, nothing refers to them."""
    for commit in commits:
        if commit.extras.blobs and sum(map(len, commit.extras.blobs.values())) > MAX_BATCH_BYTES:
            for data in commit.extras.blobs.values():
                await store.put_blob(data)
            commit.extras = msgspec.structs.replace(commit.extras, blobs={})
