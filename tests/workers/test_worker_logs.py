"""Lines of the log where workers share a pipe that nobody reads in time."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raw_http import RawConnection
from worker_server import pid_behind, worker_server

LINES = 400
KEY = "k" * 900
PIPE_BYTES = 4096


def test_lines_of_all_workers_are_whole_in_a_pipe_that_is_always_full(tmp_path: Path) -> None:
    """As `kvobj serve 2>&1 | tee` has it."""
    written = bytearray()
    path = tmp_path / "server.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    held = os.open(path, os.O_WRONLY)  # nobody else has it open now and then
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read() -> None:
        while piece := os.read(reader, 512):
            written.extend(piece)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        with worker_server(tmp_path) as server, server.raw() as signer:
            heads = [signer.head("HEAD", f"/plain/{KEY}-{number}").head for number in range(LINES)]

            def ask(connection: RawConnection) -> None:
                for head in heads:
                    connection.send(head)
                    assert connection.read_reply(has_body=False).status == 404

            one, other = connections = [RawConnection(server.host, server.port) for _ in range(2)]
            while pid_behind(server, other) == pid_behind(server, one):
                other.close()
                other = connections[1] = RawConnection(server.host, server.port)
            with ThreadPoolExecutor(2) as executor:
                list(executor.map(ask, connections))
            for each in connections:
                each.close()
            assert server.terminate() == 0
    finally:
        os.close(held)
        reading.join()
        os.close(reader)
    targets = Counter(target_of(line) for line in bytes(written).splitlines())
    assert [targets[f"/plain/{KEY}-{number}"] for number in range(LINES)] == [2] * LINES


def target_of(line: bytes) -> str:
    """What a request asked for; empty for a line that is none of a request, or not whole."""
    try:
        return str(json.loads(line).get("target", ""))
    except ValueError:
        return ""
