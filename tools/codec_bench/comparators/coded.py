"""What a comparator makes of one (layer, kind), and the protocol of one. Values are float32 that bf16 can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Kind = Literal["k", "v"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor stands in its model: some codecs treat early layers better, and K otherwise than V."""

    kind: Kind
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class Coded:
    """Bits of everything that would be stored, and what would come back: bf16 [tokens, heads, head_dim]."""

    bits: float
    decoded: torch.Tensor


class Comparator(Protocol):
    """One codec. `calibrate` is called once a set, before anything is coded; most learn nothing from it."""

    name: str

    def calibrate(self, place: Place, windows: Sequence[torch.Tensor]) -> None:
        """What the calibration windows hold at one place, each [tokens, heads, head_dim] float32."""
        ...

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """Code [tokens, heads, head_dim] float32."""
        ...


class Uncalibrated:
    """A comparator that learns nothing."""

    def calibrate(self, place: Place, windows: Sequence[torch.Tensor]) -> None:
        """Nothing to learn."""


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to fp16, as scales are stored by most."""
    return x.half().float()


def column_entropy(symbols: torch.Tensor, alphabet: int) -> float:
    """Bits of [tokens, columns] of integers from 0, each column coded at the entropy of its own histogram."""
    columns = symbols.shape[1]
    flat = symbols + alphabet * torch.arange(columns)
    counts = torch.bincount(flat.flatten(), minlength=alphabet * columns).double()
    return entropy_bits(counts.view(columns, alphabet))


def entropy_bits(counts: torch.Tensor) -> float:
    """Bits of what rows of counts were made from, each row at its own entropy."""
    totals = counts.sum(-1, keepdim=True)
    share = counts / totals.clamp(min=1)
    return float(-(counts * torch.log2(share.clamp(min=1e-300))).sum())
