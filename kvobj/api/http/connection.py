"""One client connection served to its end: head, handler, reply, and again, in one task and in order.

Pipelined requests wait in the wire's bounded buffer until their turn. Deadlines cost nothing on the way: the server sweeps over all
connections once a second and each compares what it waits for, and how far it got, with the sweep before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvobj.api.http.body_handover import Wire
from kvobj.api.http.instruments import HttpInstruments
from kvobj.api.http.limits import HttpSettings, RequestGate
from kvobj.api.http.reply_writer import ReplyWriter, content_length
from kvobj.api.http.request_body import ChunkedBody, LengthBody
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead
from kvobj.api.http.request_log import RequestLog
from kvobj.api.message import Handler, Reply, RequestHead
from kvobj.clock import Clock
from kvobj.errors import IncompleteBodyError

BadRequest = Callable[[int, str, str, str], Reply]
"""Renders a refusal of the HTTP layer: status, S3 code, message, request id."""

_BUSY = (503, "SlowDown", "Reduce your request rate.")
_FAILED = (500, "InternalError", "We encountered an internal error. Please try again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What all connections of one server share."""

    handler: Handler
    settings: HttpSettings
    clock: Clock
    new_request_id: Callable[[], str]
    bad_request: BadRequest
    gate: RequestGate
    writer: ReplyWriter
    request_log: RequestLog
    instruments: HttpInstruments
    log: logging.Logger


