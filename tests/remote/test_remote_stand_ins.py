"""Somebody else answers at the remote's address: a load balancer without a backend, a maintenance page.

The node starts, serves what is here, says that the remote does not answer, and goes on with it once it does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from raw_http import RawReply
from remote_servers import RemoteStore
from s3_proxy import FaultProxy, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

BODY = bytes(range(256)) * 300
PAGE = b"<html>Maintenance</html>"
NO_BACKEND = b"default backend - 404"


@contextmanager
def stand_in(status: int, body: bytes) -> Iterator[int]:
    """A server that answers everything so, and closes; its port."""

    class Answer(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True, slots=True)
class Node:
    """A node whose remote is behind a proxy that leads where it is told to."""

    server: ServerProcess
    proxy: FaultProxy
    store: RemoteStore

    def put(self, key: str, durability: str) -> RawReply:
        with self.server.raw(timeout_seconds=30) as raw:
            return raw.request("PUT", f"/plain/{key}", BODY, headers={"x-kvobj-durability": durability})

    def get(self, key: str) -> bytes:
        with self.server.raw() as raw:
            return raw.request("GET", f"/plain/{key}", payload=None).body

    def remote(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.status()["remote"]
        return found

    def lead_to(self, port: int | None) -> None:
        """Whom the remote's address leads to from now on; None: to the remote."""
        self.proxy.upstream = (self.store.host, self.store.port) if port is None else ("127.0.0.1", port)

    def wait_for(self, **expected: str) -> None:
        wait_until(
            lambda: {name: self.remote()[name] for name in expected} == expected,
            timeout_seconds=30,
            what=f"{expected}, is {json.dumps(self.remote())}",
        )

    def warned(self, *words: str) -> bool:
        lines = self.server.log_path.read_text().splitlines()
        return any('"warning"' in line and all(word in line for word in words) for line in lines)


@pytest.fixture
def node(kvobj_remote: RemoteStore, tmp_path: Path) -> Iterator[Node]:
    """It is not started yet."""
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as proxy:
        settings = ServerSettings(
            dram_bytes=64 * MIB,
            nvme_bytes=256 * MIB,
            buckets=(BucketSetting("plain"),),
            remote=kvobj_remote.behind(proxy.port).tier(
                share_timeout='"3 s"', request_timeout='"2 s"', operation_timeout='"3 s"'
            ),
            sections={"log": {"requests": "false"}},
            workers=1,
        )
        server = ServerProcess(tmp_path / "node", settings)
        try:
            yield Node(server, proxy, kvobj_remote)
        finally:
            server.close()


@pytest.mark.parametrize("body", [PAGE, b""], ids=["a page", "nothing"])
def test_a_start_goes_on_where_a_page_is_answered_in_place_of_the_remote(node: Node, body: bytes) -> None:
    with stand_in(200, body) as port:
        node.lead_to(port)
        node.server.start()
        assert node.put("before", "local").status == 200
        assert node.remote()["claim"] == "unclaimed"
        assert node.warned("the start goes on without it", "store/store.json")
        assert node.put("refused", "shared").status == 503
        node.lead_to(None)
        node.wait_for(claim="claimed", state="ok")
        assert node.put("kept", "shared").status == 200
        node.server.terminate()
        node.lead_to(port)
        node.server.start()
        assert node.get("before") == BODY
        assert node.remote()["claim"] == "unclaimed"
        node.lead_to(None)
        node.wait_for(claim="claimed", state="ok")
        assert node.put("after", "shared").status == 200
        assert node.get("kept") == BODY


def test_a_remote_in_whose_place_nobody_answers_with_an_error_code_is_down(node: Node) -> None:
    node.server.start()
    assert node.put("before", "shared").status == 200
    with stand_in(404, NO_BACKEND) as port:
        node.lead_to(port)
        node.server.terminate()
        node.server.start()
        node.wait_for(state="down")
        assert node.put("during", "shared").status == 503
        assert "404" in node.remote()["reason"]
        assert node.get("before") == BODY
        node.lead_to(None)
        node.wait_for(claim="claimed", state="ok")
        assert node.put("after", "shared").status == 200
