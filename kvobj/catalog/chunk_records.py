"""The chunks of a long match as records of 72 bytes: looked up in the tables, scanned from their rows, and written into a reply, by
native code.

A quarter of the cost of an object a chunk. Without native code, and for rows that it does not know, `chunk_heads` decodes them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final, cast, overload

from kvobj.catalog.chunk_heads import MatchedChunk
from kvobj.catalog.chunk_list import ChunkList, IdList
from kvobj.database import TablePages
from kvobj.native import library

_RECORD: Final = struct.Struct("<16s32sQB15s")
_BLOB_IDS: Final = struct.Struct("16s56x")
_UNPACKED: Final = 256
_MANY_BLOB_IDS: Final = struct.Struct("16s56x" * _UNPACKED)
"""So many are unpacked at once: a third of the cost of one by one."""
_FLAGS_AT: Final = 56
_HAS_DIGEST: Final = 1
_SEVERAL_BLOBS: Final = 2
_MAP_BYTES: Final = 192
_TIER_NAME_BYTES: Final = 16
_FIXARRAY_MAX: Final = 15
_ARRAY16_MAX: Final = 0xFFFF


class ChunkRecords(Sequence[MatchedChunk]):
    """Consecutive chunks of a list, from its first one on. What `__getitem__` gives is made anew each time."""

    __slots__ = ("chunks", "raw")

    def __init__(self, chunks: ChunkList, pages: Sequence[bytes]) -> None:
        self.chunks = chunks
        self.raw = b"".join(pages)

    def __len__(self) -> int:
        return len(self.raw) // _RECORD.size

    @overload
    def __getitem__(self, index: int) -> MatchedChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[MatchedChunk]: ...
    def __getitem__(self, index: int | slice) -> MatchedChunk | list[MatchedChunk]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError("no such record")
        blob_id, digest, size_bytes, flags, codec = _RECORD.unpack_from(self.raw, index * _RECORD.size)
        return MatchedChunk(
            self.chunks.key(index),
            blob_id,
            codec.rstrip(b"\0").decode(),
            not flags & _SEVERAL_BLOBS,
            size_bytes,
            digest if flags & _HAS_DIGEST else None,
        )

    @property
    def have_digests(self) -> bool:
        """Whether the digest of every chunk is known."""
        flags = self.raw[_FLAGS_AT :: _RECORD.size]
        return flags.count(_HAS_DIGEST) + flags.count(_HAS_DIGEST | _SEVERAL_BLOBS) == len(flags)

    def blob_ids(self) -> list[bytes]:
        """The first blob of each."""
        whole = len(self.raw) // _MANY_BLOB_IDS.size * _MANY_BLOB_IDS.size
        with memoryview(self.raw) as raw:
            blob_ids = list(chain.from_iterable(_MANY_BLOB_IDS.iter_unpack(raw[:whole])))
            return blob_ids + [blob_id for (blob_id,) in _BLOB_IDS.iter_unpack(raw[whole:])]


class EncodedChunks:
    """The details of chunks as the msgpack list of a reply, ids raw. `size_by_tier`: bytes in each tier."""

    __slots__ = ("msgpack", "size_by_tier")

    def __init__(self, msgpack: bytes, size_by_tier: Mapping[str, int]) -> None:
        self.msgpack = msgpack
        self.size_by_tier = size_by_tier


def find_records(tables: Sequence[TablePages], root: bytes, chunks: ChunkList, start: int, stop: int) -> bytes | None:
    """The records of the chunks from `start` to before `stop`, looked up in the tables of an open snapshot (`ObjectRows.pages`).
    None where a row is not there, not live, or of a form not known here. Only on the thread that closes the database (the event
    loop's), right after `pages`: the map is read without the interpreter's lock, and must not go away meanwhile. ~0.2 µs a row."""
    if _find_rows is None or not tables:
        return None
    keys, ends = chunks.joined_keys(start, stop)
    count = len(ends)
    found = (ctypes.c_char * count)()
    records = (ctypes.c_char * (count * _RECORD.size))()
    for table in tables:
        if _find_rows(ctypes.byref(table), root, len(root), keys, ends.buffer_info()[0], count, found, records):
            return None
    return None if b"\0" in found.raw else records.raw


def scan_records(rows: Sequence[bytes | None]) -> bytes | None:
    """The records of encoded rows; None where one is not there, not live, or of a form not known here. ~0.2 µs a row."""
    if _scan_rows is None:
        return None
    try:
        encoded = b"".join(cast("Sequence[bytes]", rows))
    except TypeError:  # a None among them
        return None
    records = (ctypes.c_char * (len(rows) * _RECORD.size))()
    return None if _scan_rows(encoded, len(encoded), len(rows), records) else records.raw


def live_blob_ids(rows: Sequence[bytes | None]) -> list[bytes] | None:
    """The first blob of each encoded row; None as of `scan_records`, and of no rows."""
    records = scan_records(rows)
    return [blob_id for (blob_id,) in _BLOB_IDS.iter_unpack(records)] if records else None


def encode_chunks(found: ChunkRecords, tiers: Sequence[str]) -> EncodedChunks | None:
    """The chunks as a reply tells of them. None where that takes the slower way: no raw ids, or a digest that is not known yet.
    `tiers`: of each chunk. ~0.1 µs a chunk."""
    if _chunk_maps is None or not isinstance(found.chunks, IdList) or not found.have_digests:
        return None
    is_one = len(tiers) > 0 and tiers.count(tiers[0]) == len(tiers)  # as of most lists
    names = [tiers[0]] if is_one else list(dict.fromkeys(tiers))
    if any(len(name.encode()) >= _TIER_NAME_BYTES for name in names):
        return None
    place = {name: number for number, name in enumerate(names)}
    sums = (ctypes.c_uint64 * len(names))()
    maps = ctypes.create_string_buffer(len(found) * _MAP_BYTES)
    length = _chunk_maps(
        found.chunks.raw,
        found.raw,
        bytes(len(tiers)) if is_one else bytes(map(place.__getitem__, tiers)),
        b"".join(name.encode().ljust(_TIER_NAME_BYTES, b"\0") for name in names),
        sums,
        len(found),
        maps,
    )
    count = len(found)
    return EncodedChunks(_list_head(count) + memoryview(maps)[:length], dict(zip(names, sums, strict=True)))


def _list_head(count: int) -> bytes:
    if count <= _FIXARRAY_MAX:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count <= _ARRAY16_MAX else b"\xdd" + count.to_bytes(4, "big")


_Characters = ctypes.Array[ctypes.c_char]
_Find = Callable[[object, bytes, int, bytes, int, int, _Characters, _Characters], int]
_Scan = Callable[[bytes, int, int, _Characters], int]
_Maps = Callable[[bytes, bytes, bytes, bytes, "ctypes.Array[ctypes.c_uint64]", int, _Characters], int]


def _native_find() -> _Find | None:
    function = getattr(library(), "kvobj_find_rows", None)  # absent in a library built from an older source
    if function is None:
        return None
    function.argtypes = [
        ctypes.POINTER(TablePages),
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_char_p,
    ]
    function.restype = ctypes.c_int
    return cast("_Find", function)


def _native_scan() -> _Scan | None:
    function = getattr(library(), "kvobj_scan_rows", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p]
    function.restype = ctypes.c_int
    return cast("_Scan", function)


def _native_maps() -> _Maps | None:
    function = getattr(library(), "kvobj_chunk_maps", None)
    if function is None:
        return None
    function.argtypes = [
        *([ctypes.c_char_p] * 4),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_size_t,
        ctypes.c_char_p,
    ]
    function.restype = ctypes.c_size_t
    return cast("_Maps", function)


_find_rows: Final = _native_find()
_scan_rows: Final = _native_scan()
_chunk_maps: Final = _native_maps()
