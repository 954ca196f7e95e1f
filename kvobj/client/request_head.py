"""The head of an HTTP/1.1 request, signed with Signature Version 4. Pure but for what a `SignedHeads` keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvobj.client.credentials import Credentials
from kvobj.client.native_fetch import FetchCalls, NativeFrame, native_frame
from kvobj.client.sigv4 import EMPTY_SHA256, SigningFrame, encoded_path, encoded_query
from kvobj.errors import InvalidRequestError

_NEVER: Final = -1


class SignedHeads:
    """Heads of requests to one host in the name of one user. Not thread-safe.

    What follows the request line is the same but for the signature for all requests of a second with the same fields and payload:
    it is written once, and kept for the next one.
    """

    __slots__ = (
        "_credentials", "_fields", "_frame", "_headers", "_host", "_native", "_native_headers", "_native_second",
        "_payload_sha256", "_region", "_second",
    )  # fmt: skip

    def __init__(self, credentials: Credentials, *, host: str, region: str) -> None:
        self._credentials = credentials
        self._host = host
        self._region = region
        self._second = _NEVER
        self._headers: Mapping[str, str] = {}
        self._payload_sha256 = ""
        self._fields = ""
        self._frame: SigningFrame | None = None
        self._native: NativeFrame | None = None
        self._native_second = _NEVER
        self._native_headers: Mapping[str, str] = {}

    def native(self, calls: FetchCalls, headers: Mapping[str, str], *, second: int) -> NativeFrame | None:
        """What a native GET of any path without a query is signed with, in the second and with the fields given. Errors as `head`;
        None where it is too long. It is written anew by the next call for another second or other fields."""
        if second != self._native_second or headers != self._native_headers:
            frame = self._begin(headers, EMPTY_SHA256, second)
            self._native = native_frame(calls, frame, self._fields)
            self._native_second, self._native_headers = second, self._headers
        return self._native

    def head(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        payload_sha256: str,
        *,
        second: int,
        length: int | None = None,
    ) -> bytes:
        """Request line and fields with the blank line behind them. `path` is not yet encoded, `headers` are signed as well,
        `second` is that of the epoch, and `length` of the body stands in Content-Length, if there is one. `InvalidRequestError`
        for a field that would end its line too early or is not Latin-1."""
        frame = self._frame
        if (
            frame is None
            or second != self._second
            or payload_sha256 != self._payload_sha256
            or headers != self._headers
        ):
            frame = self._begin(headers, payload_sha256, second)
        target, asked = encoded_path(path), encoded_query(query) if query else ""
        signature = frame.signature(method, target, asked)
        if asked:
            target = f"{target}?{asked}"
        framing = "" if length is None else f"content-length: {length}\r\n"
        return f"{method} {target} HTTP/1.1\r\n{self._fields}{signature}\r\n{framing}\r\n".encode("latin-1")

    def _begin(self, headers: Mapping[str, str], payload_sha256: str, second: int) -> SigningFrame:
        self._frame = None
        frame = SigningFrame.of(
            self._credentials,
            {"host": self._host, **{name.lower(): value for name, value in headers.items()}},
            payload_sha256=payload_sha256,
            region=self._region,
            timestamp=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)),
        )
        self._fields = field_lines({**frame.headers, "authorization": frame.authorization})[:-2]
        self._second, self._headers, self._payload_sha256 = second, dict(headers), payload_sha256
        self._frame = frame
        return frame


def field_lines(headers: Mapping[str, str]) -> str:
    """Fields as lines, each with its end. `InvalidRequestError` for what would end a line too early or is not Latin-1: a header is
    never the place for two."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise InvalidRequestError("a header field with a line break or a NUL")
    try:
        text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise InvalidRequestError("a header field that is not Latin-1") from error
    return text
