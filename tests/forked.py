"""What a forked child does with what its parent made: one check there, whose outcome the parent is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

_SECONDS: Final = 20


def in_child(check: Callable[[], bool]) -> bool:
    """Whether the check holds in a forked child; not where it raises, or hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)  # ends it
            os.write(writer, b"holds" if check() else b"fails")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        holds = told.read() == b"holds"
    os.waitpid(child, 0)
    return holds
