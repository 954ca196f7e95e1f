"""`xa`: lossless; exponents by rANS over static tables, signs and mantissas as they are. bf16, fp16, fp8 and fp32.

An encoded block, H heads of T tokens of D values, n = T · D, little-endian:

| offset | size | field |
| --- | --- | --- |
| 0 | 4 · H | end of each head's stream, u32, in bytes from the first stream on: the first begins at 0, the last ends the block |
| 4 · H | H | largest exponent of each head: of its finite values (fp8_e4m3: of all), 0 where there is none |
| 5 · H | | zeros up to L = 5 · H rounded up to 16 |
| L + h · P | P | low parts of head h |
| L + H · P | | streams, in the order of the heads, without gaps |

A value i = t · D + d of a head is split into exponent and *low part*: the mantissa with the sign above it, b bits (bf16 8,
fp16 11, fp8_e4m3 4, fp8_e5m2 3, fp32 24). Low parts of a head are first b % 8 bit planes, of the bits above the whole bytes, the
lowest first in each step of 32 values: one u32 a plane and step, bit j that of value 32 · step + j, 0 beyond the last value.
Then b / 8 byte planes of n bytes, the lowest byte first. Zeros up to P, a multiple of 4.

The symbol of a value is d = the largest exponent less its own, from 0 to 23; else it is escaped, with its exponent as the raw
word. A head's stream (`kernels/rans.cuh`: states, words; the table ids of its D columns, its n symbols) uses the alphabet of
`tables_xa.cuh`: symbols 0 to 23, then the escape, at slot 4,095. A column's table is the cheapest for its symbols by
`tables_cost.cuh`, where an escape costs 16 bits more (of the first D · 65,535 / 32 steps, rounded up, which is all below 65,536
tokens), the lowest id of equal ones.

A block stays RAW where it does not shrink, where a head's stream needs more than the head's plain bytes, and where the dtype is
of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToDecode, BlockToEncode, Coding, EncodedLength
from kvobj.tensors.form import Dtype, TensorForm
from kvobj.tensors.head_reports import LONGEST_HEAD, address_table, any_of_heads, words_at
from kvobj.tensors.kernels.launcher import Launcher
from kvobj.tensors.kernels.rans_tables import prepare

_NUMBERS: Final[dict[Dtype, int]] = {"bf16": 0, "fp16": 1, "fp8_e4m3": 2, "fp8_e5m2": 3, "fp32": 4}
"""As the kernels number dtypes."""
_LOW_BITS: Final = (8, 11, 4, 3, 24)
_LANES: Final = 32
_COUNTER_BYTES: Final = 2 * 32
_SLOT_WORDS: Final = 256
"""Room of a stream, beyond the plain bytes of its head."""
_REFUSED: Final = 1


class Xa:
    """See `TensorCodec`. Stateless."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return "xa"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return 0

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`. Takes every dtype; integers stay RAW."""
        if form.block_bytes > LONGEST_HEAD:
            return f"xa takes up to {LONGEST_HEAD} bytes a layer of K or V"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`."""
        return form.block_bytes if form.dtype not in _NUMBERS else max(form.block_bytes, _streams_offset(form))

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`."""
        form = coding.form
        if form.dtype not in _NUMBERS or not blocks:
            return [EncodedLength(STAYS_RAW) for _ in blocks]
        prepare(launcher)
        heads, values, columns = form.kv_heads, form.tokens * form.head_dim, form.head_dim
        warps = len(blocks) * heads
        table = address_table(launcher, "xa.blocks", (int(at) for block in blocks for at in (block.plain, block.slot)))
        rooms = (
            1 if launcher.is_host else warps
        )  # on a CPU warps run one after the other, in what the cache holds already
        room_bytes = _up(_up(values, _LANES)) + _up(columns * _COUNTER_BYTES) + _ids_bytes(columns)
        slot_words = _up(values * form.element_bytes // 2 + _SLOT_WORDS)
        work = launcher.scratch("xa.work", rooms * room_bytes)
        slots = launcher.scratch("xa.slots", 2 * warps * slot_words)
        streams, lengths = launcher.scratch("xa.streams", 8 * warps), launcher.scratch("xa.lengths", 4 * warps)
        block_bytes = launcher.scratch("xa.block-bytes", 4 * len(blocks))
        launcher.launch(
            "xa_encode", warps, table, _NUMBERS[form.dtype], heads, values, columns, work, rooms, room_bytes, slots, slot_words,
            streams, lengths,
        )  # fmt: skip
        launcher.launch(
            "xa_place",
            warps,
            table,
            heads,
            _low_offset(form),
            _streams_offset(form),
            form.block_bytes,
            streams,
            lengths,
            block_bytes,
        )
        return [EncodedLength(length) for length in words_at(launcher, block_bytes, len(blocks))]

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`."""
        form = coding.form
        if form.dtype not in _NUMBERS or not blocks:
            return [_REFUSED for _ in blocks]
        prepare(launcher)
        heads, columns = form.kv_heads, form.head_dim
        warps = len(blocks) * heads
        table = address_table(
            launcher, "xa.blocks", (int(at) for block in blocks for at in (block.encoded, block.plain, block.length))
        )
        ids = launcher.scratch("xa.ids", warps * _ids_bytes(columns))
        statuses = launcher.scratch("xa.statuses", 4 * warps)
        launcher.launch(
            "xa_decode", warps, table, _NUMBERS[form.dtype], heads, form.tokens * columns, columns, ids, statuses
        )
        return any_of_heads(words_at(launcher, statuses, warps), heads)


def codec(step_index: int = 0) -> Xa:
    """The codec; it has no steps."""
    if step_index:
        raise ValueError(f"xa has no step, got {step_index}")
    return Xa()


def _low_offset(form: TensorForm) -> int:
    return _up(5 * form.kv_heads, 16)


def _streams_offset(form: TensorForm) -> int:
    bytes_wide, bits = divmod(_LOW_BITS[_NUMBERS[form.dtype]], 8)
    values = form.tokens * form.head_dim
    return _low_offset(form) + form.kv_heads * _up(-(-values // _LANES) * bits * 4 + values * bytes_wide, 4)


def _ids_bytes(columns: int) -> int:
    return _up(columns + _LANES)


def _up(size: int, alignment: int = 64) -> int:
    return -(-size // alignment) * alignment
