"""vLLM's block hashes (`v1/core/kv_cache_utils.py`, `utils/hashing.py`).

    hash = f((parent hash, token tuple, extra))      root = f(seed)

f is one of four; `extra` is None or a tuple of what else tells blocks apart: adapter, multimodal items, salt, prompt embeddings.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvobj.ids.engine_chains.canonical_cbor import CborValue, canonical_cbor
from kvobj.ids.engine_chains.spans import blocks
from kvobj.ids.engine_chains.xxh3 import xxh3_128

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
"""`sha256` is vLLM's default; `xxhash` and `sha256` hash Python's pickle of the values."""

DEFAULT_SEED: Final = "vllm-none-hash"
_PICKLE_PROTOCOL: Final = 5
"""vLLM takes the highest one, which has been 5 since Python 3.8."""


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item: `length` placeholders from `offset` on, counted in tokens of the whole sequence."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides tokens goes into the hashes. `items` in order of offset, not overlapping; `prompt_embeds` are digests by the
    first token of their block; `adapter` is the name and path of a LoRA adapter."""

    adapter: tuple[str, str] | None = None
    items: tuple[Item, ...] = ()
    cache_salt: str = ""
    prompt_embeds: Mapping[int, bytes] = field(default_factory=dict)

    def of_block(self, start: int, end: int) -> tuple[CborValue, ...] | None:
        """The extra of the block of tokens from `start` up to `end`."""
        extra: list[CborValue] = []
        if self.adapter is not None:
            extra.append(("lora", *self.adapter))
        extra += [
            ("mm", item.identifier, item.offset - start)
            for item in self.items
            if item.offset < end and item.offset + item.length > start
        ]
        if self.cache_salt and start == 0:
            extra.append(("cache_salt", self.cache_salt))
        if start in self.prompt_embeds:
            extra.append(("prompt_embeds", self.prompt_embeds[start]))
        return tuple(extra) or None


NO_EXTRAS: Final = Extras()


def hash_function(algorithm: Algorithm) -> Callable[[CborValue], bytes]:
    """The function f by its name in vLLM's `--prefix-caching-hash-algo`."""
    match algorithm:
        case "sha256":
            return lambda value: hashlib.sha256(_pickled(value)).digest()
        case "sha256_cbor":
            return lambda value: hashlib.sha256(canonical_cbor(value)).digest()
        case "xxhash":
            return lambda value: xxh3_128(_pickled(value))
        case "xxhash_cbor":
            return lambda value: xxh3_128(canonical_cbor(value))


def root_hash(algorithm: Algorithm = "sha256", *, seed: str | None = None) -> bytes:
    """The parent of first blocks. `seed` is the engine's PYTHONHASHSEED; without one, SHA-256 has a constant and XXH3 draws one
    for each process, which nobody else can know (ValueError)."""
    if seed is None:
        if algorithm.startswith("xxhash"):
            raise ValueError(f"{algorithm} has no root that other processes know unless PYTHONHASHSEED is set")
        seed = DEFAULT_SEED
    return hash_function(algorithm)(seed)


def block_hashes(
    tokens: Sequence[int],
    *,
    block_tokens: int = 16,
    algorithm: Algorithm = "sha256",
    seed: str | None = None,
    extras: Extras = NO_EXTRAS,
) -> list[bytes]:
    """Hashes of all full blocks: 32 bytes each with SHA-256, 16 with XXH3."""
    hashed = hash_function(algorithm)
    parent = root_hash(algorithm, seed=seed)
    hashes: list[bytes] = []
    for number, block in enumerate(blocks(tokens, block_tokens)):
        start = number * block_tokens
        parent = hashed((parent, block, extras.of_block(start, start + block_tokens)))
        hashes.append(parent)
    return hashes


def offload_key(block_hash: bytes, group: int = 0) -> bytes:
    """The key of a block in the offload tiers: its hash and the index of its KV cache group."""
    return block_hash + group.to_bytes(4, "big")


def event_integer(block_hash: bytes) -> int:
    """The hash as KV events carry it under VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: the low 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


def _pickled(value: CborValue) -> bytes:
    return pickle.dumps(value, protocol=_PICKLE_PROTOCOL)
