"""Threads that help with a large batch: one copies no faster than one core, and waits for the store while it could copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Final

from kvobj.client.call_scope import CallScope, current_scope
from kvobj.connectors.pieces import shared_out
from kvobj.errors import UnavailableError

BYTES_A_THREAD: Final = 4 * 1024 * 1024
"""Less than this for each is moved by one thread."""


class Helpers:
    """At most `count` threads, made when they are needed. Thread-safe.

    A batch gets those that are free at its beginning, and its own thread works too: none ever waits for another batch's helpers.
    """

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)
        self._threads = ThreadPoolExecutor(max(1, count), thread_name_prefix="kvobj-helper")

    def divide(
        self, sizes: Sequence[int], start: int, stop: int, move: Callable[[int, int], None], *, threads: int
    ) -> None:
        """Have a piece's chunks moved, from one index to another, by so many threads at most: this one and those that are free."""
        size_bytes = sum(sizes[start:stop])
        taken = self.take(min(threads, stop - start, size_bytes // BYTES_A_THREAD) - 1)
        bounds = shared_out(sizes, start, stop, taken + 1)
        self.run([partial(move, *each) for each in pairwise(bounds)], taken=taken)

    def take(self, wanted: int) -> int:
        """How many helpers a batch gets, at most as many as it wants. All of them are then given work by `run`."""
        taken = 0
        while taken < wanted and self._free.acquire(blocking=False):
            taken += 1
        return taken

    def run(self, parts: Sequence[Callable[[], None]], *, taken: int) -> None:
        """Run all parts, the first one here; there is one more of them than helpers were taken, or fewer. What a part raises is
        raised when all have ended: the first one's before the others'. Where the call is ended (`CallScope`) its parts are.
        `UnavailableError` after `close`."""
        futures: list[Future[None]] = []
        failed: BaseException | None = None
        scope = current_scope()
        try:
            if scope is not None:
                parts = _scoped(scope, parts)
            # What has begun is waited for, if the next fails.
            futures.extend(self._submitted(part) for part in parts[1:])
            parts[0]()
        finally:
            wait(futures)
            if scope is not None:
                scope.unguard()
            for _ in range(taken):
                self._free.release()
            failed = _first_failure(futures)
            futures.clear()
        try:
            if failed is not None:
                raise failed
        finally:
            # The traceback has this frame: what is raised must not be in it, or it keeps the parts' memory until it is collected.
            del failed

    def _submitted(self, part: Callable[[], None]) -> Future[None]:
        try:
            return self._threads.submit(part)
        except RuntimeError as error:  # how a pool tells that it is shut down
            raise UnavailableError("the link was closed") from error

    def close(self) -> None:
        """No further parts; those that run end by their own deadlines. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _first_failure(futures: Sequence[Future[None]]) -> BaseException | None:
    """What the first of them that failed raised. Not by way of `result`, which would put it where its own traceback finds it."""
    for future in futures:
        failed = UnavailableError("the link was closed") if future.cancelled() else future.exception()
        if failed is not None:
            return failed
    return None


def _scoped(scope: CallScope, parts: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """The parts, each with a scope of its own, since a scope is one thread's; they end with the call's."""
    scopes = [CallScope(scope.deadline) for _ in parts]

    def end() -> None:
        for each in scopes:
            each.cancel()

    scope.guard(end)
    return [partial(_within, each, part) for each, part in zip(scopes, parts, strict=True)]


def _within(scope: CallScope, part: Callable[[], None]) -> None:
    with scope.entered():
        part()
