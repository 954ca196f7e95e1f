"""What a condemnation or a claim asks of many chunks of a bucket, asked at once by native code in LMDB's pages (ADR 16).

Are their rows live under the blobs expected, do their children all go with them; and of those that a claim takes, what is to be
counted, told and unlinked: all that it needs of a row, without an object of it. A fifth of the time, most of it without the
interpreter's lock. `gc_changes` asks the same one by one where this knows no answer: few chunks, tables that the change's group has
written to, rows of an unusual form (several blobs, a lossy copy, class `shared` or not written down), keys of more than a stride.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, compress, groupby
from typing import Final, NamedTuple, cast

from kvobj.catalog.encoding import CHILDREN, CHILDREN_VOLATILE, OBJECTS, OBJECTS_VOLATILE
from kvobj.catalog.key_hash import KEY_HASH_BYTES
from kvobj.catalog.key_tree import STRIDE_BYTES
from kvobj.database import ReadView, TablePages
from kvobj.errors import CorruptionError
from kvobj.ids import BLOB_ID_BYTES
from kvobj.native import library

MANY: Final = 32
"""From so many chunks on it is worth its while."""
_HAS_PARENT: Final = 2
_HAS_OTHERS_BELOW: Final = 4
_LINK_BYTES: Final = 40
_SPACES: Final = 64
_NAME_BYTES: Final = 256


class Span(NamedTuple):
    """Consecutive chunks of one namespace that go: places in `ClaimedFacts`, from `start` to before `stop`."""

    namespace: str
    start: int
    stop: int


class ClaimedFacts(NamedTuple):
    """Of the chunks of a bucket that go, in the order in which they were given. `places`: which they are of those given; `links`:
    their keys in the children directory, of those that have a parent; `hashes`: `key_hash` of each."""

    places: Sequence[int]
    sizes: array[int]
    tokens: array[int]
    links: list[bytes]
    hashes: list[bytes]
    spaces: list[Span]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(self.sizes)


def scan_claim(
    view: ReadView, root: bytes, keys: Sequence[bytes], blob_ids: Sequence[bytes], held: bytes | None
) -> ClaimedFacts | None:
    """Which of the chunks go, children before parents: their rows are live and have the blobs given first, no pin holds them
    (`held`: of each 1 if one does; None: there is none), and every child row is one of those that go before them. `CorruptionError`
    for a row that goes and whose namespace is no text."""
    tables = _Tables.of(view, rows=True) if _is_plain(keys, blob_ids) else None
    if tables is None:
        return None
    count = len(keys)
    asked = _Asked(root, keys, blob_ids, held)
    sizes, tokens = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
    links, spaces, names = bytearray(_LINK_BYTES * count), bytearray(count), bytearray(_SPACES * _NAME_BYTES)
    scan = asked.scan(tables)
    scan.sizes, scan.tokens = sizes.buffer_info()[0], tokens.buffer_info()[0]
    scan.links, scan.spaces, scan.names = _at(links), _at(spaces), _at(names)
    if not _run(scan):
        return None
    outcomes = asked.outcomes
    hashes = asked.hash_list()
    with memoryview(links) as view_of_links:
        all_links = [bytes(view_of_links[at : at + _LINK_BYTES]) for at in range(0, len(links), _LINK_BYTES)]
    linked = list(compress(all_links, [outcome & _HAS_PARENT for outcome in outcomes]))
    places: Sequence[int] = range(count)
    if 0 in outcomes:
        places = list(compress(places, outcomes))
        sizes, tokens = array("Q", compress(sizes, outcomes)), array("Q", compress(tokens, outcomes))
        hashes = list(compress(hashes, outcomes))
        spaces = bytearray(compress(spaces, outcomes))
    known = [_name_at(names, number) for number in range(scan.names_count)]
    return ClaimedFacts(places, sizes, tokens, linked, hashes, _spans(spaces, known))


def scan_condemned(
    view: ReadView, root: bytes, keys: Sequence[bytes], blob_ids: Sequence[bytes], held: bytes | None
) -> tuple[list[bool], list[int]] | None:
    """As `scan_claim` of which may go, and which of these only if somebody else says so of their children: other chunks, that are
    not among those given before them, hang below (places). Should one of them not go, the answer is of no use."""
    tables = _Tables.of(view, rows=True) if _is_plain(keys, blob_ids) else None
    if tables is None:
        return None
    asked = _Asked(root, keys, blob_ids, held)
    scan = asked.scan(tables)
    scan.may_have_others = 1
    if not _run(scan):
        return None
    outcomes = asked.outcomes
    others = (
        [place for place, outcome in enumerate(outcomes) if outcome & _HAS_OTHERS_BELOW] if max(outcomes) > 1 else []
    )
    return list(map(bool, outcomes)), others


def scan_children(view: ReadView, root: bytes, keys: Sequence[bytes], held: bytes | None) -> bytes | None:
    """Of each of the keys 1 if it is not `held` and every child row is one of those that go before it, else 0."""
    tables = _Tables.of(view, rows=False) if _is_plain(keys, None) else None
    if tables is None:
        return None
    asked = _Asked(root, keys, None, held)
    return bytes(asked.outcomes) if _run(asked.scan(tables)) else None


class _Tables(NamedTuple):
    """The pages of tables; None where one is empty or not asked."""

    objects: TablePages | None
    objects_above: TablePages | None
    children: TablePages | None
    children_above: TablePages | None

    @classmethod
    def of(cls, view: ReadView, *, rows: bool) -> _Tables | None:
        """Those of a view. None where the pages of one cannot be read as the view sees it."""
        found: list[TablePages | None] = []
        for table in (OBJECTS, OBJECTS_VOLATILE, CHILDREN, CHILDREN_VOLATILE):
            pages = None
            if (rows or table in (CHILDREN, CHILDREN_VOLATILE)) and not view.is_empty(table):
                pages = view.pages(table)
                if pages is None:
                    return None
            found.append(pages)
        return None if rows and found[0] is None else cls(*found)


class _Asked:
    """What native code is given and gives of every chunk: kept alive until it has been read."""

    __slots__ = ("_blob_ids", "_count", "_ends", "_hashes", "_held", "_keys", "_root", "outcomes")

    def __init__(
        self, root: bytes, keys: Sequence[bytes], blob_ids: Sequence[bytes] | None, held: bytes | None
    ) -> None:
        self._root = root
        self._count = len(keys)
        self._keys = b"".join(keys)
        self._ends = array("I", accumulate(map(len, keys)))
        self._blob_ids = None if blob_ids is None else b"".join(blob_ids)
        self._held = held
        self._hashes = bytearray(KEY_HASH_BYTES * self._count)
        self.outcomes = bytearray(self._count)

    def scan(self, tables: _Tables) -> _Scan:
        """What native code is given; `self` must outlive it."""
        pages = [None if table is None else ctypes.pointer(table) for table in tables]
        scan = _Scan(*pages, self._root, self._keys, self._ends.buffer_info()[0], self._count)
        scan.blob_ids, scan.held = self._blob_ids, self._held
        scan.outcomes, scan.hashes = _at(self.outcomes), _at(self._hashes)
        return scan

    def hash_list(self) -> list[bytes]:
        """The hash of each key, once it has run."""
        joined = bytes(self._hashes)
        return [joined[at : at + KEY_HASH_BYTES] for at in range(0, len(joined), KEY_HASH_BYTES)]


_Pages = ctypes.POINTER(TablePages)


class _Scan(ctypes.Structure):
    """`scan_t` of native code."""

    _fields_ = (
        ("objects", _Pages),
        ("objects_above", _Pages),
        ("children", _Pages),
        ("children_above", _Pages),
        ("root", ctypes.c_char_p),
        ("keys", ctypes.c_char_p),
        ("ends", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("blob_ids", ctypes.c_char_p),
        ("held", ctypes.c_char_p),
        ("outcomes", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("hashes", ctypes.c_void_p),
        ("links", ctypes.c_void_p),
        ("spaces", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("names_count", ctypes.c_uint32),
        ("may_have_others", ctypes.c_uint32),
    )


def _is_plain(keys: Sequence[bytes], blob_ids: Sequence[bytes] | None) -> bool:
    """Whether there are enough of them, and none is of a form that is not known there."""
    return (
        _scan_claims is not None
        and len(keys) >= MANY
        and max(map(len, keys)) <= STRIDE_BYTES
        and (blob_ids is None or set(map(len, blob_ids)) == {BLOB_ID_BYTES})
    )


def _run(scan: _Scan) -> bool:
    return _scan_claims is not None and not _scan_claims(ctypes.byref(scan))


def _at(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _name_at(names: bytearray, number: int) -> str:
    start = number * _NAME_BYTES
    name = bytes(names[start : start + names[start + _NAME_BYTES - 1]])
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError("a row's namespace is no text", namespace=name.hex()) from error


def _spans(spaces: bytearray, names: Sequence[str]) -> list[Span]:
    if len(names) == 1:
        return [Span(names[0], 0, len(spaces))]
    found: list[Span] = []
    start = 0
    for number, members in groupby(spaces):
        stop = start + sum(1 for _ in members)
        found.append(Span(names[number], start, stop))
        start = stop
    return found


def _native_scan() -> Callable[[object], int] | None:
    function = getattr(library(), "kvobj_scan_claims", None)  # absent in a library built from an older source
    if function is None:
        return None
    function.argtypes = [ctypes.POINTER(_Scan)]
    function.restype = ctypes.c_int
    return cast("Callable[[object], int]", function)


_scan_claims: Final = _native_scan()
