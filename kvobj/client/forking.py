"""A forked child shares its parent's sockets: who used one there would put its bytes between the parent's.

So whatever owns a socket, or a lock that a thread may hold at the moment of the fork, is told in the child before it does
anything else, and begins anew there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol


class ForgetsInChild(Protocol):
    """What must not be used in a child as the parent left it."""

    def forget(self) -> None:
        """Called in the child, by its only thread: close what is shared without a word to the peer, and make new locks."""


_known: Final[weakref.WeakSet[ForgetsInChild]] = weakref.WeakSet()


def forget_in_child(thing: ForgetsInChild) -> None:
    """Have it forget in every child forked from now on, as long as it lives."""
    _known.add(thing)


_making: Final = threading.RLock()
"""Held for a few microseconds at a time; by a thread that may itself fork, in a signal's handler."""


@contextmanager
def unforked() -> Iterator[None]:
    """No child is forked meanwhile by another thread: for making a socket and making it known, of which a child would otherwise
    have a duplicate that nobody there closes. Nothing that waits belongs in here."""
    with _making:
        yield


def _forget_all() -> None:
    _making.release()
    for thing in list(_known):
        thing.forget()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_forget_all)
