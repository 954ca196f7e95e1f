"""What a failed call was given is its caller's again at once, and not when the interpreter next looks for cycles: never, where an
engine has frozen its objects."""

from __future__ import annotations

import asyncio
import gc
import mmap
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import BUCKET, async_client_of, credentials_of, kv_server
from server_process import ServerProcess

from kvobj.client import KvClient, NewChunk
from kvobj.client.aio import AsyncKvClient
from kvobj.errors import ImmutableChunkError, KvobjError, UnavailableError

SIZE = 1 << 20
TIMEOUT_SECONDS = 0.3

Calls = dict[str, Callable[[Any, memoryview], Any]]
CALLS: Calls = {
    "put": lambda client, memory: client.put_chunk("put", memory[:SIZE]),
    "mput": lambda client, memory: client.mput([NewChunk("a", memory[:SIZE]), NewChunk("b", memory[SIZE:])]),
    "get": lambda client, memory: client.get_chunk("stored", into=memory[:SIZE]),
    "get many": lambda client, memory: client.get_chunks(["stored"], [memory[:SIZE]]),
}
BATCHES: Calls = {
    "one": lambda client, memory: client.mput_batches([[NewChunk("a", memory[:SIZE])]]),
    "two": lambda client, memory: client.mput_batches([[NewChunk(name, memory[:SIZE])] for name in ("a", "b")]),
}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("memory")) as running:
        yield running


@contextmanager
def memory_given_back() -> Iterator[memoryview]:
    """Memory of which nobody else has any part at the block's end."""
    memory = mmap.mmap(-1, 2 * SIZE)
    gc.collect()
    gc.disable()
    try:
        with memoryview(memory) as view:
            yield view
        memory.close()  # BufferError where somebody has
    finally:
        gc.enable()


async def timed_out(call: Coroutine[Any, Any, object]) -> None:
    try:
        await call
    except UnavailableError:
        return
    raise AssertionError("it did not fail")


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS / 3):
            await call
    except TimeoutError:
        return
    raise AssertionError("it was not cancelled")


async def refused(call: Coroutine[Any, Any, object]) -> None:
    try:
        await call
    except ImmutableChunkError:
        return
    raise AssertionError("it was not refused")


async def ready_client(server: ServerProcess, *, same_host: bool) -> AsyncKvClient:
    """One that is connected, and knows which way bytes go."""
    client = async_client_of(server, timeout_seconds=TIMEOUT_SECONDS, same_host=same_host)
    await client.put_chunk("stored", bytes(SIZE))
    assert await client.get_chunk("stored") is not None
    assert client.is_same_host == same_host
    return client


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("fails", [timed_out, cancelled])
@pytest.mark.parametrize("call", list(CALLS))
async def test_an_awaited_call_that_failed_keeps_nothing_of_its_callers_memory(
    server: ServerProcess,
    call: str,
    fails: Callable[[Coroutine[Any, Any, object]], Coroutine[Any, Any, None]],
    *,
    same_host: bool,
) -> None:
    async with await ready_client(server, same_host=same_host) as client:
        with server.hanging(), memory_given_back() as memory:
            await fails(CALLS[call](client, memory))


async def test_an_awaited_call_that_found_no_thread_keeps_nothing_of_its_callers_memory(server: ServerProcess) -> None:
    async with async_client_of(server, connections=1) as client:
        with server.hanging():
            busy = asyncio.create_task(client.get_chunk("stored"))
            await asyncio.sleep(0)
            with memory_given_back() as memory:
                await timed_out(client.get_chunk("stored", into=memory, timeout_seconds=TIMEOUT_SECONDS))
        await busy


def has_failed(answers: list[Any]) -> bool:
    return all(isinstance(each, UnavailableError) for each in answers)


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("batches", list(BATCHES))
async def test_a_batch_that_was_not_answered_keeps_nothing_of_its_callers_memory(
    server: ServerProcess, batches: str, *, same_host: bool
) -> None:
    async with await ready_client(server, same_host=same_host) as client:
        with server.hanging(), memory_given_back() as memory:
            await cancelled(BATCHES[batches](client, memory))
            assert has_failed(await BATCHES[batches](client, memory))
    with KvClient(
        server.endpoint, credentials_of(server), BUCKET, timeout_seconds=TIMEOUT_SECONDS, same_host=same_host
    ) as client:
        assert client.is_same_host == same_host
        with server.hanging(), memory_given_back() as memory:
            answers = BATCHES[batches](client, memory)
            assert has_failed(answers)


@pytest.mark.parametrize("same_host", [True, False])
async def test_a_chunk_that_was_refused_keeps_nothing_of_its_callers_memory(
    server: ServerProcess, *, same_host: bool
) -> None:
    async with async_client_of(server, same_host=same_host) as client:
        await client.put_chunk("refused", b"of another size")
        with memory_given_back() as memory:
            await refused(client.put_chunk("refused", memory[:SIZE]))


def test_a_batch_that_was_refused_keeps_nothing_of_its_callers_memory(server: ServerProcess) -> None:
    with KvClient(server.endpoint, credentials_of(server), BUCKET) as client, memory_given_back() as memory:
        twice = [NewChunk("twice", memory[:SIZE]), NewChunk("twice", memory[SIZE:])]
        unnamed = [NewChunk("", memory[:SIZE])]
        answers = client.mput_batches([twice, unnamed])
        assert all(isinstance(each, KvobjError) for each in answers)
        del twice, unnamed
