"""Copies beside an engine's scheduler: a full store lets each store wait, and loads do not wait with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvobj.connectors.transfers import Piece, Transfers

WAIT_SECONDS = 10.0
LOADS = 10


class Room:
    """What stores wait for."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.waiting = 0
        self.waited = threading.Semaphore(0)

    def store(self) -> Sequence[bool]:
        self.waiting += 1
        self.waited.release()
        self.is_there.wait(WAIT_SECONDS)
        self.waiting -= 1
        return [True]


@pytest.mark.parametrize("threads", [2, 4])
def test_stores_that_wait_for_room_leave_a_thread_to_loads_and_are_all_done_once_there_is_some(threads: int) -> None:
    room, loaded = Room(), threading.Semaphore(0)

    def load() -> Sequence[bool]:
        loaded.release()
        return [room.waiting == threads - 1]

    transfers = Transfers(threads=threads, store_wait_seconds=60.0)
    transfers.submit(0, [Piece(1, room.store) for _ in range(3 * threads)], is_load=False)
    for _ in range(threads - 1):
        assert room.waited.acquire(timeout=WAIT_SECONDS)
    for job in range(1, LOADS + 1):  # one after the other: behind each its thread might take a store
        transfers.submit(job, [Piece(1, load)], is_load=True)
        assert loaded.acquire(timeout=WAIT_SECONDS / 2)
    room.is_there.set()
    transfers.drain()
    ended = {ended.job: ended.copied for ended in transfers.finished()}
    assert ended == {0: [True] * 3 * threads, **{job: [True] for job in range(1, LOADS + 1)}}
    transfers.close()
