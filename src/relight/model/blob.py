"""How blobs are addressed: by the SHA-256 of their content, so that storing twice stores once."""

from __future__ import annotations

import hashlib


def blob_digest(data: bytes) -> str:
    """The address of this content."""
    return hashlib.sha256(data).hexdigest()
