"""The S3 port of a real server, as configured: its own refusals, its deadlines, and what a client that stalls leaves behind."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from module_paths import ModulePaths
from raw_http import RawS3
from server_process import REPOSITORY, ServerProcess, ServerSettings, wait_until

from kvobj.config.settings import LimitSettings

LIMITS = {"header_timeout": '"1 s"', "progress_timeout": '"1 s"', "address_connections": "2", "header_fields": "40"}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(sections={"limits": LIMITS})
    with ServerProcess(module_paths.mktemp("server"), settings) as server:
        with server.raw() as s3:
            assert s3.request("PUT", "/bucket").status == 200
        yield server


@pytest.fixture
def s3(server: ServerProcess) -> Iterator[RawS3]:
    with server.raw() as s3:
        yield s3


def element(body: bytes, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body.decode())
    return found[1] if found else ""


def logged(server: ServerProcess, request_id: str) -> dict[str, object]:
    """The line that the request has in the log, a moment after its reply."""

    def lines() -> list[str]:
        return [line for line in server.log_path.read_text().splitlines() if f'"request_id":"{request_id}"' in line]

    wait_until(lambda: bool(lines()), timeout_seconds=10, what="the request's line", pause_seconds=0.005)
    (line,) = lines()
    fields: dict[str, object] = json.loads(line)
    return fields


def test_a_refusal_of_the_http_layer_looks_like_one_of_s3(server: ServerProcess, s3: RawS3) -> None:
    of_s3 = s3.request("GET", "/bucket/absent")
    with s3.connect() as connection:
        connection.send(b"GET /bucket/absent HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n")
        reply = connection.read_reply()
        assert connection.is_closed_by_peer()
    assert (reply.status, reply.code) == (400, "BadRequest")
    assert reply.headers["x-amz-id-2"] == of_s3.headers["x-amz-id-2"] == element(reply.body, "HostId")
    assert reply.headers["x-amz-request-id"] == element(reply.body, "RequestId")
    assert len(reply.headers["x-amz-request-id"]) == len(of_s3.headers["x-amz-request-id"])
    line = logged(server, reply.headers["x-amz-request-id"])
    assert (line["status"], line["error"], line["target"]) == (400, "BadRequest", "/bucket/absent")


def test_the_configured_number_of_fields_counts(s3: RawS3) -> None:
    with s3.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * 40 + b"\r\n")
        assert connection.read_reply().code == "RequestHeaderSectionTooLarge"


def test_a_head_that_does_not_come_is_a_request_timeout(s3: RawS3) -> None:
    with s3.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: h\r\nX-")
        reply = connection.read_reply()
        assert (reply.status, reply.code) == (400, "RequestTimeout")


def test_bodies_that_stall_are_request_timeouts_and_hold_nothing(server: ServerProcess, s3: RawS3) -> None:
    before = server.settled_occupancy()
    connections = [s3.connect() for _ in range(2)]
    unsigned = s3.head("PUT", "/bucket/stalled", headers={"content-length": "3000000"})
    trailer = s3.head(
        "PUT",
        "/bucket/stalled",
        headers={
            "transfer-encoding": "chunked",
            "x-amz-decoded-content-length": "3000000",
            "x-amz-trailer": "x-amz-checksum-crc32",
            "content-encoding": "aws-chunked",
        },
        payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
    connections[0].send(unsigned.head + b"x" * 100_000)
    connections[1].send(trailer.head + b"10000\r\n10000\r\n" + b"x" * 1000)
    for connection in connections:
        reply = connection.read_reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (400, "RequestTimeout", "close")
        connection.close()
    assert s3.request("GET", "/bucket/stalled").status == 404
    assert server.settled_occupancy() == before


def test_one_address_may_have_so_many_connections_and_this_machine_more(server: ServerProcess, s3: RawS3) -> None:
    connections = [s3.connect() for _ in range(8)]
    for connection in connections:
        connection.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert connection.read_reply().status == 403
        connection.close()
    assert server.is_running


LIMITED = """
import logging, resource, sys
from kvobj.app.open_files import allow_open_files
from kvobj.config.settings import LimitSettings
logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4000))
for connections, workers in ((10, 1), (1_000_000, 1), (5_000, 16)):
    allow_open_files(LimitSettings(connections=connections), logging.getLogger(), workers=workers)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_too_low_a_one_is_told() -> None:
    lines = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    warning = "WARNING:root:the limit of open files is 4000, 1000000 connections on each of two ports may need 2000512"
    of_workers = "5000 connections on the admin port, or on that of 16 workers, may need 5563"
    warnings = [warning, f"WARNING:root:the limit of open files is 4000, {of_workers}"]
    assert lines == ["4000", warnings[0], "4000", warnings[1], "4000"]


def test_a_server_raises_its_limit_of_open_files(server: ServerProcess) -> None:
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(2 * LimitSettings().connections, hard)
