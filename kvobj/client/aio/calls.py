"""Makes a coroutine, or an asynchronous iterator, of a blocking method, with the same parameters and the same contract."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from kvobj.client.aio.threads import CallThreads
from kvobj.client.call_scope import CallScope

Core = TypeVar("Core")
P = ParamSpec("P")
T = TypeVar("T")

_END: Final = object()


class OnThreads(Generic[Core]):
    """What has a blocking counterpart, `core`, and threads to call it on. Calls about sessions have threads of their own, as they
    have connections of their own: a renewal never waits for a read."""

    def __init__(self, core: Core, calls: CallThreads, leases: CallThreads, *, timeout_seconds: float) -> None:
        self.core: Final = core
        self.calls: Final = calls
        self.leases: Final = leases
        self.timeout_seconds: Final = timeout_seconds


def awaited(
    method: Callable[Concatenate[Core, P], T], *, undo: Callable[[T], object] | None = None, is_lease: bool = False
) -> Callable[Concatenate[OnThreads[Core], P], Coroutine[Any, Any, T]]:
    """The method as a coroutine. `undo`: see `CallThreads.run`."""

    async def call(self: OnThreads[Core], /, *args: P.args, **kwargs: P.kwargs) -> T:
        seconds = kwargs.get("timeout_seconds")
        scope = CallScope(time.monotonic() + (seconds if isinstance(seconds, int | float) else self.timeout_seconds))
        threads = self.leases if is_lease else self.calls
        return await threads.run(functools.partial(method, self.core, *args, **kwargs), scope, undo=undo)

    functools.update_wrapper(call, method)
    return call


def iterated(
    method: Callable[Concatenate[Core, P], Iterator[T]], *, is_endless: bool = False
) -> Callable[Concatenate[OnThreads[Core], P], AsyncGenerator[T, None]]:
    """The method as an asynchronous generator: each step is a call. Leaving it early, by `aclose` or by cancelling, ends it.

    `is_endless`: a stream that may wait for ever has a thread of its own.
    """

    async def stream(self: OnThreads[Core], /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        threads = self.calls
        if is_endless:
            threads = CallThreads("kvobj-stream", 1, timeout_seconds=self.timeout_seconds)
        scope = CallScope()
        items = method(self.core, *args, **kwargs)
        step: Callable[[], T | object] = functools.partial(next, items, _END)
        try:
            while (item := await threads.run(step, scope)) is not _END:
                yield item  # type: ignore[misc]  # what is not the end is an item
        finally:
            items.close()  # type: ignore[attr-defined]  # a generator, and not running: closes its connection and waits for nothing
            if is_endless:
                threads.close()

    functools.update_wrapper(stream, method)
    return stream
