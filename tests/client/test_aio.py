"""The asynchronous client: the same calls as the blocking one, on asyncio and uvloop; cancelling ends a call and leaves nothing."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import uvloop
from module_paths import ModulePaths
from real_client import (
    CHUNK_BYTES,
    DECLARATION,
    LAYERS,
    TOKENS,
    async_client_of,
    bytes_of,
    client_of,
    kv_server,
    payload,
    put_chain,
)
from scripted_server import CREDENTIALS, REQUEST_ID, ScriptedServer, ok, read_request
from server_process import ServerProcess, wait_until

from kvobj.client import Event, KvClient, Namespace, NewChunk, Session
from kvobj.client.aio import AsyncKvClient, AsyncSession
from kvobj.client.aio.kv import STREAMS_MAX
from kvobj.client.aio.threads import CallThreads
from kvobj.client.call_scope import CallScope
from kvobj.client.kv_values import ROOT, StoredChunk
from kvobj.errors import CorruptionError, InvalidRequestError, NoSuchNamespaceError, UnavailableError

PROMPT_SECONDS = 2.0
LOOPS: list[Callable[[Coroutine[Any, Any, None]], None]] = [asyncio.run, uvloop.run]
ONLY_ASYNC = {"core", "calls", "streams", "leases", "timeout_seconds"}
ONLY_SYNC = {"forget"}
WAIT_FOR_NOTHING = {"release", "now"}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("aio")) as running:
        yield running


def public(kind: type) -> dict[str, object]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "awaiting"), [(KvClient, AsyncKvClient), (Session, AsyncSession)])
def test_both_clients_have_the_same_calls_with_the_same_parameters(blocking: type, awaiting: type) -> None:
    ours, theirs = public(blocking), public(awaiting)
    attributes = {"bucket"} if blocking is KvClient else {"now", "reclaims"}  # set in the constructor
    assert set(ours) - ONLY_SYNC | attributes == set(theirs) - ONLY_ASYNC
    for name, call in ours.items():
        if name in ONLY_SYNC or name in attributes:
            continue
        other = theirs[name]
        if isinstance(call, property):
            assert isinstance(other, property), name
            continue
        assert callable(call)
        assert callable(other)
        assert inspect.signature(call) == inspect.signature(other), name
        if name in WAIT_FOR_NOTHING:
            assert not inspect.iscoroutinefunction(other), name
        else:
            is_stream = inspect.isgeneratorfunction(call) or "Iterator" in str(
                inspect.signature(call).return_annotation
            )
            assert inspect.isasyncgenfunction(other) == is_stream, name
            assert inspect.iscoroutinefunction(other) == (not is_stream), name
            assert other.__doc__, name
    constructors = [inspect.signature(each).parameters.values() for each in (blocking, awaiting)]
    assert [(each.name, each.default, each.kind) for each in constructors[0]] == [
        (each.name, each.default, each.kind) for each in constructors[1]
    ]


@pytest.mark.parametrize("run", LOOPS)
def test_all_that_the_blocking_client_does_is_done_awaited(
    server: ServerProcess, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    name = f"aio-{LOOPS.index(run)}"
    run(_everything(server, name))
    wait_until(lambda: not _threads(), timeout_seconds=10, what="the threads to end")


async def _everything(server: ServerProcess, name: str) -> None:
    async with async_client_of(server) as client:
        namespace = await client.declare_namespace(name, DECLARATION)
        assert name in [each.name async for each in client.namespaces()]
        ids = namespace.chunk_ids(TOKENS)
        await _batches(client, namespace, ids)
        async with AsyncSession(client, holder="decode") as session:
            found = await session.match(namespace=namespace, ids=ids)
            assert found.pin is not None
            assert session.is_valid
            for chunk_id in ids:
                assert bytes_of(await session.read(found.pin, chunk_id)) == payload(chunk_id)
            view = await session.view(found.pin, ids[4])
            assert view is not None
            with view:
                assert bytes_of(view.data) == payload(ids[4])
            unpinned = await client.view_chunks(ids, namespace=namespace)
            for each, chunk_id in zip([*await session.view_many(found.pin, ids), *unpinned], [*ids, *ids], strict=True):
                assert each is not None
                with each:
                    assert bytes_of(each.data) == payload(chunk_id)
            many = [bytes_of(item.data) async for item in session.read_many(found.pin, ids)]
            assert many == [payload(each) for each in ids]
            (single,) = await session.pin([ids[2]], namespace=namespace)
            assert single is not None
            session.release(single)
            await session.renew()
            assert session.reclaims == 0
        assert not found.pin.is_valid
        events = [event async for event in client.events() if event.namespace == name]
        assert [event.type for event in events] == ["stored"] * len(events)
        assert {each for event in events for each in event.ids} == {each.hex() for each in ids}
        assert await client.remove_namespace(name) == 6
        with pytest.raises(NoSuchNamespaceError):
            await client.namespace(name)


async def _batches(client: AsyncKvClient, namespace: Namespace, ids: list[bytes]) -> None:
    parents: list[bytes | str] = [ROOT, *ids]
    stored = await client.put_chunk(ids[0], payload(ids[0]), namespace=namespace, parent=ROOT)
    assert not stored.existed
    chunks = [NewChunk(each, payload(each), parent=parent) for each, parent in zip(ids, parents, strict=False)]
    told = await client.mput(chunks, namespace=namespace)
    assert [each.existed for each in told if isinstance(each, StoredChunk)] == [True] + [False] * 5
    assert (await client.match(namespace=namespace, tokens=TOKENS)).matched == 6
    room = bytearray(CHUNK_BYTES + 8)
    view = await client.get_chunk(ids[1], namespace=namespace, into=room)
    assert view is not None
    assert view.obj is room
    assert view == payload(ids[1])
    with pytest.raises(InvalidRequestError, match="room"):
        await client.get_chunk(ids[1], namespace=namespace, into=bytearray(8))
    rooms = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(3)]
    filled = await client.get_chunks([ids[0], ids[5], bytes(32)], rooms, namespace=namespace)
    assert filled == [CHUNK_BYTES, CHUNK_BYTES, None]
    assert bytes_of(rooms[1]) == payload(ids[5])
    followed = [bytes_of(piece) or b"" async for piece in client.follow_chunk(ids[3], namespace=namespace)]
    assert b"".join(followed) == payload(ids[3])
    layers = [item.layer async for item in client.mget(ids, namespace=namespace, layer_order=True)]
    assert layers == [layer for layer in range(LAYERS) for _ in ids]
    reads = [client.get_chunk(each, namespace=namespace) for each in ids * 8]
    assert [bytes_of(each) for each in await asyncio.gather(*reads)] == [payload(each) for each in ids * 8]


def _threads() -> list[str]:
    """Those of clients: what helps to copy is the process's, and stays."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvobj-") and not name.startswith("kvobj-copier-")]


