"""Chain sums: 16 bytes a chunk that say which chunks lie before it and in which order (`gc-protocol` §2.4).

A sum is two u64 lanes, each Σ (j + 1) · lane(j) modulo 2^64 over the chain from its first chunk (j = 0) on; everything is
little-endian. Equal depth and equal sum mean equal chains but for a chance of 2^-128 a pair, since names are hashes; a match
that probes with sums therefore never walks. Sums stand in rows: the definition cannot change without a rebuild.

Long lists are summed by native code where it was built, else by the functions here, which give the same bytes.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from typing import Final, cast

from blake3 import blake3

from kvobj.native import library

SUM_BYTES: Final = 16
NAME_LANE_BYTES: Final = 16
"""Bytes of a name that go into a sum: its lanes."""

_LANES: Final = struct.Struct("<QQ")
_MASK: Final = 2**64 - 1
_ID_BYTES: Final = 32
_CHUNK_ID_KEY: Final = re.compile(r"[0-9a-f]{64}")

_Batch = Callable[[bytes, int, "ctypes.Array[ctypes.c_char]"], None]


def key_lanes(key: str) -> bytes:
    """The lanes of a key: the first 16 bytes of the chunk id where the key is 64 lower-case hex digits, else of BLAKE3 over
    the key's UTF-8. So a chunk id gives the same lanes as an id and as a key."""
    if _CHUNK_ID_KEY.fullmatch(key):
        return bytes.fromhex(key[: 2 * NAME_LANE_BYTES])
    return blake3(key.encode()).digest(length=NAME_LANE_BYTES)


def id_lanes(ids: bytes) -> bytes:
    """The lanes of chunk ids of 32 bytes each, in order."""
    count = len(ids) // _ID_BYTES
    if _native_id_lanes is None:
        return b"".join([ids[at : at + NAME_LANE_BYTES] for at in range(0, count * _ID_BYTES, _ID_BYTES)])
    return _run(_native_id_lanes, ids, count)


def extend(parent_sum: bytes, depth: int, lanes: bytes) -> bytes:
    """The sum of a chain that ends with a chunk of these lanes at `depth` (0: the first, whose `parent_sum` is b"")."""
    first, second = _LANES.unpack(parent_sum) if parent_sum else (0, 0)
    lane, other = _LANES.unpack(lanes)
    return _LANES.pack((first + (depth + 1) * lane) & _MASK, (second + (depth + 1) * other) & _MASK)


def running_sums(lanes: bytes) -> bytes:
    """The sum of each prefix of a list, 16 bytes a prefix: the i-th is that of the first i + 1 names."""
    if _native_running_sums is None:
        return running_sums_pure(lanes)
    return _run(_native_running_sums, lanes, len(lanes) // NAME_LANE_BYTES)


def running_sums_pure(lanes: bytes) -> bytes:
    """`running_sums` without native code."""
    sums: list[int] = []
    first = second = 0
    for weight, (lane, other) in enumerate(_LANES.iter_unpack(lanes), start=1):
        first = (first + weight * lane) & _MASK
        second = (second + weight * other) & _MASK
        sums += (first, second)
    return struct.pack(f"<{len(sums)}Q", *sums)


def _run(function: _Batch, source: bytes, count: int) -> bytes:
    target = (ctypes.c_char * (count * SUM_BYTES))()
    function(source, count, target)
    return target.raw


def _native(name: str) -> _Batch | None:
    function = getattr(library(), name, None)  # absent in a library that was built from an older source, too
    if function is None:
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    function.restype = None
    return cast("_Batch", function)


_native_running_sums: Final = _native("kvobj_running_sums")
_native_id_lanes: Final = _native("kvobj_id_lanes")
