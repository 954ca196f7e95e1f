"""Copies between mapped memory and rooms, by one thread and by several, and pages that are made ready in the background."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from kvobj.buffers import address_of
from kvobj.native import library
from kvobj.same_host import copying
from kvobj.same_host.copying import Copiers, Piece
from kvobj.same_host.descriptors import staging_memory
from kvobj.same_host.mapping import Mapping
from kvobj.same_host.touching import Toucher

MIB = 1024 * 1024
SIZE = 24 * MIB
WAIT_SECONDS = 10.0


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    descriptor = staging_memory(SIZE)
    try:
        yield Mapping(descriptor, SIZE, is_writable=True)
    finally:
        os.close(descriptor)


def pieces_of(mapping: Mapping, room: memoryview, *bounds: int) -> list[Piece]:
    base = address_of(room)
    return [
        Piece(base + start, mapping.address(start), stop - start, mapping, start) for start, stop in pairwise(bounds)
    ]


@pytest.fixture(params=["native", "piece by piece"])
def way(request: pytest.FixtureRequest, mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """How batches are copied, those of this size by helpers, too."""
    monkeypatch.setattr(copying, "HELPED_BYTES", 4 * MIB)
    if request.param == "native":
        assert copying._copy_steps is not None
        mapping.touch(0, SIZE)  # what is not ready is copied piece by piece
    else:
        monkeypatch.setattr(copying, "_copy_steps", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_byte_of_every_piece_is_copied_and_no_other(mapping: Mapping, helpers: int) -> None:
    content = os.urandom(SIZE)
    mapping.room[:] = content
    room = memoryview(bytearray(SIZE))
    # small ones, one that is cut with a rest, and a last byte that nobody asked for
    Copiers(helpers).copy_all(pieces_of(mapping, room, 0, 1, 4097, 5 * MIB + 3, 19 * MIB + 7, SIZE - 1))
    assert room[: SIZE - 1] == content[: SIZE - 1]
    assert room[SIZE - 1] == 0


@pytest.mark.usefixtures("way")
def test_a_batch_within_the_caches_is_copied_to_the_byte(mapping: Mapping) -> None:
    content = os.urandom(MIB)
    mapping.room[7 : 7 + MIB] = content
    room = memoryview(bytearray(MIB + 2))
    piece = Piece(address_of(room) + 1, mapping.address(7), MIB, mapping, 7)
    Copiers(1).copy_all([piece])
    assert room == b"\0" + content + b"\0"


@pytest.mark.usefixtures("way")
def test_helpers_serve_one_batch_after_another(mapping: Mapping) -> None:
    copiers = Copiers(2)
    for number in range(1, 6):
        mapping.room[:] = bytes([number]) * SIZE
        room = memoryview(bytearray(SIZE))
        copiers.copy_all(pieces_of(mapping, room, 0, 8 * MIB, 16 * MIB, SIZE))
        assert bytes(room) == bytes([number]) * SIZE


@pytest.mark.usefixtures("way")
def test_a_helper_that_comes_when_all_is_copied_writes_nothing(mapping: Mapping) -> None:
    mapping.room[:] = b"1" * SIZE
    room = memoryview(bytearray(SIZE))
    pieces = pieces_of(mapping, room, 0, 8 * MIB, SIZE)
    call = copying._copy_steps
    job: copying._Job = copying._Pieces(pieces) if call is None else copying._Steps(call, pieces, is_streamed=True)
    job.finish()
    assert bytes(room) == b"1" * SIZE
    room[:] = b"2" * SIZE  # the room is the engine's again
    job.help()
    assert bytes(room) == b"2" * SIZE


def test_a_step_that_another_thread_has_begun_and_not_ended_is_not_taken_for_copied(mapping: Mapping) -> None:
    mapping.touch(0, SIZE)
    mapping.room[:] = b"1" * SIZE
    room = memoryview(bytearray(SIZE))
    call = copying._copy_steps
    assert call is not None
    job = copying._Steps(call, pieces_of(mapping, room, 0, 8 * MIB, SIZE), is_streamed=True)
    job._taken.value = 1
    assert not job.work(waits=True)
    assert bytes(room) == bytes(MIB) + b"1" * (SIZE - MIB)
    job._done.value += 1
    assert job.work(waits=True)


class Told(threading.Condition):
    """Tells that its thread has come to wait."""

    def __init__(self, lock: threading.Lock, told: threading.Event) -> None:
        super().__init__(lock)
        self._told = told

    def wait(self, timeout: float | None = None) -> bool:
        self._told.set()
        return super().wait(timeout)


class Held(copying._Job):
    """A batch that a helper is still at when its own thread has found nothing left: it ends once that one waits for it."""

    __slots__ = ("_of_own_thread", "ended", "is_begun", "is_waited_for")

    def __init__(self, of_own_thread: Callable[[], bool]) -> None:
        super().__init__()
        self._of_own_thread = of_own_thread
        self.is_begun, self.is_waited_for = threading.Event(), threading.Event()
        self._idle = Told(self._lock, self.is_waited_for)
        self.ended = 0

    def work(self, *, waits: bool = False) -> bool:
        if waits:
            assert self.is_begun.wait(WAIT_SECONDS)
            return self._of_own_thread()
        self.is_begun.set()
        assert self.is_waited_for.wait(WAIT_SECONDS)
        self.ended += 1
        return False


def interrupted() -> bool:
    raise KeyboardInterrupt


def test_a_batch_is_not_over_while_a_helper_still_copies() -> None:
    job = Held(lambda: False)
    Copiers(1)._share(job, 1)
    assert job.ended == 1


def test_who_is_interrupted_goes_on_when_no_helper_is_at_the_memory_any_more() -> None:
    job = Held(interrupted)
    with pytest.raises(KeyboardInterrupt):
        Copiers(1)._share(job, 1)
    assert job.ended == 1


def test_who_is_interrupted_again_while_it_waits_for_a_helper_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Held(interrupted)
    wait, interrupts = job._idle.wait, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted_wait(timeout: float | None = None) -> bool:
        if interrupts:
            raise interrupts.pop()
        return wait(timeout)

    monkeypatch.setattr(job._idle, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        Copiers(1)._share(job, 1)
    assert job.ended == 1
    assert not interrupts


class Unmapped(Mapping):
    """Fails a helper that wants its pages, and lets the first piece of everybody else go once that has happened."""

    def touch(self, offset: int, size_bytes: int) -> None:
        if threading.current_thread().name.startswith("kvobj-copier"):
            self.has_failed.set()
            raise MemoryError
        assert self.has_failed.wait(WAIT_SECONDS)
        super().touch(offset, size_bytes)

    has_failed: threading.Event


def test_a_piece_that_a_helper_could_not_copy_is_told_of_and_the_helper_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "HELPED_BYTES", 4 * MIB)
    descriptor = staging_memory(SIZE)
    mapping = Unmapped(descriptor, SIZE, is_writable=True)
    os.close(descriptor)
    room = memoryview(bytearray(SIZE))
    copiers = Copiers(1)
    for _ in range(2):  # the second time by the same helper
        mapping.has_failed = threading.Event()
        with pytest.raises(MemoryError):
            copiers.copy_all(pieces_of(mapping, room, 0, 8 * MIB, SIZE))
    assert len(copiers._helpers) == 1


def test_touching_changes_no_byte_and_may_be_done_again(mapping: Mapping) -> None:
    mapping.room[5 * MIB] = 7
    for _ in range(2):
        mapping.touch(3 * MIB, 4 * MIB)
        mapping.touch(SIZE - 1, 1)
        mapping.touch(0, 0)
    assert bytes(mapping.room).count(0) == SIZE - 1
    assert mapping.room[5 * MIB] == 7


def test_the_background_keeps_no_mapping_alive() -> None:
    descriptor = staging_memory(SIZE)
    mapping = Mapping(descriptor, SIZE, is_writable=True)
    os.close(descriptor)
    known, toucher = weakref.ref(mapping), Toucher()
    toucher._waiting.append(known)
    del mapping
    assert known() is None
    toucher._run()
    assert not toucher._waiting


@pytest.mark.parametrize("way", range(4))
def test_whichever_way_is_taken_the_same_bytes_come(way: int) -> None:
    """Of `kvobj_copy_steps`; which of them the processor's maker decides cannot be seen here."""
    native = library()
    assert native is not None
    source, target = memoryview(bytearray(os.urandom(3 * MIB + 77))), memoryview(bytearray(3 * MIB + 99))
    triples = array("Q", [address_of(target[11:]), address_of(source), len(source)])
    taken, done = ctypes.c_uint64(0), ctypes.c_uint64(0)
    counts = ctypes.byref(taken), ctypes.byref(done)
    pieces = ctypes.c_void_p(triples.buffer_info()[0])
    assert native.kvobj_copy_steps(pieces, ctypes.c_uint64(1), *counts, way, 0) == 1
    assert target[11 : 11 + len(source)] == source
    assert not any(target[:11])
    assert not any(target[11 + len(source) :])
    assert done.value == 4
