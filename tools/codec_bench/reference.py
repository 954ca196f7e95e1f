"""An independent model of x3, xa and eq: decoded values and sizes straight from codecs.md §3, slow and plain. Pure.

It shares no code with `kvobj.tensors`: its values are held against what frames decode to, bit for bit, its sizes within the
little that an entropy coder's states differ from their entropy. A block is one (layer, kind): words [tokens, heads,
head_dim], uint16, bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from codec_bench import reference_tables as tables

WORD_BITS: Final = 16
_ESCAPE_GROUP: Final = 2048
_FIELD: Final = 1024
_ROW: Final = 128
_CHUNK_ROWS: Final = 64
_CHUNK_LEAST: Final = 32
_CODES: Final = 7
_EXPONENTS: Final = 256
_HEADER_BYTES: Final = 128
_ENTRY_BYTES: Final = 12
_BLOCK_ALIGNMENT: Final = 256
_GROUP_ALIGNMENT: Final = 4096
_GROUP_BYTES: Final = 2**20
_LANES: Final = 32
_STATE_BITS: Final = 8
_ID_BITS: Final = 6
_RAW_VALUE_BITS: Final = 16
_FRACTION: Final = 14
"""Bits below the largest value's leading one in what is summed."""
_ROOT_BITS: Final = 24
_EXPONENT_OF_ZERO: Final = -200

Words = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one encoded block, by what they are for."""

    payload: float
    """Codes, low bytes, entropy of the symbols, escapes."""
    streams: float
    """States and table ids."""
    side: float
    """Steps, means, windows, offsets, counts."""
    guard: float = 0.0

    @property
    def total(self) -> int:
        """All of it, in whole bytes."""
        return int(np.ceil(self.payload + self.streams + self.side + self.guard))


def frame_bytes(blocks: Sequence[int], kinds: int) -> int:
    """A whole frame of blocks, layer by layer: head, directory, alignment of blocks and of groups of layers. codecs.md §2."""
    at = _HEADER_BYTES + _ENTRY_BYTES * len(blocks)
    group: int | None = None
    for first in range(0, len(blocks), kinds):
        if group is None or at - group >= _GROUP_BYTES:
            at = group = _up(at, _GROUP_ALIGNMENT)
        for block in blocks[first : first + kinds]:
            at = _up(at, _BLOCK_ALIGNMENT) + block
    return at


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def exponents(words: Words) -> Integers:
    """The 8 bits of each bf16's exponent."""
    return (words >> 7).astype(np.int64) & 0xFF


def stream_bytes(streams: int, columns: int) -> float:
    """What streams take beside their values: states of 32 bits, of which all but 8 carry values on average, and 6 bits an id."""
    return (streams * _LANES * _STATE_BITS + columns * _ID_BITS) / 8


