"""What holds once a client was closed, of both clients alike: nothing is asked any more, nobody waits, and no thread is left."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import async_client_of, bytes_of, client_of, kv_server
from scripted_server import CREDENTIALS, ScriptedServer, ok, read_request
from server_process import ServerProcess, wait_until
from test_aio import Hanging

from kvobj.client import KvClient, NewChunk
from kvobj.client.aio import AsyncKvClient, AsyncSession
from kvobj.errors import UnavailableError

PROMPT_SECONDS = 2.0
CALLS: dict[str, Callable[[Any], Any]] = {
    "put": lambda client: client.put_chunk("a", b"a"),
    "get": lambda client: client.get_chunk("a"),
    "get into": lambda client: client.get_chunk("a", into=bytearray(8)),
    "view": lambda client: client.view_chunk("a"),
    "mput": lambda client: client.mput([NewChunk("a", b"a")]),
    "match": lambda client: client.match(ids=["a"]),
    "session": lambda client: client.open_session(holder="", ttl_ms=1000),
}
STREAMS: dict[str, Callable[[Any], Any]] = {
    "mget": lambda client: client.mget(["a"]),
    "events": lambda client: client.events(),
    "follow": lambda client: client.follow_chunk("a"),
    "namespaces": lambda client: client.namespaces(),
}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("closed")) as running:
        yield running


def threads_left() -> list[str]:
    """Those of clients: what helps to copy is the process's, and stays."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvobj-") and not name.startswith("kvobj-copier-")]


def wait_for_no_thread() -> None:
    wait_until(lambda: not threads_left(), timeout_seconds=10, what="the threads to end")


async def is_refused(call: Coroutine[Any, Any, object]) -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="the client is closed"):
        await call
    assert time.monotonic() - began < PROMPT_SECONDS


# -- after it --------------------------------------------------------------------------------------------------------


def test_a_closed_client_asks_nothing(server: ServerProcess) -> None:
    client = client_of(server)
    client.put_chunk("a", b"a")
    assert client.is_same_host
    client.close()
    for call in CALLS.values():
        with pytest.raises(UnavailableError, match="the client is closed"):
            call(client)
    for stream in STREAMS.values():
        with pytest.raises(UnavailableError, match="the client is closed"):
            next(stream(client))
    assert not client.is_same_host
    assert not client.is_answered(timeout_seconds=1)
    client.close()
    wait_for_no_thread()


async def test_a_closed_client_of_an_event_loop_asks_nothing_and_has_no_thread(server: ServerProcess) -> None:
    client = async_client_of(server)
    await client.put_chunk("a", b"a")
    await client.close()
    for call in CALLS.values():
        await is_refused(call(client))
    for stream in STREAMS.values():
        await is_refused(anext(stream(client)))
    await client.close()
    wait_for_no_thread()


@pytest.mark.parametrize("leaves", [AsyncSession.close, AsyncSession.abandon])
async def test_a_session_that_is_left_after_its_client_was_closed_is_left_without_a_word(
    server: ServerProcess, leaves: Callable[[AsyncSession], Coroutine[Any, Any, None]]
) -> None:
    client = async_client_of(server)
    session = AsyncSession(client, ttl_ms=2000)
    await session.__aenter__()
    await client.close()
    await leaves(session)
    wait_until(lambda: not session.is_valid, timeout_seconds=20, what="its thread to end it")
    wait_until(lambda: server.status()["leases"]["sessions"] == 0, timeout_seconds=20, what="the session to end")
    wait_for_no_thread()


# -- in the midst of calls -------------------------------------------------------------------------------------------


def test_a_call_that_waits_for_a_connection_is_refused_and_one_that_has_it_comes_to_its_end() -> None:
    came, may_answer = threading.Event(), threading.Event()

    def serve(connection: socket.socket, _: int) -> None:
        read_request(connection)
        came.set()
        may_answer.wait(10)
        connection.sendall(ok(b"whole"))

    with ScriptedServer(serve) as server:
        client = KvClient(server.endpoint, CREDENTIALS, "cache", connections=1, timeout_seconds=20, same_host=False)
        read: list[bytes | None] = []
        refused: list[UnavailableError] = []

        def wait() -> None:
            try:
                client.get_chunk("b")
            except UnavailableError as error:
                refused.append(error)

        threads = [threading.Thread(target=lambda: read.append(bytes_of(client.get_chunk("a"))))]
        threads[0].start()
        assert came.wait(10)
        threads.append(threading.Thread(target=wait))
        threads[1].start()
        wait_until(lambda: len(client._transport._given) == 1, timeout_seconds=10, what="the second to wait")
        client.close()
        threads[1].join(PROMPT_SECONDS)
        assert [error.message for error in refused] == ["the client is closed"]
        may_answer.set()
        threads[0].join(10)
        assert read == [b"whole"]
        assert server.connections == 1


async def test_calls_of_an_event_loop_that_are_under_way_or_wait_for_a_thread_end_as_it_is_closed() -> None:
    hanging = Hanging()
    with ScriptedServer(hanging) as server:
        client = AsyncKvClient(
            server.endpoint, CREDENTIALS, "cache", connections=2, timeout_seconds=20, same_host=False
        )
        tasks = [asyncio.create_task(client.get_chunk("a")) for _ in range(2)]
        await hanging.wait_for(2)
        tasks += [asyncio.create_task(client.get_chunk("a")) for _ in range(8)]
        events: AsyncIterator[Any] = client.events(follow=True)
        streams = [asyncio.ensure_future(anext(each)) for each in (events, client.mget(["a"]))]
        await hanging.wait_for(1)
        await client.close()
        for each in [*tasks, *streams]:
            await is_refused(each)  # type: ignore[arg-type]  # a future
        wait_for_no_thread()
        assert server.connections == 3


async def test_a_stream_that_was_open_as_its_client_was_closed_does_not_go_on(server: ServerProcess) -> None:
    async with async_client_of(server, same_host=False) as client:
        await client.mput([NewChunk(f"open/{number}", bytes(1000)) for number in range(4)])
        stream = client.mget([f"open/{number}" for number in range(4)])
        assert (await anext(stream)).index == 0
        await client.close()
        await is_refused(anext(stream))
        wait_for_no_thread()


# -- an event loop that ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("are_tasks_kept", [True, False])
def test_calls_of_an_event_loop_that_was_closed_under_them_do_not_keep_those_of_the_next(
    *, are_tasks_kept: bool
) -> None:
    hanging = Hanging()
    with ScriptedServer(hanging) as server:
        client = AsyncKvClient(
            server.endpoint, CREDENTIALS, "cache", connections=2, timeout_seconds=20, same_host=False
        )
        tasks: list[asyncio.Task[memoryview | None]] = []

        async def begin() -> None:
            tasks.extend(asyncio.create_task(client.get_chunk("a")) for _ in range(3))
            await hanging.wait_for(2)

        async def read() -> list[bytes | None]:
            return [bytes_of(each) for each in await asyncio.gather(*[client.get_chunk("a") for _ in range(4)])]

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        if not are_tasks_kept:
            tasks.clear()
        hanging.answers.set()
        began = time.monotonic()
        assert asyncio.run(read()) == [b"whole"] * 4
        tasks.clear()  # what they give back is none of the next loop's
        assert asyncio.run(read()) == [b"whole"] * 4
        assert time.monotonic() - began < PROMPT_SECONDS
        asyncio.run(client.close())
        wait_for_no_thread()
