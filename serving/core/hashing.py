"""Names of cached content: a digest that covers a page and everything before it, and the store's keys.

Everything that changes the bytes of a page or a state is in the root, so equal digests mean equal bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from serving.core.types import EntryKind

_DIGEST_SIZE = 32


def root_digest(identity: str, cache_salt: str) -> bytes:
    """Start of a chain: `identity` of the device's bytes, and the salt that keeps tenants apart."""
    parts = (identity.encode(), cache_salt.encode())
    # Lengths first: no two pairs may spell the same bytes.
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE, person=b"k3jax root").digest()


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of the sequence that ends with the full page `token_ids`, after the sequence of `parent`."""
    data = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hashlib.blake2b(parent + data, digest_size=_DIGEST_SIZE).digest()


def store_key(digest: bytes, kind: EntryKind) -> bytes:
    """Key in the state store of the page that ends the sequence `digest`, or of the state after it."""
    return hashlib.blake2b(digest, digest_size=_DIGEST_SIZE, person=kind.encode()).digest()
