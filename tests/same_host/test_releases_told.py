"""What a client lets go of is told when the server takes it, and no call waits for that, nor costs what others hold."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from module_paths import ModulePaths
from same_host_world import client_of, payload, settings, viewed, wait_for_nothing_held, wait_for_pinned
from server_process import ServerProcess, wait_until

from kvobj.client import KvClient
from kvobj.errors import UnavailableError
from kvobj.store.extents import extent_bytes

SIZE = 4096
MANY = 400
"""Enough to fill a socket that nobody reads, each told by a message of its own."""


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    # A lease that is renewed later than anything here waits: nothing is told just because it was time.
    with ServerProcess(module_paths.mktemp("releases"), settings(lease="90 s")) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as client:
        assert client.is_same_host
        for name in ("kept", "other"):
            client.put_chunk(name, payload(name, SIZE))
        yield client
    wait_for_nothing_held(server)


def test_a_server_that_stands_still_is_told_later_and_nobody_waits_for_it(
    server: ServerProcess, client: KvClient
) -> None:
    with viewed(client, "kept") as kept:
        views = [viewed(client, "other") for _ in range(MANY)]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for view in views:
                view.release()
                client._same_host.flush()
            with pytest.raises(UnavailableError):
                client.get_chunk("absent", timeout_seconds=0)
            assert kept.is_valid, "the connection was given up for want of a reader"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_for_pinned(server, extent_bytes(SIZE))
        assert kept.data == payload("kept", SIZE)
        assert kept.is_valid
        assert client.get_chunk("other") == payload("other", SIZE)


def test_what_is_let_go_of_while_another_call_has_the_connection_is_told_when_that_ends(
    server: ServerProcess, client: KvClient
) -> None:
    view = viewed(client, "kept")
    path = client._same_host
    (lane,) = path._lanes
    os.kill(server.pid, signal.SIGSTOP)
    try:
        reader = threading.Thread(target=client.get_chunk, args=("absent",))
        reader.start()
        wait_until(lambda: lane not in path._idle, timeout_seconds=10, what="the call to have the connection")
        view.release()
        assert path.flush()  # as the thread does that tells: the connection is in use
    finally:
        os.kill(server.pid, signal.SIGCONT)
    reader.join(10)
    wait_for_pinned(server, 0)


def test_a_call_that_has_no_time_left_ends_no_view(client: KvClient) -> None:
    with viewed(client, "kept") as view:
        with pytest.raises(UnavailableError):
            client.get_chunk("other", timeout_seconds=0)
        assert view.is_valid
        assert client.is_same_host
        assert view.data == payload("kept", SIZE)
