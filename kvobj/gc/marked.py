"""The collector's own list of what it has condemned: which chunks, until when, how many bytes. The catalog's marks decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from kvobj.gc.home_chunks import HomeChunk
from kvobj.gc.quotas import Place


class Marked:
    """Condemned chunks by the policy's name, in the order in which they were condemned; `size_bytes` is what they take in nvme.
    Event-loop-only."""

    __slots__ = ("_marks", "_names", "size_bytes")

    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[HomeChunk, int]] = {}
        self._names: dict[bytes, bytes] = {}  # by blob id
        self.size_bytes = 0

    def __len__(self) -> int:
        """How many chunks are condemned."""
        return len(self._marks)

    def add(self, chunk: HomeChunk, *, due_ms: int) -> None:
        """The chunk is condemned, to be claimed from `due_ms` of the boot clock on."""
        self._marks[chunk.name] = (chunk, due_ms)
        self._names[chunk.chunk.blob_id] = chunk.name
        self.size_bytes += chunk.home_bytes

    def add_all(self, chunks: Sequence[HomeChunk], *, due_ms: int) -> None:
        """`add` of each."""
        names = [chunk.name for chunk in chunks]
        self._marks.update(zip(names, zip(chunks, repeat(due_ms)), strict=False))
        self._names.update(zip([chunk.chunk.blob_id for chunk in chunks], names, strict=True))
        self.size_bytes += sum([0 if chunk.is_away else chunk.size_bytes for chunk in chunks])

    def claimed(self, blob_ids: Iterable[bytes]) -> list[bytes]:
        """The chunks that have these first blobs are gone: the names of those that were on the list."""
        taken = self._names.pop
        names = [name for blob_id in blob_ids if (name := taken(blob_id, None)) is not None]
        marks = [mark for name in names if (mark := self._marks.pop(name, None)) is not None]
        self.size_bytes -= sum([0 if chunk.is_away else chunk.size_bytes for chunk, _ in marks])
        return names

    def pop(self, name: bytes) -> HomeChunk | None:
        """Take a chunk off the list; None if it is not on it."""
        mark = self._marks.pop(name, None)
        if mark is None:
            return None
        self._names.pop(mark[0].chunk.blob_id, None)
        self.size_bytes -= mark[0].home_bytes
        return mark[0]

    def get(self, name: bytes) -> HomeChunk | None:
        """The condemned chunk of this name; None where there is none."""
        mark = self._marks.get(name)
        return None if mark is None else mark[0]

    def is_blob(self, name: bytes, blob_id: bytes) -> bool:
        """Whether the condemned chunk of this name has this first blob."""
        mark = self._marks.get(name)
        return mark is not None and mark[0].chunk.blob_id == blob_id

    def name_of(self, blob_id: bytes) -> bytes | None:
        """The name of the condemned chunk that has this first blob, None where there is none: a tenth of what making it costs."""
        return self._names.get(blob_id)

    def __contains__(self, name: bytes) -> bool:
        """Whether the chunk of this name is condemned."""
        return name in self._marks

    @property
    def oldest_due_ms(self) -> int | None:
        """When the chunk that was condemned first is due. 1 ns for each that was taken off in front of it since one was added."""
        for _, due_ms in self._marks.values():
            return due_ms
        return None

    def due(self, now_ms: int) -> list[bytes]:
        """Names of the chunks whose time has come."""
        return [name for name, (_, due_ms) in self._marks.items() if due_ms <= now_ms]

    def later(self, now_ms: int, limit: int) -> list[bytes]:
        """Names of the first chunks in nvme whose time has not come."""
        marks = self._marks.items()
        return list(islice((name for name, (each, due_ms) in marks if due_ms > now_ms and each.home_bytes), limit))

    def by_place(self) -> dict[Place, tuple[int, int]]:
        """How many chunks and bytes of each bucket and namespace are condemned."""
        sums: dict[Place, tuple[int, int]] = {}
        for chunk, _ in self._marks.values():
            place = (chunk.chunk.bucket, chunk.namespace)
            chunks, size_bytes = sums.get(place, (0, 0))
            sums[place] = (chunks + 1, size_bytes + chunk.size_bytes)
        return sums
