"""What a link has seen, counted for an engine's status page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.client.kv_values import NewChunk
from kvobj.connectors.notes import Notes
from kvobj.errors import KvobjError

_COUNTS: Final = (
    *("hits", "misses", "loads", "load_misses", "loaded_bytes"),
    *("found_unheld", "stores", "store_failures", "stored_bytes", "errors", "disagreements", "corrupt"),
)

_DISAGREEMENT: Final = ("disagreement",)


def kind_of(error: Exception) -> tuple[str, ...]:
    """What two errors have in common that one line in the log stands for: their class, and the code that the server gave."""
    code = str(error.data.get("code", "")) if isinstance(error, KvobjError) else ""
    return type(error).__name__, code


def another_size(stored_bytes: int, size_bytes: int) -> str:
    """See `Tally.differs`."""
    return f"are stored with another size ({stored_bytes}, not {size_bytes} bytes)"


class Tally:
    """Counts since the process began, and which of them the log has been told of. Thread-safe."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._last_error = ""
        self._last_disagreement = ""
        self._notes = Notes(now)
        self._differing = 0
        self._differs = ""

    def looked_up(self, found: Sequence[bool]) -> None:
        """Chunks were asked for."""
        hits = sum(found)
        self._add(hits=hits, misses=len(found) - hits)

    def found_unheld(self, count: int) -> None:
        """Of what was looked up to be held so many are stored and not held: there were no pins left."""
        self._add(found_unheld=count)

    def looked_up_run(self, run: int, asked: int) -> None:
        """A run was asked for: the chunk that ends it is the one miss."""
        self._add(hits=run, misses=int(run < asked))

    def read(self, found: Sequence[memoryview | None]) -> None:
        """Chunks were to be loaded."""
        came = [view.nbytes for view in found if view is not None]
        self._add(loads=len(came), load_misses=len(found) - len(came), loaded_bytes=sum(came))

    def stored(self, stored: Sequence[bool], chunks: Sequence[NewChunk]) -> None:
        """Chunks were to be stored."""
        size_bytes = sum(
            memoryview(each.data).nbytes for each, is_there in zip(chunks, stored, strict=True) if is_there
        )
        hits = sum(stored)
        self._add(stores=hits, store_failures=len(stored) - hits, stored_bytes=size_bytes)

    def gave_up(self, count: int) -> None:
        """Chunks were to be stored, and were not sent."""
        self._add(store_failures=count)

    def disagreed(self, error: Exception, difference: str) -> None:
        """A chunk is stored with another size or layout than the one that came. `difference`: see `differs`; "" is not told."""
        with self._lock:
            self._counts["disagreements"] += 1
            self._last_disagreement = str(error)
        if difference:
            self.differs(difference)

    def differs(self, difference: str) -> None:
        """A chunk is not what this engine stores under its name: what a log line says of such chunks, behind their number."""
        with self._lock:
            self._last_error = f"chunks {difference}"
            self._differing += 1
            self._differs = difference

    def differences(self) -> tuple[int, str]:
        """How many chunks differed since that was told last and how the last of them did, where it is to be told now, else 0."""
        if not self._differing:
            return 0, ""
        with self._lock:
            count, self._differing = self._differing, 0
            return self._notes.happened(_DISAGREEMENT, count) if count else 0, self._differs

    def corrupt(self) -> None:
        """A chunk's bytes were not what was stored."""
        self._add(corrupt=1)

    def failed(self, error: Exception, calls: str | None = None) -> int:
        """A call failed. Of `calls` of that sort: how many have with this kind of error since it was told last in the log, where it
        is to be told now, else 0."""
        with self._lock:
            self._counts["errors"] += 1
            self._last_error = f"{type(error).__name__}: {error}"
            return 0 if calls is None else self._notes.happened((calls, *kind_of(error)))

    def went_well(self, calls: str) -> None:
        """A call of that sort did all that it should."""
        if self._notes:
            with self._lock:
                self._notes.went_well(calls)

    def report(self) -> dict[str, object]:
        """All counts, and the last error ("" where there was none)."""
        with self._lock:
            return {**self._counts, "last_error": self._last_error, "last_disagreement": self._last_disagreement}

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
