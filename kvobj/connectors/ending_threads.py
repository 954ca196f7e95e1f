"""How threads that call a store are ended: they are waited for, then their calls are ended, and what those return is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.client.call_scope import CallScope

CLOSE_SECONDS: Final = 10.0
"""Who closes waits so long for what is under way, before it is ended."""
_END_SECONDS: Final = 10.0
"""How long a call that was ended may take to return: nothing that it waits for keeps it, and a copy is soon done."""


def end_threads(
    threads: Sequence[threading.Thread],
    scopes: Sequence[CallScope],
    deadline: float | None = None,
    *,
    is_calling: Callable[[CallScope], bool] = lambda _: True,
) -> None:
    """Wait for threads that begin nothing more until the deadline, by default for `CLOSE_SECONDS`, then end the calls that they
    make, each in its scope, and wait until those have returned. `is_calling`: whether the thread of a scope makes one at this
    moment; of others nothing more is waited for."""
    _join(threads, time.monotonic() + CLOSE_SECONDS if deadline is None else deadline)
    for scope in scopes:
        scope.cancel()
    calling = [thread for thread, scope in zip(threads, scopes, strict=True) if is_calling(scope)]
    _join(calling, time.monotonic() + _END_SECONDS)


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
