"""How a link reads a batch of chunks: at once out of shared memory where that goes, else as a stream, over what breaks it off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.client.chunk_bytes import PartlyReadError
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import Name, Namespace
from kvobj.connectors.tally import Tally, another_size
from kvobj.errors import CorruptionError, InvalidRequestError, UnavailableError

_BREAKS_MAX: Final = 4
"""So many chunks of a batch may break it off, each a miss; more is an outage."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks to be read: `came` is told of each once its bytes are right. Without `views` each comes in memory of its own, and with
    them one of another size than its view does, unless `is_exact`: then nothing is done for it. `deadline`: of `time.monotonic`."""

    names: Sequence[Name]
    namespace: Namespace
    views: Sequence[memoryview] | None
    came: Callable[[int, memoryview], None]
    deadline: float
    is_exact: bool = False


class ChunkReader:
    """Thread-safe. `UnavailableError` where the server is not there, or nothing comes within the deadline; what came until then has
    been told of."""

    def __init__(self, client: KvClient, tally: Tally) -> None:
        self._client = client
        self._tally = tally

    def read(self, wanted: Wanted, start: int, stop: int) -> None:
        """Read some of what is wanted."""
        if self._copied(wanted, start, stop):
            return
        breaks = 0
        while start < stop:
            start = self._streamed(wanted, start, stop)
            breaks += 1
            if start < stop and breaks > _BREAKS_MAX:
                raise UnavailableError("the stream of chunks broke off again and again")

    def _copied(self, wanted: Wanted, start: int, stop: int) -> bool:
        """All at once, where they come by shared memory and are as expected; False where they have to be streamed."""
        if wanted.views is None or not self._client.is_same_host:
            return False
        rooms = wanted.views[start:stop]
        try:
            sizes = self._client.get_chunks(wanted.names[start:stop], rooms, namespace=wanted.namespace)
        except (InvalidRequestError, CorruptionError):
            return False  # one is larger than its room, or damaged: which one, the stream tells
        except PartlyReadError as error:
            self._tell(wanted, start, rooms, error.sizes)
            raise
        are_right = [size is None or size == len(room) for size, room in zip(sizes, rooms, strict=True)]
        if not wanted.is_exact and not all(are_right):
            return False
        self._tell(wanted, start, rooms, sizes)
        return True

    def _tell(self, wanted: Wanted, start: int, rooms: Sequence[memoryview], sizes: Sequence[int | None]) -> None:
        """Of the chunks that fill their rooms, and of those that should."""
        for index, (size, room) in enumerate(zip(sizes, rooms, strict=True), start=start):
            if size == len(room):
                wanted.came(index, room)
            elif size is not None and wanted.is_exact:
                self._tally.differs(another_size(size, len(room)))

    def _streamed(self, wanted: Wanted, start: int, stop: int) -> int:
        """Read until the end or until a chunk breaks the stream off: where to go on, behind that one."""
        reading = start - 1  # the chunk whose bytes are coming

        def room_for(index: int, _layer: int | None, size_bytes: int) -> memoryview | None:
            nonlocal reading
            reading = start + index
            _check_time(wanted)
            view = None if wanted.views is None else wanted.views[reading]
            if view is not None and wanted.is_exact and len(view) != size_bytes:
                self._tally.differs(another_size(size_bytes, len(view)))
            return view if view is not None and len(view) == size_bytes else None

        try:
            for item in self._client.mget(
                wanted.names[start:stop],
                namespace=wanted.namespace,
                into=room_for,
                timeout_seconds=max(0.0, wanted.deadline - time.monotonic()),
            ):
                if item.data is not None:
                    wanted.came(start + item.index, memoryview(item.data))
                else:
                    _check_time(wanted)  # one for which there was no room was waited for
        except CorruptionError:
            self._tally.corrupt()
        except UnavailableError:
            if reading < start or time.monotonic() >= wanted.deadline:
                raise
        else:
            return stop
        return max(reading, start) + 1


def _check_time(wanted: Wanted) -> None:
    """`UnavailableError` once the deadline is over."""
    if time.monotonic() >= wanted.deadline:
        raise UnavailableError("the chunks did not come within the deadline")
