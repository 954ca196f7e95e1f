"""LMCache's chunk hashes: of its multi-process server (`v1/multiprocess/token_hasher.py`) and in process (`v1/token_database.py`).

Multi-process: hash = BLAKE3(parent ‖ tokens as big-endian u32), 32 bytes; nothing about the model is in it. In process:
hash = first 8 bytes, big-endian, of f((parent, token tuple, ())) with one of vLLM's functions: 64 bits, an alias, no storage key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from kvobj.ids.engine_chains import vllm
from kvobj.ids.engine_chains.spans import blocks, packed

CHUNK_TOKENS: Final = 256
_FOLDED_BYTES: Final = 8


def mp_root() -> bytes:
    """The parent of first chunks in the multi-process server: the hash of nothing but zeros."""
    return blake3(bytes(8) + packed(">I", (0,))).digest()


def mp_chunk_hashes(
    tokens: Sequence[int], *, chunk_tokens: int = CHUNK_TOKENS, parent: bytes | None = None
) -> list[bytes]:
    """Hashes of all full chunks, as the multi-process server makes them by default."""
    parent = mp_root() if parent is None else parent
    hashes: list[bytes] = []
    for chunk in blocks(tokens, chunk_tokens):
        parent = blake3(parent + packed(">I", chunk)).digest()
        hashes.append(parent)
    return hashes


def in_process_root(algorithm: vllm.Algorithm, *, seed: str | None = None) -> int:
    """The parent of first chunks in process, where vLLM is installed; without it the root is 0."""
    return _folded(vllm.root_hash(algorithm, seed=seed))


def in_process_chunk_hashes(
    tokens: Sequence[int],
    *,
    algorithm: vllm.Algorithm,
    root: int,
    chunk_tokens: int = CHUNK_TOKENS,
    save_unfull_chunk: bool = False,
) -> list[int]:
    """Hashes in process. The algorithm `builtin` (Python's own hash) is not here: it differs from process to process."""
    hashed = vllm.hash_function(algorithm)
    parent = root
    hashes: list[int] = []
    for chunk in blocks(tokens, chunk_tokens, partial_last=save_unfull_chunk):
        parent = _folded(hashed((parent, chunk, ())))
        hashes.append(parent)
    return hashes


def _folded(digest: bytes) -> int:
    return int.from_bytes(digest[:_FOLDED_BYTES], "big")
