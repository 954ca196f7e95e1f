"""Dynamo's block, sequence and lineage hashes (`lib/tokens/src/lib.rs`, `lib/kv-hashing/src/salt.rs`).

    salt hash  = XXH3-64(compact JSON of salt and adapter, each left out where empty)
    block hash = XXH3-64(tokens as little-endian u32, seed: salt hash)
    sequence   = block hash at position 0; then XXH3-64(parent's sequence ‖ block hash, both u64 little-endian)

64 bits: aliases for match and events, never storage keys. Needs the extra `engines`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.ids.engine_chains.spans import blocks, packed
from kvobj.ids.engine_chains.xxh3 import xxh3_64

_PAIR: Final = struct.Struct("<QQ")
_TOKEN_FRAME: Final = struct.Struct("<BIQ")
_TAG_TOKEN: Final = 0
_TAG_PLACEHOLDER: Final = 1
_POSITIONS: Final = 2**24
_LAYOUTS: Final = ((2**8, 54), (2**16, 46), (_POSITIONS, 38))
"""By mode: positions below this, and the bits that are left for the parent's sequence hash."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block's hashes. `lineage` has 128 bits: mode, position, sequence hash, low bits of the parent's sequence hash."""

    block_hash: int
    sequence_hash: int
    lineage: int


@dataclass(frozen=True, slots=True)
class Run:
    """A multimodal run: `length` placeholder slots from `offset` on, counted in tokens of the whole sequence."""

    hash: int
    offset: int
    length: int


def salt_hash(*, salt: str = "", adapter: str = "") -> int:
    """The seed of a request's block hashes."""
    parts = {"salt": salt, "lora_name": adapter}
    document = {name: text for name, text in parts.items() if text}
    return xxh3_64(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


def hashed_blocks(
    tokens: Sequence[int],
    *,
    block_tokens: int,
    salt: int,
    runs: Sequence[Run] = (),
    steps_are_salted: bool = False,
) -> list[Block]:
    """All full blocks. `salt` is a `salt_hash`; `runs` in order of offset, not overlapping. Releases before the salt was taken
    out of the steps seed each sequence step with it: `steps_are_salted`."""
    hashed: list[Block] = []
    for position, block in enumerate(blocks(tokens, block_tokens)):
        block_hash = xxh3_64(_block_bytes(block, position * block_tokens, runs), salt)
        if not hashed:
            sequence, parent = block_hash, 0
        else:
            parent = hashed[-1].sequence_hash
            sequence = xxh3_64(_PAIR.pack(parent, block_hash), salt if steps_are_salted else 0)
        hashed.append(Block(block_hash, sequence, lineage_hash(position, sequence, parent)))
    return hashed


def lineage_hash(position: int, sequence: int, parent_sequence: int) -> int:
    """The positional lineage hash. ValueError from position 2^24 on."""
    for mode, (positions, parent_bits) in enumerate(_LAYOUTS):
        if position < positions:
            fragment = parent_sequence & ((1 << parent_bits) - 1)
            return mode << 126 | position << (64 + parent_bits) | sequence << parent_bits | fragment
    raise ValueError(f"position {position} is past the last that a lineage hash has room for")


def _block_bytes(block: Sequence[int], offset: int, runs: Sequence[Run]) -> bytes:
    """Bare tokens where no run touches the block, else a frame of 13 bytes for each slot."""
    touching = [run for run in runs if run.offset < offset + len(block) and run.offset + run.length > offset]
    if not touching:
        return packed("<I", block)
    frames: list[bytes] = []
    for place, token in enumerate(block, start=offset):
        run = next((run for run in touching if run.offset <= place < run.offset + run.length), None)
        if run is None:
            frames.append(_TOKEN_FRAME.pack(_TAG_TOKEN, token, 0))
        else:
            frames.append(_TOKEN_FRAME.pack(_TAG_PLACEHOLDER, place - run.offset, run.hash))
    return b"".join(frames)
