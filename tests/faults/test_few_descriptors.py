"""A server that is out of descriptors: who connects waits until there is one, and an operator is told."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from free_ports import free_port
from raw_http import RawConnection, RawS3
from server_process import BucketSetting, ServerProcess, ServerSettings, wait_until

LEFT = 2
CONNECTIONS_MAX = 16
PATIENCE_SECONDS = 2.0
TOLD = "no connection can be accepted for now"


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Within the block the process may open `LEFT` files more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    now_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (now_open + LEFT, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def is_answered(connection: RawConnection, *, within_seconds: float) -> bool:
    """Whether a reply comes; ConnectionError where the connection is closed instead."""
    connection.limit(within_seconds)
    try:
        return connection.read_reply().status == 200
    except TimeoutError:
        return False


def value(server: ServerProcess, name: str) -> float:
    with RawS3(server.host, server.admin_port, server.credentials(), 30.0) as admin:
        text = admin.request("GET", "/metrics", payload=None).body.decode()
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_who_connects_when_there_are_no_descriptors_waits_and_is_served_when_there_are(tmp_path: Path) -> None:
    lm_port = free_port()
    settings = ServerSettings(
        buckets=(BucketSetting("plain"), BucketSetting("cache", "kv", "memory")),
        workers=1,
        sections={"lm": {"listen": f'"127.0.0.1:{lm_port}"', "bucket": '"cache"'}},
    )
    with ServerProcess(tmp_path, settings) as server, ExitStack() as stack:
        with server.raw() as raw:
            assert raw.request("PUT", "/plain/o", b"x").status == 200
            head = raw.head("GET", "/plain/o", payload=None).head
        with few_descriptors(server.pid):
            served: list[RawConnection] = []
            while True:
                connection = stack.enter_context(RawConnection(server.host, server.port))
                connection.send(head)
                if not is_answered(connection, within_seconds=PATIENCE_SECONDS):
                    break
                served.append(connection)
                assert len(served) < CONNECTIONS_MAX
            assert served
            served.pop().close()
            assert is_answered(connection, within_seconds=20)
            lm = stack.enter_context(RawConnection(server.host, lm_port, PATIENCE_SECONDS))
            with pytest.raises(TimeoutError):
                lm.is_closed_by_peer()
        last = stack.enter_context(RawConnection(server.host, server.port))
        last.send(head)
        assert is_answered(last, within_seconds=20)
        assert value(server, "kvobj_s3_accept_waits_total") >= 1
        assert value(server, "kvobj_lm_accept_waits_total") >= 1
        # Each listener tries again by itself, once a second.
        wait_until(lambda: value(server, "kvobj_lm_connections") == 1, timeout_seconds=20, what="the client of lm://")
        assert server.log_path.read_text().count(TOLD) == 2  # of each port once
