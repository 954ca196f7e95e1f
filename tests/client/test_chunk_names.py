"""What is no name of a chunk is refused before anything is asked: some such keys are the bucket itself, or another namespace's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from module_paths import ModulePaths
from real_client import BUCKET, CHUNK_BYTES, DECLARATION, bytes_of, credentials_of, kv_server
from scripted_server import CREDENTIALS, ScriptedServer, answering
from server_process import ServerProcess

from kvobj.client import DEFAULT, ROOT, Credentials, Endpoint, KvClient, Namespace, NewChunk, S3Client, SignedConnection
from kvobj.client.kv_values import fits_header
from kvobj.errors import InvalidChunkIdError, InvalidRequestError, ParentNotFoundError

CALLS: dict[str, Callable[[KvClient, Any, Namespace], object]] = {
    "get_chunk": lambda client, name, space: client.get_chunk(name, namespace=space),
    "view_chunk": lambda client, name, space: client.view_chunk(name, namespace=space),
    "view_chunks": lambda client, name, space: client.view_chunks(["another", name], namespace=space),
    "get_chunks": lambda client, name, space: client.get_chunks([name], [memoryview(bytearray(9))], namespace=space),
    "mget": lambda client, name, space: list(client.mget([name], namespace=space)),
    "get_stored": lambda client, name, space: client.get_stored(name, namespace=space, accept=["raw"]),
    "put_chunk": lambda client, name, space: client.put_chunk(name, b"bytes", namespace=space, parent=ROOT),
    "follow_chunk": lambda client, name, space: list(client.follow_chunk(name, namespace=space)),
    "mput": lambda client, name, space: client.mput([NewChunk(name, b"bytes", ROOT)], namespace=space),
    "put_part": lambda client, name, space: client.put_part(name, b"b", part=(0, 2), namespace=space, parent=ROOT),
}
CHILDREN: dict[str, Callable[[KvClient, Any], object]] = {
    "put_chunk": lambda client, parent: client.put_chunk("child", b"bytes", parent=parent),
    "mput": lambda client, parent: client.mput([NewChunk("child", b"bytes", parent)]),
    "put_part": lambda client, parent: client.put_part("child", b"b", part=(0, 2), namespace=DEFAULT, parent=parent),
}
NO_NAMES = ["", "lone \ud800", "nul \0", "..", "a/../../b", 5, bytearray(32), b"", b"x" * 31]
NOT_AS_THEY_ARE = [
    " lead",
    "trail ",
    "\u00fc",
    "\u00e0",
    "\u65e5\u672c",
    "tab\tin",
    "line\nin",
    "\x7f",
    "\x85",
    "\xa0a",
]
"""Names of chunks that no header field carries, or not unchanged."""


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("names")) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["same host", "http"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[KvClient]:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, same_host=request.param) as client:
        yield client


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [*NO_NAMES, None], ids=ascii)
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


@pytest.mark.parametrize("call", CHILDREN)
@pytest.mark.parametrize("parent", NO_NAMES, ids=ascii)
def test_what_no_chunk_is_called_is_no_parent_either(client: KvClient, parent: object, call: str) -> None:
    with pytest.raises(InvalidChunkIdError):
        CHILDREN[call](client, parent)


@pytest.mark.parametrize("parent", [*NOT_AS_THEY_ARE, "plain", "two  spaces", "a/../b", "x" * 1000], ids=ascii)
def test_a_chunk_has_the_parent_that_was_named_whatever_its_name(client: KvClient, parent: str) -> None:
    child = f"child of {parent[:99]}"
    trimmed = parent.strip() or "nothing left"
    client.put_chunk(parent, b"1")
    client.put_chunk(trimmed, b"1")
    client.put_chunk(child, b"3", parent=parent, tokens=7)
    assert client.match(ids=[parent, child]).matched == 2
    assert client.match(ids=[trimmed, child]).matched == (2 if trimmed == parent else 1)
    assert client.put_chunk(child, b"3", parent=parent, tokens=7).existed


@pytest.mark.parametrize("parent", ["absent", *NOT_AS_THEY_ARE], ids=ascii)
def test_a_parent_that_is_absent_is_told_of_alike_whatever_its_name(client: KvClient, parent: str) -> None:
    absent = f"{parent} absent {parent}"
    with pytest.raises(ParentNotFoundError) as caught:
        client.put_chunk("orphan", b"bytes", parent=absent)
    assert caught.value.data["parent"] == absent
    assert client.get_chunk("orphan") is None


def test_a_key_that_may_be_another_namespaces_needs_its_name_where_no_header_carries_the_parent(
    client: KvClient,
) -> None:
    client.mput([NewChunk("\u00fc", b"1")])
    with pytest.raises(InvalidChunkIdError, match="name the namespace, or use mput"):
        client.put_chunk("front/child", b"2", parent="\u00fc")


@pytest.mark.parametrize("parent", NOT_AS_THEY_ARE, ids=ascii)
def test_a_part_whose_parent_no_header_carries_is_refused_before_anything_is_sent(parent: str) -> None:
    with (
        ScriptedServer(answering()) as server,
        KvClient(server.endpoint, CREDENTIALS, BUCKET, same_host=False) as client,
    ):
        with pytest.raises(InvalidChunkIdError, match="put_chunk or mput"):
            client.put_part("child", b"b", part=(0, 2), namespace=DEFAULT, parent=parent)
        assert server.connections == 0


@given(st.text(max_size=8))
def test_what_a_header_is_said_to_carry_is_ascii_that_nobody_trims(name: str) -> None:
    if fits_header(name):
        assert name.isascii()
        assert name.isprintable()
        assert name.strip() == name != ""


def test_a_batch_with_a_name_that_is_none_is_refused_alone(client: KvClient) -> None:
    good = [NewChunk("good", b"1")]
    for bad in (
        NewChunk("\ud800", b"x"),
        NewChunk("sound", b"x", parent="\ud800"),
        NewChunk("sound", b"x", parent=b"12"),
    ):
        refused, stored = client.mput_batches([[NewChunk("beside", b"x"), bad], good])
        assert isinstance(refused, InvalidChunkIdError)
        assert isinstance(stored, list)
        assert bytes_of(client.get_chunk("good")) == b"1"
        assert client.get_chunk("beside") is None


def test_a_name_that_is_none_leaves_what_others_look_at_as_it_is(server: ServerProcess) -> None:
    with KvClient(server.endpoint, credentials_of(server), BUCKET) as client:
        client.put_chunk("looked at", b"x" * 100_000)
        with client.view_chunk("looked at") as view:  # type: ignore[union-attr]
            assert view.is_shared
            for chunk in (NewChunk("\ud800", b"x"), NewChunk("ok", b"x", parent="\ud800")):
                with pytest.raises(InvalidChunkIdError):
                    client.mput([chunk])
            with pytest.raises(TypeError):
                client.mput([NewChunk("ok", b"x", tokens=object())])  # type: ignore[arg-type]
            assert view.is_valid


def test_what_is_no_name_is_left_out_of_what_is_opened_ahead(client: KvClient) -> None:
    client.mput([NewChunk("ahead", b"bytes")])
    client.open_ahead([b"x", "ahead", 5], seconds=float("nan"))  # type: ignore[list-item]
    room = memoryview(bytearray(5))
    assert client.get_chunks(["ahead"], [room]) == [5]
    assert bytes(room) == b"bytes"
    client.drop_ahead([b"x", "ahead", 5])  # type: ignore[list-item]


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_whether_the_server_answers_may_be_asked_for_ever(client: KvClient, seconds: float) -> None:
    assert client.is_answered(timeout_seconds=seconds)


def test_what_cannot_be_asked_is_no_answer(server: ServerProcess) -> None:
    with KvClient(server.endpoint, Credentials("a\nb", "secret"), "cache", timeout_seconds=5) as client:
        assert not client.is_answered(timeout_seconds=5)


def test_a_timeout_that_is_no_number_is_refused(client: KvClient) -> None:
    with pytest.raises(InvalidRequestError):
        client.is_answered(timeout_seconds=float("nan"))
