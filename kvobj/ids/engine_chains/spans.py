"""Cuts a token sequence into the blocks that engines hash."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from kvobj.errors import InvalidTokensError
from kvobj.ids.chunk_ids import TOKEN_BYTES


def blocks(tokens: Sequence[int], block_tokens: int, *, partial_last: bool = False) -> Iterator[tuple[int, ...]]:
    """Blocks in order; what does not fill the last one is left out, or is a shorter one with `partial_last`."""
    if block_tokens < 1:
        raise ValueError("a block has at least one token")
    end = len(tokens) if partial_last else len(tokens) - len(tokens) % block_tokens
    for at in range(0, end, block_tokens):
        yield tuple(tokens[at : at + block_tokens])


def tokens_of(raw: bytes) -> tuple[int, ...]:
    """The ids in little-endian u32 bytes, as `chunk_ids.token_bytes` makes them."""
    return struct.unpack(f"<{len(raw) // TOKEN_BYTES}I", raw)


def packed(layout: str, tokens: Sequence[int]) -> bytes:
    """Tokens as numbers of a `struct` layout. `InvalidTokensError` for one that does not fit."""
    try:
        return struct.pack(f"{layout[0]}{len(tokens)}{layout[1]}", *tokens)
    except struct.error as error:
        raise InvalidTokensError("a token id does not fit the engine's encoding", layout=layout) from error
