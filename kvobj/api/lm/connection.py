"""One `lm://` client served to its end: head, command, reply, and again, in one task and in order.

The connection stays in step whatever becomes of a command: a PUT that is dropped is read to its end. An idle connection is kept
for ever, since LMCache opens one when it starts and never another. All other waits have deadlines, which the server checks once a
second (`sweep`). A reply that cannot be completed resets the connection, so that half a chunk is never taken for a whole one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, cast

from kvobj.api.lm.commands import LmCommands, OpenChunk
from kvobj.api.lm.instruments import LmInstruments
from kvobj.api.lm.protocol import (
    ABSENT,
    FOUND,
    HEALTH_CHECK_KEY,
    REQUEST_BYTES,
    Code,
    Command,
    Request,
    reply_head,
)
from kvobj.clock import Clock
from kvobj.errors import BodyTimeoutError, IncompleteBodyError, InvalidRequestError, KvobjError
from kvobj.wire.body_handover import Wire

PROGRESS_BYTES: Final = 8 * 1024
PARTING_STALL_SECONDS: Final = 5.0
"""What deadlines are shortened to in a drain: who sends nothing, or takes nothing, has all others wait."""
_DROPPED_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LmServing:
    """What all connections share. `stall_seconds`: the span in which a client must send `PROGRESS_BYTES` of what it began, or take
    a byte of a reply."""

    commands: LmCommands
    instruments: LmInstruments
    clock: Clock
    stall_seconds: float


class LmConnection:
    """Serves one wire. `serve` runs as a task; `sweep` and `drain` are called by the server, on the same loop."""

    __slots__ = (
        "_health_check",
        "_is_draining",
        "_is_idle",
        "_mark",
        "_requests",
        "_serving",
        "_since",
        "_stage",
        "wire",
    )

    def __init__(self, wire: Wire, serving: LmServing) -> None:
        self.wire = wire
        self._serving = serving
        self._health_check: str | None = None
        self._is_idle = True
        self._is_draining = False
        self._requests = 0
        self._stage: tuple[str, int] = ("", 0)
        self._since = 0.0
        self._mark = 0

    async def serve(self) -> None:
        """Serve requests until the client goes or the server drains; the connection is closed when this returns."""
        wire, instruments = self.wire, self._serving.instruments
        try:
            while (head := await self._head()) is not None:
                try:
                    request = Request.parse(head)
                except InvalidRequestError as error:
                    instruments.ended(str(error), wire.remote)
                    wire.reset()
                    break
                await self._answer(request)
                if self._is_draining and not wire.has_unread:
                    break
        except (ConnectionError, IncompleteBodyError):
            pass  # the client went, or was too slow: there is nobody to tell
        finally:
            wire.close()
            await wire.wait_closed()
            await self._forget_health_check()

    def drain(self) -> None:
        """End after the request in progress, and after those that have come already; at once where there is none."""
        self._is_draining = True
        if self._is_idle and not self.wire.has_unread:
            self.wire.close()

    def sweep(self, now: float) -> None:
        """Give up on a client that lets the server wait. `now` is the clock's monotonic time."""
        wire, serving = self.wire, self._serving
        wire.await_any()
        if wire.is_flushing:
            stage, progress, enough = "send", wire.bytes_taken, 1
        elif wire.is_awaiting_bytes and not self._is_idle:
            stage, progress, enough = "receive", wire.bytes_in, PROGRESS_BYTES
        else:
            stage, progress, enough = "", 0, 0
        if (stage, self._requests) != self._stage:
            self._stage, self._since, self._mark = (stage, self._requests), now, progress
        elif stage and now - self._since >= self._patience():
            if progress - self._mark >= enough:
                self._since, self._mark = now, progress
            elif stage == "send":
                serving.instruments.stalled("the reply was not taken", wire.remote)
                wire.reset()
            else:
                serving.instruments.stalled("the request came too slowly", wire.remote)
                wire.fail_reader(BodyTimeoutError("the request came too slowly"))

    def _patience(self) -> float:
        seconds = self._serving.stall_seconds
        return min(seconds, PARTING_STALL_SECONDS) if self._is_draining else seconds

    async def _head(self) -> bytes | None:
        """The next request's head; None when the client sends no more, or no whole one."""
        wire = self.wire
        head = b""
        while len(head) < REQUEST_BYTES:
            self._is_idle = not head
            if not wire.has_unread and not await wire.arrive():
                return None
            head += await wire.read_some(REQUEST_BYTES - len(head))
        self._is_idle = False
        self._requests += 1
        return head

    async def _answer(self, request: Request) -> None:
        serving = self._serving
        name = request.command.name.lower()
        started = serving.clock.monotonic()
        sent_before = self.wire.bytes_out
        result = "failed"
        try:
            if request.key == HEALTH_CHECK_KEY:
                request = await self._of_health_check(request)
            result = await (self._put(request) if request.command is Command.PUT else self._reply(request, name))
        finally:
            serving.instruments.count(
                name,
                result,
                seconds=serving.clock.monotonic() - started,
                bytes_in=request.body_bytes,
                bytes_out=self.wire.bytes_out - sent_before,
            )

    async def _of_health_check(self, request: Request) -> Request:
        """The request as it is carried out. A chunk is never replaced, and a health check asks for the bytes that it put a moment
        ago: so each of its PUTs has a key of its own, known to the connection that it came on, and none sees another engine's."""
        if request.command is Command.PUT:
            await self._forget_health_check()
            self._health_check = f"{HEALTH_CHECK_KEY}@put%{secrets.token_hex(8)}"
        return replace(request, key=self._health_check or request.key)

    async def _forget_health_check(self) -> None:
        before, self._health_check = self._health_check, None
        if before is not None:
            await self._serving.commands.remove(before)

    async def _put(self, request: Request) -> str:
        serving = self._serving
        body = _Body(self.wire, request.body_bytes)
        # LMCache sends head and body apart and asks on after them: each would wait 40 ms for the other's acknowledgement.
        self.wire.acknowledge()
        outcome, why = await serving.commands.put(request, body)
        await body.drop()
        self.wire.acknowledge()
        if outcome.is_drop:
            serving.instruments.dropped(outcome, why)
        return outcome.value

    async def _reply(self, request: Request, name: str) -> str:
        """Answer what has an answer. A store that cannot say is a miss."""
        commands, key = self._serving.commands, request.key
        try:
            match request.command:
                case Command.HEALTH:
                    await commands.check()
                    return await self._say(FOUND)
                case Command.LIST:
                    keys = await commands.listed()
                    return await self._say(reply_head(Code.SUCCESS, body_bytes=len(keys)) + keys)
                case Command.EXIST if key is not None:
                    return await self._say(FOUND if await commands.exists(key) else ABSENT)
                case Command.GET if key is not None:
                    chunk = await commands.open(key)
                case _:
                    return await self._say(ABSENT)
        except KvobjError as error:
            if isinstance(error, IncompleteBodyError):
                raise
            self._serving.instruments.failed(name, str(error))
            await self._say(ABSENT)
            return "failed"
        return await (self._say(ABSENT) if chunk is None else self._send(chunk))

    async def _say(self, reply: bytes) -> str:
        self.wire.write(reply)
        await self.wire.flush()
        return "miss" if reply is ABSENT else "ok"

    async def _send(self, chunk: OpenChunk) -> str:
        """Head and bytes, the head in one write with the first of them: sent apart, they would wait 40 ms for each other."""
        wire, reader = self.wire, chunk.reader
        if reader is None:
            return await self._say(reply_head(Code.SUCCESS, form=chunk.form))
        is_whole = False
        try:
            head = reply_head(Code.SUCCESS, body_bytes=chunk.size_bytes, form=chunk.form)
            async with aclosing(cast("AsyncGenerator[memoryview, None]", reader.views())) as views:
                async for view in views:
                    if len(view):
                        await wire.send(head, view)
                        head = b""
            is_whole = True
        except KvobjError as error:
            self._serving.instruments.failed("get", str(error))
        finally:
            try:
                if not is_whole:
                    self._serving.instruments.cut_replies.inc()
                    wire.reset()
                    await wire.wait_closed()  # from then on nothing refers to what was written
            finally:
                await reader.aclose()
        if not is_whole:
            raise ConnectionResetError("the reply was cut")
        return "ok"


class _Body:
    """The `ByteSource` of a PUT: exactly the bytes that its head announced."""

    __slots__ = ("_left_bytes", "_wire")

    def __init__(self, wire: Wire, size_bytes: int) -> None:
        self._wire = wire
        self._left_bytes = size_bytes

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `message.ByteSource`."""
        left_bytes = self._left_bytes - len(buffer)
        assert left_bytes >= 0
        await self._wire.fill(buffer, on_bytes, has_more=left_bytes > 0)
        self._left_bytes = left_bytes

    async def drop(self) -> None:
        """Read what is left of it and forget it."""
        while self._left_bytes:
            piece = await self._wire.read_some(min(self._left_bytes, _DROPPED_PIECE_BYTES))
            if not piece:
                raise IncompleteBodyError("the client went in the middle of a PUT", left_bytes=self._left_bytes)
            self._left_bytes -= len(piece)
