"""Requests to the remote server: one attempt, its hedge, and its repeats within budget and deadline.

What is bounded here: requests in flight (`connections`), the time of each, how often it is repeated, and how many repeats and
hedges there are beside the requests themselves. The breaker is asked before each attempt and told of its outcome. Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from kvobj.clock import Clock
from kvobj.config import RemoteSettings
from kvobj.errors import IncompleteBodyError
from kvobj.tiers.remote.breaker import CircuitBreaker
from kvobj.tiers.remote.connection import ConnectionPool, RemoteConnection, StaleConnectionError, TooLongError
from kvobj.tiers.remote.faults import RemoteFault, fault_of_answer
from kvobj.tiers.remote.instruments import RemoteInstruments
from kvobj.tiers.remote.pacing import FirstByteTimes, TokenBudget, backoff_seconds
from kvobj.wire.response_head import BrokenAnswerError, ResponseHead

EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
ANSWER_BYTES_MAX: Final = 16 * 2**20
"""Of a document: a page of 1,000 keys of 1,024 bytes each is 6 MiB when all of them are percent-escaped."""

TOO_LONG: Final = "AnswerTooLong"
"""The code, of this package's own, of an answer that is longer than was asked to be taken."""

_ATTEMPTS_MAX: Final = 6
_RETRY_SHARE: Final = 0.2
_RETRY_BURST: Final = 20.0
_HEDGE_SHARE: Final = 0.1
_HEDGE_BURST: Final = 10.0
_ERROR_BYTES_MAX: Final = 2**20
_SUCCESSES: Final = range(200, 300)
_NOT_FOUND: Final = 404
_OUTCOMES: Final[Mapping[str, str]] = {"busy": "busy", "refused": "refused", "full": "refused", "timeout": "timeout"}
_STALL_BYTES_PER_SECOND: Final = 32 * 1024
_MARGIN_SECONDS: Final = 0.002
_UPLOADS: Final = frozenset({"PutObject", "UploadPart"})
_NOTHING: Final = memoryview(b"")

T = TypeVar("T")


class Signer(Protocol):
    """See `RequestSigner.head`."""

    def head(
        self,
        method: str,
        key: str,
        *,
        query: tuple[tuple[str, str], ...],
        headers: Mapping[str, str],
        payload_sha256: str,
        length: int | None,
    ) -> bytes:
        """A signed head."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """One request. `operation` is S3's name for it. `body` is sent from where it lies; a GET, HEAD or DELETE has none.
    `is_repeatable_unseen`: where a kept connection turns out to be closed it is sent again without being counted as failed."""

    operation: str
    method: str
    key: str = ""
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: memoryview = _NOTHING
    payload_sha256: str = EMPTY_SHA256
    is_repeatable_unseen: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of status 2xx; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """A request whose answer's head has come, with a status of 2xx. To be ended by exactly one of `finish` and `end`."""

    __slots__ = ("_requests", "_started", "connection", "head", "request")

    def __init__(
        self,
        requests: Requests,
        request: RemoteRequest,
        connection: RemoteConnection,
        head: ResponseHead,
        started: float,
    ) -> None:
        self._requests = requests
        self.connection = connection
        self._started = started
        self.request = request
        self.head = head

    async def read_all(self, limit: int = ANSWER_BYTES_MAX) -> bytes:
        """The body."""
        return await self._guarded(self.connection.read_all(self.head, limit))

    async def fill(self, into: memoryview, on_filled: Callable[[int], None]) -> None:
        """The body, straight into memory of its length. `RemoteFault` where it ends early or does not move; what came stays."""
        wire = self.connection.wire
        watch = _StallWatch(self.connection, self._requests.stall_seconds)
        try:
            await self._guarded(self.connection.fill(into, on_filled))
        finally:
            watch.stop()
            self._requests.instruments.received(wire.filled)

    def finish(self) -> None:
        """The body was read to its end: the connection is kept if it can be."""
        requests = self._requests
        requests.let_go(self.connection, is_kept=self.head.is_kept)
        seconds = requests.clock.monotonic() - self._started
        requests.instruments.whole(self.request.operation, seconds, sent=len(self.request.body))

    async def end(self) -> None:
        """Read no more: the connection is closed, and nothing refers to the memory that was being filled when this returns."""
        await self._requests.end(self.connection)

    async def _guarded(self, reading: Awaitable[T]) -> T:
        try:
            return await reading
        except TooLongError as error:
            raise RemoteFault("client", str(error), code=TOO_LONG, is_repeatable=False) from error
        except (OSError, BrokenAnswerError, IncompleteBodyError) as error:
            raise RemoteFault("network", str(error) or type(error).__name__) from error


