"""Lossless codecs: zstd level 1 on raw bytes, on byte planes and on the exponents alone; SplitZip's format; entropy of exponents.

All take the bf16 words of a whole window, each (layer, kind) by itself, in [token][head][dim] order. The entropy is of one
histogram for each (layer, kind): what order-0 coding of exponents could reach with sign and mantissa as they are. SplitZip
(arXiv 2605.01708): 8 bits of sign and mantissa, a 4-bit code for the commonest fifteen exponents, the sixteenth code for
others, which stand beside with a 16-bit position and their 8 bits. Its codebook is outside of the payload and is not counted
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import zstandard

Size = Callable[[np.ndarray], float]
"""Bits that bf16 words (uint16, one (layer, kind)) take."""

_SPLITZIP_CODES: Final = 15
_SPLITZIP_ESCAPE_BITS: Final = 16 + 8


def zstd_raw(words: np.ndarray) -> float:
    """Zstd level 1 on the plain bytes."""
    return 8.0 * len(zstandard.ZstdCompressor(level=1).compress(words.tobytes()))


def zstd_planes(words: np.ndarray) -> float:
    """Zstd level 1 on the low bytes and on the high bytes, each as it is where it does not shrink: our `zp`."""
    low, high = (words & 0xFF).astype(np.uint8).tobytes(), (words >> 8).astype(np.uint8).tobytes()
    return sum(
        min(8.0 * len(zstandard.ZstdCompressor(level=1).compress(plane)), 8.0 * len(plane)) for plane in (low, high)
    )


def zstd_exponents(words: np.ndarray) -> float:
    """Zstd level 1 on the exponents; sign and mantissa as they are."""
    plane = ((words >> 7) & 0xFF).astype(np.uint8).tobytes()
    return 8.0 * words.size + 8.0 * len(zstandard.ZstdCompressor(level=1).compress(plane))


def exponent_entropy(words: np.ndarray) -> float:
    """Sign and mantissa as they are, exponents at the entropy of their histogram."""
    counts = np.bincount(((words >> 7) & 0xFF).ravel(), minlength=256)
    share = counts[counts > 0] / words.size
    return 8.0 * words.size - float((counts[counts > 0] * np.log2(share)).sum())


def splitzip(words: np.ndarray) -> float:
    """SplitZip's payload."""
    counts = np.sort(np.bincount(((words >> 7) & 0xFF).ravel(), minlength=256))
    return 12.0 * words.size + _SPLITZIP_ESCAPE_BITS * int(counts[:-_SPLITZIP_CODES].sum())


LOSSLESS: Final[Mapping[str, Size]] = {
    "zstd-1 raw": zstd_raw,
    "zstd-1 byte planes": zstd_planes,
    "zstd-1 exponents": zstd_exponents,
    "exponent entropy": exponent_entropy,
    "SplitZip": splitzip,
}
