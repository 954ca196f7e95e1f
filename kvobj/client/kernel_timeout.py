"""Deadlines that the kernel keeps: of a socket that blocks, by SO_RCVTIMEO and SO_SNDTIMEO.

A timeout is set a little too long, and again once it is a tenth too long (`SHARE_LEFT`) or at all too short: two system calls less
for most waits, which end at most so much after their deadline. Who waits compares for himself, and calls nothing for that:

    if not timeout * SHARE_LEFT <= left <= timeout:
        timeout = set_timeout(connection, left)
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

SHARE_SET: Final = 1.05
"""What is set, of what is left."""
SHARE_LEFT: Final = 0.9
"""Of the timeout that is set: with less than this left it is set again."""

_TIMEVAL: Final = struct.Struct("@ll")


def set_timeout(connection: socket.socket, left: float) -> float:
    """Have the kernel end each wait after the seconds that are left, or a little later; the timeout that is set."""
    timeout = left * SHARE_SET
    timeval = _TIMEVAL.pack(*divmod(int(timeout * 1e6) + 1, 1_000_000))  # zero would be for ever
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    return timeout


def left_until(deadline: float) -> float:
    """Seconds to a deadline, of `time.monotonic`; TimeoutError where none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
