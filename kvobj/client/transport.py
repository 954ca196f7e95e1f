"""Calls of many threads over a few kept connections, each call with a deadline and a bounded number of retries.

What is retried: 503 and connections that broke. Every call may be made twice: PUTs of chunks are idempotent, and a pin whose answer
was lost is found by the next renewal. A call that another thread ends (`CallScope`) is not made again, its connection is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvobj.client.call_scope import current_scope, pause
from kvobj.client.connection import ASKED, Incoming, SignedConnection
from kvobj.client.forking import forget_in_child
from kvobj.client.loans import Bell, Loans, wake
from kvobj.client.retry import RetryBudget, RetryRule, pause_seconds, told_seconds
from kvobj.errors import BusyError, KvobjError, UnavailableError

MSGPACK: Final = "application/msgpack"

NO_DOCUMENT: Final = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are none of what they should be."""

T = TypeVar("T")


class Fetched(NamedTuple):
    """How many bytes of a room were filled; their BLAKE3 if it was wanted, and the server told it."""

    size_bytes: int
    digest: bytes | None


class Lent:
    """A context manager: an answer to be read within the block, on a connection that is lent until the block's end. Before there
    is an answer, it is but the connection, and before that a place of those that the transport has.

    Made before its place is counted: it is counted for as long as somebody has it (`loans`)."""

    __slots__ = ("__weakref__", "_connection", "_transport", "incoming")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._connection: SignedConnection | None = None
        self.incoming: Incoming | None = None

    @property
    def connection(self) -> SignedConnection:
        """The connection that is lent."""
        assert self._connection is not None
        return self._connection

    @connection.setter
    def connection(self, connection: SignedConnection) -> None:
        self._connection = connection

    def give_back(self, *, is_known: bool = True) -> None:
        """The place is the transport's again, and so is the connection, closed if there is an answer that was not read to its end.
        `is_known` False: what came on it is not known, so it is closed. Idempotent."""
        connection, self._connection = self._connection, None
        try:
            if self.incoming is not None:
                self.incoming.close()
            if connection is not None and not is_known:
                connection.close()
        except BaseException:
            self._transport.give(self, None)  # not the connection: whether it was closed is not known
            raise
        self._transport.give(self, connection)

    def __enter__(self) -> Incoming:
        assert self.incoming is not None
        return self.incoming

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Transport:
    """Lends connections. Thread-safe. `connect` makes one; at most `connections` are open, and who finds none free waits.

    In a forked child it begins anew: the parent's connections stay the parent's.
    """

    def __init__(
        self,
        connect: Callable[[], SignedConnection],
        *,
        connections: int,
        timeout_seconds: float,
        retry: RetryRule,
    ) -> None:
        self._connect = connect
        self._connections = connections
        self._retry = retry
        self._is_closed = False
        self.timeout_seconds = timeout_seconds
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        # One that its thread may take twice: a stream that nobody refers to is ended wherever the interpreter looks for cycles,
        # also under this lock, and gives its connection back there. What is done under it stands that.
        self._lock = threading.RLock()
        self._given = Bell()
        self._lent: Loans[Lent] = Loans()
        self._idle: list[SignedConnection] = []
        self._budget = RetryBudget(self._retry)

    def forget(self) -> None:
        """See `ForgetsInChild`; the wires forget by themselves."""
        self._begin()

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        query: Sequence[tuple[str, str]] = (),
        document: object = None,
        timeout_seconds: float | None = None,
    ) -> T:
        """A call of the KV API: a msgpack document, answered with another that is read as `kind`.

        Raises the error that the answer stands for; `UnavailableError` where nobody answers in time.
        """
        body = b"" if document is None else msgspec.msgpack.encode(document)
        headers = {"accept": MSGPACK} | ({"content-type": MSGPACK} if body else {})
        with self.open(
            method, path, query=query, headers=headers, body=body, timeout_seconds=timeout_seconds
        ) as answer:
            return read_answer(answer.read(), kind)

    def fetch(
        self,
        path: str,
        headers: Mapping[str, str],
        room: memoryview,
        timeout_seconds: float | None = None,
        *,
        wants_digest: bool,
    ) -> Fetched | Lent:
        """GET a path into a room that is writable and not empty, in as few steps as there can be. Where they do not bring the whole
        answer it is lent, to be read as after `open`. Errors as `open`."""
        began = time.monotonic()
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        scope = current_scope()
        if scope is not None and scope.deadline < began + seconds:
            seconds = scope.deadline - began
        lent = None
        try:
            lent = self._lend_idle()
            if lent is not None:
                told = lent.connection.fetch(path, headers, room, timeout_seconds=seconds)
                if told >= 0:
                    fetched = Fetched(told, lent.connection.fetched_digest() if wants_digest else None)
                    lent.give_back()
                    self._budget.note_call()
                    return fetched
                if told != ASKED:
                    lent.give_back()
                    lent = None
            left = seconds - (time.monotonic() - began)  # what was waited for so far is not to be waited for again
            return self.open("GET", path, headers=headers, timeout_seconds=left, asked=lent)
        except BaseException as error:
            if lent is not None:
                lent.give_back(is_known=isinstance(error, KvobjError))
            raise

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes | Sequence[bytes | memoryview] = b"",
        timeout_seconds: float | None = None,
        asked: Lent | None = None,
        is_last: bool = False,
    ) -> Lent:
        """Send a request and wait for its answer's head; the body is read within the block. Nothing is retried then. `asked`: a
        connection that has sent it already; after an error it is given back. `is_last`: also after `close`."""
        deadline = time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        scope = current_scope()
        if scope is not None and scope.deadline < deadline:
            deadline = scope.deadline
        self._budget.note_call()
        tries = 0
        while True:
            is_asked = asked is not None
            lent, asked = asked or Lent(self), None
            try:
                if not is_asked:
                    self._take(lent, deadline, is_last=is_last)
                left = max(0.0, deadline - time.monotonic())
                lent.incoming = lent.connection.open(
                    method, path, query=query, headers=headers, body=body, timeout_seconds=left, is_asked=is_asked
                )
                return lent  # noqa: TRY300 - up to here an interrupt gives it back
            except (BusyError, UnavailableError) as error:
                lent.give_back()
                tries += 1
                seconds = self._pause_seconds(error, tries, deadline, is_last=is_last)
                if seconds is None:
                    raise
            except BaseException as error:
                lent.give_back(is_known=isinstance(error, KvobjError))
                raise
            pause(seconds)

    def open_on(
        self,
        connection: SignedConnection,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> Incoming:
        """As `open` without a body, on a connection of the caller's own (`own_connection`)."""
        deadline = time.monotonic() + self.timeout_seconds
        self._budget.note_call()
        tries = 0
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return connection.open(method, path, query=query, headers=headers, timeout_seconds=left)
            except (BusyError, UnavailableError) as error:
                tries += 1
                seconds = self._pause_seconds(error, tries, deadline)
                if seconds is None:
                    raise
            pause(seconds)

    def _pause_seconds(self, error: KvobjError, tries: int, deadline: float, *, is_last: bool = False) -> float | None:
        """How long to wait before a call is made once more that has failed so often; None: it is not."""
        seconds = told_seconds(error) + pause_seconds(tries)
        scope = current_scope()
        is_late = time.monotonic() + seconds >= deadline
        is_ended = (scope is not None and scope.is_cancelled) or (self._is_closed and not is_last)
        return None if is_late or is_ended or tries >= self._retry.tries or not self._budget.take() else seconds

    def own_connection(self) -> SignedConnection:
        """A connection that is none of those lent, for an answer that goes on for ever. The caller closes it."""
        if self._is_closed:
            raise _closed()
        return self._connect()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back. Nothing is lent any more, also to who waits for it:
        `UnavailableError`. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._given.ring_all()
        for connection in idle:
            connection.close()

    def give(self, lent: Lent, connection: SignedConnection | None) -> None:
        """A place comes back, with its connection unless that is lost. A broken one has been closed, and opens itself again."""
        with self._lock:
            self._lent.remove(lent)
            if connection is None:
                pass
            elif self._is_closed or len(self._idle) >= self._connections:
                connection.close()
            else:
                self._idle.append(connection)
            if self._given:
                self._given.ring()

    def _lend_idle(self) -> Lent | None:
        """One that is idle, if another may be lent."""
        if not self._idle:
            return None
        lent = Lent(self)
        with self._lock:
            if not self._idle or len(self._lent) >= self._connections:
                return None
            self._lent.add(lent)
            lent.connection = self._idle.pop()
        return lent

    def _take(self, lent: Lent, deadline: float, *, is_last: bool) -> None:
        """Give it a place and a connection."""
        while True:
            with self._lock:
                if self._is_closed and not is_last:
                    raise _closed()
                if len(self._lent) < self._connections:
                    self._lent.add(lent)
                    if not self._idle:
                        break
                    lent.connection = self._idle.pop()
                    return
                ticket = self._given.ticket()
            self._wait(ticket, deadline)
        lent.connection = self._connect()

    def _wait(self, ticket: threading.Lock, deadline: float) -> None:
        """For a connection that comes back, or for the end of the call."""
        scope = current_scope()
        try:
            if scope is not None:
                scope.guard(partial(wake, ticket))
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnavailableError("all connections of this client are in use")
            self._given.wait(ticket, left)
        finally:
            self._given.drop(ticket)
        if scope is not None:
            scope.unguard()
            if scope.is_cancelled:
                raise UnavailableError("the call was cancelled")


def _closed() -> UnavailableError:
    return UnavailableError("the client is closed")


def read_answer(body: bytes, kind: type[T]) -> T:
    """A msgpack answer. `UnavailableError` for what is none: then this is not the server it was taken for."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except NO_DOCUMENT as error:
        raise UnavailableError("the answer is none of a kvobj server", reason=str(error)) from error
