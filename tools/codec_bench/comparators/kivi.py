"""KIVI (arXiv 2402.02750): asymmetric integers, K by channel over groups of 32 tokens, V by token over groups of 32 channels.

Minimum and scale of a group are fp16, so 32 values cost 32 bits beside their codes: one bit a value. The unquantised last
tokens of the paper are a matter of a running engine: a stored chunk has none.
"""

from __future__ import annotations

import torch

from codec_bench.comparators.coded import Coded, Place, Uncalibrated, half


class Kivi(Uncalibrated):
    """KIVI at so many bits. Tokens and channels are multiples of the group."""

    def __init__(self, bits: int, group: int = 32) -> None:
        self.name = f"KIVI-{bits} g{group}"
        self._bits = bits
        self._group = group

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """Codes, and 32 bits a group."""
        tokens, heads, head_dim = x.shape
        if place.kind == "k":
            groups = x.reshape(tokens // self._group, self._group, heads, head_dim)
            decoded = self._coded(groups, 1)
        else:
            groups = x.reshape(tokens, heads, head_dim // self._group, self._group)
            decoded = self._coded(groups, 3)
        return Coded((self._bits + 32 / self._group) * x.numel(), decoded.reshape(x.shape).bfloat16())

    def _coded(self, groups: torch.Tensor, along: int) -> torch.Tensor:
        least = half(groups.amin(dim=along, keepdim=True))
        most = 2**self._bits - 1
        scale = half((groups.amax(dim=along, keepdim=True) - least) / most).clamp(min=1e-7)
        return ((groups - least) / scale).round().clamp(0, most) * scale + least
