"""Followers that come to worker processes, and go while nothing comes: the store process follows for them no longer."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from module_paths import ModulePaths
from raw_http import RawConnection
from server_process import MIB, ServerProcess, wait_until
from worker_server import worker_server

from kvobj.api.following import CHUNK_FOLLOWERS_MAX

SIZE_BYTES = 3 * MIB


def followers_of(server: ServerProcess) -> float:
    """How many the store process counts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}/metrics") as reply:
        text = reply.read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("kvobj_upload_followers ")]
    return float(line.split()[1])


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with worker_server(module_paths.mktemp("followed")) as running:
        yield running


@pytest.mark.parametrize("way", ["close", "reset"])
def test_followers_of_workers_that_go_are_followed_for_no_longer(server: ServerProcess, way: str) -> None:
    path = f"/cache/{way}"
    with RawConnection(server.host, server.port) as writer, server.raw() as signer:
        writer.send(signer.head("PUT", path, headers={"content-length": str(SIZE_BYTES)}).head)
        writer.send(bytes(2 * MIB))
        head = signer.head("GET", path, query={"follow": ""}).head
        for _ in range(2):  # twice as many as may follow at once
            with ExitStack() as stack:
                followers = [
                    stack.enter_context(RawConnection(server.host, server.port)) for _ in range(CHUNK_FOLLOWERS_MAX)
                ]
                for each in followers:
                    wait_until(partial(is_let_in, each, head), timeout_seconds=20, what="the upload to be followed")
                wait_until(
                    lambda: followers_of(server) == CHUNK_FOLLOWERS_MAX, timeout_seconds=10, what="all to be counted"
                )
                for each in followers:
                    if way == "close":
                        each.close()
                    else:
                        each.reset()
                wait_until(lambda: not followers_of(server), timeout_seconds=10, what="the followers' end")


def is_let_in(follower: RawConnection, head: bytes) -> bool:
    """Ask to follow; whether the reply has begun, and not refused."""
    follower.send(head)
    began = follower._socket.recv(12)
    if began.endswith(b"200"):
        return True
    rest = follower._socket.recv(64 * 1024)
    assert began.endswith(b"404"), (began, rest)
    return False
