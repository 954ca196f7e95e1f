"""`f8`: e4m3 with one scale for each head, 8 bits a value; bf16 and fp16.

An encoded block, H heads of T tokens of D values, n = T · D, little-endian:

| offset | size | field |
| --- | --- | --- |
| 0 | 4 · H | scale of each head: fp32, from 2^-120 to 7.6e35 |
| S = 4 · H rounded up to 16 | | zeros before it |
| S + h · n | n | e4m3 (OCP, `S.1111.111` does not occur) of head h, [token][dim] |

scale = max(fp32(amax · fp32(1/448)), 2^-120), amax the head's largest absolute value. A code is e4m3(fp32(x · fp32(1/scale))), to
nearest, ties to even, saturating at ±448; it decodes to fp32(code · scale), rounded to the form's dtype to nearest, ties to even.
A block with a value that is not finite stays RAW. Chunks that an engine already holds as fp8 have its own scales and are kept as
they come: this codec refuses them.
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

_SCALE_BYTES: Final = 4
_ALIGNMENT: Final = 16
_REFUSED: Final = 1


class F8:
    """See `TensorCodec`. Stateless."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return "f8"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return 0

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`."""
        if form.dtype.startswith("fp8"):
            return f"{form.dtype} is 8 bits a value as it comes: store it raw"
        if form.dtype not in {"bf16", "fp16"}:
            return f"f8 takes bf16 and fp16, not {form.dtype}"
        if form.tokens * form.head_dim > LONGEST_HEAD:
            return f"f8 takes up to {LONGEST_HEAD} values a head"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`: what every encoded block has."""
        return _head_bytes(form) + form.block_values

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`."""
        form = coding.form
        heads, head_bytes = form.kv_heads, _head_bytes(form)
        padding = bytes(head_bytes - _SCALE_BYTES * heads)
        for block in blocks if padding else ():
            launcher.upload(block.slot.after(_SCALE_BYTES * heads), padding)
        table = address_table(
            launcher, "f8.blocks", (int(at or 0) for block in blocks for at in (block.plain, block.slot, block.decoded))
        )
        warps = len(blocks) * heads
        reports = launcher.scratch("f8.reports", warps * REPORT_BYTES)
        values = form.tokens * form.head_dim
        launcher.launch("f8_encode", warps, table, heads, values, head_bytes, int(form.dtype == "fp16"), reports)
        lengths = [head_bytes + form.block_values] * len(blocks)
        return lengths_of(launcher, reports, heads, lengths, Sums(values, values // 2048 + 1))

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`."""
        form = coding.form
        heads, head_bytes = form.kv_heads, _head_bytes(form)
        length = head_bytes + form.block_values
        whole = [block for block in blocks if block.length == length]
        table = address_table(
            launcher, "f8.blocks", (int(at) for block in whole for at in (block.encoded, block.plain))
        )
        warps = len(whole) * heads
        statuses = launcher.scratch("f8.statuses", 4 * warps)
        values = form.tokens * form.head_dim
        launcher.launch("f8_decode", warps, table, heads, values, head_bytes, int(form.dtype == "fp16"), statuses)
        found = iter(any_of_heads(words_at(launcher, statuses, warps), heads))
        return [next(found) if block.length == length else _REFUSED for block in blocks]


def codec(step_index: int = 0) -> F8:
    """The codec; it has no steps."""
    if step_index:
        raise ValueError(f"f8 has no step, got {step_index}")
    return F8()


def _head_bytes(form: TensorForm) -> int:
    return -(-_SCALE_BYTES * form.kv_heads // _ALIGNMENT) * _ALIGNMENT
