"""One signed HTTP connection to a server, kept alive, each wait with a deadline.

Synchronous and for one thread. A request on a kept connection that the server has closed meanwhile is sent once more on
a new one, which is safe since every call here is idempotent or answers a repeat with a conflict; nothing else is retried.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

from kvobj.client.credentials import Credentials
from kvobj.client.errors import answer_error
from kvobj.client.sigv4 import UNSIGNED_PAYLOAD, encoded_path, encoded_query, signed_headers
from kvobj.errors import InvalidRequestError, UnavailableError

TIMEOUT_SECONDS: Final = 60.0

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Read at once: between two pieces the deadline is looked at."""

T = TypeVar("T")


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
            port = parts.port
        except ValueError as error:
            raise InvalidRequestError("not an endpoint like http://HOST:PORT", endpoint=url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise InvalidRequestError("not an endpoint like http://HOST:PORT", endpoint=url)
        is_tls = parts.scheme == "https"
        return cls(is_tls=is_tls, host=parts.hostname, port=port or (443 if is_tls else 80))

    @property
    def host_header(self) -> str:
        """Value of the Host header, which the signature covers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


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


class Incoming:
    """An answer of status 2xx or 3xx whose body is still to be read. A context manager: what is left unread at its end costs the
    connection. Reading raises `UnavailableError` where the body ends early or does not come in time."""

    def __init__(
        self,
        response: http.client.HTTPResponse,
        connection: http.client.HTTPConnection,
        *,
        deadline: float,
        unavailable: Callable[[Exception], UnavailableError],
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in response.getheaders()}
        self._response = response
        self._connection = connection
        self._socket = connection.sock  # a connection that the server closes after this answer forgets it
        self._deadline = deadline
        self._unavailable = unavailable

    def allow(self, seconds: float) -> None:
        """Set another deadline, from now: what is read next of a long answer may take so long."""
        self._deadline = time.monotonic() + seconds

    def read(self) -> bytes:
        """All that is left."""
        return self._reading(self._response.read)

    def readinto(self, view: memoryview) -> None:
        """Fill the whole view."""
        filled = 0
        while filled < len(view):
            piece = view[filled : filled + _PIECE_BYTES]
            count = self._reading(lambda piece=piece: self._response.readinto(piece))  # type: ignore[misc]
            if not count:
                raise self._unavailable(http.client.IncompleteRead(b"", len(view) - filled))
            filled += count

    def readline(self) -> bytes:
        """The next line; b"" at the end."""
        return self._reading(self._response.readline)

    def close(self) -> None:
        """Read no more. Idempotent."""
        if not self._response.isclosed():
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reading(self, read: Callable[[], T]) -> T:
        try:
            if self._socket is not None and self._socket.fileno() >= 0:
                self._socket.settimeout(_left(self._deadline))
            return read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise self._unavailable(error) from error


class SignedConnection:
    """Sends signed requests to one endpoint. A context manager; not thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        *,
        region: str = "us-east-1",
        timeout_seconds: float = TIMEOUT_SECONDS,
        wall_seconds: Callable[[], float] = time.time,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._credentials = credentials
        self._region = region
        self._wall_seconds = wall_seconds
        self._timeout_seconds = timeout_seconds
        if endpoint.is_tls:
            context = tls or ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=timeout_seconds, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_seconds)

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
    ) -> Incoming:
        """Send a request and read the head of its answer, all within the timeout; the body is the caller's to read.

        A body of several buffers is sent without being copied, and not signed. Errors are those of `request`.
        """
        deadline = time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        target = encoded_path(path) + ("?" + encoded_query(query) if query else "")
        for is_last_try in (False, True):
            was_kept = self._connection.sock is not None
            try:
                self._connection.timeout = _left(deadline)
                if self._connection.sock is not None:
                    self._connection.sock.settimeout(self._connection.timeout)
                signed = self._signed(method, path, query, headers or {}, body)
                with suppress(BrokenPipeError):  # who refuses a body may have answered before the last of it
                    self._connection.request(method, target, body, signed)
                response = self._connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self._connection.close()
                if is_last_try or not was_kept:
                    raise self._unavailable(error) from error
                continue
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                raise self._unavailable(error) from error
            incoming = Incoming(response, self._connection, deadline=deadline, unavailable=self._unavailable)
            if incoming.status >= http.client.BAD_REQUEST:
                with incoming:
                    content_type = incoming.headers.get("content-type", "")
                    raise answer_error(incoming.status, incoming.read(), content_type=content_type)
            return incoming
        raise AssertionError("unreachable: the last try returns or raises")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signed(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        body: bytes | Sequence[bytes | memoryview],
    ) -> dict[str, str]:
        timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall_seconds()))
        signed = signed_headers(
            self._credentials,
            method=method,
            path=path,
            query=query,
            headers={"host": self.endpoint.host_header, **{name.lower(): value for name, value in headers.items()}},
            payload_sha256=hashlib.sha256(body).hexdigest() if isinstance(body, bytes) else UNSIGNED_PAYLOAD,
            region=self._region,
            timestamp=timestamp,
        )
        if not isinstance(body, bytes):
            signed["content-length"] = str(sum(len(buffer) for buffer in body))
        return signed

    def _unavailable(self, error: Exception) -> UnavailableError:
        reason = str(error) or type(error).__name__
        return UnavailableError("no answer from the server", endpoint=self.endpoint.host_header, reason=reason)


def _left(deadline: float) -> float:
    """Seconds to a deadline; TimeoutError where none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
