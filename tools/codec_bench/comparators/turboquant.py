"""TurboQuant (arXiv 2504.19874) without its QJL residual: a random rotation of each (token, head), then Lloyd-Max by coordinate.

The rotation is signs and a Walsh-Hadamard transform, as its ports use; what travels as fp16 is the norm times ⟨u,r⟩/⟨r,r⟩,
without which the quantiser shrinks all values alike (the plain norm is 15 to 30 % off the published attention errors on
minilm). "Centred" takes each channel's mean (bf16, over the chunk) away first.
"""

from __future__ import annotations

from typing import Final

import torch

from codec_bench.comparators.coded import Coded, Place, Uncalibrated, half

_LEVELS: Final = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""Lloyd-Max levels of N(0, 1), positive half."""
_SEED: Final = 5


class TurboQuant(Uncalibrated):
    """At so many bits a coordinate."""

    def __init__(self, bits: int, *, is_centred: bool = False) -> None:
        self.name = f"TurboQuant-{bits}" + (" centred" if is_centred else "")
        self._bits = bits
        self._is_centred = is_centred
        positive = torch.tensor(_LEVELS[bits])
        self._levels = torch.cat((-positive.flip(0), positive))

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """Codes, 16 bits a (token, head), and 16 a channel where centred."""
        del place
        tokens, heads, head_dim = x.shape
        mean = x.mean(dim=0).bfloat16().float() if self._is_centred else torch.zeros(heads, head_dim)
        turn = rotation(head_dim)
        y = (x - mean) @ turn
        unit = y / y.norm(dim=-1, keepdim=True).clamp(min=1e-30) * head_dim**0.5
        found = self._levels[torch.bucketize(unit, (self._levels[1:] + self._levels[:-1]) / 2)]
        length = half((y * found).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True))
        decoded = (found * length) @ turn.T + mean
        side = tokens * heads * 16 + (heads * head_dim * 16 if self._is_centred else 0)
        return Coded(self._bits * x.numel() + side, decoded.bfloat16())


def rotation(size: int) -> torch.Tensor:
    """An orthonormal [size, size] matrix: fixed signs, then Walsh-Hadamard. `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return signs[:, None] * matrix / size**0.5
