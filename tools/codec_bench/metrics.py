"""How far decoded K and V are from what was encoded, and how far attention over them is: docs/codecs.md, Figures.

relative error: ‖X - X̂‖ / ‖X‖ over a whole window's layer, mean over layers and windows. Attention error: ‖O - Ô‖ / ‖O‖ of one
query head over all positions, mean over heads, layers and windows; O = softmax(QKᵀ/√D)V in float32 on bf16 inputs.
Worst cosine: the largest 1 - cos(O, Ô) of one head at one position, over everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import torch

from codec_bench.datasets import Layer, Window

Decoded = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Of one window: each layer's k and v as they came back, [tokens, kv_heads, head_dim], bf16 or float32."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The four numbers of one codec on one set."""

    relative_k: float
    relative_v: float
    attention: float
    worst_cosine: float


def errors(pairs: Iterable[tuple[Window, Decoded]], *, causal: bool) -> Errors:
    """Windows beside what a codec made of them. ValueError where there is none."""
    of_k: list[float] = []
    of_v: list[float] = []
    of_attention: list[float] = []
    worst = 0.0
    for window, decoded in pairs:
        for layer, (k, v) in zip(window, decoded, strict=True):
            of_k.append(relative(layer.k, k))
            of_v.append(relative(layer.v, v))
            by_head, cosine = attention_error(layer, k, v, causal=causal)
            of_attention.append(by_head)
            worst = max(worst, cosine)
    if not of_k:
        raise ValueError("no windows")
    return Errors(fmean(of_k), fmean(of_v), fmean(of_attention), worst)


def relative(x: torch.Tensor, decoded: torch.Tensor) -> float:
    """‖X - X̂‖ / ‖X‖ in float64; 0 where both are zero."""
    exact = x.double()
    difference = (exact - decoded.double()).norm().item()
    size = exact.norm().item()
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


def attention_error(layer: Layer, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[float, float]:
    """Mean over query heads of ‖O - Ô‖ / ‖O‖, and the largest 1 - cos(O, Ô) of one head at one position."""
    exact = attention(layer.q, layer.k, layer.v, causal=causal)
    found = attention(layer.q, k, v, causal=causal)
    by_head = (exact - found).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    cosine = 1 - torch.nn.functional.cosine_similarity(exact, found, dim=-1)
    return by_head.mean().item(), cosine.max().item()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[q_heads, tokens, head_dim] float32; query heads share K and V heads in runs, as grouped attention does."""
    shared = q.shape[1] // k.shape[1]
    queries = q.float().transpose(0, 1)
    keys = k.float().transpose(0, 1).repeat_interleave(shared, 0)
    values = v.float().transpose(0, 1).repeat_interleave(shared, 0)
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
