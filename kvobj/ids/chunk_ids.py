"""Chunk ids: what a span of tokens is called, given its namespace's key and all tokens before it (`kv-api` §2).

    fingerprint = BLAKE3(canonical declaration)
    root        = BLAKE3 keyed with the namespace key (fingerprint)
    chunk id    = BLAKE3 keyed with the namespace key (parent id ‖ token ids as little-endian u32)

The parent of a first chunk is the root. Server and client compute with these functions; `tests/golden/chunk_ids.json` holds the
published vectors. Everything is pure; ids are 32 raw bytes, and their S3 keys are 64 lower-case hex digits.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable
from typing import Final

from blake3 import blake3

from kvobj.errors import InvalidChunkIdError, InvalidTokensError

CHUNK_ID_BYTES: Final = 32
NAMESPACE_KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4

_HEX_ID: Final = re.compile(r"[0-9a-f]{64}")

Tokens = bytes | bytearray | memoryview | Iterable[int]
"""Token ids: as bytes, little-endian u32 each; otherwise as whole numbers."""


def fingerprint(declaration: bytes) -> bytes:
    """The 32 bytes that stand for a canonical declaration."""
    return blake3(declaration).digest()


def namespace_root(key: bytes, fingerprint: bytes) -> bytes:
    """The parent of every first chunk of a namespace."""
    return blake3(fingerprint, key=key).digest()


def chunk_id(key: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The id of one chunk. `tokens` as `token_bytes` gives them."""
    return blake3(parent + tokens, key=key).digest()


def chunk_ids(key: bytes, root: bytes, tokens: bytes, *, chunk_tokens: int, partial_last: bool = False) -> bytes:
    """The ids of a whole sequence, 32 bytes each in chain order.

    `root` is the namespace's, or the id of a chunk to go on behind. Tokens behind the last whole chunk are left out, or, with
    `partial_last`, are a chunk of their own (which never has children).
    """
    span = chunk_tokens * TOKEN_BYTES
    end = len(tokens) if partial_last else len(tokens) - len(tokens) % span
    ids: list[bytes] = []
    parent = root
    for at in range(0, end, span):
        parent = blake3(parent + tokens[at : at + span], key=key).digest()
        ids.append(parent)
    return b"".join(ids)


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian u32. `InvalidTokensError` for an id outside 0 … 2^32-1 (`position` names the first one) and for
    bytes that are no whole number of ids."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        raw = bytes(tokens)
        if len(raw) % TOKEN_BYTES:
            raise InvalidTokensError("token ids have 4 bytes each", size_bytes=len(raw))
        return raw
    listed = tokens if isinstance(tokens, list | tuple | array) else list(tokens)
    try:
        packed = array("I", listed)
    except (OverflowError, TypeError) as error:
        raise InvalidTokensError(
            "a token id is a whole number from 0 to 2^32-1", position=_first_bad(listed)
        ) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def parse_chunk_id(key: str) -> bytes:
    """The id that an S3 key spells. `InvalidChunkIdError` for anything but 64 lower-case hex digits."""
    if not _HEX_ID.fullmatch(key):
        raise InvalidChunkIdError("a chunk id is 64 lower-case hex digits", key=key[:80])
    return bytes.fromhex(key)


def is_chunk_id(key: str) -> bool:
    """Whether an S3 key has the form of a chunk id."""
    return _HEX_ID.fullmatch(key) is not None


def _first_bad(tokens: Iterable[object]) -> int:
    for position, token in enumerate(tokens):
        if not isinstance(token, int) or not 0 <= token < 2**32:
            return position
    return 0
