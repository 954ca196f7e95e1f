"""The calls of LMCache's in-process connector, blocking: its keys, its memory, its forms of a chunk, over one link."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from lmcache.v1.protocol import RemoteMetadata

from kvobj.client.kv_values import NewChunk
from kvobj.connectors.link import StoreLink
from kvobj.connectors.lmcache.keys import HEALTH_CHECK, engine_name, plain_engine_name
from kvobj.connectors.lmcache.memory import ObjectMemory
from kvobj.connectors.lmcache.stored_form import parse_head, with_head

LISTED_MAX: Final = 1_000_000

_PAGE: Final = 1000
_UNSERIALIZABLE: Final = (KeyError, ValueError, struct.error)
"""What `RemoteMetadata.serialize` raises for a dtype, a shape or a size that it has no numbers for."""


class EngineChunks:
    """Thread-safe. `full`: shapes, dtypes and format of a full chunk, and its size; `metadata_bytes`: size of a `RemoteMetadata`;
    `allocator`: LMCache's `LocalCPUBackend`, which in a scheduler's process has no memory and is not asked for any.

    Keys are LMCache's `CacheEngineKey`s, of whole chunks or of single layers. No method raises for what the store does.

    The key of LMCache's health check (`keys.HEALTH_CHECK`) is this object's own and is not sent: what was put last under it comes
    back while the store answers. A store that may only be read, or is full, is well.
    """

    def __init__(
        self,
        link: StoreLink,
        allocator: Any,  # noqa: ANN401
        *,
        full: tuple[list[Any], list[Any], Any],
        full_bytes: int,
        metadata_bytes: int,
        is_shared_by_ranks: bool,
    ) -> None:
        self.link = link
        self._allocator = allocator
        self._full = full
        self._full_bytes = full_bytes
        self._metadata_bytes = metadata_bytes
        self._is_shared_by_ranks = is_shared_by_ranks
        self._memory = ObjectMemory()
        self._health_check: bytes | None = None
        """What the health check put last, as a chunk of any size."""

    def run(self, keys: Sequence[Any]) -> int:
        """How many at the head of the list are stored."""
        names = self._names(keys)
        if names == [HEALTH_CHECK]:
            return int(self._health_check is not None and self.link.ping())
        return self.link.run(names)

    def get(self, keys: Sequence[Any]) -> list[Any]:
        """Each chunk in memory of LMCache's, with one reference; None for a miss, and where there is no memory.

        A full chunk goes straight into memory of its size. Memory for another is asked for once its head was read.
        """
        names = self._names(keys)
        if names == [HEALTH_CHECK]:
            return self._shaped_all([self._checked()])
        if any(hasattr(key, "layer_id") for key in keys):
            return self._shaped_all(self.link.read(names))
        rooms: list[Any] = []
        try:
            while len(rooms) < len(keys) and (memory := self._allocate(*self._full)) is not None:
                rooms.append(memory)
            views = [self._memory.view(each) for each in rooms]
            found = self.link.fetch(names[: len(rooms)], views)
        except BaseException:
            give_back(rooms)
            raise
        unused = [room for room, view, data in zip(rooms, views, found, strict=True) if data is not view]
        give_back(unused)
        others = self._shaped_all([None if data is view else data for view, data in zip(views, found, strict=True)])
        filled = [
            room if data is view else other for room, view, data, other in zip(rooms, views, found, others, strict=True)
        ]
        return filled + [None] * (len(keys) - len(rooms))

    def put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks; one that cannot be, of a dtype that LMCache has no number for as well, is left out and counted."""
        names = self._names(keys)
        if names == [HEALTH_CHECK]:
            self._health_check = bytes(self._with_head(memory_objs[0]))
            return
        chunks: list[NewChunk] = []
        problem: Exception | None = None
        for name, memory in zip(names, memory_objs, strict=True):
            try:
                chunks.append(NewChunk(name, self._stored_form(memory)))
            except _UNSERIALIZABLE as error:
                problem = error
        self.link.store(chunks)
        if problem is not None:
            why = f"LMCache has no head for chunks of this form: {type(problem).__name__}: {problem}"
            self.link.gave_up(len(names) - len(chunks), why)

    def is_health_check(self, keys: Sequence[Any]) -> bool:
        """Whether this is the health check's key, which is not sent."""
        return self._names(keys) == [HEALTH_CHECK]

    def gave_up(self, count: int) -> None:
        """So many chunks that were to be put were given up while they waited."""
        self.link.gave_up(count, "chunks waited for too long to be stored, or too many did")

    def remove(self, key: Any) -> bool:  # noqa: ANN401
        """Whether the chunk is not stored any more."""
        return self.link.delete(self._names([key]))

    def names(self) -> list[str]:
        """The names of all stored chunks of the namespace, `LISTED_MAX` at most; none where the store did not tell all of them, so
        that a part is not taken for the whole. The log says why."""
        names: list[str] = []
        while len(names) < LISTED_MAX:
            page = self.link.page(after=names[-1] if names else "", limit=_PAGE)
            if page is None:
                return []
            names += [name for name, _ in page]
            if len(page) < _PAGE:
                break
        return [plain_engine_name(name) for name in names]

    def _names(self, keys: Sequence[Any]) -> list[str | bytes]:
        return [engine_name(key, is_shared_by_ranks=self._is_shared_by_ranks) for key in keys]

    def _checked(self) -> memoryview | None:
        """What the health check is to get."""
        stored = self._health_check
        return None if stored is None or not self.link.ping() else memoryview(stored)

    def _allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Any:  # noqa: ANN401 - LMCache's MemoryObj or None
        # without LMCache's busy loop, which waits for memory and has no deadline
        return self._allocator.allocate(shapes, dtypes, fmt, busy_loop=False)

    def _shaped_all(self, stored: Sequence[memoryview | None]) -> list[Any]:
        shaped: list[Any] = []
        try:
            shaped.extend(None if each is None else self._shaped(each) for each in stored)
        except BaseException:
            give_back(shaped)
            raise
        return shaped

    def _shaped(self, stored: memoryview) -> Any:  # noqa: ANN401 - LMCache's MemoryObj or None
        told = parse_head(
            stored,
            metadata_bytes=self._metadata_bytes,
            parse=RemoteMetadata.deserialize,
            length_of=lambda metadata: int(metadata.length),
        )
        if told is None:
            return None
        metadata, data = told
        memory = self._allocate(metadata.shapes, metadata.dtypes, metadata.fmt)
        if memory is None:
            return None
        room = self._memory.view(memory)
        if len(room) != len(data):
            memory.ref_count_down()
            return None
        room[:] = data
        return memory

    def _stored_form(self, memory: Any) -> memoryview | bytearray:  # noqa: ANN401 - LMCache's MemoryObj
        form = (list(memory.get_shapes()), list(memory.get_dtypes()), memory.get_memory_format())
        return self._memory.view(memory) if form == self._full else self._with_head(memory)

    def _with_head(self, memory: Any) -> bytearray:  # noqa: ANN401 - LMCache's MemoryObj
        data = self._memory.view(memory)
        shapes, dtypes, fmt = list(memory.get_shapes()), list(memory.get_dtypes()), memory.get_memory_format()
        metadata: bytes = RemoteMetadata(len(data), shapes, dtypes, fmt).serialize()
        return with_head(metadata, data, full_bytes=self._full_bytes)


def give_back(memory_objs: Sequence[Any]) -> None:
    """One reference less to each."""
    for each in memory_objs:
        if each is not None:
            each.ref_count_down()
