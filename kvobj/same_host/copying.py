"""Copies of many pieces of memory, by as many threads as help: one core often copies slower than the memory could.

Pieces are taken one after the other by whoever is free, so a helper that gets no processor holds nobody up but for the piece that
it has. Nothing here holds the interpreter's lock while it copies. Where the native library was built, each thread copies in one
call, which waits for the others' last steps without sleeping for a while, and large batches past the caches (native/copies.c);
without it the same bytes are copied piece by piece.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, cast

from kvobj.native import library
from kvobj.same_host.mapping import UNLOCKED_BYTES, Mapping
from kvobj.same_host.touching import toucher

HELPERS_MAX: Final = 3
"""Besides the caller's own thread, for all callers of a process together, and never more than cores: one more than other cores,
since who wakes a helper often has it wait for its own core, or for one on which a thread of the engine spins (as those of OpenMP do
for milliseconds), and any that runs takes all that is left."""
HELPED_BYTES: Final = 8 * 1024 * 1024
"""Each helper is worth its waking from so many bytes on. On a quiet machine two threads copy 32 MiB hardly faster than one; but the
one may have to wait for a processor that others want, too: the server's event loop, or an engine's threads."""
STREAMED_BYTES: Final = 2 * 1024 * 1024
"""A batch from here on is copied past the caches: less may be read again while it still lies there."""
_PIECE_BYTES: Final = 4 * 1024 * 1024

_CopySteps = Callable[[int, int, Any, Any, int, int], int]


class Piece(NamedTuple):
    """`size_bytes` from one address to another, of memory that the caller keeps. One of the two is `offset` of `mapping`, whose
    pages are made ready first."""

    target: int
    source: int
    size_bytes: int
    mapping: Mapping
    offset: int

    @property
    def is_ready(self) -> bool:
        """Whether no page of it has to be made ready."""
        return self.mapping.is_touched(self.offset, self.size_bytes)

    def copy(self) -> None:
        """Copy it."""
        self.mapping.touch(self.offset, self.size_bytes)
        ctypes.memmove(self.target, self.source, self.size_bytes)


class _Job:
    """A batch that is being copied, how many helpers are at it, and what one of them raised."""

    __slots__ = ("_error", "_helping", "_idle", "_is_over", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # To wait by. The lock itself is what is entered: an interrupt as a condition is, in Python, would leave it held for ever.
        self._idle = threading.Condition(self._lock)
        self._helping = 0
        self._is_over = False
        self._error: Exception | None = None

    def work(self, *, waits: bool = False) -> bool:
        """Copy what nobody has begun to copy; True where all is known to be copied then. `waits`: for a moment, for the others'."""
        raise NotImplementedError

    def help(self) -> None:
        """Copy what is left, beside the job's own thread; nothing once that has found none. `finish` raises what this would."""
        with self._lock:
            if self._is_over:
                return
            self._helping += 1
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - its piece is not copied: the caller has to know, and the helper serves on
            self._error = error
        finally:
            with self._lock:
                self._helping -= 1
                self._idle.notify_all()

    def finish(self) -> None:
        """Copy all: what nobody has begun, and then wait for the helpers' pieces. Raises what a helper raised; whatever is raised,
        `leave` has to follow."""
        if self.work(waits=True):
            return
        self._wait()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Return once no helper is at it and none comes any more, whatever is raised meanwhile: they write to memory that its owner
        takes for its own again."""
        is_left = False
        while not is_left:
            with suppress(BaseException):  # another one is being raised already
                self._wait()
                is_left = True

    def _wait(self) -> None:
        with self._lock:
            self._is_over = True
            while self._helping:
                self._idle.wait()


class _Pieces(_Job):
    """One call for each piece."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = deque(pieces)

    def work(self, *, waits: bool = False) -> bool:  # noqa: ARG002 - there is nothing to wait by
        pieces = self._pieces
        while pieces:
            try:
                piece = pieces.popleft()
            except IndexError:
                break
            piece.copy()
        return False


class _Steps(_Job):
    """One native call for each thread, which takes step by step."""

    __slots__ = ("_call", "_count", "_done", "_is_streamed", "_taken", "_triples")

    def __init__(self, call: _CopySteps, pieces: Sequence[Piece], *, is_streamed: bool) -> None:
        super().__init__()
        self._call = call
        self._count = len(pieces)
        self._is_streamed = is_streamed
        self._taken, self._done = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._triples = array("Q", [number for piece in pieces for number in piece[:3]])

    def work(self, *, waits: bool = False) -> bool:
        triples, taken, done = self._triples.buffer_info()[0], ctypes.byref(self._taken), ctypes.byref(self._done)
        return self._call(triples, self._count, taken, done, self._is_streamed, waits) == 1


class Copiers:
    """See the module's text. Thread-safe; `count` helpers at most, made when they are first needed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def forget(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._begin()

    def copy_all(self, pieces: Sequence[Piece]) -> None:
        """Copy all pieces, which overlap nowhere; all is there when this returns. Raises what a piece raises (MemoryError), or the
        handler of a signal. Nobody reads or writes the memory any more then, but not all may be there."""
        toucher.note_copy()
        size_bytes = sum([piece.size_bytes for piece in pieces])
        wanted = min(self._count, size_bytes // HELPED_BYTES - 1)
        call = _copy_steps
        job: _Job
        if call is not None and size_bytes >= UNLOCKED_BYTES and all(piece.is_ready for piece in pieces):
            job = _Steps(call, pieces, is_streamed=size_bytes >= STREAMED_BYTES)
        else:
            job = _Pieces(_cut(pieces) if wanted > 0 else pieces)
        if wanted <= 0:
            job.work()
            return
        self._share(job, wanted)

    def _share(self, job: _Job, helpers: int) -> None:
        made = self._make(helpers)
        try:
            for _ in range(made):
                self._jobs.put(job)
            job.finish()
        except BaseException:
            job.leave()
            raise

    def _make(self, wanted: int) -> int:
        """Have so many helpers, or as many as threads can be started; how many of them there are."""
        with self._lock:
            helpers = self._helpers = [each for each in self._helpers if each.is_alive()]
            while len(helpers) < wanted:
                name = f"kvobj-copier-{len(helpers) + 1}"
                helper = threading.Thread(target=_help, args=(self._jobs,), name=name, daemon=True)
                helpers.append(helper)
                try:
                    helper.start()
                except RuntimeError:  # none can be started now
                    helpers.pop()
                    break
            return min(wanted, len(helpers))


def _helpers_for(cores: int) -> int:
    return min(HELPERS_MAX, cores) if cores > 1 else 0


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


def _native() -> _CopySteps | None:
    native = library()
    if native is None:
        return None
    call = native.kvobj_copy_steps
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    call.restype = ctypes.c_int
    return cast("_CopySteps", call)


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


_copy_steps: Final = _native()
copiers: Final = Copiers(_helpers_for(os.cpu_count() or 1))
os.register_at_fork(after_in_child=copiers.forget)
