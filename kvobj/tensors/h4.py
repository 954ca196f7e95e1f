"""`h4`: 4 bits a value at a fixed rate, after a centred Hadamard transform of each (token, head); bf16 and fp16, D from 32 to 256.

An encoded block, H heads of T tokens of D values, little-endian; whatever a token needs lies at an offset that its number gives:

| offset | size | field |
| --- | --- | --- |
| 0 | 2 · H · D | means, bf16, [head][dim] |
| A = 2 · H · D | 2 · H · T | scale of each token, fp16, [head][token]: not negative, finite |
| C = A + 2 · H · T rounded up to 16 | | zeros before it |
| C + (h · T + t) · D / 2 | D / 2 | codes of a token: byte j has that of value j below and that of value j + D / 2 above |

A code is a level's number (bits 0 to 2) and its sign (bit 3, set for negative). D is a power of two. Everything is fp32, operation
by operation, without contraction:
- mean μ: each value times 2^(22 - e), e the exponent of the head's largest value (at least -100, at most 126), truncated to an
  integer; the sum of the tokens' as the nearest float, times fp32(1/T), times 2^(e - 22), to the nearest bf16;
- v = H(s ∘ (x - μ)): H the Walsh-Hadamard transform, not normalised, its butterflies of distance 1, 2, 4 … D/2 in that order,
  a + b in the lower place; s_d = -1 where bit d of the eight words of `kernels/h4.cuh` is set;
- n = sqrt(Σ v² / D); the code's number is how many of the seven thresholds times n lie below |v|; its sign is v's;
- scale = fp16(Σ |v|·r · (1 / Σ r²) · fp32(1/√D)), r the levels (16-level Lloyd-Max of N(0, 1), six decimals). Sums go: the values
  d, d + 32, d + 64 …; of these 32 sums the i-th and (i + 16)-th, then + 8, + 4, + 2, + 1.
Decode: x̂ = s ∘ (H(±r) · (scale · fp32(1/√D))) + μ, rounded to the form's dtype. A block stays RAW where a value is not finite, a
scale is above 65,504 or a decoded value is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvobj.tensors.codec_protocol import BlockToDecode, BlockToEncode, Coding, EncodedLength
from kvobj.tensors.form import TensorForm
from kvobj.tensors.head_reports import (
    LONGEST_HEAD,
    REPORT_BYTES,
    Sums,
    address_table,
    any_of_heads,
    lengths_of,
    words_at,
)
from kvobj.tensors.kernels.launcher import Launcher

_DIMS: Final = (32, 64, 128, 256)
_ALIGNMENT: Final = 16
_REFUSED: Final = 1


class H4:
    """See `TensorCodec`. Stateless."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return "h4"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return 0

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`."""
        if form.dtype not in {"bf16", "fp16"}:
            return f"h4 takes bf16 and fp16, not {form.dtype}"
        if form.head_dim not in _DIMS:
            return f"h4 takes a head_dim of {', '.join(map(str, _DIMS))}, not {form.head_dim}"
        if form.tokens * form.head_dim > LONGEST_HEAD or codes_at(form) >= 2**32:
            return f"h4 takes up to {LONGEST_HEAD} values a head"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`: what every encoded block has."""
        return codes_at(form) + form.block_values // 2

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`."""
        form = coding.form
        heads, end = form.kv_heads, scales_at(form) + 2 * form.kv_heads * form.tokens
        padding = bytes(codes_at(form) - end)
        for block in blocks if padding else ():
            launcher.upload(block.slot.after(end), padding)
        table = address_table(
            launcher, "h4.blocks", (int(at or 0) for block in blocks for at in (block.plain, block.slot, block.decoded))
        )
        warps = len(blocks) * heads
        reports = launcher.scratch("h4.reports", warps * REPORT_BYTES)
        launcher.launch("h4_encode", warps, table, *_sizes(form), reports)
        values, lengths = form.tokens * form.head_dim, [self.slot_bytes(form)] * len(blocks)
        return lengths_of(launcher, reports, heads, lengths, Sums(values, values // 2048 + 1))

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`."""
        form = coding.form
        length = self.slot_bytes(form)
        whole = [block for block in blocks if block.length == length]
        table = address_table(
            launcher, "h4.blocks", (int(at) for block in whole for at in (block.encoded, block.plain))
        )
        warps = len(whole) * form.kv_heads
        statuses = launcher.scratch("h4.statuses", 4 * warps)
        launcher.launch("h4_decode", warps, table, *_sizes(form), statuses)
        found = iter(any_of_heads(words_at(launcher, statuses, warps), form.kv_heads))
        return [next(found) if block.length == length else _REFUSED for block in blocks]


def codec(step_index: int = 0) -> H4:
    """The codec; it has no steps."""
    if step_index:
        raise ValueError(f"h4 has no step, got {step_index}")
    return H4()


def scales_at(form: TensorForm) -> int:
    """Offset of the scales in an encoded block, which readers in place need; before them the means."""
    return 2 * form.kv_heads * form.head_dim


def codes_at(form: TensorForm) -> int:
    """Offset of the codes in an encoded block."""
    return -(-(scales_at(form) + 2 * form.kv_heads * form.tokens) // _ALIGNMENT) * _ALIGNMENT


def _sizes(form: TensorForm) -> tuple[int, ...]:
    return form.kv_heads, form.tokens, form.head_dim, scales_at(form), codes_at(form), int(form.dtype == "fp16")
