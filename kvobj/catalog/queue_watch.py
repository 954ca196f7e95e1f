"""Tells that blobs were queued for deletion: by whatever change, of whoever's, so that no kind of it has to remember to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvobj.catalog.object_rows import ObjectRows
from kvobj.database import Database


class QueueWatch:
    """See the module's text. `tell` is called on the event loop, once for all that was queued together, and once readers see it.
    Made on the event loop."""

    __slots__ = ("_has_queued", "_is_telling", "_loop", "_loop_thread", "_tell")

    def __init__(self, database: Database, objects: ObjectRows, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._has_queued = False
        self._is_telling = False
        objects.on_queued = self._on_queued
        database.watch_groups(started=_nothing, settled=self._on_settled)

    def _on_queued(self) -> None:
        """A change queues something; it is not over yet. Of the durable writer's, `_on_settled` follows."""
        if threading.get_ident() != self._loop_thread:
            self._has_queued = True
        elif not self._is_telling:
            self._is_telling = True
            self._loop.call_soon(self._tell_inline)

    def _tell_inline(self) -> None:
        self._is_telling = False
        self._tell()

    def _on_settled(self) -> None:
        if self._has_queued:
            self._has_queued = False
            self._tell()


def _nothing() -> None:
    """Of a group's beginning there is nothing to tell."""
