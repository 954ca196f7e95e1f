"""Makes a coroutine, or an asynchronous iterator, of a blocking method, with the same parameters and the same contract."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import closing
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from kvobj.client.aio.threads import CallThreads
from kvobj.client.call_scope import CallScope, bounded_seconds

Core = TypeVar("Core")
P = ParamSpec("P")
T = TypeVar("T")

_END: Final = object()
_NEVER: Final = float("inf")


class OnThreads(Generic[Core]):
    """What has a blocking counterpart, `core`, and threads to call it on. Calls about sessions have threads of their own, as they
    have connections of their own: a renewal never waits for a read. So have streams, each from its beginning to its end: calls
    that wait for the connection of a stream do not keep it from going on."""

    def __init__(
        self, core: Core, calls: CallThreads, streams: CallThreads, leases: CallThreads, *, timeout_seconds: float
    ) -> None:
        self.core: Final = core
        self.calls: Final = calls
        self.streams: Final = streams
        self.leases: Final = leases
        self.timeout_seconds: Final = timeout_seconds
        self._endless: Final[weakref.WeakSet[CallThreads]] = weakref.WeakSet()
        """Of streams that may wait for ever."""


def awaited(
    method: Callable[Concatenate[Core, P], T], *, undo: Callable[[T], object] | None = None, is_lease: bool = False
) -> Callable[Concatenate[OnThreads[Core], P], Coroutine[Any, Any, T]]:
    """The method as a coroutine. `undo`: see `CallThreads.run`."""

    async def call(self: OnThreads[Core], /, *args: P.args, **kwargs: P.kwargs) -> T:
        scope = CallScope(_deadline(self, kwargs))
        threads = self.leases if is_lease else self.calls
        return await threads.run(functools.partial(method, self.core, *args, **kwargs), scope, undo=undo)

    functools.update_wrapper(call, method)
    return call


def iterated(
    method: Callable[Concatenate[Core, P], Iterator[T]],
) -> Callable[Concatenate[OnThreads[Core], P], AsyncGenerator[T, None]]:
    """The method, one that keeps nothing between two steps, as an asynchronous generator: each step is a call. Leaving it early, by
    `aclose` or by cancelling, ends it."""

    async def iterate(self: OnThreads[Core], /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        scope = CallScope(_deadline(self, kwargs))
        items = method(self.core, *args, **kwargs)
        step: Callable[[], T | object] = functools.partial(next, items, _END)
        with closing(items):  # type: ignore[type-var]  # a generator, and not running: its end waits for nothing
            while (item := await self.calls.run(step, scope)) is not _END:
                yield item  # type: ignore[misc]  # what is not the end is an item
                scope.deadline = _deadline(self, kwargs)

    functools.update_wrapper(iterate, method)
    return iterate


def streamed(
    method: Callable[Concatenate[Core, P], Iterator[T]], *, is_endless: bool = False
) -> Callable[Concatenate[OnThreads[Core], P], AsyncGenerator[T, None]]:
    """The method, one that keeps a connection between two steps, as an asynchronous generator that has a thread until its end.
    Leaving it early, by `aclose` or by cancelling, ends it.

    `is_endless`: one that may wait for ever, with a thread that is none of the streams'.
    """

    async def stream(self: OnThreads[Core], /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        threads = CallThreads("kvobj-endless", 1) if is_endless else self.streams
        if is_endless:
            self._endless.add(threads)
        scope = CallScope()
        deadline = _deadline(self, kwargs)
        taken = await threads.take(deadline)
        if not is_endless:
            scope.deadline = deadline  # of the first step, which has waited for the thread
        try:
            items = method(self.core, *args, **kwargs)
            step: Callable[[], T | object] = functools.partial(next, items, _END)
            with closing(items):  # type: ignore[type-var]  # as above: closes its connection
                while (item := await threads.run_taken(step, scope)) is not _END:
                    scope.deadline = _NEVER  # the method has one for each item
                    yield item  # type: ignore[misc]  # what is not the end is an item
        finally:
            threads.give(taken)
            if is_endless:
                threads.close()

    functools.update_wrapper(stream, method)
    return stream


def _deadline(client: OnThreads[Core], parameters: Mapping[str, object]) -> float:
    """When a call that begins now is to be over, by its own timeout or the client's."""
    seconds = parameters.get("timeout_seconds")
    return time.monotonic() + (bounded_seconds(seconds) if isinstance(seconds, int | float) else client.timeout_seconds)
