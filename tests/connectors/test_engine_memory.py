"""An engine's memory is its own again once a call has failed, and once what copies it was closed, also where the server hangs."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from link_world import settings_of
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.client import NewChunk
from kvobj.connectors import StoreLink
from kvobj.connectors.lookups import Lookups
from kvobj.connectors.transfers import Finished, Piece, Transfers

SETTINGS = ServerSettings(
    dram_bytes=64 * MIB, nvme_bytes=128 * MIB, buckets=(BucketSetting("cache", kind="kv", durability="memory"),)
)
CHUNKS = 16
PROMPT_SECONDS = 5.0
LONG_SECONDS = 45.0


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("memory"), SETTINGS) as running:
        yield running


def link_to(server: ServerProcess, *, timeout_seconds: float, same_host: bool = True) -> StoreLink:
    return StoreLink(settings_of(server, timeout_seconds=timeout_seconds, same_host=same_host))


@contextmanager
def memory_given_back() -> Iterator[memoryview]:
    """Memory of which nobody else has any part at the block's end, without a search for cycles: an engine may have frozen its
    objects."""
    memory = mmap.mmap(-1, CHUNKS * MIB)
    gc.collect()
    gc.disable()
    try:
        with memoryview(memory) as view:
            yield view
        # A thread that helped lets go of its part once it has told of it.
        wait_until(lambda: is_unmapped(memory), timeout_seconds=PROMPT_SECONDS, what="the memory to be nobody else's")
    finally:
        gc.enable()


def is_unmapped(memory: mmap.mmap) -> bool:
    try:
        memory.close()
    except BufferError:  # somebody has some of it
        return False
    return True


def row(memory: memoryview, index: int) -> memoryview:
    return memory[index * MIB : (index + 1) * MIB]


@pytest.mark.parametrize("same_host", [True, False])
def test_a_store_that_is_not_answered_keeps_nothing_of_the_engines_memory(
    server: ServerProcess, *, same_host: bool
) -> None:
    with closing(link_to(server, timeout_seconds=1.0, same_host=same_host)) as link:
        assert link.store([NewChunk(f"stored/{same_host}", bytes(MIB))]) == [True]
        assert link.report()["same_host"] is same_host
        with server.hanging(), memory_given_back() as memory:
            chunks = [NewChunk(f"hangs/{index}", row(memory, index)) for index in range(CHUNKS)]
            assert link.store(chunks) == [False] * CHUNKS
            chunks.clear()


def test_a_store_that_is_refused_keeps_nothing_of_the_engines_memory(server: ServerProcess) -> None:
    with closing(link_to(server, timeout_seconds=5.0)) as link:
        assert link.store([NewChunk("refused", bytes(1))]) == [True]
        with memory_given_back() as memory:
            chunks = [NewChunk("refused" if index else "", row(memory, index)) for index in range(CHUNKS)]
            assert link.store(chunks) == [False] * CHUNKS
            chunks.clear()


class Copying:
    """Transfers over a link, and a job that has begun once `begun` is set."""

    def __init__(self, link: StoreLink, memory: memoryview) -> None:
        self.begun = threading.Event()
        self.transfers = Transfers(threads=2, store_wait_seconds=LONG_SECONDS)

        def load() -> list[bool]:
            self.begun.set()
            return link.load(["hang/0", "hang/1"], [row(memory, 0), row(memory, 1)])

        self.transfers.submit(1, [Piece(2, load)], is_load=True)

    def finished(self) -> list[Finished]:
        return self.transfers.finished()


@pytest.mark.parametrize("same_host", [True, False])
def test_copies_that_a_hanging_server_does_not_answer_are_ended_as_they_are_closed(
    server: ServerProcess, *, same_host: bool
) -> None:
    with closing(link_to(server, timeout_seconds=LONG_SECONDS, same_host=same_host)) as link:
        chunks = [NewChunk(f"hang/{index}", bytes(MIB)) for index in range(2)]
        assert link.store(chunks) == [True] * 2
        with server.hanging(), memory_given_back() as memory:
            copying = Copying(link, memory)
            assert copying.begun.wait(10)
            began = time.monotonic()
            copying.transfers.close(began + 0.2)
            assert time.monotonic() - began < PROMPT_SECONDS
            assert [(ended.job, ended.copied) for ended in copying.finished()] == [(1, [False, False])]
            assert link.is_up, "that a call was ended says nothing of the server"


@pytest.mark.parametrize("same_host", [True, False])
def test_questions_that_a_hanging_server_does_not_answer_are_ended_as_they_are_closed(
    server: ServerProcess, *, same_host: bool
) -> None:
    with closing(link_to(server, timeout_seconds=LONG_SECONDS, same_host=same_host)) as link:
        assert link.store([NewChunk("asked", b"a")]) == [True]
        lookups = Lookups(link, name_of=bytes.decode, deadline_seconds=LONG_SECONDS)
        with server.hanging():
            for key in (b"asked", b"unknown"):
                assert lookups.ask(key, "request") is None
                lookups.flush()  # each by itself: the second waits behind the first
            wait_until(lambda: lookups._sent.qsize() == 1, timeout_seconds=10, what="the first to be asked")
            began = time.monotonic()
            lookups.close(began + 0.2)
            assert time.monotonic() - began < PROMPT_SECONDS
        assert lookups.ask(b"asked", "request") is False