# -- cancelling -----------------------------------------------------------------------------------------------------


class Hanging:
    """Answers nothing until it is told to; counts what came."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.came = threading.Semaphore(0)

    def __call__(self, connection: socket.socket, _: int) -> None:
        while True:
            read_request(connection)
            self.came.release()
            if self.answers.is_set():
                connection.sendall(ok(b"whole"))

    async def wait_for(self, requests: int) -> None:
        """Until so many more requests have come."""
        for _ in range(requests):
            assert await asyncio.to_thread(self.came.acquire, timeout=10)


@asynccontextmanager
async def hanging_client(
    *, connections: int = 2, timeout_seconds: float = 20.0
) -> AsyncIterator[tuple[AsyncKvClient, Hanging]]:
    hanging = Hanging()
    with ScriptedServer(hanging) as server:
        async with AsyncKvClient(
            server.endpoint,
            CREDENTIALS,
            "cache",
            connections=connections,
            timeout_seconds=timeout_seconds,
            same_host=False,
        ) as client:
            yield client, hanging


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel it and expect it to be over soon."""
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < PROMPT_SECONDS


async def test_a_cancelled_call_frees_its_place_at_once_and_leaves_the_client_usable() -> None:
    async with hanging_client() as (client, hanging):
        for _ in range(3):
            tasks = [asyncio.create_task(client.get_chunk("a")) for _ in range(2)]
            await hanging.wait_for(2)
            for task in tasks:
                await cancelled(task)
        hanging.answers.set()
        read = await asyncio.gather(*[client.get_chunk("a") for _ in range(8)])
        assert [bytes_of(each) for each in read] == [b"whole"] * 8
        assert len(_threads()) == 2


