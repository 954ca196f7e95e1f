"""Tells whoever started the process how far it is: systemd (`Type=notify`), or `kvobj serve --hold-sockets`.

The protocol is sd_notify(3): a datagram of KEY=VALUE lines to the Unix socket that NOTIFY_SOCKET names.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"


def tell(environment: Mapping[str, str], state: str) -> None:
    """Send a state; nothing where nobody asked for it. Never waits and never fails: it is a courtesy."""
    address = environment.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.send(state.encode())
