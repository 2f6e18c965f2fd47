"""What the error of a failed write adds, for SQLite and PostgreSQL. The error of a read has nothing of the kind to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relight.errors import StoreUnavailableError

NOTHING_KNOWN = "nothing of this operation is known to be written"


@contextmanager
def writing() -> Iterator[None]:
    """Around a write. It was perhaps written although it failed: the answer may be lost, or the sync of the disk."""
    try:
        yield
    except StoreUnavailableError as error:
        error.args = (f"{error}; {NOTHING_KNOWN}",)
        raise
