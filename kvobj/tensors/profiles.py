"""Profiles: what `ek` knows of a model besides the chunk. One canonical object, named by its BLAKE3, which frames name.

For each (layer, kind) block, layer-major as in frames, over C = heads times head_dim columns, [head][dim], of keys before rotary
position embedding (RoPE) and of values as they are: the mean of each column, an orthonormal basis that decorrelates the columns,
and the root mean square of what is left after the mean, from which a frame's step follows. A frame cannot be read without its
profile, so whoever keeps the frame keeps the object; in a bucket it lies at `profiles/<digest in hex>` (`object_key`).

The object, little-endian, L layers, B = L times kinds blocks, C a multiple of 32 up to 4,096:

| size | field |
| --- | --- |
| 4, 2, 1, 1 | magic `KVPF`; version 1; kind (0 kv, 1 k, 2 v, 3 mla); 1 with RoPE, else 0 |
| 4, 4, 4, 12 | layers, heads, head_dim, zeros |
| 4 · B | rms, fp32, from 2^-40 to 2^40 |
| 4 · B · C | means, fp32, [block][column], each below 2^40 |
| 2 · B · C · C | bases, i16 in units of 2^-14, [block][column][coefficient], from -16,384 to 16,384 |
| 16 · 1024 · D / 2, with RoPE | cosines, sines of positions 0 … 1023, then of 0, 1024, 2048 … 1023 · 1024: fp32, [position][pair] |
| 128 | zeros |

RoPE is half-split: pair i of a head is columns i and i + D / 2, turned by position times frequency i. Positions go below 2^20.
"""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Self

from blake3 import blake3

from kvobj.errors import FrameCorruptError
from kvobj.tensors.form import Kind, TensorForm
from kvobj.tensors.frame import TensorFrame

MAGIC: Final = b"KVPF"
VERSION: Final = 1
POSITIONS: Final = 2**20
"""Positions that RoPE tables reach."""
COLUMNS_MAX: Final = 4096
COLUMNS_STEP: Final = 32
BASIS_ONE: Final = 1 << 14
"""What 1 is in a basis."""
KEY_PREFIX: Final = "profiles/"

_HEAD: Final = struct.Struct("<4sHBBIII12x")
_KINDS: Final[tuple[Kind, ...]] = ("kv", "k", "v", "mla")
_LARGEST: Final = 2.0**40
_TAIL: Final = bytes(128)
_TABLE_POSITIONS: Final = 1024
_LAYERS_MAX: Final = 2**12


class ProfileError(ValueError):
    """Why bytes are no profile, or numbers make none."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Half-split rotary position embedding: a frequency for each pair, in radians a position."""

    frequencies: tuple[float, ...]

    @classmethod
    def of(cls, theta: float, head_dim: int) -> Self:
        """Unscaled: theta^(-2i / head_dim)."""
        return cls(tuple(theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)))

    def tables(self) -> bytes:
        """Cosines and sines as profiles hold them, each the nearest fp32 of a double."""
        found = array.array("f")
        for step in (1, _TABLE_POSITIONS):
            angles = [
                position * step * frequency for position in range(_TABLE_POSITIONS) for frequency in self.frequencies
            ]
            found.extend(map(math.cos, angles))
            found.extend(map(math.sin, angles))
        return _little_endian(found)


@dataclass(frozen=True, slots=True)
class BlockBasis:
    """One block of a profile: its rms, C means, and the C by C entries of its basis, [column][coefficient]."""

    rms: float
    means: Sequence[float]
    basis: Sequence[float]