class Connection:
    """Serves one wire. `serve` runs as a task; `sweep`, `drain` and `reset` are called by the server, on the same loop."""

    __slots__ = (
        "_is_draining",
        "_is_fresh",
        "_is_in_head",
        "_mark",
        "_reader",
        "_remote",
        "_requests",
        "_serving",
        "_since",
        "_stage",
        "is_in_flight",
        "wire",
    )

    def __init__(self, wire: Wire, reader: HeadReader, serving: Serving) -> None:
        self.wire = wire
        self._reader = reader
        self._serving = serving
        self._remote = wire.remote
        self._requests = 0
        self._is_in_head = True
        self._is_fresh = True
        self._is_draining = False
        self.is_in_flight = False
        self._stage: tuple[str, int] = ("", 0)
        self._since = serving.clock.monotonic()
        self._mark = 0

    async def serve(self) -> None:
        """Serve requests until either side has had enough; the connection is closed when this returns."""
        try:
            while await self._serve_one():
                pass
        except (ConnectionError, IncompleteBodyError):
            pass  # the client went: there is nobody to tell
        finally:
            self.is_in_flight = False
            self.wire.close()
            await self.wire.wait_closed()

    async def refuse(self) -> None:
        """Answer that the server is busy, without reading a request, and close."""
        serving = self._serving
        self._is_in_head = False
        request_id = serving.new_request_id()
        reply = serving.bad_request(*_BUSY, request_id)
        try:
            with suppress(ConnectionError):
                await serving.writer.send(self.wire, reply, self._head(reply, keep_alive=False), is_head=False)
                await self._linger()
        finally:
            self.wire.close()
            await self.wire.wait_closed()

    def drain(self) -> None:
        """Close when the request in flight, if any, is answered: at once when idle."""
        self._is_draining = True
        if not self.is_in_flight and not self.wire.has_unread:
            self.wire.close()

    def sweep(self, now: float) -> None:
        """Check the deadline of what is being waited for. Event loop only; `now` is the clock's monotonic time."""
        settings = self._serving.settings
        wire = self.wire
        stage, progress = self._present()
        if stage != self._stage:
            self._stage, self._since, self._mark = stage, now, progress
            return
        waited = now - self._since
        match stage[0]:
            case "idle" if waited >= settings.keep_alive_seconds:
                wire.close()
            case "head" if waited >= settings.header_seconds:
                self._stall("no complete request head in time")
            case "body" if waited >= settings.body_stall_seconds:
                if progress - self._mark < settings.body_stall_bytes:
                    self._stall("the body came too slowly")
                self._since, self._mark = now, progress
            case "send":
                if progress > self._mark:
                    self._since, self._mark = now, progress
                elif waited >= settings.send_stall_seconds:
                    self._stall("the reply was not taken")
            case _:
                pass

    def _present(self) -> tuple[tuple[str, int], int]:
        """What is waited for, in which request, and how many bytes it has seen."""
        wire = self.wire
        if wire.is_flushing:
            return ("send", self._requests), wire.bytes_taken
        if self._is_in_head:
            is_idle = not self._is_fresh and not self._reader.is_within_head
            return ("idle" if is_idle else "head", self._requests), 0
        if wire.is_awaiting_bytes:
            return ("body", self._requests), wire.bytes_in
        return ("", self._requests), 0

    def _stall(self, reason: str) -> None:
        self._serving.instruments.stalled_connections.inc()
        self._serving.log.info("connection reset: %s, remote %s", reason, self._remote)
        self.wire.reset()

    async def _serve_one(self) -> bool:
        """Serve the next request; False when the connection is to be closed."""
        serving = self._serving
        self._is_in_head = True
        try:
            head = await self._read_head()
        except HeadError as error:
            self._is_in_head = self._is_fresh = False
            await self._refuse_head(error)
            return False
        self._is_in_head = self._is_fresh = False
        if head is None:
            return False
        self.is_in_flight = True
        self._requests += 1
        started = serving.clock.monotonic()
        request_id = serving.new_request_id()
        body = self._body(head)
        reply = await self._answer(head, body, request_id)
        body.expire()
        is_complete = body.is_finished
        keep_alive = (
            head.keep_alive
            and not reply.close
            and not (head.is_http_10 and content_length(reply) is None)
            and not self._is_draining
            and not self.wire.is_at_end
            and (is_complete or body.can_be_dropped(serving.settings.unread_body_bytes))
        )
        head_bytes, reply = self._checked_head(reply, request_id, keep_alive=keep_alive, is_http_10=head.is_http_10)
        sent_before = self.wire.bytes_out
        is_whole = await serving.writer.send(
            self.wire, reply, head_bytes, is_head=head.method == "HEAD", is_http_10=head.is_http_10
        )
        self._account(
            head,
            reply,
            request_id,
            started=started,
            bytes_in=body.received,
            bytes_out=self.wire.bytes_out - sent_before,
            is_whole=is_whole,
        )
        if not is_whole:
            return False
        if not is_complete:
            if not keep_alive:
                await self._linger()
                return False
            await body.drop()
        self.is_in_flight = False
        return keep_alive and not self._is_draining

    async def _read_head(self) -> ParsedHead | None:
        while True:
            segment = await self.wire.read_segment()
            if not segment:
                return None
            head, rest = self._reader.feed(segment)
            if head is not None:
                self.wire.push_back(rest)
                return head

    def _body(self, head: ParsedHead) -> LengthBody | ChunkedBody:
        if head.length is None:
            return ChunkedBody(self.wire, expects_continue=head.expects_continue)
        return LengthBody(self.wire, head.length, expects_continue=head.expects_continue)

    async def _answer(self, head: ParsedHead, body: LengthBody | ChunkedBody, request_id: str) -> Reply:
        serving = self._serving
        if not await serving.gate.enter():
            return serving.bad_request(*_BUSY, request_id)
        try:
            request = RequestHead(head.method, head.target, head.headers, request_id, self._remote, self.wire.is_tls)
            return await serving.handler(request, body)
        except (ConnectionError, IncompleteBodyError):
            # The client went, or sent less than it announced. If it still listens it gets to know.
            return serving.bad_request(400, "IncompleteBody", "The body is shorter than announced.", request_id)
        except Exception:  # handlers answer their own errors; one that does not must not take the server's word with it
            serving.log.exception("the handler failed, request_id %s", request_id)
            return serving.bad_request(*_FAILED, request_id)
        finally:
            serving.gate.leave()

    def _checked_head(
        self, reply: Reply, request_id: str, *, keep_alive: bool, is_http_10: bool
    ) -> tuple[bytes, Reply]:
        try:
            return self._head(reply, keep_alive=keep_alive, is_http_10=is_http_10), reply
        except ValueError:
            self._serving.log.exception("a reply that cannot be sent, request_id %s", request_id)
            failed = self._serving.bad_request(*_FAILED, request_id)
            return self._head(failed, keep_alive=keep_alive, is_http_10=is_http_10), failed

    def _head(self, reply: Reply, *, keep_alive: bool, is_http_10: bool = False) -> bytes:
        return self._serving.writer.head(reply, keep_alive=keep_alive, is_http_10=is_http_10)

    async def _refuse_head(self, error: HeadError) -> None:
        serving = self._serving
        request_id = serving.new_request_id()
        reply = serving.bad_request(error.status, error.code, error.message, request_id)
        head_bytes = self._head(reply, keep_alive=False)
        is_whole = await serving.writer.send(self.wire, reply, head_bytes, is_head=False)
        started = serving.clock.monotonic()
        self._account(
            None, reply, request_id, started=started, bytes_in=0, bytes_out=len(head_bytes), is_whole=is_whole
        )
        await self._linger()

    async def _linger(self) -> None:
        """Read and drop what the client still sends, within bounds: closing over unread bytes would reset the reply away."""
        settings = self._serving.settings
        self.wire.finish_sending()
        remaining = settings.unread_body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.linger_seconds):
                while remaining > 0:
                    segment = await self.wire.read_segment()
                    if not segment:
                        return
                    remaining -= len(segment)

    def _account(
        self,
        head: ParsedHead | None,
        reply: Reply,
        request_id: str,
        *,
        started: float,
        bytes_in: int,
        bytes_out: int,
        is_whole: bool,
    ) -> None:
        serving = self._serving
        seconds = serving.clock.monotonic() - started
        method = head.method if head else "other"
        serving.instruments.count(method, reply.status, seconds=seconds, bytes_in=bytes_in, bytes_out=bytes_out)
        if not is_whole:
            serving.instruments.cut_replies.inc()
        if serving.request_log.is_enabled:
            serving.request_log.write(
                request_id,
                self._remote,
                head,
                reply,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                duration_seconds=seconds,
                is_whole=is_whole,
            )
