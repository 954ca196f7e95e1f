"""Copies of a database's file in which a little of its tree is otherwise: what reads pages must stay within them.

Each copy lies in memory whose neighbours may not be read, a page in front and 1 TiB behind: that is where a page's number leads of
which any of the lowest three bytes is wrong. Who reads beyond a copy ends his process, so that such tests run in one of their own
(`ended`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import resource
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kvobj.buffers import address_of
from kvobj.database import TablePages

PAGE_BYTES = 4096
_AROUND_BYTES = 1 << 40
_NOT_TO_BE_READ = 0  # PROT_NONE
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_HEAD_BYTES, _NODE_HEAD_BYTES = 16, 8
_KIND_AT, _LOWER_AT = 10, 12
_BRANCH, _LEAF = 1, 2
_TREE_KINDS = {_BRANCH, _LEAF}
_SHORTS = (0, 1, 15, 16, 4079, 4080, 4088, 4094, 4095, 4096, 0x7FFF, 0xFFFE, 0xFFFF)


def ended(run: Callable[[], None]) -> int:
    """How a copy of this process ended that ran it: 0; 1 where it raised, its traceback on stderr; or the negative number of the
    signal that ended it."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - told, and the copy must not go on
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def damaged_copies(file: Path, chance: random.Random, count: int) -> Iterator[Callable[[TablePages], TablePages]]:
    """So many copies; each is told as what makes a table of the file one of the copy. It is gone when the next is asked for."""
    whole = file.read_bytes()
    pages = len(whole) // PAGE_BYTES
    kinds = {at: whole[at * PAGE_BYTES + _KIND_AT] for at in range(2, pages)}
    tree = [at for at, kind in kinds.items() if kind in _TREE_KINDS]
    # They are few, and lead everywhere: half of the damage is theirs.
    tree += [at for at in tree if kinds[at] == _BRANCH] * (len(tree) // max(1, list(kinds.values()).count(_BRANCH)))
    with guarded(pages * PAGE_BYTES) as copy:
        for _ in range(count):
            copy[:] = whole[: pages * PAGE_BYTES]
            for _ in range(chance.randrange(1, 5)):
                chance.choice(_DAMAGES)(copy, tree, chance)
            yield partial(_of_copy, address_of(copy), pages)


@contextmanager
def guarded(size: int) -> Iterator[memoryview]:
    """So many bytes, whole pages, between memory that may not be read. Gone behind the block."""
    reserved = PAGE_BYTES + _AROUND_BYTES
    whole = _libc.mmap(None, reserved, _NOT_TO_BE_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if whole in {None, _FAILED}:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if _libc.mprotect(whole + PAGE_BYTES, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        yield memoryview((ctypes.c_ubyte * size).from_address(whole + PAGE_BYTES)).cast("B")
    finally:
        _libc.munmap(whole, reserved)


def _of_copy(address: int, pages: int, table: TablePages) -> TablePages:
    return TablePages(address, pages, table.root, table.page_bytes, table.depth)


def _bytes(copy: memoryview, tree: list[int], chance: random.Random) -> None:
    at = chance.choice(tree) * PAGE_BYTES + chance.choice([chance.randrange(64), chance.randrange(PAGE_BYTES)])
    copy[at] = chance.choice([0, 0xFF, chance.randrange(256)])


def _head(copy: memoryview, tree: list[int], chance: random.Random) -> None:
    """Its number, kind, or where its free room begins and ends."""
    at = chance.choice(tree) * PAGE_BYTES + chance.choice([0, 2, 4, 6, 8, _KIND_AT, _LOWER_AT, _LOWER_AT + 2])
    struct.pack_into("<H", copy, at, chance.choice(_SHORTS))


def _pointer(copy: memoryview, tree: list[int], chance: random.Random) -> None:
    """Where one of its nodes is."""
    page = chance.choice(tree) * PAGE_BYTES
    struct.pack_into("<H", copy, page + _HEAD_BYTES + 2 * chance.randrange(_nodes(copy, page)), chance.choice(_SHORTS))


def _node(copy: memoryview, tree: list[int], chance: random.Random) -> None:
    """What one of its nodes says: the page below it or its value's length, its flags, its key's length."""
    page = chance.choice(tree) * PAGE_BYTES
    node = _node_at(copy, page, chance)
    if node is None:
        return
    if chance.random() < 0.5:
        pages = len(copy) // PAGE_BYTES
        below = chance.choice([0, 1, page // PAGE_BYTES, pages - 1, pages, pages + 1, 1 << 24, 0xFFFFFFFF])
        struct.pack_into("<I", copy, node, below)
    else:
        struct.pack_into("<H", copy, node + chance.choice([4, 6]), chance.choice(_SHORTS))


def _exchanged(copy: memoryview, tree: list[int], chance: random.Random) -> None:
    """A page that is another's copy."""
    to, source = (chance.choice(tree) * PAGE_BYTES for _ in range(2))
    copy[to : to + PAGE_BYTES] = bytes(copy[source : source + PAGE_BYTES])


def _nodes(copy: memoryview, page: int) -> int:
    lower = int.from_bytes(copy[page + _LOWER_AT : page + _LOWER_AT + 2], "little")
    return min(max((lower - _HEAD_BYTES) // 2, 1), (PAGE_BYTES - _HEAD_BYTES) // 2)


def _node_at(copy: memoryview, page: int, chance: random.Random) -> int | None:
    pointer = page + _HEAD_BYTES + 2 * chance.randrange(_nodes(copy, page))
    at = int.from_bytes(copy[pointer : pointer + 2], "little")
    return page + at if at <= PAGE_BYTES - _NODE_HEAD_BYTES else None


_DAMAGES: tuple[Callable[[memoryview, list[int], random.Random], None], ...] = (
    _bytes,
    _head,
    _pointer,
    _node,
    _exchanged,
)
