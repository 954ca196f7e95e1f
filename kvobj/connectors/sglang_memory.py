"""Pages of SGLang's host memory as buffers that chunks are read from and written into, where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch

STAGED_BYTES: Final = 64 * 1024 * 1024
"""So much is put together at once of pages that lie in too many pieces."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a pool: what its chunks are called, and where its buffers lie."""

    names: list[str]
    rooms: list[memoryview]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(len(room) for room in self.rooms)


def batches(pages: Sequence[Page]) -> Iterator[Sequence[Page]]:
    """All pages at once, or so many of those that are put together as may be in memory."""
    start, staged = 0, 0
    for index, page in enumerate(pages):
        size_bytes = page.size_bytes if is_packed(page) else 0
        if staged + size_bytes > STAGED_BYTES and index > start:
            yield pages[start:index]
            start, staged = index, 0
        staged += size_bytes
    if start < len(pages):
        yield pages[start:]


def all_of(answers: Iterator[bool], count: int) -> bool:
    """Whether the next answers are all True; takes as many whatever the first ones say."""
    return list(islice(answers, count)).count(True) == count


def is_packed(page: Page) -> bool:
    """Whether the page's buffers are one chunk, put together in memory."""
    return len(page.rooms) > len(page.names)


def unpack(stage: bytearray, rooms: Sequence[memoryview]) -> None:
    """Copy what was put together into the buffers, in order; it has exactly their bytes."""
    at = 0
    for room in rooms:
        room[:] = memoryview(stage)[at : at + len(room)]
        at += len(room)


def page_buffers(host_pool: Any, indices: torch.Tensor, count: int) -> list[list[memoryview]]:  # noqa: ANN401 - SGLang's
    """The buffers of each of `count` pages where they lie. SGLang keeps the memory for as long as the pool is registered.
    ValueError for buffers that are not those of so many pages, and what the pool itself raises for a layout that it cannot tell."""
    addresses, sizes = host_pool.get_page_buffer_meta(indices)
    if isinstance(sizes, int):
        sizes = [sizes] * len(addresses)
    if len(addresses) % count or len(addresses) != len(sizes):
        raise ValueError(f"{len(addresses)} buffers of {len(sizes)} sizes are not those of {count} pages")
    each = len(addresses) // count
    rooms = [memory_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
    return [rooms[at : at + each] for at in range(0, len(rooms), each)]


def page_facts(host_pool: Any, page_size: int) -> dict[str, object]:  # noqa: ANN401 - SGLang's
    """What bytes of a pool's pages mean: two pools that differ in it must not read each other's, and two that do not differ may,
    however much memory they have. Raises nothing: of a layout that the pool cannot tell there are no sizes, and no pages either."""
    try:
        sizes = [len(room) for room in page_buffers(host_pool, torch.arange(page_size), 1)[0]]
    except Exception:  # noqa: BLE001 - SGLang's own pools refuse some layouts
        sizes = []
    dtypes = {told for name, value in getattr(host_pool, "__dict__", {}).items() for told in _dtypes(name, value)}
    return {
        "page_size": page_size,
        "sizes": sizes,
        "layout": str(getattr(host_pool, "layout", "")),
        "layers": int(getattr(host_pool, "layer_num", 0) or getattr(host_pool, "num_mamba_layers", 0) or 0),
        "dtypes": sorted(dtypes),
        **first_layer(host_pool),
    }


def first_layer(host_pool: Any) -> dict[str, object]:  # noqa: ANN401 - SGLang's
    """Which layer of the model is the pool's first, where that is not the model's first: pools of two stages may have as many."""
    first = int(getattr(host_pool, "start_layer", 0) or 0)
    return {"first_layer": first} if first else {}


def _dtypes(name: str, value: object) -> list[str]:
    """The data types that an attribute of a pool tells of: its own (`temporal_dtype`), or those of its buffers. What attributes are
    called is SGLang's, and may change where bytes do not: only the types are told."""
    if isinstance(value, torch.dtype):
        return [str(value)]
    if not name.endswith(("buffer", "buffers")) or "staging" in name:
        return []
    tensors = value if isinstance(value, list | tuple) else [value]
    return [str(each.dtype) for each in tensors if isinstance(each, torch.Tensor)]


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Memory of this process, writable. Who asks knows that it is there, and for how long."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes where they lie; the caller keeps the tensor."""
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