def x3(words: Words) -> Size:
    """Size of a block of whole chunks, with a window of seven exponents for each column."""
    found = exponents(words)
    tokens, heads, head_dim = words.shape
    distance = x3_tops(found)[None] - found
    escapes = int(((distance < 0) | (distance >= _CODES)).sum())
    values = tokens * head_dim
    groups, fields = -(-values // _ESCAPE_GROUP), -(-values // _FIELD)
    side = _up(_up(heads * head_dim, 4) + heads * (4 + 2 * groups), 16)
    return Size(heads * (_up(values, 4) + _FIELD * 3 // 8 * fields) + escapes, 0.0, side)


def x3_tops(found: Integers) -> Integers:
    """The highest exponent of each column's window [heads, head_dim], from exponents [tokens, heads, head_dim].

    Of every 64 rows the greatest exponent; the lower median of those that are not 0; at least 6. A row is a token, or as many
    tokens as fill 128 dimensions, where each of a row's tokens counts by itself.
    """
    tokens, heads, head_dim = found.shape
    beside = _ROW // head_dim if head_dim < _ROW and _ROW % head_dim == 0 else 1
    whole = tokens // beside * beside
    rows = found[:whole].reshape(whole // beside, beside, heads, head_dim)
    starts = range(0, max(1, len(rows) - _CHUNK_LEAST + 1), _CHUNK_ROWS)
    greatest = np.concatenate([rows[start : start + _CHUNK_ROWS].max(axis=0) for start in starts])
    tops = np.zeros((heads, head_dim), np.int64)
    for head in range(heads):
        for dim in range(head_dim):
            counted = np.sort(greatest[:, head, dim][greatest[:, head, dim] > 0])
            tops[head, dim] = counted[(len(counted) - 1) // 2] if len(counted) else 0
    return np.maximum(tops, _CODES - 1)


def xa(words: Words) -> Size:
    """Size of a block: a table for each column, symbols below the head's largest finite exponent."""
    found = exponents(words)
    tokens, heads, head_dim = words.shape
    largest = np.where(found == _EXPONENTS - 1, 0, found).max(axis=(0, 2))
    distance = largest[None, :, None] - found
    symbols = np.where((distance >= 0) & (distance < tables.XA_SYMBOLS), distance, tables.XA_SYMBOLS)
    bits = _table_coded(symbols.reshape(tokens, -1), tables.xa_frequencies(), raw_bits=8)
    return Size(words.size + bits / 8, stream_bytes(heads, heads * head_dim), heads * (1 + 4))


def _table_coded(symbols: Integers, frequencies: Integers, *, raw_bits: int) -> float:
    """Entropy in bits of [tokens, columns] with the cheapest table of each column, escapes' raw bits counted."""
    alphabet = frequencies.shape[1]
    columns = symbols.shape[1]
    cost = tables.costs(frequencies)
    escaped = frequencies == 0
    escaped[:, -1] = True
    cost = cost + escaped * raw_bits * tables.COST_ONE_BIT
    flat = symbols + alphabet * np.arange(columns)[None, :]
    histogram = np.bincount(flat.ravel(), minlength=alphabet * columns).reshape(columns, alphabet)
    ids = (histogram @ cost.T).argmin(axis=1)
    of_table = np.where(escaped, frequencies[:, -1:], frequencies)
    exact = -np.log2(of_table / tables.TOTAL) + escaped * raw_bits
    return float((histogram * exact[ids]).sum())


# --- eq ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantised:
    """One block of `eq` before entropy coding."""

    integers: Integers
    """[tokens, heads, head_dim] int64 after every division by 3; zeros at guarded tokens."""
    steps: Floats
    """[heads] float32: the base steps, which are bf16 values."""
    means: Floats
    """[heads, head_dim] float32, bf16 values."""
    guarded: Integers
    """Token numbers, ascending."""
    power: int
    words: Words

    def decoded(self) -> Words:
        """The words that the block decodes to, [tokens, heads, head_dim] uint16."""
        step = self.steps * np.float32(3**self.power)
        found = self.integers.astype(np.float32) * step[None, :, None] + self.means[None]
        words = to_bf16(found)
        words[self.guarded] = self.words[self.guarded]
        return words

    def size(self) -> Size:
        """What the block takes."""
        tokens, heads, head_dim = self.integers.shape
        symbols = self.integers.reshape(tokens, -1) + tables.EQ_LARGEST
        symbols = np.where((symbols < 0) | (symbols > 2 * tables.EQ_LARGEST), 2 * tables.EQ_LARGEST + 1, symbols)
        bits = _table_coded(symbols, tables.eq_frequencies(), raw_bits=_RAW_VALUE_BITS)
        columns = heads * head_dim
        return Size(
            bits / 8,
            stream_bytes(heads, columns),
            columns * 2 + heads * (2 + 4),
            2 + len(self.guarded) * 2 * (1 + columns),
        )


def eq(words: Words, base_step: int, power: int = 0) -> Quantised:
    """Quantise a finite block with a base step of so many thousandths of a head's rms, then divide by 3 `power` times.

    Every sum is of integers and every other operation one of float32, in the order that the format fixes (`kvobj/tensors/eq.py`).
    """
    values = from_bf16(words)
    largest = np.array([_exponent(head) for head in np.abs(values).max(axis=(0, 2))])
    whole = np.trunc(values.astype(np.float64) * 2.0 ** (_FRACTION - largest)[None, :, None]).astype(np.int64)
    guarded = guarded_tokens(whole, largest)
    kept = np.setdiff1d(np.arange(len(values)), guarded)
    unit = np.exp2(largest - _FRACTION).astype(np.float32)
    share = np.float32(1) / np.float32(len(kept))
    means = from_bf16(to_bf16(whole[kept].sum(axis=0).astype(np.float32) * share * unit[:, None]))
    steps = np.array(
        [_step(whole[kept][:, h], means[h], largest[h], base_step) for h in range(len(largest))], np.float32
    )
    inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0)
    scaled = ((values - means[None]) * inverse[None, :, None]).astype(np.float64)
    integers = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int64)
    integers[guarded] = 0
    for _ in range(power):
        integers = demoted(integers)
    return Quantised(integers, steps, means, guarded, power, words)


def _exponent(magnitude: np.float32) -> int:
    """The power of two below or at a magnitude; of zero one below all."""
    return int(np.frexp(magnitude)[1]) - 1 if magnitude else _EXPONENT_OF_ZERO


def _step(whole: Integers, means: Floats, largest: int, base_step: int) -> np.float32:
    """A head's base step: `whole` [tokens, head_dim] of what is not guarded, in units of 2^(largest - 14)."""
    if largest == _EXPONENT_OF_ZERO:
        return np.float32(0)
    of_means = np.trunc(means.astype(np.float64) * 2.0 ** (_FRACTION - largest)).astype(np.int64)
    square = int(((whole - of_means) ** 2).sum())
    shift = max(0, square.bit_length() - _ROOT_BITS + 1) // 2 * 2
    mean_square = np.float32(square >> shift) * (np.float32(1) / np.float32(whole.size))
    root = max(np.sqrt(mean_square) * np.float32(2.0 ** (shift // 2)), np.float32(1))
    step = np.float32(base_step / 1000) * root * np.float32(2.0 ** (largest - _FRACTION))
    return np.float32(from_bf16(to_bf16(np.array([step])))[0])


def demoted(integers: Integers) -> Integers:
    """One rung down the ladder: sign(q) · floor((|q| + 1) / 3)."""
    found: Integers = np.sign(integers) * ((np.abs(integers) + 1) // 3)
    return found


def guarded_tokens(whole: Integers, largest: Integers) -> Integers:
    """Tokens far from the lower median by their squared norm over all heads; none where more than a sixteenth are.

    `whole` [tokens, heads, head_dim] counts in units of 2^(largest - 14), a head's own.
    """
    by_head = (whole**2).sum(axis=2) >> np.minimum(2 * (largest.max() - largest), 62)[None]
    squares = by_head.sum(axis=1)
    middle = np.sort(squares)[(len(squares) - 1) // 2]
    far = np.flatnonzero((100 * squares < 9 * middle) | (squares > 9 * middle))
    return far if len(far) <= len(whole) // 16 else far[:0]


def to_bf16(values: Floats) -> Words:
    """Words of finite float32 values, to the nearest, ties to even; by integers."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(words: Words) -> Floats:
    """The float32 values of bf16 words, exactly."""
    return (words.astype(np.uint32) << 16).view(np.float32)
