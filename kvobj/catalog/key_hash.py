"""The hash that stands for an S3 key in the tables that look chunks up beside their rows: children, pins, removals."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from blake3 import blake3

KEY_HASH_BYTES: Final = 16
_REMEMBERED: Final = 8192
"""A removal asks for a key's hash five times, and for that of its parent, which is next. At most 10 MB with the longest keys."""


@lru_cache(_REMEMBERED)
def key_hash(key: bytes) -> bytes:
    """BLAKE3 of a key's UTF-8, the first 16 bytes. Any thread."""
    return blake3(key).digest(KEY_HASH_BYTES)
