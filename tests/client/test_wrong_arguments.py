"""What a program has wrong in how it calls the client is told at once, in words that say what to give instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import BUCKET, DECLARATION, async_client_of, bytes_of, credentials_of, kv_server
from server_process import ServerProcess

from kvobj.client import Credentials, KvClient, NewChunk, Session
from kvobj.errors import InvalidRequestError

NAMED: dict[str, Callable[[KvClient, Any], object]] = {
    "put_chunk": lambda client, space: client.put_chunk("a", b"x", namespace=space),
    "get_chunk": lambda client, space: client.get_chunk("a", namespace=space),
    "get_stored": lambda client, space: client.get_stored("a", namespace=space, accept=["raw"]),
    "view_chunk": lambda client, space: client.view_chunk("a", namespace=space),
    "view_chunks": lambda client, space: client.view_chunks(["a"], namespace=space),
    "get_chunks": lambda client, space: client.get_chunks(["a"], [memoryview(bytearray(9))], namespace=space),
    "open_ahead": lambda client, space: client.open_ahead(["a"], namespace=space),
    "drop_ahead": lambda client, space: client.drop_ahead(["a"], namespace=space),
    "put_part": lambda client, space: client.put_part("a", b"b", part=(0, 2), namespace=space),
    "follow_chunk": lambda client, space: client.follow_chunk("a", namespace=space),
    "match": lambda client, space: client.match(namespace=space, ids=["a"]),
    "pin_tails": lambda client, space: client.pin_tails(bytes(16), ["a"], namespace=space),
    "mget": lambda client, space: client.mget(["a"], namespace=space),
    "mput": lambda client, space: client.mput([NewChunk("a", b"x")], namespace=space),
    "mput_batches": lambda client, space: client.mput_batches([[NewChunk("a", b"x")]], namespace=space),
}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("arguments")) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["same host", "http"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[KvClient]:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, same_host=request.param) as made:
        yield made


@pytest.mark.parametrize("call", NAMED)
def test_a_namespaces_name_is_no_namespace_and_is_told_so_at_once(client: KvClient, call: str) -> None:
    client.declare_namespace("named", DECLARATION)
    for given in ("named", None):
        with pytest.raises(TypeError, match=r"namespace\(name\)"):
            NAMED[call](client, given)


def test_a_session_takes_no_namespaces_name_either(client: KvClient) -> None:
    named: Any = "named"
    calls: tuple[Callable[[Session], object], ...] = (
        lambda session: session.match(namespace=named, ids=["a"]),
        lambda session: session.match(namespace=named, tokens=[1] * 16),
        lambda session: session.pin(["a"], namespace=named),
    )
    with Session(client) as session:
        for call in calls:
            with pytest.raises(TypeError, match=r"namespace\(name\)"):
                call(session)


def test_an_awaited_call_takes_no_namespaces_name_either(server: ServerProcess) -> None:
    async def asked() -> None:
        async with async_client_of(server) as kv:
            with pytest.raises(TypeError, match=r"namespace\(name\)"):
                await kv.get_chunk("a", namespace="named")  # type: ignore[arg-type]

    asyncio.run(asked())


@pytest.mark.parametrize(("access_key", "secret_key"), [(None, None), ("key", None), (None, "secret"), (b"key", b"s")])
def test_keys_that_the_environment_does_not_have_are_told_to_be_missing(access_key: Any, secret_key: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError, match="access_key and secret_key are both needed") as refused:
        Credentials(access_key, secret_key)
    assert "secret" not in str(refused.value).replace("secret_key", "")


def test_as_many_rooms_and_pins_as_chunks_are_asked_for_by_what_they_are(client: KvClient) -> None:
    with pytest.raises(ValueError, match="get_chunks has one room for each name: 2 names, 1 room"):
        client.get_chunks(["a", "b"], [memoryview(bytearray(9))])
    with pytest.raises(ValueError, match="view_chunks has no pin, one for all names, or one for each: 3 names, 2 pins"):
        client.view_chunks(["a", "b", "c"], pins=[bytes(16)] * 2)


def test_a_room_that_may_not_be_written_is_told_as_such_and_the_client_goes_on(client: KvClient) -> None:
    client.put_chunk("room", b"bytes")
    for read in (
        lambda room: client.get_chunk("room", into=room),
        lambda room: client.get_chunks(["room"], [memoryview(room)]),
        lambda room: list(client.mget(["room"], into=lambda *_: memoryview(room))),
    ):
        with pytest.raises(TypeError, match="the room for a chunk is read-only"):
            read(bytes(9))
    assert bytes_of(client.get_chunk("room", into=bytearray(9))) == b"bytes"
