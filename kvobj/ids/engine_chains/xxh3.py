"""XXH3 through the `xxhash` library, which is in the extra `engines`: only Dynamo's chain and two of vLLM's need it."""

from __future__ import annotations

from typing import Final

try:
    import xxhash
except ImportError:  # the extra is not installed
    xxhash = None  # type: ignore[assignment]

_MISSING: Final = "this chain needs the xxhash library: pip install 'kvobj[engines]'"


def xxh3_64(content: bytes, seed: int = 0) -> int:
    """XXH3, 64 bits. ImportError without the library."""
    if xxhash is None:
        raise ImportError(_MISSING)
    return xxhash.xxh3_64_intdigest(content, seed)


def xxh3_128(content: bytes) -> bytes:
    """XXH3, 16 bytes, big-endian as `xxhash` prints them. ImportError without the library."""
    if xxhash is None:
        raise ImportError(_MISSING)
    return xxhash.xxh3_128_digest(content)
