"""What a link has seen, counted for an engine's status page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvobj.client.kv_values import NewChunk

_COUNTS: Final = (
    *("hits", "misses", "loads", "load_misses", "loaded_bytes"),
    *("found_unheld", "stores", "store_failures", "stored_bytes", "errors", "disagreements", "corrupt"),
)


class Tally:
    """Counts since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._last_error = ""
        self._last_disagreement = ""
        self._told: set[type[Exception]] = set()

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

    def disagreed(self, error: Exception) -> None:
        """A chunk is stored with another size or layout than the one that came."""
        with self._lock:
            self._counts["disagreements"] += 1
            self._last_disagreement = str(error)

    def corrupt(self) -> None:
        """A chunk's bytes were not what was stored."""
        self._add(corrupt=1)

    def failed(self, error: Exception) -> bool:
        """A call failed: whether this kind of error is a new one, to be told in the log."""
        with self._lock:
            self._counts["errors"] += 1
            self._last_error = f"{type(error).__name__}: {error}"
            is_new = type(error) not in self._told
            self._told.add(type(error))
            return is_new

    def report(self) -> dict[str, object]:
        """All counts, and the last error ("" where there was none)."""
        with self._lock:
            return {**self._counts, "last_error": self._last_error, "last_disagreement": self._last_disagreement}

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
