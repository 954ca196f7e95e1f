"""SGLang HiCache's page hashes (`mem_cache/utils.py`, `cpp_utils/hash_binding.cpp`).

    hash = SHA-256(parent digest, if there is one ‖ tokens as little-endian u32)

A page with a token id above u32 is hashed as 0xff ‖ tokens as u64; a bigram page hashes each unit as two tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvobj.errors import InvalidTokensError
from kvobj.ids.engine_chains.spans import packed

_NAMESPACE: Final = b"sglang-cache-namespace-v1"
_EVENT_SALT: Final = b"sglang-cache-salt-v1\0"
_WIDE: Final = b"\xff"
_U32_MAX: Final = 2**32 - 1
_I64_MAX: Final = 2**63 - 1


def namespace_seed(*, extra_key: str | None = None, cache_salt: str | None = None) -> bytes | None:
    """The parent of first pages of a request with an extra key or a salt; None without either."""
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(_NAMESPACE)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def event_seed(cache_salt: str | None) -> bytes | None:
    """The parent of first pages in KV events, where the seed is another one and the extra key is left out."""
    return None if cache_salt is None else hashlib.sha256(_EVENT_SALT + cache_salt.encode()).digest()


def page_hashes(
    tokens: Sequence[int],
    *,
    page_tokens: int,
    parent: bytes | None = None,
    bigram: bool = False,
    partial_last: bool = True,
) -> list[bytes]:
    """Digests of all pages; SGLang hashes a shorter last page too. With `bigram` the units are pairs of neighbours, one fewer
    than tokens. `InvalidTokensError` for ids outside 0 … 2^63-1."""
    units = max(len(tokens) - 1, 0) if bigram else len(tokens)
    end = units if partial_last else units - units % page_tokens
    hashes: list[bytes] = []
    for at in range(0, end, page_tokens):
        page = tokens[at : at + page_tokens]
        if bigram:
            page = [token for pair in pairwise(tokens[at : at + page_tokens + 1]) for token in pair]
        parent = hashlib.sha256((parent or b"") + _encoded(page)).digest()
        hashes.append(parent)
    return hashes


def event_integer(digest: bytes) -> int:
    """The digest as KV events carry it: its first 64 bits, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _encoded(page: Sequence[int]) -> bytes:
    if min(page) < 0 or max(page) > _I64_MAX:
        raise InvalidTokensError("a token id is a whole number from 0 to 2^63-1 for SGLang")
    return packed("<I", page) if max(page) <= _U32_MAX else _WIDE + packed("<Q", page)
