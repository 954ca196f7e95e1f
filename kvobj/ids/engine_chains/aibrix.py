"""AIBrix's key builders (`aibrix_kvcache/l2/key_builders`), with the 128-bit hash as an argument.

AIBrix hashes with FarmHash-128, which no maintained Python package offers for all our platforms, so none is depended on here:
who has one passes it. Token ids are hashed as native 32-bit numbers, which is little-endian wherever it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.ids.engine_chains.spans import blocks, packed

Hash128 = Callable[[bytes], int]

_PRIME: Final = 0x1000000000000000000013B
_MASK: Final = 2**128 - 1
_KEY_BYTES: Final = 16


def md5_128(content: bytes) -> int:
    """The hash of AIBrix's own tests."""
    return int.from_bytes(hashlib.md5(content, usedforsecurity=False).digest(), "big")


def combined(parent: int, block: int) -> int:
    """The rolling step: a block's hash upon that of what lies before it."""
    mixed = (parent ^ (block + _PRIME + (parent << 24) + (parent >> 4))) & _MASK
    return mixed * _PRIME & _MASK


def rolling_keys(tokens: Sequence[int], *, block_tokens: int, hash_128: Hash128) -> list[bytes]:
    """ROLLING_HASH: each block hashed for itself and combined with its parent; 16 bytes each."""
    keys: list[bytes] = []
    parent: int | None = None
    for block in blocks(tokens, block_tokens):
        hashed = hash_128(packed("<I", block))
        parent = hashed if parent is None else combined(parent, hashed)
        keys.append(parent.to_bytes(_KEY_BYTES, "big"))
    return keys


def simple_keys(tokens: Sequence[int], *, block_tokens: int, hash_128: Hash128) -> list[bytes]:
    """SIMPLE_HASH: all tokens up to the block's end; 16 bytes each."""
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    return [hash_128(packed("<I", tokens[:end])).to_bytes(_KEY_BYTES, "big") for end in ends]
