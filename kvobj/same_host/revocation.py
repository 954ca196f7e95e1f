"""The control page: one word by which a server tells a client that nothing it was handed holds any more.

The server writes it before it gives memory away, so a client that looks after it has used the memory needs neither the server's
answer nor a clock. It is never taken back: a client that goes on gets another connection with another page.
"""

from __future__ import annotations

import mmap
from typing import Final

_REVOKED: Final = 1


def revoke(page: mmap.mmap) -> None:
    """Say that all is over."""
    # x86 and ARM both make a store visible before what the same thread does after the system calls that follow it here.
    page[0] = _REVOKED


def is_revoked(page: memoryview) -> bool:
    """Whether the server has said so."""
    return bool(page[0])
