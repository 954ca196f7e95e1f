"""Sorted maps under a root, with keys longer than LMDB's 511 bytes, in key order at every length.

A key is cut into strides of 480 bytes. A node is 8 bytes in front of an entry: node ‖ rest of the key (at most 480 bytes) holds
the value; a longer key goes on under a child node, which node ‖ 480 bytes ‖ 0x00 points to. That pointer sorts right behind
the key that ends there and in front of all others, so byte order is kept; its length (489) tells it from a value.
Guarantees: an empty child is pruned by the delete that emptied it, so listings never walk leftovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvobj.database import ReadView, Table, WriteView

NODE_BYTES: Final = 8
STRIDE_BYTES: Final = 480
_POINTER_BYTES: Final = NODE_BYTES + STRIDE_BYTES + 1


class KeyTree:
    """The trees in one table. `allocate` draws node ids that are never drawn again, roots among them; any thread may call it."""

    __slots__ = ("_allocate", "table")

    def __init__(self, table: Table, allocate: Callable[[], int]) -> None:
        self.table = table
        self._allocate = allocate

    def get(self, view: ReadView, root: bytes, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        node: bytes | None = root
        while node is not None and len(key) > STRIDE_BYTES:
            node = view.get(self.table, _pointer(node, key))
            key = key[STRIDE_BYTES:]
        return None if node is None else view.get(self.table, node + key)

    def put(self, view: WriteView, root: bytes, key: bytes, value: bytes, *, headroom: bool = False) -> None:
        """Set a value. Raises `StoreFullError` before anything is changed, unless it is part of making room (`headroom`)."""
        node = root
        while len(key) > STRIDE_BYTES:
            pointer = _pointer(node, key)
            child = view.get(self.table, pointer)
            if child is None:
                child = self._allocate().to_bytes(NODE_BYTES, "big")
                view.put(self.table, pointer, child, headroom=headroom)
            node, key = child, key[STRIDE_BYTES:]
        view.put(self.table, node + key, value, headroom=headroom)

    def delete(self, view: WriteView, root: bytes, key: bytes) -> bool:
        """Remove a key and the child nodes that this leaves empty; whether it was there."""
        if len(key) <= STRIDE_BYTES:
            return view.delete(self.table, root + key)
        pointer = _pointer(root, key)
        child = view.get(self.table, pointer)
        if child is None or not self.delete(view, child, key[STRIDE_BYTES:]):
            return False
        if self.is_empty(view, child):
            view.delete(self.table, pointer)
        return True

    def is_empty(self, view: ReadView, root: bytes) -> bool:
        """Whether there is no key under the root."""
        return next(view.range(self.table, root, behind(root)), None) is None

    def items(self, view: ReadView, root: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in key order, from the first key >= `start`."""
        return self._items(view, root, start, b"")

    def _items(self, view: ReadView, node: bytes, start: bytes, above: bytes) -> Iterator[tuple[bytes, bytes]]:
        first = _pointer(node, start) if len(start) > STRIDE_BYTES else node + start
        for entry, value in view.range(self.table, first, behind(node)):
            if len(entry) == _POINTER_BYTES:
                stride = entry[NODE_BYTES:-1]
                child_start = start[STRIDE_BYTES:] if start.startswith(stride) else b""
                yield from self._items(view, value, child_start, above + stride)
            else:
                yield above + entry[NODE_BYTES:], value


def is_pointer(stored_key: bytes) -> bool:
    """Whether a key as it stands in the table leads to a child node instead of holding a value."""
    return len(stored_key) == _POINTER_BYTES


def _pointer(node: bytes, key: bytes) -> bytes:
    return node + key[:STRIDE_BYTES] + b"\0"


def behind(node: bytes) -> bytes:
    """The least bytes above every entry of a node."""
    return (int.from_bytes(node, "big") + 1).to_bytes(NODE_BYTES, "big")
