"""What kernels that code one head of a block with one warp are told and tell: tables of addresses, and a report for each head.

A report is eight 32-bit words (`kernels/values.cuh`): a status (0 where the head was encoded), the bits of the largest absolute
error, the bits of the sums of squares of error and values in units of 4^exponent, and that exponent. Sums were rounded on the
way; what is returned here is rounded up by more than that, so that a certificate made of it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.tensors.codec_protocol import STAYS_RAW, BlockError, EncodedLength
from kvobj.tensors.kernels.launcher import Address, Launcher

REPORT_BYTES: Final = 32
_REPORT: Final = struct.Struct("<I3fi12x")
_LARGEST_ROUNDED: Final = 1 + 2.0**-22
_PART_ROUNDINGS: Final = 80
_LEAST_SQUARE: Final = 2.0**-126
"""What a square, in units of 4^exponent, may have lost to underflow."""
LONGEST_HEAD: Final = 2**31 - 32
"""Values of a head that kernels count in 32 bits."""


@dataclass(frozen=True, slots=True)
class Sums:
    """How a head's squares were summed: how many, and in how many parts."""

    values: int
    parts: int


def address_table(launcher: Launcher, slot: str, addresses: Iterable[int]) -> Address:
    """The addresses as an array of 64-bit integers in the launcher's memory; 0 says that there is none."""
    packed = b"".join(address.to_bytes(8, "little") for address in addresses)
    table = launcher.scratch(slot, len(packed))
    launcher.upload(table, packed)
    return table


def words_at(launcher: Launcher, at: Address, count: int) -> tuple[int, ...]:
    """So many 32-bit words, after everything launched before."""
    found = bytearray(4 * count)
    launcher.download(at, memoryview(found))
    return struct.unpack(f"<{count}I", found)


def lengths_of(
    launcher: Launcher, reports: Address, heads: int, lengths: Sequence[int], sums: Sums
) -> list[EncodedLength]:
    """What became of blocks whose heads reported one after the other: its length, or STAYS_RAW where that is 0 or a head was not
    encoded."""
    blocks = len(lengths)
    found = bytearray(REPORT_BYTES * blocks * heads)
    launcher.download(reports, memoryview(found))
    every = list(_REPORT.iter_unpack(found))
    return [_length_of(every[block * heads : (block + 1) * heads], lengths[block], sums) for block in range(blocks)]


def _length_of(reports: Sequence[tuple[int, float, float, float, int]], length: int, sums: Sums) -> EncodedLength:
    if not length or any(status for status, *_ in reports):
        return EncodedLength(STAYS_RAW)
    rounded = 1 + (_PART_ROUNDINGS + sums.parts) * 2.0**-23
    lost = sums.values * _LEAST_SQUARE
    return EncodedLength(
        length,
        (
            BlockError(
                max(largest for _, largest, *_ in reports) * _LARGEST_ROUNDED,
                sum((error * rounded + lost) * 4.0**exponent for _, largest, error, _, exponent in reports if largest),
                sum(before / rounded * 4.0**exponent for _, _, _, before, exponent in reports),
            ),
        ),
    )


def any_of_heads(statuses: Sequence[int], heads: int) -> list[int]:
    """For each block whether a head has a status other than 0."""
    return [int(any(statuses[first : first + heads])) for first in range(0, len(statuses), heads)]
