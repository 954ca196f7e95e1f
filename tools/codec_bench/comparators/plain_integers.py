"""Fixed-rate codecs with plain scales: fp8 per head, int8 per token and head, llama.cpp's q4_0, NVFP4.

fp8: e4m3 with one fp32 scale for each head, amax / 448. int8: symmetric, amax / 127 in fp16 for each (token, head). q4_0: 32
values a block along the head; the scale, fp16, is the value of largest magnitude over -8, the code floor(x / d + 8.5) in
0..15. NVFP4: 16 values a block along the head; e2m1 codes, an e4m3 scale a block (amax / 6), a float32 scale a tensor (amax /
(6 · 448)).
"""

from __future__ import annotations

from typing import Final

import torch

from codec_bench.comparators.coded import Coded, Place, Uncalibrated, half

_E4M3_MOST: Final = 448.0
_E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MOST: Final = 6.0
_SCALE_BITS: Final = 16


class Fp8PerHead(Uncalibrated):
    """e4m3, a scale for each head of a (layer, kind)."""

    name = "fp8 per head"

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """8 bits a value, 32 a head."""
        del place
        scale = x.abs().amax(dim=(0, 2), keepdim=True).clamp(min=1e-30) / _E4M3_MOST
        decoded = (x / scale).to(torch.float8_e4m3fn).float() * scale
        return Coded(8 * x.numel() + 32 * x.shape[1], decoded.bfloat16())


class Int8PerTokenHead(Uncalibrated):
    """Symmetric int8, a scale for each (token, head)."""

    name = "int8 per token-head"

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """8 bits a value, 16 a token and head."""
        del place
        scale = half(x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-7)
        decoded = (x / scale).round().clamp(-127, 127) * scale
        return Coded(8 * x.numel() + _SCALE_BITS * x.shape[0] * x.shape[1], decoded.bfloat16())


class Q40(Uncalibrated):
    """llama.cpp's q4_0."""

    name = "q4_0"

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """4.5 bits a value."""
        del place
        blocks = x.reshape(-1, 32)
        largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
        scale = half(largest / -8)
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        codes = (blocks * inverse + 8.5).floor().clamp(0, 15)
        decoded = ((codes - 8) * scale).view_as(x)
        return Coded(4 * x.numel() + _SCALE_BITS * len(blocks), decoded.bfloat16())


class Nvfp4(Uncalibrated):
    """NVIDIA's 4-bit format of Blackwell."""

    name = "NVFP4"

    def code(self, x: torch.Tensor, place: Place) -> Coded:
        """4.5 bits a value."""
        del place
        whole = (x.abs().max() / (_E2M1_MOST * _E4M3_MOST)).clamp(min=1e-30)
        blocks = x.reshape(-1, 16)
        scale = (blocks.abs().amax(dim=1, keepdim=True) / _E2M1_MOST / whole).to(torch.float8_e4m3fn).float() * whole
        y = torch.where(scale == 0, torch.zeros(()), blocks / scale)
        codes = torch.bucketize(y.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2)
        decoded = (_E2M1[codes] * y.sign() * scale).view_as(x)
        return Coded(4 * x.numel() + 8 * len(blocks) + 32, decoded.bfloat16())
