"""A server that dies and comes back while a client uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_client import (
    BUCKET,
    CHUNK_TOKENS,
    DECLARATION,
    bytes_of,
    client_of,
    credentials_of,
    kv_server,
    payload,
    put_chain,
)
from server_process import ServerProcess

from kvobj.client import KvClient, RetryRule, SignedConnection
from kvobj.client.connection import Endpoint
from kvobj.errors import UnavailableError

LARGE_BYTES = 24 * 1024 * 1024


def test_a_server_that_dies_in_the_middle_of_a_transfer_is_told_and_the_client_goes_on(tmp_path: Path) -> None:
    with kv_server(tmp_path) as server, client_of(server, timeout_seconds=5) as client:
        client.put_chunk("large", payload(b"large", LARGE_BYTES), durability="local")
        namespace = client.declare_namespace("n", DECLARATION)
        ids = namespace.chunk_ids(list(range(CHUNK_TOKENS * 3)))
        put_chain(client, namespace, ids)
        with SignedConnection(Endpoint.parse(server.endpoint), credentials_of(server)) as connection:
            with connection.open("GET", "/cache/large", timeout_seconds=5) as answer:
                answer.readinto(memoryview(bytearray(1 << 20)))
                server.kill()
                with pytest.raises(UnavailableError):
                    answer.readinto(memoryview(bytearray(LARGE_BYTES - (1 << 20))))
            with pytest.raises(UnavailableError):
                client.match(namespace=namespace, ids=ids)
            server.start()
            assert connection.request("GET", "/cache/large").body == payload(b"large", LARGE_BYTES)
        assert client.match(namespace=namespace, ids=ids).matched == 3


def test_kept_connections_of_a_server_that_restarted_cost_no_retry(tmp_path: Path) -> None:
    def used(server: ServerProcess) -> None:
        for _ in range(3):
            assert bytes_of(client.get_chunk("a")) == b"a"
        assert server.is_running

    once = RetryRule(tries=1)
    with (
        kv_server(tmp_path) as server,
        KvClient(server.endpoint, credentials_of(server), BUCKET, retry=once, same_host=False) as client,
    ):
        client.put_chunk("a", b"a")
        used(server)
        server.terminate()
        server.start()
        used(server)
