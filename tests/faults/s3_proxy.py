"""A proxy in front of a real S3 server that does to requests what bad networks and bad servers do, as often as it is told.

    plan = Plan((Toxic.LOST_REPLY, Toxic.STALL_BODY), rate=0.25, seed=7)
    async with FaultProxy("127.0.0.1", server.port, plan) as proxy:      # on the caller's loop
        ...                                                              # a client of 127.0.0.1:proxy.port
        proxy.plan = NOTHING                                             # all is well again; may be set from any thread
    with proxy_thread("127.0.0.1", server.port, plan) as proxy: ...      # on a loop of its own, for tests that block

Speaks plain HTTP/1.1 with keep-alive: Content-Length and chunked bodies both ways, `Expect: 100-continue` (which it answers
itself), replies that come before the request's body is read. No TLS, no pipelining. Heads pass as they are, Host included, so
signatures stay valid. Each client connection has one of its own to the server; where the server is away the client's is closed.

`toxics.py` says what the faults are and how it is decided which request meets which. What was done is kept in `injections` in
order, and counted by toxic and operation in `record()`, which is JSON. Bodies pass in pieces and are never whole in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from free_ports import free_port
from proxy_wire import (
    HEAD_LIMIT_BYTES,
    PIECE_BYTES,
    Head,
    close,
    flipped,
    joined,
    no_delay,
    nothing,
    pieces,
    read_head,
    read_reply_head,
    reset,
)
from toxics import NOTHING, Asked, Dice, Hit, Operation, Plan, Toxic

__all__ = ["NOTHING", "FaultProxy", "Injection", "Operation", "Plan", "Toxic", "proxy_thread"]

_TRICKLE_SECONDS: Final = 0.05
_BODILESS: Final = frozenset({204, 304})
_DAY_SECONDS: Final = 86400.0
_ERRORS: Final = {
    Toxic.UNAVAILABLE: (503, "Service Unavailable", "ServiceUnavailable"),
    Toxic.UNAVAILABLE_BARE: (503, "Service Unavailable", ""),
    Toxic.SLOW_DOWN: (503, "Slow Down", "SlowDown"),
    Toxic.CONFLICT: (409, "Conflict", "OperationAborted"),
    Toxic.PRECONDITION: (412, "Precondition Failed", "PreconditionFailed"),
    Toxic.SKEWED: (403, "Forbidden", "RequestTimeTooSkewed"),
}


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault that was done: to what, and when on the monotonic clock. `key` is unescaped, empty for a bucket."""

    toxic: Toxic
    operation: Operation
    key: str
    at_seconds: float


class _Gone(Exception):  # noqa: N818 - no error: this connection is done with
    """The connection ends here, by a toxic or because the other side closed."""