class Requests:
    """See the module. `chance` draws the jitter. `on_outcome(fault)` is told of each attempt's outcome, None: the server
    answered."""

    def __init__(
        self,
        settings: RemoteSettings,
        signer: Signer,
        pool: ConnectionPool,
        *,
        breaker: CircuitBreaker,
        instruments: RemoteInstruments,
        clock: Clock,
        chance: random.Random,
        on_outcome: Callable[[RemoteFault | None], None],
    ) -> None:
        self._signer = signer
        self._pool = pool
        self._breaker = breaker
        self._chance = chance
        self._on_outcome = on_outcome
        self._slots = asyncio.Semaphore(settings.connections)
        self._upload_slots = asyncio.Semaphore(
            max(settings.connections * 3 // 4, 1)
        )  # reads never wait for uploads alone
        self._request_seconds = settings.request_timeout_seconds
        self._hedge_seconds = settings.hedge_seconds
        self._retries = TokenBudget(share=_RETRY_SHARE, burst=_RETRY_BURST)
        self._hedges = TokenBudget(share=_HEDGE_SHARE, burst=_HEDGE_BURST)
        self._times = FirstByteTimes()
        self._losing: set[asyncio.Task[Exchange]] = set()
        self.stall_seconds = settings.stall_timeout_seconds
        self.instruments = instruments
        self.clock = clock

    async def ask(
        self,
        request: RemoteRequest,
        *,
        until: float,
        limit: int = ANSWER_BYTES_MAX,
        on_fault: Callable[[RemoteFault], None] | None = None,
    ) -> Answer:
        """Make a request and read its whole answer, repeated where that may help. `RemoteFault` for any status but 2xx."""

        async def attempt() -> Answer:
            exchange = await self.begin(request)
            return await self.whole(exchange, limit=limit)

        return await self.repeated(request.operation, attempt, until=until, on_fault=on_fault)

    async def whole(self, exchange: Exchange, *, limit: int = ANSWER_BYTES_MAX) -> Answer:
        """The answer with its body, after which the exchange is over."""
        try:
            body = await exchange.read_all(limit)
        except BaseException:
            await exchange.end()
            raise
        exchange.finish()
        return Answer(exchange.head.status, exchange.head.headers, body)

    async def repeated(
        self,
        operation: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        until: float,
        on_fault: Callable[[RemoteFault], None] | None = None,
    ) -> T:
        """Make attempts until one succeeds, none may follow, or the event loop's time is `until`. `on_fault` is told what each
        attempt failed of before the next, and may raise."""
        loop = asyncio.get_running_loop()
        self._retries.earn()
        number = 0
        while True:
            if not self._breaker.admits():
                self.instruments.count(operation, "down")
                raise RemoteFault("down", "too many requests failed", is_repeatable=False)
            fault = await self._tried(operation, attempt, until=until)
            if not isinstance(fault, RemoteFault):
                return fault
            number += 1
            pause = backoff_seconds(number, fault.retry_after_seconds, self._chance)
            if not fault.is_repeatable or number >= _ATTEMPTS_MAX or loop.time() + pause >= until:
                raise fault
            if on_fault is not None:
                on_fault(fault)
            if not self._retries.spend():
                raise fault
            self.instruments.repeat(operation)
            await asyncio.sleep(pause)

    async def begin(self, request: RemoteRequest) -> Exchange:
        """One exchange up to the answer's head, in an attempt. `RemoteFault` where there is none, or its status is not 2xx."""
        return await self._exchanged(request)

    async def begin_hedged(self, request: RemoteRequest) -> Exchange:
        """As `begin`, of a request that may be made twice: where its answer is late it is, and the first head wins. The other
        connection is closed before a byte of its body is taken."""
        late_seconds = self._times.late_seconds if self._hedge_seconds is None else self._hedge_seconds
        if not late_seconds:
            return await self._exchanged(request)
        self._hedges.earn()
        first = asyncio.ensure_future(self._exchanged(request))
        racing = [first]
        taken: asyncio.Task[Exchange] | None = None
        has_slot = False
        try:
            await asyncio.wait(racing, timeout=late_seconds)
            if not first.done() and not self._slots.locked() and self._hedges.spend():
                has_slot = await self._slots.acquire()  # at once: one is free
                # On a new connection: where one that was kept leads nowhere any more, the others may not either.
                racing.append(asyncio.ensure_future(self._exchanged(request, is_fresh=True)))
            taken = await self._winner(racing)
            return taken.result()
        finally:
            if has_slot:
                self._slots.release()
            for task in racing:
                if task is taken:
                    continue
                self._losing.add(task)
                task.cancel()
                task.add_done_callback(self._lost)

    def let_go(self, connection: RemoteConnection, *, is_kept: bool) -> None:
        """Take back a connection whose answer was read to its end."""
        if is_kept:
            self._pool.give(connection)
        else:
            self._pool.drop(connection)

    async def end(self, connection: RemoteConnection) -> None:
        """Take back a connection in the middle of an exchange."""
        await self._pool.end(connection)

    async def aclose(self) -> None:
        """Wait for what lost its race, then close the connections."""
        if self._losing:
            await asyncio.wait(self._losing)
        await self._pool.aclose()

    # -- inside --------------------------------------------------------------------------------------------------
    async def _tried(self, operation: str, attempt: Callable[[], Awaitable[T]], *, until: float) -> T | RemoteFault:
        """One attempt's result, or its fault, accounted for."""
        loop = asyncio.get_running_loop()
        ends = math.inf
        try:
            # A turn is waited for outside of the request's time: the server is not to blame for it.
            async with self._upload_slots if operation in _UPLOADS else nullcontext(), self._slots:
                ends = min(loop.time() + self._request_seconds, until - _MARGIN_SECONDS)
                async with asyncio.timeout_at(ends):
                    result = await attempt()
        except TimeoutError:
            fault = RemoteFault("timeout", "no answer in time")
        except RemoteFault as error:
            fault = error
        except asyncio.CancelledError:
            # Who asks has a deadline too, and on a busy loop both are over in one turn of it: the server did not answer in time.
            if loop.time() >= ends:
                self._failed(operation, RemoteFault("timeout", "no answer in time"))
            else:
                self._abandoned(operation)
            raise
        except BaseException:
            self._abandoned(operation)
            raise
        else:
            self._breaker.succeeded()
            self.instruments.count(operation, "ok")
            self._on_outcome(None)
            return result
        self._failed(operation, fault)
        return fault

    def _abandoned(self, operation: str) -> None:
        self._breaker.abandoned()
        self.instruments.count(operation, "cancelled")

    def _failed(self, operation: str, fault: RemoteFault) -> None:
        if fault.is_ambiguous:
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        # A 404 of somebody in the server's place is of another kind.
        is_missing = fault.status == _NOT_FOUND and fault.kind == "client"
        self.instruments.count(operation, "missing" if is_missing else _OUTCOMES.get(fault.kind, "error"))
        self._on_outcome(fault)

    async def _exchanged(self, request: RemoteRequest, *, is_fresh: bool = False) -> Exchange:
        """One exchange up to its head."""
        started = self.clock.monotonic()
        connection: RemoteConnection | None = None
        try:
            connection = await self._pool.take(is_fresh=is_fresh)
            try:
                head = await self._asked(connection, request)
            except StaleConnectionError:
                stale, connection = connection, None
                await self._pool.end(stale)
                if not request.is_repeatable_unseen:
                    raise RemoteFault("network", "the connection was closed") from None
                connection = await self._pool.take(is_fresh=True)
                head = await self._asked(connection, request)
            seconds = self.clock.monotonic() - started
            self.instruments.head(request.operation, seconds)
            if head.status in _SUCCESSES:
                _check_taken(request, head)
                if request.method == "GET":
                    self._times.add(seconds)
                return Exchange(self, request, connection, head, started)
            body = await connection.read_all(head, _ERROR_BYTES_MAX)
        except BaseException as error:
            if connection is not None:
                await self._pool.end(connection)
            if isinstance(error, (OSError, BrokenAnswerError, IncompleteBodyError, TooLongError)):
                raise RemoteFault("network", str(error) or type(error).__name__) from error
            raise
        self.let_go(connection, is_kept=head.is_kept)
        # An answer to HEAD has no body; who accepts another form than XML is told in that.
        has_code = request.method != "HEAD" and "accept" not in request.headers
        raise fault_of_answer(head.status, head.headers, body, has_code=has_code)

    async def _asked(self, connection: RemoteConnection, request: RemoteRequest) -> ResponseHead:
        has_length = len(request.body) or request.method in ("PUT", "POST")
        signed = self._signer.head(
            request.method,
            request.key,
            query=request.query,
            headers=request.headers,
            payload_sha256=request.payload_sha256,
            length=len(request.body) if has_length else None,
        )
        return await connection.ask(signed, request.body, method=request.method, stall_seconds=self.stall_seconds)

    async def _winner(self, racing: Sequence[asyncio.Task[Exchange]]) -> asyncio.Task[Exchange]:
        """The first to have its head. Raises what all of them failed of, or what no other would cure."""
        fault: BaseException | None = None
        left = set(racing)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in racing:
                if task not in done:
                    continue
                fault = task.exception()
                if fault is None:
                    if len(racing) > 1:
                        self.instruments.hedge(is_won=task is not racing[0])
                    return task
                if not isinstance(fault, RemoteFault) or not fault.is_repeatable:
                    raise fault
        assert fault is not None
        raise fault

    def _lost(self, task: asyncio.Task[Exchange]) -> None:
        """An exchange that nobody wants any more, whatever became of it."""
        self._losing.discard(task)
        if not task.cancelled() and task.exception() is None:
            exchange = task.result()
            self.let_go(exchange.connection, is_kept=False)


def _check_taken(request: RemoteRequest, head: ResponseHead) -> None:
    """An S3 server answers what it has stored by its ETag. Of whoever answers without, nothing was stored: believed, it would let
    this node's copy go."""
    if request.operation in _UPLOADS and not head.headers.get("etag"):
        raise RemoteFault("server", f"an upload was answered {head.status} without an ETag", status=head.status)


class _StallWatch:
    """Fails the reader of a body that does not move: too little in too long is nothing."""

    __slots__ = ("_connection", "_due", "_handle", "_loop", "_mark", "_seconds")

    def __init__(self, connection: RemoteConnection, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._seconds = seconds
        self._arm()

    def stop(self) -> None:
        """The body is there, or given up."""
        self._handle.cancel()

    def _arm(self) -> None:
        self._mark = self._connection.wire.bytes_in
        self._due = self._loop.time() + self._seconds
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        wire = self._connection.wire
        # Where this loop itself was held up, the bytes may lie in the kernel: they get another span.
        is_late = self._loop.time() - self._due > self._seconds / 4
        if not is_late and wire.bytes_in - self._mark < self._seconds * _STALL_BYTES_PER_SECOND:
            wire.fail_reader(RemoteFault("timeout", "the body does not move"))
            return
        self._arm()