async def test_a_timeout_around_a_call_ends_it() -> None:
    async with hanging_client() as (client, hanging):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get_chunk("a")
        assert time.monotonic() - began < PROMPT_SECONDS
        hanging.answers.set()
        assert bytes_of(await client.get_chunk("a")) == b"whole"


async def test_a_buffer_is_the_callers_again_when_a_cancelled_call_has_ended() -> None:
    going_on = threading.Event()

    def trickle(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n%b\r\n\r\n" % REQUEST_ID.encode())
        for _ in range(900):
            connection.sendall(b"x" * 1000)
            going_on.set()
        read_request(connection)

    room = bytearray(1_000_000)
    with ScriptedServer(trickle) as server:
        async with AsyncKvClient(server.endpoint, CREDENTIALS, "cache", verify=False, same_host=False) as client:
            for _ in range(20):
                going_on.clear()
                task = asyncio.create_task(client.get_chunk("a", into=room))
                await asyncio.to_thread(going_on.wait, 10)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                room[:] = bytes(len(room))
                await asyncio.sleep(0)
                assert not any(room)


async def test_who_waits_for_a_thread_is_told_at_the_deadline_and_cancelled_while_waiting() -> None:
    async with hanging_client(connections=1) as (client, hanging):
        busy = asyncio.create_task(client.get_chunk("a"))
        await hanging.wait_for(1)
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="threads"):
            await client.get_chunk("b", timeout_seconds=0.2)
        assert time.monotonic() - began < PROMPT_SECONDS
        waiting = asyncio.create_task(client.get_chunk("b"))
        await asyncio.sleep(0)
        await cancelled(waiting)
        await cancelled(busy)
        hanging.answers.set()
        assert bytes_of(await client.get_chunk("a")) == b"whole"


async def test_a_call_that_is_cancelled_twice_still_ends_once() -> None:
    async with hanging_client() as (client, hanging):
        task = asyncio.create_task(client.get_chunk("a"))
        await hanging.wait_for(1)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hanging.answers.set()
        assert bytes_of(await client.get_chunk("a")) == b"whole"


async def test_an_error_reaches_who_awaits_with_its_data() -> None:
    def wrong(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"bytes", f"x-kvobj-digest: {'00' * 32}"))

    with ScriptedServer(wrong) as server:
        async with AsyncKvClient(server.endpoint, CREDENTIALS, "cache", same_host=False) as client:
            with pytest.raises(CorruptionError) as caught:
                await client.get_chunk("a")
            assert caught.value.data["size_bytes"] == 5


async def test_streams_that_are_left_or_cancelled_give_their_connections_back(server: ServerProcess) -> None:
    keys = [f"stream/{number}" for number in range(6)]
    async with async_client_of(server, connections=1, timeout_seconds=5) as client:
        await client.mput([NewChunk(key, payload(key.encode(), 100_000)) for key in keys])
        for _ in range(4):
            async with aclosing(client.mget(keys)) as stream:
                assert (await anext(stream)).index == 0
            assert await client.get_chunk(keys[0]) is not None

        async def follow(after: int) -> list[Event]:
            return [event async for event in client.events(after=after, follow=True)]

        following = [asyncio.create_task(follow(0)) for _ in range(3)]
        assert await client.get_chunk(keys[1]) is not None, "who follows keeps no thread of the others"
        for each in following:
            await cancelled(each)
        assert len([item async for item in client.mget(keys)]) == 6


