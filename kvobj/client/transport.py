"""Calls of many threads over a few kept connections, each call with a deadline and a bounded number of retries.

What is retried: 503 and connections that broke. Every call may be made twice: PUTs of chunks are idempotent, and a pin whose answer
was lost is found by the next renewal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec

from kvobj.client.connection import Incoming, SignedConnection
from kvobj.client.retry import RetryBudget, RetryRule, pause_seconds
from kvobj.errors import BusyError, UnavailableError

MSGPACK: Final = "application/msgpack"

T = TypeVar("T")


class Transport:
    """Lends connections. Thread-safe. `connect` makes one; at most `connections` are open, and who finds none free waits."""

    def __init__(
        self,
        connect: Callable[[], SignedConnection],
        *,
        connections: int,
        timeout_seconds: float,
        retry: RetryRule,
    ) -> None:
        self._connect = connect
        self._free = threading.BoundedSemaphore(connections)
        self._idle: list[SignedConnection] = []
        self._lock = threading.Lock()
        self._budget = RetryBudget(retry)
        self._is_closed = False
        self.timeout_seconds = timeout_seconds

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

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes | Sequence[bytes | memoryview] = b"",
        timeout_seconds: float | None = None,
    ) -> Iterator[Incoming]:
        """An answer to be read within the block. Once its head is there nothing is retried."""
        deadline = time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)

        def send(connection: SignedConnection) -> Incoming:
            left = max(0.0, deadline - time.monotonic())
            return connection.open(method, path, query=query, headers=headers, body=body, timeout_seconds=left)

        connection, incoming = self._sent(send, deadline)
        try:
            with incoming:
                yield incoming
        finally:
            self._give(connection)

    def _sent(self, send: Callable[[SignedConnection], Incoming], deadline: float) -> tuple[SignedConnection, Incoming]:
        self._budget.note_call()
        tries = 0
        while True:
            connection = self._take(deadline)
            try:
                return connection, send(connection)
            except (BusyError, UnavailableError):
                self._give(connection)
                tries += 1
                pause = pause_seconds(tries)
                is_late = time.monotonic() + pause >= deadline
                if is_late or tries >= self._budget.rule.tries or not self._budget.take():
                    raise
                time.sleep(pause)
            except BaseException:
                self._give(connection)
                raise

    def own_connection(self) -> SignedConnection:
        """A connection that is none of those lent, for an answer that goes on for ever. The caller closes it."""
        return self._connect()

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, deadline: float) -> SignedConnection:
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise UnavailableError("all connections of this client are in use")
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except BaseException:
            self._free.release()
            raise

    def _give(self, connection: SignedConnection) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)
        self._free.release()


def read_answer(body: bytes, kind: type[T]) -> T:
    """A msgpack answer. `UnavailableError` for what is none: then this is not the server it was taken for."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError("the answer is none of a kvobj server", reason=str(error)) from error
