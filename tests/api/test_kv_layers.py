"""The KV client layer by layer against a real server: parts, followed chunks, and batches that begin with layer 0."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.client import Credentials, KvClient, Namespace, S3Client, SignedConnection
from kvobj.client.connection import Endpoint
from kvobj.client.retry import RetryRule
from kvobj.errors import InvalidRequestError, LayoutMismatchError, NoSuchKeyError, UnavailableError

CHUNK_TOKENS, LAYERS = 256, 8
LAYER_BYTES = 2 * 4 * CHUNK_TOKENS * 64 * 2
CHUNK_BYTES = LAYERS * LAYER_BYTES
_numbers = count()


def declaration(salt: str) -> dict[str, object]:
    return {
        "model": "m",
        "chunk_tokens": CHUNK_TOKENS,
        "layout": {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": 4, "head_dim": 64},
        "part_axis": "layer",
        "ids": "kvobj",
        "salt": salt,
    }


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    bucket = BucketSetting("cache", kind="kv", durability="memory")
    settings = ServerSettings(dram_bytes=256 * MIB, nvme_bytes=512 * MIB, buckets=(bucket,))
    with ServerProcess(module_paths.mktemp("layers"), settings) as running:
        yield running


def client_of(server: ServerProcess, *, timeout_seconds: float = 20.0) -> KvClient:
    keys = server.credentials()
    credentials = Credentials(keys.access_key, keys.secret_key)
    return KvClient(server.endpoint, credentials, "cache", timeout_seconds=timeout_seconds, retry=RetryRule(tries=2))


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as made:
        yield made


@pytest.fixture
def namespace(client: KvClient) -> Namespace:
    """One of its own for each test."""
    name = f"n{next(_numbers)}"
    return client.declare_namespace(name, declaration(name))


def data_of(name: bytes) -> bytes:
    return blake3(name).digest(length=CHUNK_BYTES)


def layer_of(data: bytes, layer: int) -> bytes:
    return data[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]


def test_a_chunk_is_put_layer_by_layer_and_read_meanwhile(client: KvClient, namespace: Namespace) -> None:
    (name,) = namespace.chunk_ids(list(range(CHUNK_TOKENS)))
    data = data_of(name)
    followed: Iterator[memoryview] | None = None
    for layer in range(LAYERS):
        told = client.put_part(name, layer_of(data, layer), part=(layer, LAYERS), namespace=namespace, parent="root")
        assert (told.existed, told.have, told.count, told.is_last) == (False, layer + 1, LAYERS, layer == LAYERS - 1)
        followed = followed or client.follow_chunk(name, namespace=namespace, layers=(0, LAYERS - 1))
        assert bytes(next(followed)) == layer_of(data, layer)
    assert followed is not None
    with pytest.raises(StopIteration):
        next(followed)
    read = client.get_chunk(name, namespace=namespace)
    assert read is not None
    assert bytes(read) == data
    again = client.put_part(name, layer_of(data, 3), part=(3, LAYERS), namespace=namespace, parent="root")
    assert (again.existed, again.is_last) == (True, True)
    with pytest.raises(LayoutMismatchError):
        client.put_part(name, data[: CHUNK_BYTES // 2], part=(0, 2), namespace=namespace, parent="root")


def test_a_stored_chunk_is_followed_whole_in_pieces_and_by_layers(client: KvClient, namespace: Namespace) -> None:
    (name,) = namespace.chunk_ids(list(range(CHUNK_TOKENS)))
    data = data_of(name)
    client.put_chunk(name, data, namespace=namespace, parent="root")
    assert b"".join(client.follow_chunk(name, namespace=namespace)) == data
    layers = [bytes(view) for view in client.follow_chunk(name, namespace=namespace, layers=(2, 4))]
    assert layers == [layer_of(data, layer) for layer in (2, 3, 4)]
    with pytest.raises(InvalidRequestError):
        next(client.follow_chunk(name, namespace=namespace, layers=(0, LAYERS)))


def test_who_follows_before_anybody_writes_waits_for_as_long_as_it_said(client: KvClient, namespace: Namespace) -> None:
    (name,) = namespace.chunk_ids(list(range(CHUNK_TOKENS)))
    with pytest.raises(NoSuchKeyError):
        next(client.follow_chunk(name, namespace=namespace))
    data = data_of(name)
    begun = threading.Event()

    def read() -> bytes:
        begun.set()
        return b"".join(client.follow_chunk(name, namespace=namespace, wait_seconds=20.0))

    with ThreadPoolExecutor(1) as pool:
        reading: Future[bytes] = pool.submit(read)
        begun.wait()
        client.put_chunk(name, data, namespace=namespace, parent="root")
        assert reading.result(20.0) == data


def delete(server: ServerProcess, key: str) -> None:
    keys = server.credentials()
    endpoint = Endpoint.parse(server.endpoint)
    with SignedConnection(endpoint, Credentials(keys.access_key, keys.secret_key)) as connection:
        S3Client(connection).delete("cache", key)


def test_parts_that_are_given_up_fail_their_reader_and_not_its_client(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    (name,) = namespace.chunk_ids(list(range(CHUNK_TOKENS)))
    data = data_of(name)
    client.put_part(name, layer_of(data, 0), part=(0, LAYERS), namespace=namespace, parent="root")
    followed = client.follow_chunk(name, namespace=namespace)
    came = bytes(next(followed))
    with ThreadPoolExecutor(1) as pool:
        rest: Future[list[bytes]] = pool.submit(lambda: [bytes(piece) for piece in followed])
        delete(server, name.hex())
        with pytest.raises(UnavailableError):
            rest.result(20.0)
    assert layer_of(data, 0).startswith(came)
    assert client.match(ids=["absent"]).matched == 0


def test_decode_has_layer_0_of_all_chunks_before_the_server_has_sent_the_rest(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    """Sixteen chunks are more than sockets hold: what is sent when layer 0 has come is far less than all."""
    ids = namespace.chunk_ids(list(range(CHUNK_TOKENS * 16)))
    parent: bytes | str = "root"
    for name in ids:
        client.put_chunk(name, data_of(name), namespace=namespace, parent=parent)
        parent = name
    stream = client.mget(ids, namespace=namespace, layer_order=True, layers=(0, LAYERS - 1))
    first = [next(stream) for _ in ids]
    assert [(item.layer, item.index) for item in first] == [(0, index) for index in range(len(ids))]
    assert all(bytes(item.data or b"") == layer_of(data_of(ids[item.index]), 0) for item in first)
    client.remove_namespace(namespace.name)  # the server holds what it streams, and the rest is still to come
    rest = list(stream)
    assert [(item.layer, item.index) for item in rest] == [
        (layer, index) for layer in range(1, LAYERS) for index in range(len(ids))
    ]
    assert all(bytes(item.data or b"") == layer_of(data_of(ids[item.index]), item.layer or 0) for item in rest)
    assert server.is_running


def test_a_server_that_stops_does_not_wait_for_parts_that_may_never_come(tmp_path: Path) -> None:
    bucket = BucketSetting("cache", kind="kv", durability="memory")
    settings = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=(bucket,))
    with ServerProcess(tmp_path, settings) as server, client_of(server) as client:
        namespace = client.declare_namespace("n", declaration("n"))
        (name,) = namespace.chunk_ids(list(range(CHUNK_TOKENS)))
        data = data_of(name)
        client.put_part(name, layer_of(data, 0), part=(0, LAYERS), namespace=namespace, parent="root")
        followed = client.follow_chunk(name, namespace=namespace, layers=(0, 1))
        assert bytes(next(followed)) == layer_of(data, 0)
        assert server.terminate(timeout_seconds=15.0) == 0
        with pytest.raises(UnavailableError):
            next(followed)


@pytest.mark.parametrize("wrong", [(2, 1), (-1, 0), (0, 10**30), (0,), (0.0, 1.0), (False, True), "01"])
def test_layers_that_no_chunk_has_are_refused_alike_by_every_call(
    client: KvClient,
    namespace: Namespace,
    wrong: Any,  # noqa: ANN401 - what no type lets through
) -> None:
    with pytest.raises(InvalidRequestError):
        client.get_chunk("x", namespace=namespace, layers=wrong)
    with pytest.raises(InvalidRequestError):
        client.mget(["x"], namespace=namespace, layers=wrong)
    with pytest.raises(InvalidRequestError):
        client.follow_chunk("x", namespace=namespace, layers=wrong)
