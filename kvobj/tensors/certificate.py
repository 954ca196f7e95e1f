"""The error certificate of a lossy frame: bounds that hold for every value of the object, which a reader can refuse it by. Pure.

Four bf16 numbers in the header, rounded up whenever they are stored, so that what is stored is a bound too. Along the ladder of
`eq` each rung adds to the *stored* numbers of the one before (triangle inequality): demotion and direct coding say the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvobj.tensors.codec_protocol import BlockError

_INFINITY: Final = 0x7F80
_ABOVE_ROUNDING: Final = 1.0 + 2.0**-30
"""More than the roundings of the sums, in double precision, can have lost."""
_BF16: Final = struct.Struct("<4H")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Largest absolute error of any value, and ‖x - x̂‖ / ‖x‖, of all keys (or latents) and of all values. Zeros when lossless;
    infinity where no bound is known."""

    max_error_k: float = 0.0
    relative_l2_k: float = 0.0
    max_error_v: float = 0.0
    relative_l2_v: float = 0.0

    @property
    def max_error(self) -> float:
        """The larger absolute error."""
        return max(self.max_error_k, self.max_error_v)

    @property
    def relative_l2(self) -> float:
        """The larger relative error."""
        return max(self.relative_l2_k, self.relative_l2_v)

    def pack(self) -> bytes:
        """The eight bytes of the header."""
        numbers = (self.max_error_k, self.relative_l2_k, self.max_error_v, self.relative_l2_v)
        return _BF16.pack(*map(_bf16_up, numbers))

    @classmethod
    def unpack(cls, packed: bytes) -> Certificate:
        """Read eight bytes. ValueError for a number that is negative or none."""
        patterns = _BF16.unpack(packed)
        if any(pattern > _INFINITY for pattern in patterns):
            raise ValueError("a certificate has numbers from zero to infinity")
        return cls(*(_from_bits(pattern << 16) for pattern in patterns))

    def after(self, keys: Iterable[BlockError], values: Iterable[BlockError]) -> Certificate:
        """The certificate, as it is stored, after one more step of coding, given what it did to each block of keys and of values.

        The first step starts from zeros. Sums go in the order given.
        """
        max_k, relative_k = _added(self.max_error_k, self.relative_l2_k, keys)
        max_v, relative_v = _added(self.max_error_v, self.relative_l2_v, values)
        return Certificate.unpack(Certificate(max_k, relative_k, max_v, relative_v).pack())


def _added(max_error: float, relative_l2: float, errors: Iterable[BlockError]) -> tuple[float, float]:
    largest = error_square = before_square = 0.0
    for error in errors:
        largest = max(largest, error.max_error)
        error_square += error.error_square
        before_square += error.before_square
    if not error_square:
        step = 0.0
    elif before_square:
        # ‖x̂ - x̂'‖ / ‖x‖, where ‖x̂‖ is what is known: ‖x̂‖ ≤ (1 + ‖x - x̂‖ / ‖x‖) ‖x‖.
        step = math.sqrt(error_square / before_square) * (1.0 + relative_l2) * _ABOVE_ROUNDING
    else:
        step = math.inf
    return max_error + largest, relative_l2 + step


def _bf16_up(value: float) -> int:
    """Bit pattern of the least bf16 that is not below `value`, which is not negative."""
    if not value <= _from_bits((_INFINITY - 1) << 16):
        return _INFINITY
    bits = int.from_bytes(struct.pack(">f", value), "big")
    if _from_bits(bits) < value:
        bits += 1
    return (bits + 0xFFFF) >> 16


def _from_bits(bits: int) -> float:
    number: float = struct.unpack(">f", bits.to_bytes(4, "big"))[0]
    return number
