"""`ek`: `eq`'s quantiser after a profile's transform of all heads of a token together; bf16 and fp16.

C = H · D columns in groups of W, the largest of 128, 96, 64 and 32 that divides C; G = C / W streams. An encoded block,
little-endian, nothing between the parts:

| size | field |
| --- | --- |
| 4 · G | where the stream of each group ends: u32, bytes from the start of the first; each starts where the one before ends |
| 2 | g, how many tokens are guarded: u16, up to ⌊T / 16⌋ |
| 2 · g | which: u16, ascending |
| 2 · g · C | their values as they came, [token][head][dim] |
| the rest | a stream for each group (`kernels/rans.cuh`, `eq`'s tables): its T · W integers q, [token][coefficient], W table ids |

The profile (`profiles.py`) gives a block's means μ, basis V and rms. `fp32(…)` is one rounded operation, and so is each one
written below.

1. *Guard*: as of `eq`. Guarded tokens have q = 0 and keep their values.
2. *Step*: Δ = fp32(fp32(base / 1000) · rms).
3. *Centre*: keys of a model with RoPE are turned back: a' = a · cos + b · sin, b' = b · cos - a · sin, for the token's position p =
   first position + t; cos = cos(p mod 1024) · cos(p - p mod 1024) - sin · sin of these, sin = sin · cos + cos · sin, from the
   profile's tables. Then X = ±⌊|y| + ½⌋, y = (x - μ) · (1 / (Δ / 16)).
4. *Transform*: S_j = Σ X_c · V_cj, integers; q = ±((|S| + 2^17) >> 18), the integer nearest to S in units of 2^18.
5. Tables and streams as of `eq`.

Decode: R_c = Σ q_j · V_cj, in 32 bits that wrap; z = fp32(R) · (Δ · 2^-14) + μ; keys turned: a = a' · cos - b' · sin, b = b' ·
cos + a' · sin; rounded to the form's dtype. The transform is integers alone, so no order of summation shows, and frames of all
machines are equal.

A block stays RAW where `eq` keeps it RAW for its values, a token has |X| above 32,767 or Σ X² above 2^33, a decoded value is not
finite, a position is beyond the profile's, or it does not shrink.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvobj.errors import InvalidRequestError, UnavailableError
from kvobj.tensors.codec_names import FLAG_GUARD, FLAG_PROFILE_MEAN, STEP_MAX
from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToDecode, BlockToEncode, Coding, EncodedLength
from kvobj.tensors.eq import TOKENS_MAX
from kvobj.tensors.form import TensorForm
from kvobj.tensors.head_reports import REPORT_BYTES, Sums, any_of_heads, lengths_of, words_at
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address, Launcher
from kvobj.tensors.kernels.rans_tables import prepare
from kvobj.tensors.profiles import COLUMNS_MAX, COLUMNS_STEP, POSITIONS, Profile

_WIDTHS: Final = (128, 96, 64, 32)
_LANES: Final = 32
_TILE: Final = 8
"""Tokens of a warp of the transform."""
_ALIGNMENT: Final = 256
_PLAN: Final = struct.Struct("<20Q")
_JOB: Final = struct.Struct("<8Q")
_EQ_JOB: Final = struct.Struct("<4Q")
_EQ_HEAD_BYTES: Final = 32
_EQ_COUNTS_BYTES: Final = 2 * 130 * 32
_STREAM_BYTES: Final = 256
"""Of a stream without its values and ids, and more."""
_REFUSED: Final = 1


@dataclass(frozen=True, slots=True)
class Ek:
    """See `TensorCodec`. Stateless. `base_step` is in thousandths of a block's root mean square, as its profile states it."""

    base_step: int

    @property
    def name(self) -> str:
        """See `TensorCodec.name`."""
        return f"ek:{self.base_step}/0"

    @property
    def flags(self) -> int:
        """See `TensorCodec.flags`."""
        return FLAG_GUARD | FLAG_PROFILE_MEAN

    def refusal(self, form: TensorForm) -> str | None:
        """See `TensorCodec.refusal`."""
        columns = form.kv_heads * form.head_dim
        if form.dtype not in {"bf16", "fp16"}:
            return f"ek takes bf16 and fp16, not {form.dtype}"
        if columns > COLUMNS_MAX or columns % COLUMNS_STEP:
            return f"ek takes a multiple of {COLUMNS_STEP} columns (heads by dim) up to {COLUMNS_MAX}, not {columns}"
        if form.tokens > TOKENS_MAX:
            return f"ek takes up to {TOKENS_MAX} tokens"
        return None

    def slot_bytes(self, form: TensorForm) -> int:
        """See `TensorCodec.slot_bytes`: encoded blocks are smaller than their values."""
        return form.block_bytes

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """See `TensorCodec.encode`. `InvalidRequestError` without a profile of the form's model."""
        profile = _profile_of(coding)
        if not blocks:
            return []
        if not _positions_fit(coding, profile):
            return [EncodedLength(STAYS_RAW)] * len(blocks)
        jobs = [(block.number, block.plain, 0, block.slot, block.decoded or 0) for block in blocks]
        call = _Call.prepared(launcher, self, coding, profile, jobs)
        call.guard("eq_measure", coding.form.kv_heads)
        call.guard("eq_guard", 1)
        call.run("ek_pack", call.strips, 1)
        call.run("ek_centre", coding.form.tokens)
        call.run("ek_transform", call.tiles)
        call.run("ek_code", call.groups)
        call.run("ek_restore", call.tiles)
        call.run("ek_measure", coding.form.kv_heads)
        call.run("ek_place", 1)
        call.run("ek_move", call.groups)
        return call.lengths()

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """See `TensorCodec.decode`. `InvalidRequestError` without a profile of the form's model."""
        profile = _profile_of(coding)
        if not blocks or not _positions_fit(coding, profile):
            return [_REFUSED] * len(blocks)
        jobs = [(block.number, block.encoded, block.length, 0, block.plain) for block in blocks]
        call = _Call.prepared(launcher, self, coding, profile, jobs)
        call.run("ek_get", call.groups)
        call.run("ek_pack", call.strips, 0)
        call.run("ek_restore", call.tiles)
        call.run("ek_decode", coding.form.kv_heads)
        return call.statuses()


