"""The llm-d indexer's block keys (`pkg/kvcache/kvblock/token_processor.go`).

    key = FNV-1a-64(canonical CBOR of [parent, tokens, extra])      root = key of [FNV-1a-64(seed), null, model name]

64 bits: aliases for match and events, never storage keys. The indexer's keys are its own, whatever the engine's hashes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvobj.ids.engine_chains.canonical_cbor import CborValue, canonical_cbor
from kvobj.ids.engine_chains.spans import blocks

BLOCK_TOKENS: Final = 16
_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MASK: Final = 2**64 - 1


def fnv1a_64(content: bytes) -> int:
    """FNV-1a, 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/)."""
    state = _FNV_BASIS
    for byte in content:
        state = (state ^ byte) * _FNV_PRIME & _MASK
    return state


def root_key(model: str, *, seed: str = "") -> int:
    """The parent of first blocks of a model."""
    return _key(fnv1a_64(seed.encode()), None, model)


def block_keys(
    tokens: Sequence[int],
    *,
    model: str,
    seed: str = "",
    block_tokens: int = BLOCK_TOKENS,
    multimodal: Sequence[Sequence[str] | None] = (),
) -> list[int]:
    """Keys of all full blocks. `multimodal` has each block's list of hashes of what lies in it, None for text only."""
    parent = root_key(model, seed=seed)
    keys: list[int] = []
    for number, block in enumerate(blocks(tokens, block_tokens)):
        extra = multimodal[number] if number < len(multimodal) else None
        parent = _key(parent, block, extra)
        keys.append(parent)
    return keys


def _key(parent: int, tokens: Sequence[int] | None, extra: CborValue) -> int:
    return fnv1a_64(canonical_cbor((parent, tokens, extra)))
