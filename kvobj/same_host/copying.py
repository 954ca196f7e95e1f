"""Copies of many pieces of memory, by as many threads as help: one core often copies slower than the memory could.

Pieces are taken one after the other by whoever is free, so a helper that gets no processor holds nobody up but for the piece that
it has. Nothing here holds the interpreter's lock while it copies.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

from kvobj.same_host.mapping import Mapping

HELPERS_MAX: Final = 3
"""Besides the caller's own thread, for all callers of a process together, and never more than other cores."""
HELPED_BYTES: Final = 4 * 1024 * 1024
"""Each helper is worth its waking from so many bytes on."""
_PIECE_BYTES: Final = 4 * 1024 * 1024


class Piece(NamedTuple):
    """`size_bytes` from one address to another, of memory that the caller keeps. One of the two is `offset` of `mapping`, whose
    pages are made ready first."""

    target: int
    source: int
    size_bytes: int
    mapping: Mapping
    offset: int

    def copy(self) -> None:
        """Copy it."""
        self.mapping.touch(self.offset, self.size_bytes)
        ctypes.memmove(self.target, self.source, self.size_bytes)


class _Job:
    """Pieces that are left to copy, and how many helpers are at it."""

    __slots__ = ("_helping", "_idle", "_pieces")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = deque(pieces)
        self._idle = threading.Condition(threading.Lock())
        self._helping = 0

    def help(self) -> None:
        """Copy what is left, beside the job's own thread; nothing once that has found none."""
        with self._idle:
            if not self._pieces:
                return
            self._helping += 1
        try:
            self.work()
        finally:
            with self._idle:
                self._helping -= 1
                self._idle.notify_all()

    def work(self) -> None:
        """Copy until no piece is left."""
        pieces = self._pieces
        while pieces:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            piece.copy()

    def wait(self) -> None:
        """Return once the helpers have ended their pieces."""
        with self._idle:
            while self._helping:
                self._idle.wait()


class Copiers:
    """See the module's text. Thread-safe; `count` helpers at most, made when they are first needed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._made = 0

    def forget(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._begin()

    def copy_all(self, pieces: Sequence[Piece]) -> None:
        """Copy all pieces, which overlap nowhere; all is there when this returns."""
        wanted = min(self._count, sum(piece.size_bytes for piece in pieces) // HELPED_BYTES - 1)
        if wanted <= 0:
            for piece in pieces:
                piece.copy()
            return
        job = _Job(_cut(pieces))
        self._make(wanted)
        for _ in range(wanted):
            self._jobs.put(job)
        job.work()
        job.wait()

    def _make(self, wanted: int) -> None:
        with self._lock:
            while self._made < wanted:
                self._made += 1
                name = f"kvobj-copier-{self._made}"
                threading.Thread(target=_help, args=(self._jobs,), name=name, daemon=True).start()


def _cut(pieces: Sequence[Piece]) -> list[Piece]:
    cut: list[Piece] = []
    for piece in pieces:
        target, source, size_bytes, mapping, offset = piece
        if size_bytes <= _PIECE_BYTES:
            cut.append(piece)
            continue
        cut += [
            Piece(target + at, source + at, min(_PIECE_BYTES, size_bytes - at), mapping, offset + at)
            for at in range(0, size_bytes, _PIECE_BYTES)
        ]
    return cut


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


copiers: Final = Copiers(max(0, min(HELPERS_MAX, (os.cpu_count() or 1) - 1)))
os.register_at_fork(after_in_child=copiers.forget)
