"""CacheGen (arXiv 2310.07240): the paper's form, and what LMCache's GPU path does.

Paper: groups of ten tokens. A group's first token is its anchor, 8 bits a value; the others are differences from the decoded
anchor in steps of a quarter, a half and three quarters of a deviation (0.5, 1 and 1.5 at half a deviation: the reading that
reproduces) for the first, second and last third of the layers, times `scale`; the deviation is that of all values around
their channels' means. Differences are coded with one distribution a channel, both learnt offline from calibration windows.

LMCache: no differences. Each token is scaled by its largest magnitude over all heads to 32 bins in the first 10/32 of K's
layers and 2/32 of V's, at least one of each, else to 16; each channel is coded with its own distribution, which every 256
tokens bring along: 33 entries of 16 bits and a length of 32, 2.19 bits a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from codec_bench.comparators.coded import Coded, Place, Uncalibrated, column_entropy, half

_GROUP: Final = 10
_THIRDS: Final = (0.25, 0.5, 0.75)
_LARGEST: Final = 127
_ALPHABET: Final = 2 * _LARGEST + 1
_CHUNK: Final = 256
_TABLE_BITS: Final = 33 * 16 + 32


class CacheGenPaper:
    """The paper's form; `scale` makes all steps finer or coarser."""

    def __init__(self, scale: float) -> None:
        self.name = f"CacheGen paper x{scale:g}"
        self._scale = scale
        self._learnt: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}

    def calibrate(self, place: Place, windows: Sequence[torch.Tensor]) -> None:
        """Steps and costs in bits [columns, 255] of each channel at this place."""
        values = torch.cat([window.flatten(1) for window in windows])
        deviation = (values - values.mean(0)).square().mean().sqrt()
        differences = torch.cat([_differences(window.flatten(1))[1] for window in windows])
        step = deviation * self._scale * _THIRDS[place.layer * 3 // place.layers]
        steps = step.expand(differences.shape[1])
        symbols = _symbols(differences, steps)
        counts = torch.stack([torch.bincount(column, minlength=_ALPHABET) for column in symbols.T]).double() + 1e-2
        self._learnt[place] = steps, -torch.log2(counts / counts.sum(1, keepdim=True))

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """Anchors and their scales, and the cost of the differences under what was learnt."""
        steps, costs = self._learnt[place]
        anchors, differences, back = _differences_of(x.flatten(1))
        symbols = _symbols(differences, steps)
        bits = float(costs.gather(1, symbols.T).sum())
        decoded = back((symbols - _LARGEST) * steps)
        return Coded(bits + anchors * (8 * x[0].numel() + 16), decoded.view_as(x).bfloat16())


def _differences(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    anchors, differences, _ = _differences_of(x)
    return anchors, differences


def _differences_of(x: torch.Tensor) -> tuple[int, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """How many anchors, the others' differences from them, and the function from differences back to all tokens."""
    tokens = len(x)
    first = torch.arange(tokens) // _GROUP * _GROUP
    is_anchor = first == torch.arange(tokens)
    scale = half(x.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=1e-7)
    coarse = (x / scale).round().clamp(-_LARGEST, _LARGEST) * scale

    def back(differences: torch.Tensor) -> torch.Tensor:
        decoded = coarse[first].clone()
        decoded[~is_anchor] += differences
        return decoded

    return int(is_anchor.sum()), (x - coarse[first])[~is_anchor], back


def _symbols(differences: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    return (differences / steps).round().clamp(-_LARGEST, _LARGEST).long() + _LARGEST


class CacheGenLmcache(Uncalibrated):
    """LMCache's GPU path."""

    name = "CacheGen LMCache"

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """Each 256 tokens by themselves: entropy, tables, and a scale a token."""
        fine_layers = max(1, (10 if place.kind == "k" else 2) * place.layers // 32)
        bins = 32 if place.layer < fine_layers else 16
        bits, parts = 0.0, []
        for start in range(0, len(x), _CHUNK):
            part = x[start : start + _CHUNK].flatten(1)
            most = bins // 2 - 1
            scale = part.abs().amax(dim=1, keepdim=True).bfloat16().float().clamp(min=1e-30)
            codes = (part / scale * most).round().clamp(-most, most).long() + most
            bits += column_entropy(codes, bins) + _TABLE_BITS * part.shape[1] + 16 * len(part)
            parts.append((codes - most) * scale / most)
        return Coded(bits, torch.cat(parts).view_as(x).bfloat16())
