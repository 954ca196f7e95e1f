"""Ports for servers that tests and benchmarks start. The standard library alone: other environments' interpreters import this."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Final

_PORTS: Final = range(10_000, 32_768)
_PORT_TRIES: Final = 500
_CONTINUE_SECONDS: Final = 10.0


def _shuffled() -> Iterator[int]:
    """The ports of this process in an order of its own, again and again. Where the tests run in several processes (pytest-xdist
    names and counts them in the environment) each has ports that no other has: a server that is down for a moment, between a kill
    and its next start, keeps its port only if nobody else looks for one there meanwhile.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(_PORTS[index::processes])
    random.SystemRandom().shuffle(ports)
    return cycle(ports)


_CANDIDATES: Final = _shuffled()


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, below those that the kernel gives to connections: so nobody has it by chance
    when a server listens there for the first time, or again after a crash. None is given twice before all were tried. TimeoutError
    where hundreds are taken."""
    for _ in range(_PORT_TRIES):
        port = next(_CANDIDATES)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise TimeoutError(f"no free port among {_PORTS}")


def wait_for_port(port: int, process: subprocess.Popen[bytes], *, timeout_seconds: float = _CONTINUE_SECONDS) -> None:
    """Wait until somebody listens. RuntimeError if the process ends or nobody does within the time."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            threading.Event().wait(0.05)
        else:
            return
    raise RuntimeError(f"nothing listens port={port} command={process.args!r}")
