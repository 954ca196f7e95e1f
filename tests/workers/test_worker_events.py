"""Readers of events behind worker processes: removals wake them at once, whoever removes, and they are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from raw_http import RawConnection, RawS3
from server_process import ServerProcess, ServerSettings, wait_until
from worker_server import BUCKETS, WORKERS, worker_server

SOON_SECONDS = 5.0
"""Half of what a stream lets pass before it gives a sign of life, and reads on whether it was woken or not."""
TTL_SECONDS = 1.0
SHORT_LIVED = {"gc": {"chunk_ttl": '"1 s"', "grace": '"1 ms"', "sweep_interval": '"500 ms"'}}


class Reader:
    """Follows the events of one bucket, from its beginning on."""

    def __init__(self, server: ServerProcess, bucket: str) -> None:
        with server.raw() as signer:
            head = signer.head("GET", f"/{bucket}", query={"events": "", "follow": "", "after": "0"}, payload=None).head
        self._connection = RawConnection(server.host, server.port)
        self._connection.send(head)
        self._received = b""

    def close(self) -> None:
        """Go."""
        self._connection.close()

    def line_of(self, kind: str, *, timeout_seconds: float) -> dict[str, Any]:
        """The next event of this type. TimeoutError where nothing at all comes for so long."""
        self._connection.limit(timeout_seconds)
        while True:
            *lines, self._received = self._received.split(b"\n")
            for place, line in enumerate(lines):
                if line.startswith(b"{") and (event := json.loads(line))["type"] == kind:
                    self._received = b"\n".join([*lines[place + 1 :], self._received])
                    return dict(event)
            received = self._connection._socket.recv(65536)
            assert received, "the stream ended"
            self._received += received


@contextmanager
def reading(server: ServerProcess, bucket: str) -> Iterator[Reader]:
    reader = Reader(server, bucket)
    try:
        yield reader
    finally:
        reader.close()


def gauge(server: ServerProcess, name: str) -> float:
    with RawS3(server.host, server.admin_port, server.credentials(), 30.0) as admin:
        text = admin.request("GET", "/metrics", payload=None).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_a_deletion_is_told_at_once(tmp_path: Path) -> None:
    with worker_server(tmp_path) as server, server.raw() as raw, reading(server, "cache") as reader:
        assert raw.request("PUT", "/cache/gone", b"x").status == 200
        reader.line_of("stored", timeout_seconds=SOON_SECONDS)
        assert raw.request("DELETE", "/cache/gone").status == 204
        told = reader.line_of("removed", timeout_seconds=SOON_SECONDS)
        assert (told["ids"], told["reason"]) == (["gone"], "deleted")


def test_what_policy_removes_is_told_at_once(tmp_path: Path) -> None:
    with (
        worker_server(tmp_path, sections=SHORT_LIVED) as server,
        server.raw() as raw,
        reading(server, "kept") as reader,
    ):
        assert raw.request("PUT", "/kept/expires", b"x").status == 200
        reader.line_of("stored", timeout_seconds=SOON_SECONDS)
        told = reader.line_of("removed", timeout_seconds=SOON_SECONDS + TTL_SECONDS)
        assert (told["ids"], told["reason"]) == (["expires"], "evicted")


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_readers_that_follow_are_counted(tmp_path: Path, workers: int) -> None:
    with ServerProcess(tmp_path, ServerSettings(buckets=BUCKETS, workers=workers)) as server:
        with reading(server, "cache"), reading(server, "kept"):
            wait_until(lambda: gauge(server, "kvobj_events_followers") == 2, timeout_seconds=20, what="both readers")
        wait_until(lambda: gauge(server, "kvobj_events_followers") == 0, timeout_seconds=20, what="their end")
