"""One client connection served to its end: head, handler, reply, and again, in one task and in order.

Pipelined requests wait in the wire's bounded buffer until their turn. Deadlines cost nothing on the way: the server sweeps over all
connections once a second and each compares what it waits for, and how far it got, with the sweep before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final

from kvobj.api.http.early_start import Begun, begin
from kvobj.api.http.gathering import Gathering
from kvobj.api.http.instruments import HttpInstruments
from kvobj.api.http.limits import HttpSettings, RequestGate
from kvobj.api.http.reply_writer import ReplyWriter, content_length
from kvobj.api.http.request_body import CONTINUE, ChunkedBody, LengthBody
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead
from kvobj.api.http.request_log import RequestLog
from kvobj.api.message import Handler, HttpFault, Refusal, RenderRefusal, RepeatedRequests, Reply, RequestHead
from kvobj.clock import Clock
from kvobj.errors import BodyTimeoutError, IncompleteBodyError, InvalidRequestError
from kvobj.wire.body_handover import Wire

_REPEATED_BYTES_MAX: Final = 4096
"""What is longer is not laid aside: such a request has less than 1 KiB."""
_HOT_BYTES_MAX: Final = 32 * 1024
"""What is longer is not answered from its bytes. One as long as the wire's buffer would have reading paused, which only who takes
it in has resumed."""

_CONTINUED: Final = frozenset({"PUT", "POST"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What all connections of one server share."""

    handler: Handler
    settings: HttpSettings
    clock: Clock
    new_request_id: Callable[[], str]
    render_refusal: RenderRefusal
    gate: RequestGate
    writer: ReplyWriter
    request_log: RequestLog
    instruments: HttpInstruments
    log: logging.Logger
    gathering: Gathering
    repeated: RepeatedRequests | None = None
    hot: RepeatedRequests | None = None