class FaultProxy:
    """One proxy. It works on the loop it was entered on; `plan`, `injections` and `requests` may be used from any thread."""

    def __init__(self, host: str, port: int, plan: Plan = NOTHING) -> None:
        self.plan = plan
        self.port = free_port()  # that no connection gets while an outage has nobody listen there
        self.injections: list[Injection] = []
        self.requests: Counter[Operation] = Counter()
        self.outages: list[tuple[float, float]] = []  # (from, to) on the monotonic clock, planned at their beginning
        self.upstream = (host, port)  # of connections that come from now on
        self._dice = Dice()
        self._listening: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._outage: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outage is not None:
            self._outage.cancel()
            await asyncio.gather(self._outage, return_exceptions=True)
        self._stop_listening()
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """The URL that clients are given."""
        return f"http://127.0.0.1:{self.port}"

    def record(self) -> dict[str, object]:
        """What passed and what was done, as JSON takes it."""
        done: dict[str, Counter[str]] = {}
        for injection in tuple(self.injections):
            done.setdefault(injection.toxic.value, Counter())[injection.operation.value] += 1
        return {
            "requests": {operation.value: count for operation, count in sorted(self.requests.items())},
            "injected": {toxic: dict(sorted(counts.items())) for toxic, counts in sorted(done.items())},
            "outages": len(self.outages),
        }

    async def _listen(self) -> None:
        """Listen on the port had before. By a socket of its own: `asyncio.Server` leaks what it accepts while it is closed."""
        listening = socket.socket()
        listening.setblocking(False)  # noqa: FBT003 - its only form
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", self.port))
        except OSError:
            listening.close()
            raise
        listening.listen(1024)
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            accepted, _ = listening.accept()
            accepted.setblocking(False)  # noqa: FBT003
            task = asyncio.create_task(self._serve(accepted))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    def decide(self, asked: Asked) -> Hit | None:
        """Count a request and note what is to be done to it."""
        plan = self.plan
        self.requests[asked.operation] += 1
        hit = self._dice.throw(plan, asked)
        if hit is not None:
            self.injections.append(Injection(hit.toxic, asked.operation, asked.key, time.monotonic()))
            if hit.toxic is Toxic.REFUSED:
                self._begin_outage(plan.outage_seconds)
        return hit

    def _begin_outage(self, seconds: float) -> None:
        if self._outage is None or self._outage.done():
            now = time.monotonic()
            self.outages.append((now, now + seconds))
            self._outage = asyncio.create_task(self._be_away(seconds))

    async def _be_away(self, seconds: float) -> None:
        self._stop_listening()
        for writer in tuple(self._writers):
            reset(writer)
        await asyncio.sleep(seconds)
        await self._listen()

    async def _serve(self, accepted: socket.socket) -> None:
        if self.decide(Asked(Operation.CONNECT, "")) is not None:
            accepted.close()
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HEAD_LIMIT_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        no_delay(writer)
        connection = _Connection(self, reader, writer)
        self._writers.add(writer)
        try:
            while await connection.exchange():
                pass
        except (_Gone, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one side is away: so is the other
        finally:
            self._writers.discard(writer)
            await connection.aclose()


class _Connection:
    """One client connection and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._up_reader: asyncio.StreamReader | None = None
        self._up_writer: asyncio.StreamWriter | None = None
        self._is_body_sent = False

    async def aclose(self) -> None:
        both = [writer for writer in (self._up_writer, self._writer) if writer is not None]
        for writer in both:
            writer.close()  # at once: who is cancelled while one of them is waited for must not leave the other open
        for writer in both:
            await close(writer)

    async def exchange(self) -> bool:
        """One request and its reply; whether there may be another."""
        head = await read_head(self._reader)
        if head is None:
            return False
        plan = self._proxy.plan
        hit = self._proxy.decide(Asked.parse(head.words[0], head.words[1]))
        if hit is not None and hit.toxic is Toxic.REFUSED:
            raise _Gone
        if hit is not None and hit.toxic in _ERRORS:
            return await self._refuse(head, hit.toxic, plan)
        return await self._pass(head, hit, plan)

    async def _refuse(self, head: Head, toxic: Toxic, plan: Plan) -> bool:
        """Answer without asking the server."""
        status, reason, code = _ERRORS[toxic]
        ahead = _DAY_SECONDS if toxic is Toxic.SKEWED else plan.clock_ahead_seconds
        body = b""
        if code and head.words[0] != "HEAD":
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        lines = [f"HTTP/1.1 {status} {reason}", f"Date: {email.utils.formatdate(time.time() + ahead, usegmt=True)}"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/xml"]
        if toxic is Toxic.SLOW_DOWN:
            lines.append(f"Retry-After: {plan.retry_after_seconds}")
        is_early = toxic is Toxic.UNAVAILABLE_BARE
        if is_early:
            lines.append("Connection: close")
        else:
            await self._drain(head)
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._writer.drain()
        if is_early:  # what the client still sends is read, else the reply might be lost to a reset
            self._writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while await self._reader.read(PIECE_BYTES):
                        pass
        return not is_early and not head.is_last

    async def _drain(self, head: Head) -> None:
        await self._invite(head)
        async for _ in pieces(self._reader, head):
            pass

    async def _invite(self, head: Head) -> None:
        if head.fields.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._writer.drain()

    async def _pass(self, head: Head, hit: Hit | None, plan: Plan) -> bool:
        """Ask the server and give its reply to the client, with what the hit does to either."""
        up_reader, up_writer = await self._connected()
        toxic = None if hit is None else hit.toxic
        is_write = head.is_chunked or head.length > 0
        await self._invite(head)
        up_writer.write(head.replaced("expect", None).raw)
        sending = asyncio.create_task(self._send_body(head, up_writer, hit, plan))
        answering = asyncio.create_task(read_reply_head(up_reader))
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is not None:
                reset(self._writer)
                raise _Gone
            reply = await answering
            if reply is None:
                raise _Gone
            if plan.clock_ahead_seconds:
                date = email.utils.formatdate(time.time() + plan.clock_ahead_seconds, usegmt=True)
                reply = reply.replaced("date", date)
            is_last = not self._is_body_sent or head.is_last or reply.is_last or Toxic.CLOSED_AT_ACCEPT in plan.toxics
            if is_last and not reply.is_last:
                reply = reply.replaced("connection", "close")
            if is_write and toxic in (Toxic.STALL_BODY, Toxic.RESET_BODY):
                hit = None  # done already, on the way up
            status = int(reply.words[1])
            has_body = head.words[0] != "HEAD" and status not in _BODILESS
            await self._reply(reply, hit, plan, has_body=has_body)
            return not is_last
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._up_reader is None or self._up_writer is None or self._up_reader.at_eof():
            if self._up_writer is not None:
                await close(self._up_writer)
            host, port = self._proxy.upstream
            self._up_reader, self._up_writer = await asyncio.open_connection(host, port, limit=HEAD_LIMIT_BYTES)
            no_delay(self._up_writer)
        return self._up_reader, self._up_writer

    async def _send_body(self, head: Head, up_writer: asyncio.StreamWriter, hit: Hit | None, plan: Plan) -> None:
        """Sends what the client sends. An error is the client's or a toxic's; a server that listens no more has its reply said."""
        self._is_body_sent = False
        length = head.length
        toxic = None if hit is None else hit.toxic
        middle = length // 2 if length and toxic in (Toxic.STALL_BODY, Toxic.RESET_BODY) else None
        flip = int(hit.fraction * length) if hit is not None and length and toxic is Toxic.WRONG_BYTE_UP else None
        position = 0
        async for piece in pieces(self._reader, head):
            start, position = position, position + len(piece)
            if flip is not None and start <= flip < position:
                piece = flipped(piece, flip - start)  # noqa: PLW2901 - the same piece, spoiled
            rest = piece
            if middle is not None and position >= middle:
                up_writer.write(piece[: middle - start])
                if toxic is Toxic.RESET_BODY:
                    reset(up_writer)
                    raise _Gone
                await asyncio.sleep(plan.stall_seconds)
                rest, middle = piece[middle - start :], None
            up_writer.write(rest)
            try:
                await up_writer.drain()
            except ConnectionError:
                return
        self._is_body_sent = True

    async def _reply(self, reply: Head, hit: Hit | None, plan: Plan, *, has_body: bool) -> None:
        """Hand the reply on. Raises `_Gone` where it ends early."""
        assert self._up_reader is not None
        body = pieces(self._up_reader, reply, until_close=True) if has_body else nothing()
        if hit is None:
            async for piece in joined(reply.raw, body):
                await self._write(piece)
            return
        if hit.toxic is Toxic.LOST_REPLY:
            async for _ in body:
                pass
            raise _Gone
        if hit.toxic is Toxic.HALF_HEAD:
            await self._write(reply.raw[: len(reply.raw) // 2])
            raise _Gone
        if hit.toxic is Toxic.STALL_HEAD:
            await asyncio.sleep(plan.stall_seconds)
        await self._spoil(reply, body, reply.length if has_body else 0, hit, plan)

    async def _spoil(self, reply: Head, body: AsyncIterator[bytes], length: int, hit: Hit, plan: Plan) -> None:
        """Hand on a reply with a body of `length` bytes that has a place where something happens to it."""
        toxic = hit.toxic
        cut = len(reply.raw) + length // 2 if length > 1 else len(reply.raw) // 2
        flip = len(reply.raw) + int(hit.fraction * length) if length else -1
        position = 0
        async for piece in joined(reply.raw, body):
            start, position = position, position + len(piece)
            match toxic:
                case Toxic.TRUNCATED | Toxic.RESET_BODY if position >= cut:
                    await self._write(piece[: max(cut - start, 0)])
                    if toxic is Toxic.RESET_BODY:
                        reset(self._writer)
                    raise _Gone
                case Toxic.STALL_BODY if start < cut <= position:
                    await self._write(piece[: cut - start])
                    await asyncio.sleep(plan.stall_seconds)
                    await self._write(piece[cut - start :])
                case Toxic.TRICKLE:
                    await self._trickle(piece, plan)
                case Toxic.WRONG_BYTE_DOWN if start <= flip < position:
                    await self._write(flipped(piece, flip - start))
                case _:
                    await self._write(piece)

    async def _trickle(self, piece: bytes, plan: Plan) -> None:
        step = max(int(plan.trickle_bytes_per_second * _TRICKLE_SECONDS), 1)
        for start in range(0, len(piece), step):
            await self._write(piece[start : start + step])
            await asyncio.sleep(_TRICKLE_SECONDS)

    async def _write(self, piece: bytes) -> None:
        self._writer.write(piece)
        await self._writer.drain()


@contextmanager
def proxy_thread(host: str, port: int, plan: Plan = NOTHING) -> Iterator[FaultProxy]:
    """A proxy on a loop of a thread of its own. The caller may set its `plan` and read its counts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="s3-proxy", daemon=True)
    thread.start()

    def wait_for(step: Coroutine[object, object, object]) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result(10)

    proxy = FaultProxy(host, port, plan)
    try:
        wait_for(proxy.__aenter__())
        try:
            yield proxy
        finally:
            wait_for(proxy.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
