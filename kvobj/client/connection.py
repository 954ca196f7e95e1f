"""One signed HTTP connection to a server, kept alive, each wait with a deadline.

Synchronous and for one thread. A request on a kept connection that the server has closed meanwhile is sent once more on
a new one, which is safe since every call here is idempotent or answers a repeat with a conflict; nothing else is retried.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

from kvobj.client.call_scope import CallScope, current_scope
from kvobj.client.credentials import Credentials
from kvobj.client.errors import answer_error
from kvobj.client.incoming import Incoming
from kvobj.client.native_fetch import BROKEN_HEAD, HANDED, STALE, TIMED_OUT, UNFIT, fetch_calls
from kvobj.client.request_head import SignedHeads
from kvobj.client.sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD
from kvobj.client.wire import ServerClosedError, Wire
from kvobj.errors import ConfigurationError, InvalidRequestError, UnavailableError
from kvobj.wire.response_head import BrokenAnswerError, ResponseHead

__all__ = ["Answer", "Endpoint", "Incoming", "SignedConnection"]

TIMEOUT_SECONDS: Final = 60.0

ASK: Final = UNFIT
ASKED: Final = HANDED
"""What `fetch` tells instead of a number of bytes."""

_FIRST_ERROR_STATUS: Final = 400
_PLAIN_ANSWERS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_CLOSED: Final = (ServerClosedError, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How the end of a connection is told; by TLS in words of its own, as it cannot be seen beforehand there (`Wire.is_stale`)."""
_BODILESS_METHODS: Final = frozenset({"GET", "HEAD", "DELETE"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. `host_header` is what it calls itself: the port stands in it unless it is the scheme's own."""

    is_tls: bool
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """From `http://HOST:PORT`. `InvalidRequestError` for anything else."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname or ""
            host.encode("idna")  # as the resolver does: an empty label, or one that is too long, is a ValueError
        except ValueError as error:
            raise InvalidRequestError("not an endpoint like http://HOST:PORT", endpoint=url) from error
        is_host = bool(host) and "@" not in parts.netloc and host.isprintable() and " " not in host
        is_all = not (parts.path.strip("/") or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not is_host or not is_all or port == 0:
            raise InvalidRequestError("not an endpoint like http://HOST:PORT", endpoint=url)
        is_tls = parts.scheme == "https"
        return cls(is_tls=is_tls, host=host, port=port or (443 if is_tls else 80))

    @property
    def host_header(self) -> str:
        """Value of the Host header, which the signature covers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def trusting(ca_bundle: str | PathLike[str]) -> ssl.SSLContext:
    """For connections that trust the authorities of a PEM file (`~/…`: in the user's home), and none of the system's.
    `ConfigurationError` for one that cannot be read, or has none."""
    try:
        return ssl.create_default_context(cafile=Path(ca_bundle).expanduser())
    except ssl.SSLError as error:  # an OSError, too, whose text names OpenSSL's source
        raise ConfigurationError([f"ca_bundle: {fspath(ca_bundle)}: no PEM file of certificates"]) from error
    except (OSError, ValueError, RuntimeError) as error:  # the last: nobody's home
        why = error.strerror if isinstance(error, OSError) else None
        raise ConfigurationError([f"ca_bundle: {fspath(ca_bundle)}: {why or error}"]) from error


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of status 2xx or 3xx; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self) -> dict[str, object]:
        """The body as a JSON object. `UnavailableError` if it is none: then this is not the server it was taken for."""
        try:
            document = json.loads(self.body)
        except ValueError as error:
            raise UnavailableError("the answer is not JSON: is this a kvobj admin port?", status=self.status) from error
        if not isinstance(document, dict):
            raise UnavailableError("the answer is no JSON object: is this a kvobj admin port?", status=self.status)
        return document


class SignedConnection:
    """Sends signed requests to one endpoint. A context manager; not thread-safe. `is_native` False: never by the native library."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        *,
        region: str = "us-east-1",
        timeout_seconds: float = TIMEOUT_SECONDS,
        wall_seconds: Callable[[], float] = time.time,
        tls: ssl.SSLContext | None = None,
        is_native: bool = True,
    ) -> None:
        self.endpoint = endpoint
        self._heads = SignedHeads(credentials, host=endpoint.host_header, region=region)
        self._wall_seconds = wall_seconds
        self._timeout_seconds = timeout_seconds
        self._tls = (tls or ssl.create_default_context()) if endpoint.is_tls else None
        self._wire = Wire()
        self._fetch_calls = fetch_calls() if is_native and not endpoint.is_tls else None

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """Send a request and read its whole answer. A status of 400 or more raises the typed error that fits it;
        `UnavailableError` where nobody answers within the deadline."""
        with self.open(method, path, query=query, headers=headers, body=body) as incoming:
            return Answer(incoming.status, incoming.headers, incoming.read())

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes | Sequence[bytes | memoryview] = b"",
        timeout_seconds: float | None = None,
        is_asked: bool = False,
    ) -> Incoming:
        """Send a request and read the head of its answer, all within the timeout; the body is the caller's to read.

        A body of several buffers is sent without being copied, and not signed. Errors are those of `request`. `is_asked`: `fetch`
        has sent this very request.
        """
        deadline = time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        buffers = body if not isinstance(body, bytes) else (body,) if body else ()
        head = b"" if is_asked else self._signed(method, path, query, headers or {}, body)
        scope = current_scope()
        try:
            if is_asked:
                answered = self._wire.read_head(method=method, deadline=deadline)
            else:
                answered = self._exchange(method, head, buffers, deadline=deadline, scope=scope)
        except (OSError, BrokenAnswerError) as error:
            self._end(scope)
            raise self._unavailable(error) from error
        except BaseException:  # an interrupt: nobody knows what of it was sent, so the connection ends here
            self._end(scope)
            raise
        incoming = Incoming(answered, self._wire, deadline=deadline, scope=scope, unavailable=self._unavailable)
        if incoming.status < _FIRST_ERROR_STATUS:
            return incoming
        with incoming:
            told = incoming.headers
            raise answer_error(
                incoming.status,
                incoming.read(),
                content_type=told.get("content-type", ""),
                retry_after=told.get("retry-after", ""),
            )

    def fetch(self, path: str, headers: Mapping[str, str], room: memoryview, *, timeout_seconds: float) -> int:
        """GET a path, and the whole body of its answer into a room that is writable and not empty: how many bytes it has. `ASK`: it
        could not be done so, call `open`; `ASKED`: call `open` with `is_asked`, since the answer is on its way. Errors as `open`
        and as of reading a body."""
        calls, wire = self._fetch_calls, self._wire
        if calls is None or (frame := self._heads.native(calls, headers, second=int(self._wall_seconds()))) is None:
            return ASK
        scope = current_scope()
        if scope is not None:
            scope.guard(wire.abort)
        try:
            told = wire.fetch(calls, frame, path.encode(), room, seconds=timeout_seconds)
        except BaseException:
            self._end(scope)
            raise
        if told == HANDED:
            return ASKED
        if scope is not None:
            scope.unguard()
        if told >= 0 or told == UNFIT:
            return told
        error = TimeoutError("timed out") if told == TIMED_OUT else wire.fetch_error()
        wire.close()
        if told in (STALE, BROKEN_HEAD):
            return ASK
        raise self._unavailable(error) from error

    def fetched_digest(self) -> bytes | None:
        """BLAKE3 of what the last fetch read, if the server told it."""
        return self._wire.fetched_digest()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------
    def _exchange(
        self,
        method: str,
        head: bytes,
        body: Sequence[bytes | memoryview],
        *,
        deadline: float,
        scope: CallScope | None,
    ) -> ResponseHead:
        """Send, and read the answer's head; on a kept connection that the server has closed, once more on a new one."""
        if self._wire.is_open and self._wire.is_stale():
            self._wire.close()
        was_kept = self._wire.is_open
        while True:
            if not self._wire.is_open:
                self._wire = Wire()
            if scope is not None:
                scope.guard(self._wire.abort)
            if not self._wire.is_open:
                self._wire.connect(self.endpoint.host, self.endpoint.port, tls=self._tls, deadline=deadline)
            try:
                return self._asked(method, head, body, deadline)
            except _CLOSED:
                self._wire.close()
                if not was_kept:
                    raise
                was_kept = False

    def _asked(self, method: str, head: bytes, body: Sequence[bytes | memoryview], deadline: float) -> ResponseHead:
        try:
            self._wire.send(head, body, deadline=deadline)
        except _CLOSED:  # who refuses a body may have answered before the last of it
            answered = self._wire.read_head(method=method, deadline=deadline)
            return msgspec.structs.replace(answered, is_kept=False)
        return self._wire.read_head(method=method, deadline=deadline)

    def _end(self, scope: CallScope | None) -> None:
        if scope is not None:
            scope.unguard()
        self._wire.close()

    def _signed(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        body: bytes | Sequence[bytes | memoryview],
    ) -> bytes:
        if not isinstance(body, bytes):
            payload_sha256 = UNSIGNED_PAYLOAD
        else:
            payload_sha256 = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
        length = None
        if body or method not in _BODILESS_METHODS:
            length = len(body) if isinstance(body, bytes) else sum(memoryview(buffer).nbytes for buffer in body)
        second = int(self._wall_seconds())
        return self._heads.head(method, path, query, headers, payload_sha256, second=second, length=length)

    def _unavailable(self, error: Exception) -> UnavailableError:
        reason = str(error) or type(error).__name__
        if isinstance(error, ssl.SSLError) and error.reason in _PLAIN_ANSWERS:
            reason = f"{reason}: does it speak http, not https?"
        elif isinstance(error, ServerClosedError) and self._tls is None:
            reason = f"{reason}: it may have ended, or speak https, not http"
        return UnavailableError("no answer from the server", endpoint=self.endpoint.host_header, reason=reason)
