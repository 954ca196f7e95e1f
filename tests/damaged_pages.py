"""Copies of a database's file in which a few bytes of its tree are others: what reads pages must stay within them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kvobj.buffers import address_of
from kvobj.database import TablePages

PAGE_BYTES = 4096
_KIND_AT = 10
_TREE_KINDS = {1, 2}  # branches and leaves


def damaged_copies(file: Path, chance: random.Random, count: int) -> Iterator[Callable[[TablePages], TablePages]]:
    """So many copies; each is told as what makes a table of the file one of the copy. It is gone when the next is asked for."""
    whole = file.read_bytes()
    pages = len(whole) // PAGE_BYTES
    tree = [at for at in range(2, pages) if whole[at * PAGE_BYTES + _KIND_AT] in _TREE_KINDS]
    for _ in range(count):
        copy = bytearray(whole[: pages * PAGE_BYTES])
        for _ in range(chance.randrange(1, 5)):
            at = chance.choice(tree) * PAGE_BYTES + chance.choice([chance.randrange(64), chance.randrange(PAGE_BYTES)])
            copy[at] = chance.choice([0, 0xFF, chance.randrange(256)])
        with memoryview(copy) as held:
            yield partial(_of_copy, address_of(held), pages)


def _of_copy(address: int, pages: int, table: TablePages) -> TablePages:
    return TablePages(address, pages, table.root, table.page_bytes, table.depth)
