"""Limits of a node with worker processes: those of the whole node hold whoever of them is asked, and divided ones leave room for
connections that the kernel does not deal out evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from module_paths import ModulePaths
from raw_http import RawConnection
from server_process import ServerProcess
from worker_server import pid_behind, pids_of, worker_server

UPLOADS = 5
CONNECTIONS = 12


def begin_upload(server: ServerProcess, key: str) -> str:
    """The code of the answer on a connection of its own, empty where the upload was begun."""
    with server.raw() as raw:
        return raw.request("POST", f"/plain/{key}", query={"uploads": ""}).code


def uploads_of(server: ServerProcess) -> list[tuple[str, str]]:
    """Keys and ids of those in progress."""
    with server.raw() as raw:
        _, *found = raw.request("GET", "/plain", query={"uploads": ""}).body.decode().split("<Upload>")
    return [(between(each, "Key"), between(each, "UploadId")) for each in found]


def between(text: str, name: str) -> str:
    return text.partition(f"<{name}>")[2].partition(f"</{name}>")[0]


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    limits = {"bucket_uploads": str(UPLOADS), "connections": str(CONNECTIONS)}
    with worker_server(module_paths.mktemp("limits"), sections={"limits": limits}) as running:
        yield running


def test_uploads_that_are_begun_at_once_through_all_workers_are_as_many_as_a_bucket_may_have(
    server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(6) as executor:
        codes = Counter(executor.map(lambda number: begin_upload(server, f"u{number}"), range(24)))
    assert codes == {"": UPLOADS, "TooManyUploads": 24 - UPLOADS}
    begun = uploads_of(server)
    assert len(begun) == UPLOADS
    key, upload_id = begun[0]
    with server.raw() as raw:
        assert raw.request("DELETE", f"/plain/{key}", query={"uploadId": upload_id}).status == 204
    codes = Counter(begin_upload(server, f"v{number}") for number in range(8))
    assert codes == {"": 1, "TooManyUploads": 7}


def test_one_worker_may_have_all_of_a_few_connections(server: ServerProcess) -> None:
    """The kernel deals them out by chance: what is below the limit is served, whoever has it."""
    with ExitStack() as stack:
        favoured = pids_of(server)[0]
        signer = stack.enter_context(server.raw())
        kept = 0
        while kept < CONNECTIONS:
            connection = RawConnection(server.host, server.port)
            if pid_behind(server, connection) != favoured:
                connection.close()
                continue
            stack.enter_context(connection)
            kept += 1
            connection.send(signer.head("HEAD", "/plain").head)
            assert connection.read_reply(has_body=False).status == 200