def codec(step_index: int = 0) -> Ek:
    """The codec of a header's step index. ValueError without a base step, `UnavailableError` for a demoted one: there is none."""
    if not step_index & STEP_MAX:
        raise ValueError(f"ek has a step, got {step_index}")
    if step_index > STEP_MAX:
        raise UnavailableError("ek has no demoted steps")
    return Ek(step_index)


def _profile_of(coding: Coding) -> Profile:
    profile = coding.profile
    if not isinstance(profile, Profile) or not profile.fits(coding.form):
        raise InvalidRequestError("ek needs the profile of this form's model")
    return profile


def _positions_fit(coding: Coding, profile: Profile) -> bool:
    return not profile.has_rope or coding.first_position + coding.form.tokens <= POSITIONS


def _width(columns: int) -> int:
    return next(width for width in _WIDTHS if columns % width == 0)


@dataclass(frozen=True, slots=True)
class _Room:
    """Places of a call's working memory from its start, and its size."""

    guard: tuple[int, ...]
    """Of the plan of eq's that finds guarded tokens, and of that which codes streams, in the order of `eq_plan.cuh`."""
    stream: tuple[int, ...]
    own: tuple[int, ...]
    """centred, forth, back, restored, statuses, reports, lengths: the order of `ek.cuh`."""
    stream_bytes: int
    total_bytes: int


