"""`x3`: lossless, exponents as 3-bit codes with escapes; bf16, fp16 and fp8, every bit pattern.

A value divides into an exponent, a *low* byte and *rest* bits:

| dtype | exponent | low | rest |
| --- | --- | --- | --- |
| bf16 | 8 bits | sign · 128 + mantissa | none |
| fp16 | 5 bits | low 8 bits of the mantissa | 3 bits: sign · 4 + high 2 bits of the mantissa |
| fp8_e4m3 | 4 bits | none | 4 bits: sign · 8 + mantissa |
| fp8_e5m2 | 5 bits | none | 3 bits: sign · 4 + mantissa |

A column is one of a head's D dims. Its window is seven consecutive exponents, the highest of which, 6 or more, is its *top*. A
value's code is top - exponent where that is 0 to 6, else 7: an *escape*, whose exponent is stored as a byte.

An encoded block, H heads of n = T · D values ([token][dim]), G = n / 2048 rounded up groups and F = n / 1024 rounded up fields a
head, little-endian:

| offset | size | what |
| --- | --- | --- |
| 0 | H · D | tops, a byte a column |
| A = H · D rounded up to 4 | 4 · H | for each head how many escapes it and the heads before it have |
| B = A + 4 · H | 2 · H · G | for each group how many escapes its head has before it |
| C = B + 2 · H · G rounded up to 16 | 384 · H · F | codes, a *field* of 3 bits for each 1,024 values |
| L = C + 384 · H · F | H · P | low bytes, P = n rounded up to 4 a head; nothing where there are none |
| R = L + H · P | 128 · b · H · F | rest bits, a field of b = 3 or 4 bits for each 1,024 values; nothing where there are none |
| E = R + 128 · b · H · F | | exponents of escapes, a byte each, in the order of the values |

A field of b bits holds 1,024 values in b rows of 128 bytes. Byte c of all rows, the first row the least significant, is a number of
8 · b bits: value c + 128 · j is its bits b · j to b · j + b - 1, j from 0 to 7. So 128 neighbouring values are 128 neighbouring
bytes at the same bits, and packing is a shift; any group decodes alone. Padding, and the bits of values that a last field does not
have, are 0.

What a writer does is fixed too, so that equal values give equal bytes. A column's top is the lower median of the greatest exponents
of its *chunks* (element (k - 1) / 2, rounded down, of k in ascending order), or 6 where that is below 6 or there are none. A chunk
is 64 rows; rows after the last whole chunk are one more if they are 32 or more, or all there are, else they have no say. A row is a
token, or, where D is below 128 and divides it, 128 / D tokens that count by themselves: row r has at place p the token
128 / D · r + p, and each (chunk, p) is one of the k. Those that are 0 do not count, so that what is padded with zeros does not
spoil the rest. (The greatest of 64 is most often near the end of the best window, whatever the column's distribution: it costs
0.01 bits a value more than the best of all windows, and nothing is counted.)

A block that does not shrink, or has a group with more than 65,535 escapes before it in its head, stays RAW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToDecode, BlockToEncode, Coding, EncodedLength
from kvobj.tensors.form import TensorForm
from kvobj.tensors.head_reports import LONGEST_HEAD, address_table, words_at
from kvobj.tensors.kernels.launcher import Address, Launcher

_GROUP: Final = 2048
_FIELD: Final = 1024
_STEP: Final = 128
_CHUNK: Final = 64
_SPLITS: Final = {"bf16": (0, 1, 0), "fp16": (1, 1, 3), "fp8_e4m3": (2, 0, 4), "fp8_e5m2": (3, 0, 3)}
"""dtype → its number in `x3.cuh`, low bytes and rest bits of a value."""
_LARGEST_BLOCK: Final = 2**31 - 2**16
_REFUSED: Final = 1


class X3:
    """See `TensorCodec`. Stateless."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return "x3"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return 0

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`."""
        if form.dtype not in _SPLITS:
            return f"x3 takes {', '.join(_SPLITS)}, not {form.dtype}"
        if form.tokens * form.head_dim > LONGEST_HEAD or form.block_bytes > _LARGEST_BLOCK:
            return f"x3 takes up to {LONGEST_HEAD} values a head and {_LARGEST_BLOCK} bytes a block"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`: nothing is written of a block that cannot shrink, nor escapes of one that did not."""
        return form.block_bytes

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`."""
        form, count = coding.form, len(blocks)
        if not blocks or _fixed_bytes(form) >= form.block_bytes:
            return [EncodedLength(STAYS_RAW)] * count
        heads, dim, values, split = form.kv_heads, form.head_dim, form.tokens * form.head_dim, _SPLITS[form.dtype][0]
        tiles, warps = count * heads * -(-dim // _STEP), count * heads * -(-values // _GROUP)
        plains = address_table(launcher, "x3.plains", (block.plain for block in blocks))
        slots = address_table(launcher, "x3.slots", (block.slot for block in blocks))
        room = _STEP * -(-form.tokens // _CHUNK)
        maxima = launcher.scratch("x3.maxima", room * tiles)
        escapes = launcher.scratch("x3.escapes", _GROUP * warps)
        counts = launcher.scratch("x3.counts", 4 * warps)
        lengths = launcher.scratch("x3.lengths", 4 * count)
        launcher.launch("x3_choose_tops", tiles, plains, slots, maxima, room, heads, form.tokens, dim, split)
        spread = _spread_tops(launcher, slots, count, form)
        launcher.launch("x3_encode", warps, plains, slots, *spread, escapes, counts, heads, values, dim, split)
        launcher.launch("x3_place", count, slots, lengths, counts, heads, values, dim, split)
        launcher.launch("x3_gather", warps, slots, lengths, escapes, counts, heads, values, dim, split)
        return [EncodedLength(length) for length in words_at(launcher, lengths, count)]

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`."""
        form = coding.form
        least = _fixed_bytes(form)
        whole = [block for block in blocks if least <= block.length < form.block_bytes]
        count = len(whole)
        if not whole:
            return [_REFUSED] * len(blocks)
        heads, dim, values, split = form.kv_heads, form.head_dim, form.tokens * form.head_dim, _SPLITS[form.dtype][0]
        encoded = address_table(launcher, "x3.encoded", (block.encoded for block in whole))
        plains = address_table(launcher, "x3.plains", (block.plain for block in whole))
        lengths, statuses = launcher.scratch("x3.lengths", 4 * count), launcher.scratch("x3.statuses", 4 * count)
        launcher.upload(lengths, b"".join(block.length.to_bytes(4, "little") for block in whole))
        launcher.upload(statuses, bytes(4 * count))
        spread = _spread_tops(launcher, encoded, count, form)
        warps = count * heads * -(-values // _GROUP)
        launcher.launch("x3_decode", warps, encoded, lengths, plains, *spread, statuses, heads, values, dim, split)
        found = iter(words_at(launcher, statuses, count))
        return [next(found) if least <= block.length < form.block_bytes else _REFUSED for block in blocks]


def codec(step_index: int = 0) -> X3:
    """See `codec_protocol`: it has no step."""
    assert not step_index, "x3 has no step"
    return _X3


def _spread_tops(launcher: Launcher, blocks: Address, count: int, form: TensorForm) -> tuple[Address, int]:
    """Tops repeated so that those of any 128 neighbouring values lie together, and how far a head's are from the next's."""
    dim = form.head_dim
    if dim % _STEP == 0:
        return Address(0), 0  # they do so in the block
    pitch = _rounded(dim + _STEP, 16)
    spread = launcher.scratch("x3.spread", pitch * count * form.kv_heads)
    launcher.launch("x3_spread_tops", count * form.kv_heads, blocks, spread, pitch, form.kv_heads, dim)
    return spread, pitch


def _fixed_bytes(form: TensorForm) -> int:
    """Length of an encoded block that has no escapes: all parts but the last."""
    _, lows, rest_bits = _SPLITS[form.dtype]
    heads, values = form.kv_heads, form.tokens * form.head_dim
    groups, fields = heads * -(-values // _GROUP), heads * -(-values // _FIELD)
    head = _rounded(_rounded(heads * form.head_dim, 4) + 4 * heads + 2 * groups, 16)
    return head + fields * _STEP * (3 + rest_bits) + heads * lows * _rounded(values, 4)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_X3: Final = X3()
