"""Streams that are left half-read and referred to by nobody: the interpreter ends them wherever it looks for cycles."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from scripted_server import CREDENTIALS, ScriptedServer, ok, read_request

from kvobj.client import KvClient


@pytest.fixture
def collector() -> Iterator[None]:
    """The interpreter's, as it was before. Meanwhile it looks at what the test makes alone: all of pytest's takes 0.3 s a time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def serve(connection: socket.socket, _: int) -> None:
    """Answers a GET, and the first of two chunks of a stream."""
    header = msgspec.msgpack.encode({"i": 0, "size_bytes": 4, "status": 200})
    item = struct.pack("<I", len(header)) + header + b"abcd"
    begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(item), item)
    while True:
        head, _body = read_request(connection)
        connection.sendall(begun if b"mget" in head else ok(b"abcd"))


def abandon(client: KvClient) -> None:
    stream = client.mget(["a", "b"])
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


@pytest.mark.usefixtures("collector")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket is found before its stream is
def test_one_that_is_found_in_the_middle_of_another_call_of_its_thread_costs_a_connection_and_no_call() -> None:
    with ScriptedServer(serve) as server:
        client = KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, timeout_seconds=10)

        def call_on() -> None:
            for allocations in range(1, 120):
                abandon(client)
                gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)  # found so many allocations later
                assert bytes(client.get_chunk("x") or b"") == b"abcd"
                gc.collect()

        thread = threading.Thread(target=call_on, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a call waits for the lock that its own thread has"
        client.close()
