"""Values of many keys of one table, or of all keys under many prefixes, copied out of LMDB's pages by native code.

A sixth of the time that LMDB takes key by key (`table_pages`). Whatever native code leaves open, LMDB is asked for. By itself: what
has no room in what was set aside, and under a prefix what does not lie in one page. All keys of a call: where the value of one is
in pages of its own, or pages are not as expected.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, cast

from kvobj.database.table_pages import TablePages
from kvobj.native import library

MANY: Final = 32
"""From so many keys on it is worth its while."""
_ABSENT: Final = 0xFFFF_FFFF
_UNKNOWN: Final = 0xFFFF_FFFE
_VALUE_BYTES: Final = 512
"""Of a value so much room is set aside, on average."""
_VALUES_UNDER: Final = 2
"""Of a prefix so many, on average."""


def find_values(
    pages: TablePages, keys: Sequence[bytes], ask: Callable[[bytes], bytes | None]
) -> list[bytes | None] | None:
    """The value of each key, None where the table has none; LMDB is to be asked by `ask`. None where the pages cannot be read."""
    if _copy_values is None:
        return None
    count, (joined, ends) = len(keys), _joined(keys)
    lengths, room = _numbers(count), _VALUE_BYTES * count
    values = (ctypes.c_char * room)()
    used = _copy_values(ctypes.byref(pages), joined, _at(ends), count, _at(lengths), values, room)
    if used < 0:
        return None
    copied, at = ctypes.string_at(values, used), 0
    found: list[bytes | None] = []
    for place, length in enumerate(lengths):
        if length < _UNKNOWN:
            found.append(copied[at : at + length])
            at += length
        else:
            found.append(None if length == _ABSENT else ask(keys[place]))
    return found


def find_values_under(
    pages: TablePages, prefixes: Sequence[bytes], ask: Callable[[bytes], list[bytes]]
) -> list[list[bytes]] | None:
    """Of each prefix the values of all keys that begin with it, in key order. Otherwise as `find_values`."""
    if _copy_values_under is None:
        return None
    count, (joined, ends) = len(prefixes), _joined(prefixes)
    most, room = _VALUES_UNDER * count, _VALUE_BYTES * count
    counts, lengths = _numbers(count), _numbers(most)
    values = (ctypes.c_char * room)()
    used = _copy_values_under(
        ctypes.byref(pages), joined, _at(ends), count, _at(counts), _at(lengths), most, values, room
    )
    if used < 0:
        return None
    copied, at, taken = ctypes.string_at(values, used), 0, iter(lengths)
    found: list[list[bytes]] = []
    for place, number in enumerate(counts):
        if number == 1:  # as of nearly all
            length = next(taken)
            found.append([copied[at : at + length]])
            at += length
            continue
        below = ask(prefixes[place]) if number == _UNKNOWN else []
        for _ in range(number if number != _UNKNOWN else 0):
            length = next(taken)
            below.append(copied[at : at + length])
            at += length
        found.append(below)
    return found


def _joined(keys: Sequence[bytes]) -> tuple[bytes, array[int]]:
    """The keys end to end, and where each ends."""
    return b"".join(keys), array("I", accumulate(map(len, keys)))


def _numbers(count: int) -> array[int]:
    return array("I", bytes(4 * count))


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


_Characters = ctypes.Array[ctypes.c_char]
_CopyValues = Callable[[object, bytes, int, int, int, _Characters, int], int]
_CopyValuesUnder = Callable[[object, bytes, int, int, int, int, int, _Characters, int], int]
_HEAD: Final = (ctypes.POINTER(TablePages), ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_TAIL: Final = (ctypes.c_char_p, ctypes.c_uint64)


def _native_copy() -> _CopyValues | None:
    function = getattr(library(), "kvobj_copy_values", None)  # absent in a library built from an older source
    if function is None:
        return None
    function.argtypes = [*_HEAD, *_TAIL]
    function.restype = ctypes.c_int64
    return cast("_CopyValues", function)


def _native_copy_under() -> _CopyValuesUnder | None:
    function = getattr(library(), "kvobj_copy_values_under", None)
    if function is None:
        return None
    function.argtypes = [*_HEAD, ctypes.c_void_p, ctypes.c_size_t, *_TAIL]
    function.restype = ctypes.c_int64
    return cast("_CopyValuesUnder", function)


_copy_values: Final = _native_copy()
_copy_values_under: Final = _native_copy_under()