@dataclass(frozen=True)
class Profile:
    """A parsed profile. `data` is the object; nothing else is kept of it. Immutable; any thread."""

    data: bytes = field(repr=False)
    kind: Kind
    has_rope: bool
    layers: int
    heads: int
    head_dim: int

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read an object. `ProfileError` for anything that `build` does not make."""
        if len(data) < _HEAD.size:
            raise ProfileError(f"a profile has at least {_HEAD.size} bytes, got {len(data)}")
        magic, version, kind, rope, layers, heads, head_dim = _HEAD.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ProfileError(f"no profile of version {VERSION}: {magic!r} {version}")
        if kind >= len(_KINDS) or rope > 1 or any(data[_HEAD.size - 12 : _HEAD.size]):
            raise ProfileError("a profile's head has fields that none has")
        _check_sizes(layers, heads, head_dim, has_rope=bool(rope))
        profile = cls(bytes(data), _KINDS[kind], bool(rope), layers, heads, head_dim)
        if len(data) != profile.tables_at + profile.table_bytes + len(_TAIL) or data[-len(_TAIL) :] != _TAIL:
            raise ProfileError(f"a profile of this form has another length than {len(data)}, or no zeros at its end")
        profile._check_numbers()
        return profile

    @classmethod
    def build(cls, form: TensorForm, blocks: Sequence[BlockBasis], rope: Rope | None) -> Self:
        """The profile of a model's form (`dtype`, `tokens` and `order` do not matter), its blocks layer-major. `ProfileError`."""
        _check_sizes(form.layers, form.kv_heads, form.head_dim, has_rope=rope is not None)
        columns = form.kv_heads * form.head_dim
        if len(blocks) != form.blocks or any(len(b.means) != columns or len(b.basis) != columns**2 for b in blocks):
            raise ProfileError(f"wanted {form.blocks} blocks of {columns} columns")
        if rope is not None and len(rope.frequencies) != form.head_dim // 2:
            raise ProfileError(f"wanted {form.head_dim // 2} frequencies, got {len(rope.frequencies)}")
        head = _HEAD.pack(
            MAGIC, VERSION, _KINDS.index(form.kind), rope is not None, form.layers, form.kv_heads, form.head_dim
        )
        rms = array.array("f", [block.rms for block in blocks])
        means = array.array("f", (mean for block in blocks for mean in block.means))
        bases = b"".join(_little_endian(array.array("h", map(_basis_entry, block.basis))) for block in blocks)
        tables = rope.tables() if rope is not None else b""
        return cls.parse(b"".join((head, _little_endian(rms), _little_endian(means), bases, tables, _TAIL)))

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the object."""
        return blake3(self.data).digest()

    @property
    def kinds(self) -> int:
        """Blocks of a layer."""
        return 2 if self.kind == "kv" else 1

    @property
    def blocks(self) -> int:
        """How many blocks it describes."""
        return self.layers * self.kinds

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.heads * self.head_dim

    def is_rotated(self, block: int) -> bool:
        """Whether a block's values are turned by position: keys, where the model has RoPE."""
        return self.has_rope and self.kind in {"kv", "k"} and block % self.kinds == 0

    def fits(self, form: TensorForm) -> bool:
        """Whether it is of a form's model."""
        mine = (self.kind, self.layers, self.heads, self.head_dim)
        return mine == (form.kind, form.layers, form.kv_heads, form.head_dim)

    def rms(self, block: int) -> float:
        """Root mean square of a block's values less their means."""
        found: float = struct.unpack_from("<f", self.data, _HEAD.size + 4 * block)[0]
        return found

    @property
    def means_at(self) -> int:
        """Where the means begin in `data`."""
        return _HEAD.size + 4 * self.blocks

    @property
    def bases_at(self) -> int:
        """Where the bases begin."""
        return self.means_at + 4 * self.blocks * self.columns

    @property
    def tables_at(self) -> int:
        """Where the tables of RoPE begin, if there are any."""
        return self.bases_at + 2 * self.blocks * self.columns**2

    @property
    def table_bytes(self) -> int:
        """How long these are."""
        return 16 * _TABLE_POSITIONS * (self.head_dim // 2) if self.has_rope else 0

    def _check_numbers(self) -> None:
        numbers = _floats(self.data[_HEAD.size : self.bases_at])
        if not all(1 / _LARGEST <= rms <= _LARGEST for rms in numbers[: self.blocks]):
            raise ProfileError("an rms is not from 2^-40 to 2^40")
        if not all(-_LARGEST < mean < _LARGEST for mean in numbers[self.blocks :]):
            raise ProfileError("a mean is not below 2^40")
        step = 2 * self.columns**2
        for at in range(self.bases_at, self.tables_at, step):
            basis = array.array("h")
            basis.frombytes(self.data[at : at + step])
            if sys.byteorder == "big":
                basis.byteswap()
            if min(basis) < -BASIS_ONE or max(basis) > BASIS_ONE:
                raise ProfileError("a basis has an entry above 1")
        tables = _floats(self.data[self.tables_at : self.tables_at + self.table_bytes])
        if tables and not (min(tables) >= -1 and max(tables) <= 1 and all(map(math.isfinite, tables))):
            raise ProfileError("a cosine or sine is none")


def profile_of(head: TensorFrame) -> bytes | None:
    """Digest of the profile that a frame cannot be read without; None where it needs none."""
    return head.profile_digest


def object_key(digest: bytes) -> str:
    """Where a profile lies in its namespace's bucket."""
    return KEY_PREFIX + digest.hex()


def parse_named(data: bytes, digest: bytes) -> Profile:
    """The profile of an object that was fetched by its name. `FrameCorruptError` where the bytes are not what the name says."""
    if blake3(data).digest() != digest:
        raise FrameCorruptError(f"profile {digest.hex()}: its bytes are others")
    try:
        return Profile.parse(data)
    except ProfileError as error:
        raise FrameCorruptError(f"profile {digest.hex()}: {error}") from error


def _check_sizes(layers: int, heads: int, head_dim: int, *, has_rope: bool) -> None:
    columns = heads * head_dim
    if not (1 <= layers <= _LAYERS_MAX and heads >= 1 and head_dim >= 1):
        raise ProfileError(f"no model has {layers} layers of {heads} heads of {head_dim}")
    if columns > COLUMNS_MAX or columns % COLUMNS_STEP:
        raise ProfileError(f"{columns} columns are not a multiple of {COLUMNS_STEP} up to {COLUMNS_MAX}")
    if has_rope and head_dim % 2:
        raise ProfileError(f"RoPE turns pairs, head_dim is {head_dim}")


def _basis_entry(value: float) -> int:
    entry = round(value * BASIS_ONE)
    if not -BASIS_ONE <= entry <= BASIS_ONE:
        raise ProfileError(f"an orthonormal basis has no entry {value}")
    return entry


def _floats(data: bytes) -> array.array[float]:
    found = array.array("f")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _little_endian(numbers: array.array[float] | array.array[int] | Iterable[float]) -> bytes:
    found = numbers if isinstance(numbers, array.array) else array.array("f", numbers)
    if sys.byteorder == "big":
        found = array.array(found.typecode, found)
        found.byteswap()
    return found.tobytes()
