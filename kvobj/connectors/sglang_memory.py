"""Pages of SGLang's host memory as buffers that chunks are read from and written into, where they lie where that can be told."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch

from kvobj.connectors.sglang_pages import PARTS_MAX

STAGED_BYTES: Final = 64 * 1024 * 1024
"""So much is put together at once of pages that do not go as they lie."""


@dataclass(frozen=True, slots=True)
class FlatPage:
    """A page whose pool does not tell where it lies, and copies it as one tensor, as SGLang's own file backend has it do."""

    host_pool: Any
    index: int
    size_bytes: int
    dtype: torch.dtype

    def read(self) -> memoryview:
        """Its bytes, as the pool gives them. ValueError where they are not as many as the pool's pages have: its index is none."""
        page = flat_bytes(self.host_pool.get_data_page(self.index, flat=True))
        if len(page) != self.size_bytes:
            raise ValueError(f"the page at {self.index} has {len(page)} bytes, and not {self.size_bytes}")
        return page

    def write(self, stage: bytearray) -> None:
        """Put these bytes into its place."""
        page = torch.frombuffer(stage, dtype=torch.uint8).view(self.dtype)
        self.host_pool.set_from_flat_data_page(self.index, page)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a pool: what its chunks are called, and where its buffers lie, or how it is copied."""

    names: list[str]
    rooms: list[memoryview]
    flat: FlatPage | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(len(room) for room in self.rooms) if self.flat is None else self.flat.size_bytes

    @property
    def is_staged(self) -> bool:
        """Whether its bytes are put together in memory, as one chunk."""
        return self.flat is not None or len(self.rooms) > len(self.names)

    def packed(self) -> memoryview:
        """Its bytes, put together; may raise what the pool raises for an index that is none."""
        return memoryview(b"".join(self.rooms)) if self.flat is None else self.flat.read()

    def unpack(self, stage: bytearray) -> None:
        """Copy what was put together to where it belongs; it has exactly the page's bytes."""
        if self.flat is not None:
            self.flat.write(stage)
            return
        at = 0
        for room in self.rooms:
            room[:] = memoryview(stage)[at : at + len(room)]
            at += len(room)


@dataclass(frozen=True, slots=True)
class PagePool:
    """A pool of pages, and how they are reached."""

    host_pool: Any
    page_size: int
    sizes: list[int]
    """Bytes of a page's buffers, or of the one tensor that it is copied as."""
    flat_dtype: torch.dtype | None = None
    """Of that tensor."""

    @property
    def parts(self) -> int:
        """Chunks of a page."""
        return len(self.sizes) if len(self.sizes) <= PARTS_MAX else 1

    def pages(self, names: Sequence[list[str]], indices: torch.Tensor) -> list[Page]:
        """The pages of these names at these rows, of which each page has `page_size`. Raises what the pool raises."""
        if self.flat_dtype is None:
            buffers = page_buffers(self.host_pool, indices, len(names))
            return [Page(each, rooms) for each, rooms in zip(names, buffers, strict=True)]
        (size_bytes,) = self.sizes
        firsts = indices[:: self.page_size].tolist()
        return [
            Page(each, [], FlatPage(self.host_pool, index, size_bytes, self.flat_dtype))
            for each, index in zip(names, firsts, strict=True)
        ]

    def facts(self) -> dict[str, object]:
        """What bytes of its pages mean: two pools that differ in it must not read each other's, and two that do not differ may,
        however much memory they have."""
        pool = self.host_pool
        dtypes = {told for name, value in getattr(pool, "__dict__", {}).items() for told in _dtypes(name, value)}
        return {
            "page_size": self.page_size,
            "sizes": self.sizes,
            "layout": str(getattr(pool, "layout", "")),
            "layers": int(getattr(pool, "layer_num", 0) or getattr(pool, "num_mamba_layers", 0) or 0),
            "dtypes": sorted(dtypes),
            **({} if self.flat_dtype is None else {"form": "flat"}),
            **first_layer(pool),
        }


def page_pool(host_pool: Any) -> PagePool:  # noqa: ANN401 - SGLang's HostKVCache
    """How a pool's pages are reached: where they lie, or else as tensors. Some of SGLang's pools refuse the one (the DSA indexer's
    for layer_first, Mamba's with states beside its slots), and a few the other too: raises what they raise then."""
    page_size = int(getattr(host_pool, "page_size", 1) or 1)
    try:
        rooms = page_buffers(host_pool, torch.arange(page_size), 1)[0]
        return PagePool(host_pool, page_size, [len(room) for room in rooms])
    except Exception:  # noqa: BLE001 - each pool raises what it likes
        return _flat_pool(host_pool, page_size)


def _flat_pool(host_pool: Any, page_size: int) -> PagePool:  # noqa: ANN401 - SGLang's HostKVCache
    given, taken = host_pool.get_data_page(0, flat=True), host_pool.get_dummy_flat_data_page()
    size_bytes = len(flat_bytes(given))
    if not size_bytes or size_bytes != taken.numel() * taken.element_size():
        raise ValueError(f"it gives pages of {size_bytes} bytes, and takes those of {taken.numel()} elements")
    return PagePool(host_pool, page_size, [size_bytes], taken.dtype)


def batches(pages: Sequence[Page]) -> Iterator[Sequence[Page]]:
    """All pages at once, or so many of those that are put together as may be in memory."""
    start, staged = 0, 0
    for index, page in enumerate(pages):
        size_bytes = page.size_bytes if page.is_staged else 0
        if staged + size_bytes > STAGED_BYTES and index > start:
            yield pages[start:index]
            start, staged = index, 0
        staged += size_bytes
    if start < len(pages):
        yield pages[start:]


def all_of(answers: Iterator[bool], count: int) -> bool:
    """Whether the next answers are all True; takes as many whatever the first ones say."""
    return list(islice(answers, count)).count(True) == count


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


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, which keep it; copied where it is not in one piece in this memory."""
    return memoryview(tensor.detach().contiguous().cpu().view(torch.uint8).numpy()).cast("B")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes where they lie; the caller keeps the tensor."""
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
