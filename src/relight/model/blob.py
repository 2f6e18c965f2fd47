"""How blobs are addressed: by the SHA-256 of their content, so that storing twice stores once."""

from __future__ import annotations

import hashlib

from relight.errors import CorruptionError


def blob_digest(data: bytes) -> str:
    """The address of this content."""
    return hashlib.sha256(data).hexdigest()


def check_blob(data: bytes | None, digest: str, root_id: str) -> bytes:
    """Return `data` if its content fits this address. Raises CorruptionError if it does not, or is missing."""
    if data is not None and blob_digest(data) == digest:
        return data
    what = "is missing from the store" if data is None else "does not match its digest: the store was damaged"
    raise CorruptionError(
        f"blob {digest} of run {root_id!r} {what}; restore it from a backup", root_id=root_id, sequence=0
    )