async def test_streams_go_on_while_calls_wait_for_the_connections_that_they_keep(server: ServerProcess) -> None:
    keys = [f"kept/{number}" for number in range(4)]
    async with async_client_of(server, connections=2, timeout_seconds=5, same_host=False) as client:
        await client.mput([NewChunk(key, payload(key.encode())) for key in keys])
        async with AsyncSession(client) as session:
            pin = (await session.match(ids=keys)).pin
            assert pin is not None
            async with aclosing(client.mget(keys)) as plain, aclosing(session.read_many(pin, keys)) as pinned:
                assert [(await anext(each)).index for each in (plain, pinned)] == [0, 0]
                reads = [asyncio.create_task(client.get_chunk(key)) for key in keys]
                await asyncio.sleep(0)  # by now each has a thread, or waits for one
                assert [item.index async for item in plain] == [1, 2, 3]
                assert [item.index async for item in pinned] == [1, 2, 3]
                assert [bytes_of(each) for each in await asyncio.gather(*reads)] == [
                    payload(key.encode()) for key in keys
                ]


async def test_more_streams_than_connections_all_come_to_their_end(server: ServerProcess) -> None:
    keys = [f"many/{number}" for number in range(4)]
    async with async_client_of(server, connections=2, timeout_seconds=5, same_host=False) as client:
        await client.mput([NewChunk(key, payload(key.encode())) for key in keys])

        async def read() -> list[int]:
            found = []
            async for item in client.mget(keys):
                found.append(item.index)
                await asyncio.sleep(0)
            return found

        assert await asyncio.gather(*[read() for _ in range(12)]) == [[0, 1, 2, 3]] * 12
        assert len(_threads()) <= 2 + 12


async def test_a_stream_that_finds_no_connection_keeps_its_own_timeout() -> None:
    async with hanging_client(connections=1) as (client, hanging):
        busy = asyncio.create_task(client.get_chunk("a"))
        await hanging.wait_for(1)
        with pytest.raises(UnavailableError):
            await anext(client.mget(["b"], timeout_seconds=0.2))
        assert not busy.done(), "the client's timeout was waited for"
        await cancelled(busy)


async def test_no_more_streams_are_open_than_there_may_be_and_who_waits_is_told_in_time() -> None:
    async with hanging_client(connections=1) as (client, hanging):
        streams = [client.mget(["a"]) for _ in range(STREAMS_MAX)]
        waiting = [asyncio.create_task(anext(each)) for each in streams]
        await hanging.wait_for(1)
        with pytest.raises(UnavailableError, match="threads"):
            await anext(client.mget(["b"], timeout_seconds=0.2))
        assert not any(each.done() for each in waiting)
        for each in waiting:
            await cancelled(each)
        hanging.answers.set()
        assert bytes_of(await client.get_chunk("a")) == b"whole"


def test_a_client_is_used_by_one_event_loop_after_another(server: ServerProcess) -> None:
    client = async_client_of(server, connections=1)

    async def use() -> None:
        await client.put_chunk("loops", b"bytes")
        reads = [client.get_chunk("loops") for _ in range(4)]  # more than there are threads
        assert [bytes_of(each) for each in await asyncio.gather(*reads)] == [b"bytes"] * 4

    asyncio.run(use())
    asyncio.run(use())
    uvloop.run(use())
    asyncio.run(client.close())


def test_streams_that_ended_with_their_event_loop_take_no_threads_of_the_next() -> None:
    threads = CallThreads("kvobj-test", 1)

    taken = []

    async def take() -> None:
        taken.append(await threads.take(time.monotonic() + 1))

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(take())
        loop.close()  # and nobody has given it back
    for each in taken:
        threads.give(each)
    assert asyncio.run(threads.run(lambda: "done", CallScope(time.monotonic() + 5))) == "done"
    threads.close()


async def test_a_match_that_is_cancelled_holds_nothing(server: ServerProcess) -> None:
    with client_of(server) as blocking:
        namespace = blocking.declare_namespace("cancelled", DECLARATION)
        put_chain(blocking, namespace, namespace.chunk_ids(TOKENS))
    async with async_client_of(server) as client, AsyncSession(client) as session:
        for pause in range(12):
            task = asyncio.create_task(session.match(namespace=namespace, tokens=TOKENS))
            for _ in range(pause):
                await asyncio.sleep(0.0005)
            task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(found, BaseException) and found.pin is not None:
                found.pin.release()
        await session.renew()
        await session.renew()
        assert server.status()["leases"]["pins"] == 0
