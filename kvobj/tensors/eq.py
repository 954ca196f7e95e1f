"""`eq`: the entropy-coded uniform quantiser; bf16 and fp16, any step, along a ladder of nested steps.

An encoded block, H heads of T tokens of D values, n = T · D, little-endian, nothing between the parts:

| size | field |
| --- | --- |
| 4 · H | where the stream of each head ends: u32, bytes from the start of the first; each starts where the one before ends |
| 2 · H | base step Δ of each head: bf16, below infinity |
| 2 · H · D | mean μ of each column: bf16, [head][dim] |
| 2 | g, how many tokens are guarded: u16, up to ⌊T / 16⌋ |
| 2 · g | which: u16, ascending |
| 2 · g · H · D | their values as they came, [token][head][dim] |
| the rest | a stream for each head (`kernels/rans.cuh`), of its n integers q, [token][dim], and its D table ids |

**Numbers.** E is the exponent of a head's largest value (2^E ≤ |x| < 2^(E+1)) and X = trunc(x · 2^(14 - E)) the integer that
x counts as where something is summed: values far below the largest vanish. `fp32(…)` is one rounded operation; bf16(…) rounds
to nearest, ties to even.

1. *Guard.* N_t = Σ over heads of ⌊Σ X² over the head's row ÷ 4^(F - E)⌋, F the largest E of the block; m the lower median of
   N. Guarded are tokens with 100 · N_t < 9 · m or N_t > 9 · m, or none where these are more than ⌊T / 16⌋. All that follows
   is of the others.
2. *Mean.* S = Σ X of a column, over u tokens: μ = bf16(fp32(fp32(fp32(S) · fp32(1 / u)) · 2^(E - 14))).
3. *Step.* M = trunc(μ · 2^(14 - E)), V = Σ (X - M)² over the head, e the least even number with V < 2^(24 + e), c = u · D:
   r = fp32(√fp32(fp32(⌊V / 2^e⌋) · fp32(1 / c))) · 2^(e/2), at least 1; Δ = bf16(fp32(fp32(base / 1000) · r) · 2^(E - 14)).
   A head of zeros has Δ = 0 and q = 0.
4. *Quantise.* y = fp32(fp32(x - μ) · fp32(1 / Δ)); q = ±⌊|y| + ½⌋, exactly: half goes away from zero. Guarded rows have
   q = 0. Then k times q = ±⌊(|q| + 1) / 3⌋, k the rung. So a rung follows from the one before by integers alone.
5. *Table.* For each column the table whose costs sum to the least, the first of equal ones. |q| > 127, and what has no
   frequency in the column's table, is an escape, whose word is q as 16 bits.

x̂ = fp32(fp32(q · fp32(3^k · Δ)) + μ), rounded to the form's dtype; guarded rows are as they were.

**RAW**, whatever the rung, is a block with a value that is not finite, a head whose largest value is not 0 and not from 2^-64
up to 2^64, or a base integer beyond ±32767; and one where it is not certain that it shrinks, which is where
H · (6 + 2 · D) + 2 + g · (2 + 2 · H · D) + 192 · H + H · D + ⌈(12 · H · n + 17 · a) / 8⌉ ≥ 2 · H · n, a counting base
integers beyond ±127: no integer costs more than 12 bits by the widest table, an escape 17 more. (So a block below about ten
tokens always is.)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvobj.tensors.codec_names import BY_NAME, FLAG_GUARD, RUNG_MAX, STEP_MAX, CodecName
from kvobj.tensors.codec_protocol import (
    STAYS_RAW,
    BlockError,
    BlockToDecode,
    BlockToDemote,
    BlockToEncode,
    Coding,
    EncodedLength,
)
from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels.launcher import Address, Launcher
from kvobj.tensors.kernels.rans_tables import prepare

TOKENS_MAX: Final = 32_767
"""Counts of tokens have 15 bits."""
HEAD_VALUES_MAX: Final = 2**30
"""Values of a head that kernels count in 32 bits."""

_LANES: Final = 32
_ALIGNMENT: Final = 256
_PLAN: Final = struct.Struct("<20Q")
_JOB: Final = struct.Struct("<4Q")
_REPORT: Final = struct.Struct("<3fi")
_STEP: Final = struct.Struct("<f")
_COUNTS: Final = 130 * _LANES
"""Counters of 32 columns."""
_STREAM_BYTES: Final = 256
"""Of a stream without its values and ids, and more."""
_LARGEST_ROUNDED: Final = 1 + 2.0**-22
_LEAST_SQUARE: Final = 2.0**-126
"""What a square, in units of the step, may have lost to underflow."""


@dataclass(frozen=True, slots=True)
class Eq:
    """See `TensorCodec` and `DemotingCodec`. Stateless. `base_step` is in thousandths of a head's root mean square."""

    base_step: int
    rung: int

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return f"eq:{self.base_step}/{self.rung}"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return FLAG_GUARD

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`."""
        if form.dtype not in {"bf16", "fp16"}:
            return f"eq takes bf16 and fp16, not {form.dtype}"
        if form.tokens > TOKENS_MAX:
            return f"eq takes up to {TOKENS_MAX} tokens"
        if form.tokens * form.head_dim > HEAD_VALUES_MAX:
            return f"eq takes up to {HEAD_VALUES_MAX} values a head"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`: encoded blocks are smaller than their values."""
        return form.block_bytes

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`."""
        if not blocks:
            return []
        jobs = [(block.plain, 0, block.slot, block.decoded or 0) for block in blocks]
        call = _Call.prepared(launcher, self, 0, coding.form, jobs)
        call.for_heads("eq_measure")
        call.for_blocks("eq_guard")
        call.for_heads("eq_code")
        call.for_blocks("eq_place")
        call.for_heads("eq_move")
        return call.lengths()

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`."""
        if not blocks:
            return []
        jobs = [(block.encoded, block.length, 0, block.plain) for block in blocks]
        call = _Call.prepared(launcher, self, self.rung, coding.form, jobs)
        call.for_heads("eq_decode")
        return call.statuses()

    def demotes_from(self, finer: str) -> bool:
        """See `DemotingCodec.demotes_from`."""
        name = CodecName.parse(finer)
        return name.kind is BY_NAME["eq"] and name.base_step == self.base_step and name.rung < self.rung

    def demote(
        self, launcher: Launcher, coding: Coding, finer: str, blocks: Sequence[BlockToDemote]
    ) -> list[EncodedLength | None]:
        """See `DemotingCodec.demote`. ValueError for a codec that is no finer rung of this ladder."""
        if not self.demotes_from(finer):
            raise ValueError(f"{self.name} is no coarser rung of {finer}")
        if not blocks:
            return []
        jobs = [(block.encoded, block.length, block.slot, block.decoded) for block in blocks]
        call = _Call.prepared(launcher, self, CodecName.parse(finer).rung, coding.form, jobs)
        call.for_heads("eq_demote")
        call.for_blocks("eq_place_demoted")
        call.for_heads("eq_move_demoted")
        return [length if length.length != STAYS_RAW else None for length in call.lengths(is_demotion=True)]


def codec(step_index: int = 0) -> Eq:
    """The codec of a header's step index. ValueError without a base step."""
    base_step, rung = step_index & STEP_MAX, step_index >> 12
    if not base_step or not 0 <= rung <= RUNG_MAX:
        raise ValueError(f"eq has a step, got {step_index}")
    return Eq(base_step, rung)


@dataclass(frozen=True, slots=True)
class _Room:
    """Places of a call's working memory from its start, in the order of `eq_plan.cuh`, and its size."""

    places: tuple[int, ...]
    lengths_at: int
    reports_at: int
    total_bytes: int


@lru_cache(maxsize=64)
def _room(heads: int, tokens: int, dim: int, blocks: int, reports: int) -> _Room:
    every, rows, columns = blocks * heads, _padded(tokens), _padded(dim) + _LANES
    sizes = (
        32 * every,  # of what stages know of a head
        4 * columns * every,  # sums
        8 * rows * every,  # squares of rows
        8 * rows * blocks,  # norms
        2 * (rows + _LANES) * blocks,  # guarded tokens
        2 * columns * every,  # means
        columns * every,  # table ids
        2 * _padded(tokens * dim) * every,  # symbols
        _stream_bytes(tokens, dim) * every,  # streams
        2 * _COUNTS * every,  # counts of symbols
        4 * every,  # lengths, or statuses
        _REPORT.size * every * reports,
    )
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _Room(tuple(places), places[-2], places[-1], at)


def _stream_bytes(tokens: int, dim: int) -> int:
    """Room for the longest stream: escapes alone."""
    return -(-(_STREAM_BYTES + dim + tokens * dim * 29 // 8) // _ALIGNMENT) * _ALIGNMENT


def _padded(count: int) -> int:
    return -(-count // _LANES) * _LANES


@dataclass(frozen=True, slots=True)
class _Call:
    """The kernels of one call: their plan, and what they leave."""

    launcher: Launcher
    plan: Address
    memory: Address
    room: _Room
    form: TensorForm
    blocks: int
    reports: int

    @classmethod
    def prepared(
        cls, launcher: Launcher, codec: Eq, rung_from: int, form: TensorForm, jobs: Sequence[tuple[int, int, int, int]]
    ) -> _Call:
        """A call from symbols of one rung (0: values) to the codec's. `jobs`: of each block where it is, encoded length, slot
        and where its values go, or 0."""
        prepare(launcher)
        reports = codec.rung - rung_from + 1
        heads, tokens, dim, blocks = form.kv_heads, form.tokens, form.head_dim, len(jobs)
        room = _room(heads, tokens, dim, blocks, reports)
        memory = launcher.scratch("eq", room.total_bytes)
        step = int.from_bytes(_STEP.pack(codec.base_step / 1000), "little")
        plan = _PLAN.pack(
            heads, tokens, dim, form.dtype == "fp16", step, rung_from, codec.rung, _stream_bytes(tokens, dim),
            *(memory + place for place in room.places),
        )  # fmt: skip
        at = launcher.scratch("eq.plan", _PLAN.size + _JOB.size * blocks)
        launcher.upload(at, plan + b"".join(_JOB.pack(*job) for job in jobs))
        return cls(launcher, at, memory, room, form, blocks, reports)

    def for_heads(self, kernel: str) -> None:
        """Launch a kernel whose warps are heads."""
        self.launcher.launch(kernel, self.blocks * self.form.kv_heads, self.plan)

    def for_blocks(self, kernel: str) -> None:
        """Launch a kernel whose warps are blocks."""
        self.launcher.launch(kernel, self.blocks, self.plan)

    def statuses(self) -> list[int]:
        """Of each block, after decoding."""
        heads = self.form.kv_heads
        found = bytearray(4 * self.blocks * heads)
        self.launcher.download(self.memory.after(self.room.lengths_at), memoryview(found))
        return [int(any(found[4 * heads * block : 4 * heads * (block + 1)])) for block in range(self.blocks)]

    def lengths(self, *, is_demotion: bool = False) -> list[EncodedLength]:
        """Of each block, with the errors of its steps."""
        steps, each = self.reports - is_demotion, self.form.kv_heads * self.reports * _REPORT.size
        start = self.room.lengths_at
        found = bytearray(self.room.reports_at - start + self.blocks * each)
        self.launcher.download(self.memory.after(start), memoryview(found))
        lengths = struct.unpack_from(f"<{self.blocks}I", found)
        answers = []
        for block, length in enumerate(lengths):
            first = self.room.reports_at - start + block * each
            reports = list(_REPORT.iter_unpack(found[first : first + each])) if length else []
            errors = tuple(self._error(reports[step :: self.reports]) for step in range(steps)) if length else ()
            answers.append(EncodedLength(length or STAYS_RAW, errors))
        return answers

    def _error(self, heads: Sequence[tuple[float, float, float, int]]) -> BlockError:
        """Of one step of a block, given the reports of its heads: largest error, sums of squares in units of 4^exponent,
        exponent. Sums were rounded 80 times, and once more every 64 steps."""
        values = self.form.tokens * self.form.head_dim
        rounded = 1 + (80 + _padded(self.form.head_dim) * self.form.tokens / 2048) * 2.0**-23
        return BlockError(
            max(largest for largest, *_ in heads) * _LARGEST_ROUNDED,
            sum(
                (error * rounded + values * _LEAST_SQUARE) * 4.0**exponent
                for largest, error, _, exponent in heads
                if largest
            ),
            sum(before / rounded * 4.0**exponent for _, _, before, exponent in heads),
        )
