"""Ports for servers that tests and benchmarks start."""

from __future__ import annotations

import secrets
import socket
from typing import Final

_PORTS: Final = range(10_000, 32_768)
_PORT_TRIES: Final = 500


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, below those that the kernel gives to connections: so nobody has it by chance
    when a server listens there for the first time, or again after a crash. TimeoutError where hundreds are taken."""
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise TimeoutError(f"no free port among {_PORTS}")
