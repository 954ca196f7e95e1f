"""What is no name of a chunk is refused before anything is asked: some such keys are the bucket itself, or another namespace's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_client import BUCKET, CHUNK_BYTES, DECLARATION, bytes_of, credentials_of, kv_server
from server_process import ServerProcess

from kvobj.client import DEFAULT, ROOT, Endpoint, KvClient, Namespace, NewChunk, S3Client, SignedConnection
from kvobj.errors import InvalidChunkIdError, InvalidRequestError

CALLS: dict[str, Callable[[KvClient, Any, Namespace], object]] = {
    "get_chunk": lambda client, name, space: client.get_chunk(name, namespace=space),
    "view_chunk": lambda client, name, space: client.view_chunk(name, namespace=space),
    "get_chunks": lambda client, name, space: client.get_chunks([name], [memoryview(bytearray(9))], namespace=space),
    "mget": lambda client, name, space: list(client.mget([name], namespace=space)),
    "get_stored": lambda client, name, space: client.get_stored(name, namespace=space, accept=["raw"]),
    "put_chunk": lambda client, name, space: client.put_chunk(name, b"bytes", namespace=space, parent=ROOT),
    "follow_chunk": lambda client, name, space: list(client.follow_chunk(name, namespace=space)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with kv_server(tmp_path_factory.mktemp("names")) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["same host", "http"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[KvClient]:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, same_host=request.param) as client:
        yield client


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["", "lone \ud800", None, 5, bytearray(32), b"", b"x" * 31], ids=ascii)
def test_what_is_no_key_is_refused_and_never_taken_for_the_bucket(client: KvClient, name: object, call: str) -> None:
    with pytest.raises(InvalidChunkIdError):
        CALLS[call](client, name, DEFAULT)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["", "other", "AB" * 32, "a/../b"])
def test_what_is_no_chunk_id_is_never_read_from_another_namespace(client: KvClient, name: str, call: str) -> None:
    space = client.declare_namespace("llama", DECLARATION)
    client.mput([NewChunk("other", b"of no chain")])
    assert bytes_of(client.get_chunk("other")) == b"of no chain"
    with pytest.raises(InvalidChunkIdError):
        CALLS[call](client, name, space)


def test_ids_may_be_told_in_hex(client: KvClient) -> None:
    space = client.declare_namespace("llama", DECLARATION)
    (name,) = space.chunk_ids(range(16))
    client.put_chunk(name.hex(), bytes(CHUNK_BYTES), namespace=space, parent=ROOT)
    assert bytes_of(client.get_chunk(name, namespace=space)) == bytes(CHUNK_BYTES)
    assert bytes_of(client.get_chunk(name.hex(), namespace=space)) == bytes(CHUNK_BYTES)


def test_a_chunk_that_became_an_ordinary_object_is_none_that_was_stored(server: ServerProcess) -> None:
    with SignedConnection(Endpoint.parse(server.endpoint), credentials_of(server)) as connection:
        S3Client(connection).create_bucket("ordinary")
    with (
        KvClient(server.endpoint, credentials_of(server), "ordinary") as client,
        pytest.raises(InvalidRequestError, match="kind kv"),
    ):
        client.put_chunk("name", b"bytes")


def test_a_list_with_a_key_that_utf8_cannot_write_is_refused(client: KvClient) -> None:
    with pytest.raises(InvalidChunkIdError):
        client.match(ids=["a", "\ud800"])
