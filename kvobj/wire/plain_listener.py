"""Accepting plain connections: by the event loop while descriptors are plenty, by hand (`accept_loop`) while they are short.

A connection that the event loop accepts costs it half of what one costs that is accepted by hand and handed over, 100 and 150 µs
with one request of a byte. But out of descriptors it would accept and close whoever comes, without a word to anybody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Final

from kvobj.wire.accept_loop import AcceptLoop
from kvobj.wire.body_handover import Wire

SPARE_DESCRIPTORS: Final = 64
"""Fewer than so many left are short. An event loop accepts one connection in a turn, and tells of it in the same; files that are
opened between two looks have the rest."""

MakeWire = Callable[[Callable[[Wire], None]], Wire]


class PlainListener:
    """Accepts at one listening socket, of which it owns the duplicate that it is given. `make_wire` makes a wire that calls what it
    is given once it is connected; that is `connected`, which does not raise. `waited`: see `AcceptLoop`. Event-loop-only."""

    def __init__(
        self,
        listening: socket.socket,
        make_wire: MakeWire,
        connected: Callable[[Wire], None],
        *,
        backlog: int,
        waited: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_wire = make_wire
        self._connected = connected
        self._backlog = backlog
        self._by_hand = AcceptLoop(listening, self._accepted, waited=waited, log=log)
        self._log = log
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turning: asyncio.Task[None] | None = None
        self._is_open = False

    @property
    def unfinished(self) -> tuple[asyncio.Task[None], ...]:
        """Of what was accepted, those that may be no connection yet. Not all are done before the connections that came of them."""
        return tuple(self._tasks)

    async def start(self) -> None:
        """Accept from here on."""
        self._listening.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        self._listening.listen(self._backlog)
        self._is_open = True
        await self._let_the_loop_accept()

    def look(self) -> None:
        """Whether descriptors have become short, or are plenty again. To be called every second or so."""
        if not self._is_open:
            return
        if _is_short(self._next_descriptor()):
            self._accept_by_hand()
        elif self._server is None and self._turning is None:
            self._turning = self._loop.create_task(self._let_the_loop_accept(), name="accept")

    def stop(self) -> None:
        """Accept no more. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._by_hand.stop()
        self._close_server()
        self._listening.close()

    async def aclose(self) -> None:
        """Accept no more, and end what is no connection yet. Idempotent."""
        self.stop()
        tasks = [*self._tasks, *(() if self._turning is None else (self._turning,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- by the event loop ---------------------------------------------------------------------------------------
    async def _let_the_loop_accept(self) -> None:
        if not self._is_open:  # stopped before this task had its turn
            return
        try:
            server = await self._loop.create_server(
                lambda: self._make_wire(self._made), sock=self._listening.dup(), backlog=self._backlog
            )
        except OSError:  # no descriptor for the duplicate
            if self._is_open:
                self._by_hand.start()
            return
        finally:
            self._turning = None
        if not self._is_open:
            server.close()
            return
        self._by_hand.stop()
        self._server = server
        # Done when the server is closed and no transport of it is left: some may be no connection yet.
        self._keep(self._loop.create_task(server.wait_closed()))

    def _made(self, wire: Wire) -> None:
        if self._server is not None and _is_short(wire.descriptor):
            self._accept_by_hand()
        self._connected(wire)

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # -- by hand -------------------------------------------------------------------------------------------------
    def _accept_by_hand(self) -> None:
        if self._server is not None:
            self._close_server()
            self._by_hand.start()

    def _accepted(self, accepted: socket.socket, _: str) -> None:
        task = self._loop.create_task(self._hand_over(accepted), name="accepted")
        task.add_done_callback(lambda done: accepted.close() if done.cancelled() else None)
        self._keep(task)

    async def _hand_over(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._make_wire(self._connected), accepted)
        except OSError:  # the client went this moment
            accepted.close()

    def _next_descriptor(self) -> int:
        """The number that the next file would get; all below are in use."""
        try:
            descriptor = os.dup(self._listening.fileno())
        except OSError:
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        os.close(descriptor)
        return descriptor

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a connection could not be handed over", exc_info=task.exception())


def _is_short(descriptor: int) -> bool:
    """Whether few are left above this one, which was the lowest free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # half a microsecond; it may be changed from outside
    return limit != resource.RLIM_INFINITY and descriptor >= limit - SPARE_DESCRIPTORS
