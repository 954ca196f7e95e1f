"""The comparators over a data set, and the figures of codecs.md §7.4 and §7.5 that each must reproduce before it is compared with.

Our text is another one than that of the published figures, so minilm's rows differ by a few percent; synth's tensors are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from codec_bench.comparators.cachegen import CacheGenLmcache, CacheGenPaper
from codec_bench.comparators.coded import Comparator, Kind, Place
from codec_bench.comparators.kivi import Kivi
from codec_bench.comparators.plain_integers import Q40, Fp8PerHead, Int8PerTokenHead, Nvfp4
from codec_bench.comparators.turboquant import TurboQuant
from codec_bench.datasets import DataSet, Layer, Window
from codec_bench.metrics import Decoded, errors
from codec_bench.rows import Row

TOLERANCE: Final = 0.05
PUBLISHED_TOKENS: Final = {"minilm": 512, "synth": 1024}
"""Published figures are of whole windows as one chunk."""
_KINDS: Final[tuple[Kind, ...]] = ("k", "v")


@dataclass(frozen=True, slots=True)
class Published:
    """A codec's figures: bits, and attention error (0 where it is lossless)."""

    bits: float
    attention: float = 0.0


PUBLISHED: Final[Mapping[tuple[str, str], Published]] = {
    ("minilm", "fp8 per head"): Published(8.00, 0.027),
    ("synth", "fp8 per head"): Published(8.00, 0.029),
    ("minilm", "int8 per token-head"): Published(8.50, 0.005),
    ("synth", "int8 per token-head"): Published(8.12, 0.010),
    ("minilm", "q4_0"): Published(4.50, 0.078),
    ("synth", "q4_0"): Published(4.50, 0.114),
    ("minilm", "NVFP4"): Published(4.50, 0.092),
    ("synth", "NVFP4"): Published(4.50, 0.100),
    ("minilm", "KIVI-4 g32"): Published(5.00, 0.052),
    ("synth", "KIVI-4 g32"): Published(5.00, 0.085),
    ("minilm", "KIVI-2 g32"): Published(3.00, 0.282),
    ("synth", "KIVI-2 g32"): Published(3.00, 0.428),
    ("minilm", "TurboQuant-4"): Published(4.50, 0.079),
    ("synth", "TurboQuant-4"): Published(4.12, 0.101),
    ("minilm", "TurboQuant-4 centred"): Published(4.53, 0.072),
    ("synth", "TurboQuant-4 centred"): Published(4.14, 0.095),
    ("minilm", "TurboQuant-3"): Published(3.50, 0.157),
    ("synth", "TurboQuant-3"): Published(3.12, 0.196),
    ("minilm", "TurboQuant-3 centred"): Published(3.53, 0.143),
    ("synth", "TurboQuant-3 centred"): Published(3.14, 0.184),
    ("minilm", "TurboQuant-2"): Published(2.50, 0.311),
    ("synth", "TurboQuant-2"): Published(2.12, 0.380),
    ("minilm", "CacheGen paper x0.5"): Published(4.77, 0.046),
    ("synth", "CacheGen paper x0.5"): Published(4.93, 0.056),
    ("minilm", "CacheGen paper x1"): Published(3.87, 0.092),
    ("synth", "CacheGen paper x1"): Published(4.03, 0.111),
    ("minilm", "CacheGen LMCache"): Published(5.14, 0.117),
    ("synth", "CacheGen LMCache"): Published(4.33, 0.202),
    ("minilm", "zstd-1 raw"): Published(12.55),
    ("synth", "zstd-1 raw"): Published(12.61),
    ("minilm", "zstd-1 byte planes"): Published(11.06),
    ("synth", "zstd-1 byte planes"): Published(11.15),
    ("minilm", "zstd-1 exponents"): Published(11.03),
    ("synth", "zstd-1 exponents"): Published(11.10),
    ("minilm", "exponent entropy"): Published(10.64),
    ("synth", "exponent entropy"): Published(10.74),
    ("minilm", "SplitZip"): Published(12.02),
    ("synth", "SplitZip"): Published(12.02),
}


def comparators() -> list[Comparator]:
    """One of each, uncalibrated."""
    return [
        Fp8PerHead(),
        Int8PerTokenHead(),
        Q40(),
        Nvfp4(),
        Kivi(4),
        Kivi(2),
        *(TurboQuant(bits, is_centred=is_centred) for bits in (4, 3, 2) for is_centred in (False, True)),
        CacheGenPaper(0.5),
        CacheGenPaper(1.0),
        CacheGenLmcache(),
    ]


def measure(data: DataSet, comparator: Comparator, tokens: int) -> Row:
    """One lossy comparator over all test windows, cut into chunks of so many tokens; calibrated on the others."""
    layers = len(data.test[0])
    for number in range(layers):
        for kind in _KINDS:
            windows = [_of(window[number], kind).float() for window in data.calibration]
            comparator.calibrate(Place(kind, number, layers), windows)
    bits = 0.0
    pairs: list[tuple[Window, Decoded]] = []
    for window in data.test:
        decoded: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(window):
            back = []
            for kind in _KINDS:
                parts = [
                    comparator.code(part.float(), Place(kind, number, layers))
                    for part in _of(layer, kind).split(tokens)
                ]
                bits += sum(part.bits for part in parts)
                back.append(torch.cat([part.decoded for part in parts]))
            decoded.append((back[0], back[1]))
        pairs.append((window, tuple(decoded)))
    found = errors(pairs, causal=data.causal)
    return Row(
        data.name,
        comparator.name,
        "other",
        tokens,
        bits / data.values,
        found.relative_k,
        found.relative_v,
        found.attention,
        found.worst_cosine,
    )


def measure_lossless(data: DataSet, tokens: int) -> list[Row]:
    """Each lossless comparator's row."""
    from codec_bench.comparators.lossless import LOSSLESS  # noqa: PLC0415 - needs zstandard, which the quick run does without

    rows = []
    for name, size in LOSSLESS.items():
        bits = sum(
            size(part.contiguous().view(torch.int16).numpy().view("uint16"))
            for window in data.test
            for layer in window
            for kind in _KINDS
            for part in _of(layer, kind).split(tokens)
        )
        rows.append(Row(data.name, name, "other", tokens, bits / data.values))
    return rows


def deviation(row: Row) -> float | None:
    """By how much a row is off its published figures, the larger of bits and attention error; None where none is published
    of such chunks.

    Errors are published with three places: half of the last one is no deviation.
    """
    published = PUBLISHED.get((row.data, row.codec))
    if published is None or row.tokens != PUBLISHED_TOKENS[row.data]:
        return None
    off_bits = abs(row.bits / published.bits - 1)
    if not published.attention:
        return off_bits
    return max(off_bits, max(0.0, abs(row.attention - published.attention) - 0.0005) / published.attention)


def unreproduced(rows: Sequence[Row]) -> list[Row]:
    """Rows that are off by more than the tolerance."""
    return [row for row in rows if (off := deviation(row)) is not None and off > TOLERANCE]


def _of(layer: Layer, kind: Kind) -> torch.Tensor:
    return layer.k if kind == "k" else layer.v