class Connection:
    """Serves one wire. `serve` runs as a task that is made with `context`. `sweep`, `drain` and `reset` are called by the server,
    on the same loop."""

    __slots__ = (
        "_arrived",
        "_begun",
        "_failure",
        "_has_stalled",
        "_is_draining",
        "_is_fresh",
        "_is_in_head",
        "_is_parting",
        "_mark",
        "_reader",
        "_remote",
        "_requests",
        "_serving",
        "_since",
        "_stage",
        "_task",
        "context",
        "is_in_flight",
        "wire",
    )

    def __init__(self, wire: Wire, reader: HeadReader, serving: Serving) -> None:
        self.wire = wire
        self.context = copy_context()
        self._reader = reader
        self._serving = serving
        self._remote = wire.remote
        self._requests = 0
        self._is_in_head = True
        self._is_fresh = True
        self._is_draining = False
        self._is_parting = False
        self._has_stalled = False
        self.is_in_flight = False
        self._stage: tuple[str, int] = ("", 0)
        self._since = serving.clock.monotonic()
        self._mark = 0
        self._task: asyncio.Task[Any] | None = None
        self._begun: Begun[bool] | bool | None = None
        self._failure: BaseException | None = None
        self._arrived: float | None = None
        """When the bytes that lie here arrived, where they were laid aside."""
        if serving.repeated is not None or serving.hot is not None:
            wire.watch(self._arrives)

    async def serve(self) -> None:
        """Serve requests until either side has had enough; the connection is closed when this returns."""
        self._task = asyncio.current_task()
        try:
            while await self._serve_one():
                pass
        except (ConnectionError, IncompleteBodyError):
            pass  # the client went: there is nobody to tell
        finally:
            self.is_in_flight = False
            self.wire.close()
            await self.wire.wait_closed()

    async def refuse(self, detail: str) -> None:
        """Answer that there are too many connections, without reading a request, and close."""
        self._is_in_head = False
        try:
            with suppress(ConnectionError):
                await self._refuse(HttpFault.BUSY, detail)
        finally:
            self.wire.close()
            await self.wire.wait_closed()

    def drain(self, now: float, *, idle_seconds: float) -> None:
        """Tell the client with the next reply that it is the last one; close at once what has been idle for so long.

        A client that uses its connection often would else send a request into the close, and see a reset. `part` ends the rest.
        """
        self._is_draining = True
        stage, _ = self._present()
        if stage == self._stage and now - self._since >= idle_seconds:
            self.part()

    def part(self) -> None:
        """Close when the request in flight or on its way, if any, is answered: at once when idle."""
        self._is_parting = self._is_draining = True
        if not self.is_in_flight and not self.wire.has_unread and not self._reader.is_within_head:
            self.wire.close()

    def sweep(self, now: float) -> None:
        """Check the deadline of what is being waited for. Event loop only; `now` is the clock's monotonic time."""
        settings = self._serving.settings
        wire = self.wire
        # What a client that is slow, or pauses, has sent of a long body would else lie there unread, and count as nothing.
        wire.await_any()
        wire.look_for_departure()
        stage, progress = self._present()
        if stage != self._stage:
            self._stage, self._since, self._mark = stage, now, progress
            return
        waited = now - self._since
        match stage[0]:
            case "idle" if waited >= settings.keep_alive_seconds:
                wire.close()
            case "head" if waited >= self._patience(settings.header_seconds):
                if self._reader.is_within_head:
                    self._stall(self._reader.overdue())
                else:
                    wire.close()
            case "body" if waited >= self._patience(settings.body_stall_seconds):
                if progress - self._mark < settings.body_stall_bytes:
                    self._stall(BodyTimeoutError("the body came too slowly"))
                self._since, self._mark = now, progress
            case "send":
                if progress > self._mark:
                    self._since, self._mark = now, progress
                elif waited >= self._patience(settings.send_stall_seconds):
                    self._serving.instruments.stalled_connections.inc()
                    self._serving.log.info("connection reset: the reply was not taken, remote %s", self._remote)
                    wire.reset()
            case _:
                pass

    def _patience(self, seconds: float) -> float:
        """A deadline of a request, which is shorter while the server waits for nothing else to end."""
        return min(seconds, self._serving.settings.parting_stall_seconds) if self._is_parting else seconds

    def _present(self) -> tuple[tuple[str, int], int]:
        """What is waited for, in which request, and how many bytes it has seen."""
        wire = self.wire
        if wire.is_flushing:
            return ("send", self._requests), wire.bytes_taken
        if self._arrived is not None:  # it is served in a moment
            return ("", self._requests), 0
        if self._is_in_head:
            is_idle = not self._is_fresh and not self._reader.is_within_head
            return ("idle" if is_idle else "head", self._requests), 0
        if wire.is_awaiting_bytes:
            return ("body", self._requests), wire.bytes_in
        return ("", self._requests), 0

    def _stall(self, error: InvalidRequestError) -> None:
        """Give up waiting for the client to send; whoever waits answers with the error, and the connection ends."""
        self._has_stalled = True
        self._serving.instruments.stalled_connections.inc()
        self.wire.fail_reader(error)

    async def _serve_one(self) -> bool:
        """Take in what has arrived, or arrives; False when the connection is to be closed."""
        wire = self.wire
        if wire.has_unread:
            return await self._take_in()
        try:
            await wire.arrive(self._serve_at_once)
        except HeadError as error:  # the head does not end
            return await self._refuse_head(error)
        except BaseException as error:
            begun = self._begun
            if not isinstance(begun, Begun):
                raise
            self._begun = None
            return await begun.fail(error)  # it is the request that was to be ended
        begun, self._begun = self._begun, None
        if self._failure is not None:
            raise self._failure
        if begun is None:
            return wire.has_unread
        return await begun if isinstance(begun, Begun) else begun

    def _serve_at_once(self) -> bool:
        """Take in what has arrived, where it arrives; whether no more is to be done about it, so that the task may sleep on: all is
        answered, or the rest of a body is to come first, with which this is called again."""
        assert self._task is not None
        begun, self._begun = self._begun, None
        try:
            if isinstance(begun, Begun):
                begun = begun.go_on(self._task, self.context)
            else:
                begun = begin(self._take_in(), self._task, self.context)
        except BaseException as error:  # noqa: BLE001 - the task's own
            self._failure = error
            return False
        wire = self.wire
        if begun is True and not wire.has_unread:
            return True
        self._begun = begun
        return isinstance(begun, Begun) and begun.waits_for is wire.filling is not None

    def _arrives(self, request: bytes) -> bool:
        """Whether what has arrived is laid aside, or answered; else it is to go the way of all requests."""
        serving = self._serving
        repeated = serving.repeated
        # Of a long body's first bytes nothing can be told. Within a head it is a part of that, whatever it looks like, and the
        # head's deadline runs on.
        if self.wire.reads_on or len(request) > _HOT_BYTES_MAX or self._reader.is_within_head:
            return False
        hot = serving.hot
        if hot is not None and self._arrived is None and hot.looks_like(request) is not None:
            return self._answers(hot)
        if repeated is None or len(request) > _REPEATED_BYTES_MAX or repeated.looks_like(request) is None:
            return False
        if self._arrived is None:
            now = serving.clock.monotonic()
            if serving.gathering.lays_aside(self, now):
                self._arrived = now
                return True
        return self._answers(repeated)  # it need not wait, or more has come

    def take_up(self) -> None:
        """See `gathering.Laid`."""
        repeated = self._serving.repeated
        # Where the client went or ended its side, the connection's task is awake and sees to what lies here.
        if repeated is not None and self.wire.is_asleep and not self._answers(repeated):
            self.wire.look_again()

    def _answers(self, repeated: RepeatedRequests) -> bool:
        try:
            return self._answer_repeated(repeated)
        except Exception as error:  # noqa: BLE001 - the task's own; others wait to be answered behind this one
            self.wire.fail_reader(error)
            return True

    def _answer_repeated(self, repeated: RepeatedRequests) -> bool:
        """Whether what lies here was answered at once. The task sleeps on."""
        wire, serving = self.wire, self._serving
        if self._is_draining or self._has_stalled or wire.is_flushing or self._reader.is_within_head:
            return False
        now = serving.clock.monotonic()
        started = now if self._arrived is None else self._arrived
        request, request_id = wire.take_unread(), serving.new_request_id()
        try:
            answer = repeated.answer(request, request_id, waited_ms=int((now - started) * 1000))
        except Exception:
            serving.log.exception("a request that was answered from its bytes met a defect, request_id %s", request_id)
            raise
        if answer is None:
            wire.push_back(request)
            return False
        if self._arrived is not None:
            self._arrived = None
            serving.gathering.forget(self)
        self._is_fresh = False
        self._requests += 1
        head = serving.writer.ready_head(answer.reply)
        is_whole = True
        try:
            # Nobody waits until it has left this process: one that the client does not take is the sweep's to find.
            wire.write(head + answer.body)
        except ConnectionError:
            is_whole = False  # the task is being woken
        self._account(
            answer.method,
            answer.target,
            answer.reply,
            request_id,
            started=started,
            bytes_in=answer.bytes_in,
            bytes_out=len(head) + len(answer.body) if is_whole else 0,
            is_whole=is_whole,
        )
        return True

    def _taken_up(self) -> float | None:
        """When what is to be served now arrived, where it was laid aside; it is no more."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self._serving.gathering.forget(self)
        return arrived

    async def _take_in(self) -> bool:
        """Serve the request that is completed by what has arrived, if one is; False when the connection is to be closed."""
        serving, arrived = self._serving, self._taken_up()
        try:
            head, rest = self._reader.feed(self.wire.take_unread())
        except HeadError as error:
            return await self._refuse_head(error)
        if head is None:
            return True
        self.wire.push_back(rest)
        if head.length:
            self.wire.welcome(head.length)
        self._is_in_head = self._is_fresh = False
        self.is_in_flight = True
        self._requests += 1
        now = serving.clock.monotonic()
        started = now if arrived is None else arrived
        request_id = serving.new_request_id()
        body = self._body(head)
        reply = await self._answer(head, body, request_id, waited_ms=int((now - started) * 1000))
        body.expire()
        is_complete = body.is_finished
        keep_alive = (
            head.keep_alive
            and not reply.close
            and not (head.is_http_10 and content_length(reply) is None)
            and not self._is_draining
            and not self._has_stalled
            and not self.wire.is_at_end
            and (is_complete or body.can_be_dropped(serving.settings.unread_body_bytes))
        )
        try:
            head_bytes = serving.writer.head(reply, keep_alive=keep_alive, is_http_10=head.is_http_10)
        except ValueError:
            serving.log.exception("a reply that cannot be sent, request_id %s", request_id)
            head_bytes, reply = await self._replaced(head, reply, request_id, keep_alive=keep_alive)
        if head.expects_continue and head.length == 0 and head.method in _CONTINUED:
            # The body that the client asks about is empty, and need not be asked for. But boto3 asks about empty files too, and
            # after a reply that came without this it misreads the next one on the connection, and waits a minute for its end.
            head_bytes = CONTINUE + head_bytes
        sent_before = self.wire.bytes_out
        is_whole = await serving.writer.send(
            self.wire, reply, head_bytes, is_head=head.method == "HEAD", is_http_10=head.is_http_10
        )
        self._account(
            head.method,
            head.target,
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
        self._is_in_head = True
        return keep_alive and not self._is_parting

    def _body(self, head: ParsedHead) -> LengthBody | ChunkedBody:
        if head.length is None:
            return ChunkedBody(self.wire, expects_continue=head.expects_continue)
        return LengthBody(self.wire, head.length, expects_continue=head.expects_continue and head.length > 0)

    async def _answer(
        self, head: ParsedHead, body: LengthBody | ChunkedBody, request_id: str, *, waited_ms: int
    ) -> Reply:
        serving = self._serving
        if not serving.gate.enter_now() and not await serving.gate.enter():
            return self._refusal(HttpFault.BUSY, "too many requests", head, request_id)
        try:
            request = RequestHead(
                head.method, head.target, head.headers, request_id, self._remote, self.wire.is_tls, waited_ms, head.raw
            )
            return await serving.handler(request, body)
        except (ConnectionError, IncompleteBodyError) as error:
            # The client went, or sent less than it announced, or too slowly. If it still listens it gets to know.
            fault = HttpFault.TIMEOUT if isinstance(error, BodyTimeoutError) else HttpFault.INCOMPLETE_BODY
            return self._refusal(fault, str(error), head, request_id)
        except Exception:  # handlers answer their own errors; one that does not must not take the server's word with it
            serving.log.exception("the handler failed, request_id %s", request_id)
            return self._refusal(HttpFault.DEFECT, "the handler failed", head, request_id)
        finally:
            serving.gate.leave()

    def _refusal(self, fault: HttpFault, detail: str, head: ParsedHead, request_id: str) -> Reply:
        return self._serving.render_refusal(Refusal(fault, detail, request_id, head.method, head.target))

    async def _replaced(
        self, head: ParsedHead, reply: Reply, request_id: str, *, keep_alive: bool
    ) -> tuple[bytes, Reply]:
        """What is answered instead of a reply whose head cannot be written."""
        if not isinstance(reply.body, bytes):
            await reply.body.aclose()
        failed = self._refusal(HttpFault.DEFECT, "the reply cannot be sent", head, request_id)
        return self._serving.writer.head(failed, keep_alive=keep_alive, is_http_10=head.is_http_10), failed

    async def _refuse_head(self, error: HeadError) -> bool:
        self._is_in_head = self._is_fresh = False
        await self._refuse(error.fault, error.message, error.method, error.target)
        return False

    async def _refuse(self, fault: HttpFault, detail: str, method: str = "", target: str = "") -> None:
        """Answer what never reaches the handler, and log it as any request; the connection is to be closed after it."""
        serving = self._serving
        started = serving.clock.monotonic()
        request_id = serving.new_request_id()
        reply = serving.render_refusal(Refusal(fault, detail, request_id, method, target))
        head_bytes = serving.writer.head(reply, keep_alive=False, is_http_10=False)
        sent_before = self.wire.bytes_out
        is_whole = await serving.writer.send(self.wire, reply, head_bytes, is_head=method == "HEAD")
        self._account(
            method,
            target,
            reply,
            request_id,
            started=started,
            bytes_in=0,
            bytes_out=self.wire.bytes_out - sent_before,
            is_whole=is_whole,
        )
        await self._linger()

    async def _linger(self) -> None:
        """Read and drop what the client still sends, within bounds: closing over unread bytes would reset the reply away."""
        settings = self._serving.settings
        self.wire.finish_sending()
        remaining = settings.linger_bytes
        with suppress(TimeoutError, IncompleteBodyError):
            async with asyncio.timeout(settings.linger_seconds):
                while remaining > 0:
                    segment = await self.wire.read_segment()
                    if not segment:
                        return
                    remaining -= len(segment)

    def _account(
        self,
        method: str,
        target: str,
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
        serving.instruments.count(method, reply.status, seconds=seconds, bytes_in=bytes_in, bytes_out=bytes_out)
        if not is_whole:
            serving.instruments.cut_replies.inc()
        if serving.request_log.is_enabled:
            serving.request_log.write(
                request_id,
                self._remote,
                method,
                target,
                reply,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                duration_seconds=seconds,
                is_whole=is_whole,
            )
