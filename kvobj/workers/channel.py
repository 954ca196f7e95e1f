"""One end of the socket pair between the store process and a worker process: calls both ways, pipelined, each with a deadline.

Replies come in any order. What is sent in one turn of the event loop leaves in one system call. A call whose caller goes away is
cancelled at the other end; if it had been answered by then, and the answer held something (`HOLDING_CALLS`), `on_unwanted` gives
that back. When the pair ends, or an end that speaks all the time falls silent (`silent_seconds`), all that waits fails with
`UnavailableError`. Event-loop-only.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast

import msgspec

from kvobj.errors import KvobjError, UnavailableError
from kvobj.workers.wire import (
    FRAME_BYTES_MAX,
    FrameReader,
    Kind,
    Message,
    Signature,
    error_of,
    failure_of,
    frame,
    result_frame,
    signatures_of,
)

T = TypeVar("T")

CALL_SECONDS: Final = 60.0
"""What no call of a moment's work takes; those that move objects or wait by themselves have `LONG_SECONDS`."""
LONG_SECONDS: Final = 900.0
LONG_STORE_CALLS: Final = frozenset(
    {
        "copy",
        "complete_upload",
        "end_group",
        "commit",
        "commit_chain",
        "delete",
        "remove_namespace",
        "next_followed",
        "place",
        "put",
        "reached",
        "start_put",
        "start_group_part",
    }
)
"""Calls of the store process that move objects, follow what others do, or wait for class shared."""
HOLDING_CALLS: Final = frozenset({"open", "open_blob", "start_put", "put", "spare_rooms", "follow"})
"""Calls whose answers hold something in the store process."""
_SWEEP_SECONDS: Final = 1.0
_STOOD_STILL_SECONDS: Final = 5.0
"""Nobody who looks every second or three is that late, unless it could not run."""
# Plain numbers: to compare with a member of an enumeration costs ten times as much.
_TELL: Final = int(Kind.TELL)
_RESULT: Final = int(Kind.RESULT)
_CANCEL: Final = int(Kind.CANCEL)
_UNSENT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Of one pair, each way: the longest message there may be, with as much again of others. Not less: requests that run together may
each be answered with rows of a tenth of that, and who has stood still for some seconds is to find all of it. It is memory only
for as long as the other end takes nothing, and one that says nothing is killed before long."""

LATER: Final = object()
"""What a handler for the moment (`at_once`) returns where it cannot answer yet: the method itself is then run."""


class Silence:
    """For how long the other end has said nothing while this process was there to hear it. One that stood still itself (SIGSTOP, a
    paused machine) comes to its timers before it has read what was sent meanwhile, so that by the clock alone all others would have
    been silent; from such a standstill on the time is counted anew."""

    __slots__ = ("_looked_at", "_since")

    def __init__(self, now: float) -> None:
        self._looked_at = self._since = now

    def seconds(self, now: float, heard_at: float) -> float:
        """The silence at a look, of which there is one every few seconds. `heard_at`: when anything came the last time."""
        if now - self._looked_at > _STOOD_STILL_SECONDS:
            self._since = now
        self._looked_at = now
        return now - max(heard_at, self._since)


class _Pending:
    __slots__ = ("deadline", "future", "signature")

    def __init__(self, future: asyncio.Future[Any], signature: Signature, deadline: float) -> None:
        self.future = future
        self.signature = signature
        self.deadline = deadline


class Channel(asyncio.Protocol):
    """See the module's text. `serves`: the object whose methods the other end may call, all those of `interface`; `calls`: the
    interface of the other end.

    `at_once`: for some of those methods, by name, a function of the same arguments that answers in this moment, or says `LATER`.
    """

    def __init__(
        self,
        *,
        serves: object,
        interface: type,
        calls: type,
        log: logging.Logger,
        at_once: Mapping[str, Callable[..., object]] | None = None,
        long_calls: frozenset[str] = frozenset(),
        silent_seconds: float | None = None,
        on_unwanted: Callable[[str, Any], None] | None = None,
        on_answer: Callable[[Any], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_answer` is given what a holding call is answered with, before any later message is looked at. `silent_seconds`: what
        waits fails where nothing at all has come for so long, of an end that says something every second."""
        self._log = log
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        served = signatures_of(interface)
        immediate = at_once or {}
        self._served = [
            (
                signature,
                getattr(serves, name),
                immediate.get(name),
                inspect.iscoroutinefunction(getattr(interface, name)),
            )
            for name, signature in served.items()
        ]
        self._methods = {name: (number, each) for number, (name, each) in enumerate(signatures_of(calls).items())}
        self._long_calls = long_calls
        self._silent_seconds = silent_seconds
        self._on_unwanted = on_unwanted
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, _Pending] = {}
        self._unwanted: dict[int, tuple[str, Signature]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._next_number = 1
        self._outgoing: list[bytes] = []
        self._is_flush_due = False
        self._is_reading = False
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        self.on_flush: list[Callable[[], None]] = []
        """Called when messages leave: what can wait for others to leave with is told now."""
        self._silence = Silence(self._loop.time())
        self.heard_at = self._loop.time()
        """When anything came from the other end the last time, on the loop's clock."""
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the pair has ended."""

    # -- calling -------------------------------------------------------------------------------------------------
    def call(self, name: str, *arguments: object, **named: object) -> asyncio.Future[Any]:
        """Send a call; the future of its result. Raises through it the error that the other end raised, or `UnavailableError`."""
        number, signature = self._methods[name]
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None:
            future.set_exception(UnavailableError("the other process is gone", call=name))
            return future
        call_number = self._next_number
        self._next_number += 1
        seconds = LONG_SECONDS if name in self._long_calls else CALL_SECONDS
        self._pending[call_number] = _Pending(future, signature, self._loop.time() + seconds)
        future.add_done_callback(lambda done: self._forget(call_number, done))
        self._send(frame(Kind.CALL, call_number, number, signature.bound(arguments, named)))
        return future

    def tell(self, name: str, *arguments: object) -> None:
        """Send a call whose result nobody waits for; nothing where the pair has ended."""
        if self._transport is not None:
            number, signature = self._methods[name]
            self._send(frame(Kind.TELL, 0, number, signature.bound(arguments, {})))

    async def call_holding(self, name: str, *arguments: object, **named: object) -> object:
        """`call`, of one whose answer holds something: that is given back where the caller goes away in the very moment in which
        it comes."""
        future = self.call(name, *arguments, **named)
        try:
            return await future
        except asyncio.CancelledError:
            is_answered = future.done() and not future.cancelled() and future.exception() is None
            if is_answered and self._on_unwanted is not None:
                self._on_unwanted(name, future.result())
            raise

    def proxy(self, interface: type[T]) -> T:
        """An object whose methods call the other end's: for the type checker it is of the interface."""
        return cast("T", _Proxy(self, signatures_of(interface)))

    def _forget(self, number: int, done: asyncio.Future[Any]) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and done.cancelled() and self._transport is not None:
            self._unwanted[number] = pending.signature.name, pending.signature
            self._send(frame(Kind.CANCEL, number, 0, None))

    # -- sending -------------------------------------------------------------------------------------------------
    def _send(self, data: bytes) -> None:
        self._outgoing.append(data)
        if not self._is_flush_due and not self._is_reading:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        for tell in self.on_flush:
            tell()
        self._is_flush_due = False
        outgoing, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None or not outgoing:
            return
        transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        if transport.get_write_buffer_size() > _UNSENT_BYTES_MAX:
            self._log.error("the other process takes nothing: the pair is closed")
            transport.abort()

    # -- receiving -----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.heard_at = self._loop.time()
        self._is_reading = True  # what is answered at once leaves together
        try:
            for message in self._reader.feed(data):
                kind = message.kind
                if kind <= _TELL:
                    self._serve(message)
                elif kind == _CANCEL:
                    running = self._running.get(message.number)
                    if running is not None:  # else the answer is on its way already
                        # Not now: a task that is cancelled before its first step never comes to what it undoes.
                        self._loop.call_soon(running.cancel)
                else:
                    self._answered(message)
        except (ValueError, IndexError, msgspec.MsgspecError):
            self._log.exception("the other process sent what is no message")
            if self._transport is not None:
                self._transport.abort()
        finally:
            self._is_reading = False
            if self._outgoing:
                self._flush()

    def _answered(self, message: Message) -> None:
        pending = self._pending.get(message.number)
        if pending is None:
            unwanted = self._unwanted.pop(message.number, None)
            if unwanted is not None and message.kind == Kind.RESULT and self._on_unwanted is not None:
                self._on_unwanted(unwanted[0], unwanted[1].decode_result(message.body))
            return
        if pending.future.done():
            return
        if message.kind == _RESULT:
            result = pending.signature.decode_result(message.body)
            if self._on_answer is not None and pending.signature.name in HOLDING_CALLS:
                self._on_answer(result)
            pending.future.set_result(result)
        else:
            pending.future.set_exception(error_of(message.body))

    def _serve(self, message: Message) -> None:
        signature, method, immediate, is_async = self._served[message.method]
        number = message.number  # 0 where nobody waits
        arguments = signature.decode_arguments(message.body)
        try:
            if immediate is not None:
                result = immediate(*arguments)
                if result is not LATER:
                    self._reply(number, result)
                    return
            if not is_async:
                result = method(*arguments)
                if number:
                    self._reply(number, result)
                return
        except KvobjError as error:
            self._refuse(number, error)
            return
        except Exception:  # noqa: BLE001 - a defect of one call must not end the pair
            self._log.exception("a call met a defect method=%s", signature.name)
            self._refuse(number, UnavailableError("a call met a defect", method=signature.name))
            return
        task = self._loop.create_task(self._run(signature.name, number, method, arguments))
        key = number or -id(task)
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _run(
        self, name: str, number: int, method: Callable[..., Awaitable[object]], arguments: tuple[object, ...]
    ) -> None:
        try:
            result = await method(*arguments)
        except KvobjError as error:
            self._refuse(number, error)
        except asyncio.CancelledError:
            self._refuse(number, UnavailableError("the call was cancelled", method=name))
            raise
        except Exception:  # noqa: BLE001 - as in `_serve`
            self._log.exception("a call met a defect method=%s", name)
            self._refuse(number, UnavailableError("a call met a defect", method=name))
        else:
            self._reply(number, result)

    def _reply(self, number: int, result: object) -> None:
        if number:
            self._send(result_frame(number, result))

    def _refuse(self, number: int, error: KvobjError) -> None:
        if number and self._transport is not None:
            self._send(frame(Kind.FAILURE, number, 0, failure_of(error)))

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        now = self._loop.time()
        silence = self._silence.seconds(now, self.heard_at)
        is_silent = self._silent_seconds is not None and silence > self._silent_seconds
        for number, pending in list(self._pending.items()):
            if (is_silent or pending.deadline <= now) and not pending.future.done():
                name = pending.signature.name
                self._unwanted[number] = name, pending.signature
                self._send(frame(Kind.CANCEL, number, 0, None))
                why = "the other process says nothing" if is_silent else "a call was not answered in time"
                pending.future.set_exception(UnavailableError(why, call=name))

    # -- the end -------------------------------------------------------------------------------------------------
    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._sweeping.cancel()
        for pending in list(self._pending.values()):
            if not pending.future.done():
                pending.future.set_exception(
                    UnavailableError("the other process is gone", call=pending.signature.name, error=str(error))
                )
        if not self.lost.done():
            self.lost.set_result(None)
        if self._on_lost is not None:
            self._on_lost()

    async def aclose(self) -> None:
        """End the pair and what runs for the other end; returns when all of that is over. Idempotent."""
        if self._outgoing:
            self._flush()
        if self._transport is not None:
            self._transport.close()
            await self.lost
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class _Proxy:
    def __init__(self, channel: Channel, signatures: Mapping[str, Signature]) -> None:
        for name in signatures:
            setattr(self, name, self._method(channel, name))

    @staticmethod
    def _method(channel: Channel, name: str) -> Callable[..., Awaitable[object]]:
        make = channel.call_holding if name in HOLDING_CALLS else channel.call

        def call(*arguments: object, **named: object) -> Awaitable[object]:
            return make(name, *arguments, **named)

        return call
