"""What a tensor codec is to the container: a function between the values of a *block* (one layer's K or V) and its encoded bytes.

The container (`codecs.py`) does once, for all codecs, what is not arithmetic: the order of axes, RAW blocks, checksums, directory,
groups, digest, certificate. A codec does blocks, many in one call: on a CPU a call brings one or a few, so that they stay in the
cache; on a GPU all there are, so that one launch codes them. It orchestrates kernels through a `Launcher` and never touches values
in Python.

Values of a block lie contiguous in [head][token][dim] order, whatever order the namespace declares: the container has packed them.
All addresses are the launcher's and multiples of 16. One module holds one codec (`x3.py` …) and has

    def codec(step_index: int = 0) -> TensorCodec

which is called often and so is cheap; `step_index` is that of the header (0 where the codec has none).
Codecs are stateless: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels.launcher import Address, Launcher

STAYS_RAW: Final = 0
"""Length of a block that the codec did not encode: it does not shrink, or holds a value that a lossy codec does not take."""


class Profile(Protocol):
    """What a codec needs to know of a model besides the chunk (`profiles.py`)."""

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the profile's object: 32 bytes, as the header names it."""
        ...


@dataclass(frozen=True, slots=True)
class Coding:
    """What all blocks of a frame share. Block number b is layer b // kinds, kind b % kinds (`form.kinds`; kind 0 is K or the latent
    unless the form is `v`)."""

    form: TensorForm
    first_position: int = 0
    rope_id: int = 0
    profile: Profile | None = None

    @property
    def values(self) -> int:
        """How many values a block has: heads * tokens * dim."""
        return self.form.block_values

    @property
    def plain_bytes(self) -> int:
        """How many bytes a block's values take."""
        return self.form.block_bytes


@dataclass(frozen=True, slots=True)
class BlockToEncode:
    """One block. `slot` takes the encoded bytes, `slot_bytes(form)` of room; `decoded`, where not None, what they decode to,
    as many bytes as the values have (only asked of lossy codecs). Neither overlaps anything else; both are undefined after
    STAYS_RAW."""

    number: int
    plain: Address
    slot: Address
    decoded: Address | None = None


@dataclass(frozen=True, slots=True)
class BlockToDecode:
    """One block: `length` encoded bytes, whose crc32c may have been right or not been checked: nothing about them can be relied on.
    `plain` takes the values and nothing else is written, whatever the bytes are."""

    number: int
    encoded: Address
    length: int
    plain: Address


@dataclass(frozen=True, slots=True)
class BlockToDemote:
    """One block of a frame of a finer step, at `encoded`, to be encoded anew into `slot`; `decoded` as of `BlockToEncode`."""

    number: int
    encoded: Address
    length: int
    slot: Address
    decoded: Address


@dataclass(frozen=True, slots=True)
class BlockError:
    """What one step of lossy coding did to a block: the largest absolute difference between `before` and `after`, the sum of the
    squares of the differences, and the sum of the squares of `before`.

    Sums are deterministic (integers, or in a fixed order), the same on every machine. `before` is x for the first step, and what
    the rung before decodes to for each further one of the ladder of `eq`.
    """

    max_error: float
    error_square: float
    before_square: float


@dataclass(frozen=True, slots=True)
class EncodedLength:
    """What became of a block. `length` is that of the encoded bytes, from the slot's start, or STAYS_RAW.

    `errors` has an entry for each step (one; `eq` at k: 1 + k), none of a lossless codec or of STAYS_RAW. The container adds them
    up to the certificate, also those of a block that it stores RAW only because it did not shrink. Codecs of a ladder say STAYS_RAW
    on every rung or on none, so that a finer frame's certificate and what demotion adds are those of direct coding.
    """

    length: int
    errors: tuple[BlockError, ...] = ()


class TensorCodec(Protocol):
    """One codec, at one step."""

    @property
    def name(self) -> str:
        """As frames and rows say it: `x3`, `eq:83/1`."""
        ...

    @property
    def flags(self) -> int:
        """Header flags that every frame of it has, as `codec_names` lists them for readers."""
        ...

    def refusal(self, form: TensorForm) -> str | None:
        """Why it does not take this form, for people; None if it does. What it takes it may still leave RAW."""
        ...

    def slot_bytes(self, form: TensorForm) -> int:
        """The most bytes that an encoded block may take while it is made; any number, also above the plain size."""
        ...

    def encode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToEncode]) -> list[EncodedLength]:
        """Encode blocks; one answer each, in order. Returns when the lengths are known (a GPU's queue is waited for).

        Same values, same bytes: on every machine, whatever else is in the call and was in the memory before. The encoded bytes
        leave nothing undefined: padding is zero.
        """
        ...

    def decode(self, launcher: Launcher, coding: Coding, blocks: Sequence[BlockToDecode]) -> list[int]:
        """Decode blocks; a status each, in order: 0, or anything else where the bytes are no encoded block of this form. Then the
        values are undefined."""
        ...


class DemotingCodec(TensorCodec, Protocol):
    """A codec of a ladder: frames of a finer step become frames of this one by integer operations, the same as direct coding."""

    def demote(
        self, launcher: Launcher, coding: Coding, finer: str, blocks: Sequence[BlockToDemote]
    ) -> list[EncodedLength | None]:
        """Encode blocks of a frame of `finer` anew; `errors` are those of the further steps alone. None where the encoded bytes
        are no block of this form. What was RAW is not given here: the container encodes it as `encode` does."""
        ...