@lru_cache(maxsize=64)
def _room(heads: int, tokens: int, dim: int, blocks: int) -> _Room:
    columns = heads * dim
    width = _width(columns)
    groups, padded = blocks * (columns // width), _padded(tokens)
    stream_bytes = -(-(_STREAM_BYTES + width + tokens * width * 29 // 8) // _ALIGNMENT) * _ALIGNMENT
    guard = (
        _EQ_HEAD_BYTES * blocks * heads,
        4 * (_padded(dim) + _LANES) * blocks * heads,  # sums
        8 * padded * blocks * heads,  # squares of rows
        8 * padded * blocks,  # norms
        2 * (padded + _LANES) * blocks,  # guarded tokens
    )
    stream = (
        _EQ_HEAD_BYTES * groups,
        0, 0, 0, 0,
        2 * (width + _LANES) * groups,  # means, not used
        (width + _LANES) * groups,  # table ids
        2 * tokens * width * groups,  # integers
        stream_bytes * groups,
        _EQ_COUNTS_BYTES * groups,  # to choose tables by
    )  # fmt: skip
    own = (
        2 * tokens * columns * blocks,
        2 * columns * columns * blocks,
        2 * columns * columns * blocks,
        4 * tokens * columns * blocks,
        4 * tokens * blocks,
        REPORT_BYTES * heads * blocks,
        4 * groups,
    )
    places, at = [], 0
    for size in (*guard, *stream, *own):
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    first, second = len(guard), len(guard) + len(stream)
    return _Room(tuple(places[:first]), tuple(places[first:second]), tuple(places[second:]), stream_bytes, at)


def _padded(count: int) -> int:
    return -(-count // _LANES) * _LANES


@dataclass(frozen=True, slots=True)
class _Call:
    """The kernels of one call: their plans, and what they leave."""

    launcher: Launcher
    plan: Address
    guard_plan: Address
    memory: Address
    room: _Room
    form: TensorForm
    blocks: int

    @classmethod
    def prepared(
        cls,
        launcher: Launcher,
        codec: Ek,
        coding: Coding,
        profile: Profile,
        jobs: Sequence[tuple[int, int, int, int, int]],
    ) -> _Call:
        """`jobs`: of each block its number, where it is, encoded length, slot, and where its values go, or 0."""
        prepare(launcher)
        form, blocks = coding.form, len(jobs)
        heads, tokens, dim = form.kv_heads, form.tokens, form.head_dim
        room = _room(heads, tokens, dim, blocks)
        memory = launcher.scratch("ek", room.total_bytes)
        width, is_half = _width(heads * dim), form.dtype == "fp16"
        at = launcher.scratch("ek.plan", 3 * _PLAN.size + (_JOB.size + _EQ_JOB.size) * blocks)
        guard_at = at.after(_PLAN.size + _JOB.size * blocks)
        stream_at = guard_at.after(_PLAN.size + _EQ_JOB.size * blocks)
        held = _held(launcher, profile)
        guard_plan = _PLAN.pack(
            heads, tokens, dim, is_half, 0, 0, 0, 0, *(memory + place for place in room.guard), *[0] * 7
        )
        stream_plan = _PLAN.pack(
            heads * dim // width, tokens, width, is_half, 0, 0, 0, room.stream_bytes,
            *(memory + place for place in room.stream), *[0] * 2,
        )  # fmt: skip
        plan = _PLAN.pack(
            heads, dim, tokens, heads * dim // width, width, is_half, coding.first_position,
            held + profile.tables_at if profile.has_rope else 0, guard_at, stream_at,
            *(memory + place for place in room.own), *[0] * 3,
        )  # fmt: skip
        own_jobs = b"".join(_jobs(codec, profile, held, jobs))
        guard_jobs = b"".join(_EQ_JOB.pack(where, 0, 0, 0) for _, where, *_ in jobs)
        launcher.upload(at, plan + own_jobs + guard_plan + guard_jobs + stream_plan)
        return cls(launcher, at, guard_at, memory, room, form, blocks)

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.form.kv_heads * self.form.head_dim

    @property
    def groups(self) -> int:
        """Streams of a block."""
        return self.columns // _width(self.columns)

    @property
    def strips(self) -> int:
        """Warps of a block that each do 32 columns."""
        return self.columns // _LANES

    @property
    def tiles(self) -> int:
        """Warps of a block that each do 32 columns of a few tokens."""
        return self.strips * -(-self.form.tokens // _TILE)

    def guard(self, kernel: str, warps: int) -> None:
        """Launch a kernel of eq's that finds guarded tokens; `warps` a block."""
        self.launcher.launch(kernel, warps * self.blocks, self.guard_plan)

    def run(self, kernel: str, warps: int, *arguments: int) -> None:
        """Launch a kernel; `warps` a block."""
        self.launcher.launch(kernel, warps * self.blocks, self.plan, *arguments)

    def statuses(self) -> list[int]:
        """Of each block, after decoding."""
        at = self.memory.after(self.room.own[-1])
        return any_of_heads(words_at(self.launcher, at, self.blocks * self.groups), self.groups)

    def lengths(self) -> list[EncodedLength]:
        """Of each block, after encoding."""
        lengths = words_at(self.launcher, self.memory.after(self.room.own[-1]), self.blocks)
        values, heads = self.form.tokens * self.form.head_dim, self.form.kv_heads
        sums = Sums(values, self.form.tokens + values // 2048)
        return lengths_of(self.launcher, self.memory.after(self.room.own[-2]), heads, lengths, sums)


def _jobs(
    codec: Ek, profile: Profile, held: Address, jobs: Sequence[tuple[int, int, int, int, int]]
) -> Iterator[bytes]:
    [thousandths] = struct.unpack("<f", struct.pack("<f", codec.base_step / 1000))
    for number, where, length, slot, decoded in jobs:
        step = int.from_bytes(struct.pack("<f", thousandths * profile.rms(number)), "little")
        means = held + profile.means_at + 4 * profile.columns * number
        basis = held + profile.bases_at + 2 * profile.columns**2 * number
        yield _JOB.pack(where, length, slot, decoded, means, basis, step, profile.is_rotated(number))


_local: Final = threading.local()


def _held(launcher: Launcher, profile: Profile) -> Address:
    """Where the profile is in the launcher's memory. A device keeps the one that the thread used last."""
    if launcher.is_host:
        return address_of(memoryview(profile.data))
    if getattr(_local, "held", None) != (launcher, profile.digest):
        _local.at = launcher.scratch("ek.profile", len(profile.data))
        launcher.upload(_local.at, profile.data)
        _local.held = (launcher, profile.digest)
    found: Address = _local.at
    return found
