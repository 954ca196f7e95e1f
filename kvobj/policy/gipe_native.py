"""GIPE through the native library (`native/gipe.c`). Decides as `gipe_python` does."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvobj.policy.chunk_policy import NAME_BYTES
from kvobj.policy.gipe_core import CoreSettings, CoreTotals
from kvobj.policy.gipe_rank import (
    BOUNDS,
    BUCKETS,
    CLASSES,
    PRIOR_RATE,
    PRIOR_WEIGHT,
    REFRESH_EVERY,
)

_COUNT_BYTES: Final = 4 * CLASSES * BUCKETS
_SIZE_MAX: Final = 2**32 - 1
_GONE_SLACK: Final = 64
"""As many as can go for one chunk (ADMISSION_LOOKS in C): a call that starts with an empty buffer gets on."""
_GONE_ROOM: Final = 1024
_UNPACKED: Final = 64
_UNPACK: Final = [struct.Struct(f"{NAME_BYTES}s" * count).unpack_from for count in range(_UNPACKED + 1)]
"""Of so many names at once: a fifth of the time of one by one."""
_POINTER: Final = ctypes.c_void_p
_U32: Final = ctypes.c_uint32
_I64: Final = ctypes.c_int64
_F64: Final = ctypes.c_double
_INT: Final = ctypes.c_int
_TEXT: Final = ctypes.c_char_p

# Of request and offer only the first two arguments: an int that fits into 32 bits, or a pointer, is passed on in a third of the
# time where no type is named for it. ctypes makes such a call as one of a function with a variable number of arguments, which on
# Linux passes ints and pointers in the same places as any other (x86-64, aarch64); elsewhere it need not.
_SIGNATURES: Final[dict[str, tuple[object, list[object]]]] = {
    "open": (
        _POINTER,
        [_TEXT, _TEXT, _F64, _F64, _F64, _F64, _U32, _U32, _U32, _U32],
    ),
    "close": (None, [_POINTER]),
    "set_capacity": (None, [_POINTER, _INT, ctypes.c_uint64]),
    "request": (ctypes.c_int32, [_TEXT, _I64]),
    "access": (None, [_POINTER, _TEXT, _I64]),
    "stored": (_INT, [_POINTER, _TEXT, _INT, _TEXT, _U32, _I64]),
    "dropped": (None, [_POINTER, _TEXT, _INT]),
    "dropped_many": (None, [_POINTER, _TEXT, _U32, _INT]),
    "walk_begin": (None, [_POINTER, _I64]),
    "walk_next": (_INT, [_POINTER, _INT, _INT, _TEXT, _POINTER]),
    "walk_some": (_U32, [_POINTER, _INT, _INT, ctypes.c_uint64, _U32, _TEXT, _POINTER]),
    "walk_end": (None, [_POINTER, _INT]),
    "admits": (_INT, [_POINTER, _TEXT, _INT, _U32, _TEXT, _I64]),
    "offer": (ctypes.c_int32, [_TEXT, _I64]),
    "locate": (None, [_POINTER, _TEXT, _U32, _TEXT]),
    "totals": (None, [_POINTER, _POINTER]),
    "counts": (None, [_POINTER, _TEXT, _TEXT]),
    "set_counts": (None, [_POINTER, _TEXT, _TEXT]),
}


class NativeCore:
    """See `GipeCore`. Owns the C object; `MemoryError` where its tables cannot grow."""

    def __init__(self, library: ctypes.CDLL, settings: CoreSettings) -> None:
        self._call = {name: getattr(library, f"kvobj_gipe_{name}") for name in _SIGNATURES}
        for name, (result, arguments) in _SIGNATURES.items():
            self._call[name].restype = result
            self._call[name].argtypes = arguments
        self._handle: int | None = self._call["open"](
            struct.pack("<2Q", *settings.capacities),
            struct.pack(f"<{len(BOUNDS)}Q", *BOUNDS),
            settings.duplicate_factor,
            settings.write_margin,
            PRIOR_WEIGHT,
            PRIOR_RATE,
            REFRESH_EVERY,
            settings.log_factor,
            settings.log_least,
            settings.log_most,
        )
        if not self._handle:
            raise MemoryError("no memory for the eviction policy")
        weakref.finalize(self, self._call["close"], self._handle)
        self._pointer = _POINTER(self._handle)
        self._totals = (ctypes.c_uint64 * 10)()
        self._request = self._call["request"]
        self._access = self._call["access"]
        self._stored = self._call["stored"]
        self._dropped = self._call["dropped"]
        self._admits = self._call["admits"]
        self._offer = self._call["offer"]
        self._make_gone_room(_GONE_ROOM)
        self._found = _U32()
        self._found_at = ctypes.byref(self._found)

    def request(self, chain: bytes, now_ms: int, *, partial_last: bool, hint: int) -> int:
        """See `GipeCore.request`."""
        known: int = self._request(chain, now_ms, self._pointer, len(chain) // NAME_BYTES, partial_last, hint)
        return known

    def access(self, name: bytes, now_ms: int) -> None:
        """See `GipeCore.access`."""
        self._access(self._handle, name, now_ms)

    def admits(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> bool:
        """See `GipeCore.admits`."""
        return bool(self._admits(self._handle, name, tier, min(size_bytes, _SIZE_MAX), parent, now_ms))

    def stored(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> None:
        """See `GipeCore.stored`."""
        if self._stored(self._handle, name, tier, parent, min(size_bytes, _SIZE_MAX), now_ms):
            raise MemoryError("no memory for the eviction policy's tables")

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: int, now_ms: int) -> None:
        """See `GipeCore.stored_many`."""
        stored, handle = self._stored, self._handle
        for name, size_bytes in chunks:
            if stored(handle, name, tier, None, min(size_bytes, _SIZE_MAX), now_ms):
                raise MemoryError("no memory for the eviction policy's tables")

    def dropped(self, name: bytes, tier: int) -> None:
        """See `GipeCore.dropped`."""
        self._dropped(self._handle, name, tier)

    def dropped_many(self, names: Sequence[bytes], tier: int) -> None:
        """See `GipeCore.dropped_many`."""
        self._call["dropped_many"](self._handle, b"".join(names), len(names), tier)

    def set_capacity(self, tier: int, capacity_bytes: int) -> None:
        """See `GipeCore.set_capacity`."""
        self._call["set_capacity"](self._handle, tier, capacity_bytes)

    def walk(self, tier: int, now_ms: int) -> NativeWalk:
        """See `GipeCore.walk`."""
        self._call["walk_begin"](self._handle, now_ms)
        return NativeWalk(self, self._call, self._handle, tier)

    def offer(self, chain: bytes, first: int, tier: int, size_bytes: int, now_ms: int) -> tuple[int, list[bytes]]:
        """See `GipeCore.offer`."""
        count = len(chain) // NAME_BYTES
        if not 0 <= first <= count:
            first = min(max(first, 0), count)
        if size_bytes > _SIZE_MAX:  # noqa: PLR1730 - min takes three times as long
            size_bytes = _SIZE_MAX
        room = count - first + _GONE_SLACK
        if self._gone_room < room:
            self._make_gone_room(room)
        room, gone_at, found_at = self._gone_room, self._gone_at, self._found_at
        taken: int = self._offer(chain, now_ms, self._pointer, count, first, tier, size_bytes, gone_at, room, found_at)
        at, gone = first, _names_in(self._gone, self._found.value)
        while taken < 0:  # there was no room for what goes for the next one
            at += ~taken
            taken = self._offer(chain, now_ms, self._pointer, count, at, tier, size_bytes, gone_at, room, found_at)
            gone += _names_in(self._gone, self._found.value)
        return at - first + taken, gone

    def _make_gone_room(self, names: int) -> None:
        gone = ctypes.create_string_buffer(names * NAME_BYTES)
        # As a pointer it is passed on in a third of the time; `_gone` keeps what it points to. All at once: C must never be told of
        # room for which there was no memory.
        self._gone, self._gone_at, self._gone_room = gone, _TEXT(ctypes.addressof(gone)), names

    def locate(self, chain: bytes) -> bytes:
        """See `GipeCore.locate`."""
        count = len(chain) // NAME_BYTES
        tiers = ctypes.create_string_buffer(count)
        self._call["locate"](self._handle, chain, count, tiers)
        return tiers.raw

    def used_bytes(self, tier: int) -> int:
        """See `GipeCore.used_bytes`."""
        return self._total(2 * tier)

    def count(self, tier: int) -> int:
        """See `GipeCore.count`."""
        return self._total(2 * tier + 1)

    def totals(self) -> CoreTotals:
        """See `GipeCore.totals`."""
        return CoreTotals(self._total(4), self._total(6), self._total(7), self._total(8))

    def _total(self, index: int) -> int:
        self._call["totals"](self._handle, self._totals)
        return int(self._totals[index])

    def counts(self) -> bytes:
        """See `GipeCore.counts`."""
        entered, ended = ctypes.create_string_buffer(_COUNT_BYTES), ctypes.create_string_buffer(_COUNT_BYTES)
        self._call["counts"](self._handle, entered, ended)
        return entered.raw + ended.raw

    def set_counts(self, raw: bytes) -> None:
        """See `GipeCore.set_counts`."""
        self._call["set_counts"](self._handle, raw[:_COUNT_BYTES], raw[_COUNT_BYTES:])


class NativeWalk:
    """See `Walk`. Keeps its core alive."""

    __slots__ = ("_core", "_end", "_handle", "_name", "_next", "_size", "_some", "_tier")

    def __init__(
        self, core: NativeCore, calls: Mapping[str, Callable[..., int]], handle: int | None, tier: int
    ) -> None:
        self._core = core
        self._next, self._some, self._end = calls["walk_next"], calls["walk_some"], calls["walk_end"]
        self._handle, self._tier = handle, tier
        self._name = ctypes.create_string_buffer(NAME_BYTES)
        self._size = _U32()

    def next(self, *, take: bool) -> tuple[bytes, int] | None:
        """See `Walk.next`."""
        if not self._next(self._handle, self._tier, take, self._name, ctypes.byref(self._size)):
            return None
        return self._name.raw, self._size.value

    def some(self, bytes_needed: int, limit: int, *, take: bool) -> tuple[list[bytes], int]:
        """See `Walk.some`."""
        raw, found_bytes = ctypes.create_string_buffer(limit * NAME_BYTES), ctypes.c_uint64()
        count = self._some(self._handle, self._tier, take, bytes_needed, limit, raw, ctypes.byref(found_bytes))
        return _names_in(raw, count), found_bytes.value

    def end(self) -> None:
        """See `Walk.end`."""
        self._end(self._handle, self._tier)


def _names_in(raw: ctypes.Array[ctypes.c_char], count: int) -> list[bytes]:
    """The first `count` names of what C has written."""
    if count <= _UNPACKED:
        return list(_UNPACK[count](raw))
    names: list[bytes] = []
    for start in range(0, count, _UNPACKED):
        names += _UNPACK[min(count - start, _UNPACKED)](raw, start * NAME_BYTES)
    return names
