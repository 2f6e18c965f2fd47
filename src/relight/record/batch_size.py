"""How many bytes one transaction may carry."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.ports.store import Commit, Store

# Payload per transaction, by at most one root more: PostgreSQL takes no message over 1 GB.
MAX_BATCH_BYTES = 64_000_000


def fitting(sizes: Sequence[int], size: int) -> tuple[int, int]:
    """How many of these, from the first on, until `size` bytes are used up; and how many bytes are left then."""
    if sum(sizes) < size:  # nearly always
        return len(sizes), size - sum(sizes)
    count = 0
    while count < len(sizes) and size > 0:
        size -= sizes[count]
        count += 1
    return count, size


async def put_large_blobs(store: Store, commits: Sequence[Commit]) -> None:
    """One run alone may have more for its next commit than a batch may hold: a hundred branches, each with a large result. Its
    blobs go ahead then, one by one. Should this process die before the commit, they are stored and nobody refers to them."""
    for commit in commits:
        if commit.extras.blobs and sum(map(len, commit.extras.blobs.values())) > MAX_BATCH_BYTES:
            for data in commit.extras.blobs.values():
                await store.put_blob(data)
            commit.extras = msgspec.structs.replace(commit.extras, blobs={})
