"""Fuzz target for request heads: what arrives on a socket, to one head or a refusal.

What must hold: only typed refusals; the verdict does not depend on how the bytes were cut into reads, but that what is refused early
may be incomplete; a plain head, which is read in one match, reads as by the parser that knows all; what is read is what stands there,
name by name and byte by byte, and there is one reading of its length.
"""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Final

from fuzz_message import FIELDS, recorded
from fuzz_mutation import Mutator
from msgspec.structs import replace

from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead

_END: Final = b"\r\n\r\n"
_TOKENS: Final = (
    b"\r\n", b"\r\n\r\n", b"\n\n", b"\r\n ", b"\r\n\t", b": ", b":", b" :", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b" HTTP/1.10",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"transfer-encoding: identity\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 6\r\n", b"Content-Length: +5\r\n", b"Content-Length: 5, 5\r\n", b"Host: a\r\n", b"Host: b\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"GET ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT ", b"OPTIONS * ", b"http://a/", b"http://", b"https://a:1?", b"//a/", b"#", b"A: b\r\n" * 101, b"A: " + b"b" * 8200 + b"\r\n",
    b"/" + b"x" * 8192, b"Content-Encoding: gzip\r\n", b"Sec-WebSocket-Key1: x\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    *(name + b": " + values[0] + b"\r\n" for name, values in FIELDS.items()),
)  # fmt: skip
_HEADS: Final = (
    b"GET /b/k HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET http://a/ HTTP/1.0\r\n\r\n",
    b"GET http://a:1?x HTTP/1.1\r\nHost: a:1\r\n\r\n",
    b"PUT https://A/b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\nExpect: 100-Continue\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET http://a HTTP/1.1\r\nHost: b\r\n\r\n",
    b"GET http://a<b HTTP/1.0\r\n\r\n",
    b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 00000000000000000005\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 9223372036854775808\r\n\r\n",
    b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"PUT /b/k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"PUT /b/k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"PUT /b/k HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /b/k HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /b/k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n",
    b"GET /" + b"x" * 8200 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\na: " + b"b" * 41_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(99)) + b"\r\n",
)
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_DIGITS: Final = re.compile(r"\d{1,19}", re.ASCII).fullmatch


class _CarefulReader(HeadReader):
    """Reads no head the short way."""

    __slots__ = ()

    def _plain(self, head: bytes) -> None:
        del head


class HeadTarget:
    """`HeadReader`, fed at once and in pieces, and without the short way of plain heads."""

    name = "heads"
    modules = ("kvobj/api/http/request_head.py", "kvobj/api/http/plain_head.py")

    def __init__(self) -> None:
        self._heads = [*(case.partition(_END)[0] + _END for case in recorded()), *_HEADS]
        self._loop = asyncio.new_event_loop()
        self._loop.close()  # the parser wants one, and never runs anything on it
        self._settings = HttpSettings()
        self._names = {f"x-known-{number}": f"x-known-{number}" for number in range(500)}  # nearly as many as are kept

    def seeds(self) -> list[bytes]:
        return [b"%d\n" % step + head for head in self._heads for step in (1000, 100_000)]

    def make(self, random: Random) -> bytes:
        mutator = Mutator(random, _TOKENS)
        head = random.choice(_HEADS if random.random() < 0.2 else self._heads)
        head = mutator.change(head, self._heads, most=4)
        if random.random() < 0.05:
            head = head.replace(b"\r\n", random.choice((b"\n", b"\r", b"\r\r\n", b"\r\n\r\n")))
        if _END not in head and random.random() < 0.7:
            head += _END
        return b"%d\n" % random.choice((1, 3, 17, 100, 1000)) + head

    def run(self, case: bytes) -> str:
        line, _, data = case.partition(b"\n")
        step = int(line) if line.isdigit() and len(line) < 7 else 1
        whole = self._read(data, len(data) + 1, HeadReader)
        careful = self._read(data, len(data) + 1, _CarefulReader)
        read = (replace(whole[0], raw=b""), whole[1]) if isinstance(whole, tuple) else whole
        assert read == careful, "a plain head is read otherwise"
        pieces = self._read(data, max(1, step, len(data) // 300), HeadReader)
        if isinstance(whole, tuple) and isinstance(pieces, tuple):
            assert whole == pieces, "the verdict depends on how the bytes were cut"
            self._check(whole[0], data)
            return "read"
        assert not isinstance(whole, tuple), f"refused only in pieces: {pieces}"
        assert not isinstance(pieces, tuple), f"refused only at once: {whole}"
        return whole

    def _read(self, data: bytes, step: int, kind: type[HeadReader]) -> tuple[ParsedHead, bytes] | str:
        """The head and what follows it, or the word for why there is none."""
        reader = kind(self._loop, self._settings, names=self._names)
        try:
            for start in range(0, len(data), step):
                head, rest = reader.feed(data[start : start + step])
                if head is not None:
                    return head, rest + data[start + step :]
        except HeadError as error:
            if error.fault.status >= 500 and error.fault.status != 505:
                raise AssertionError("a head that is the server's fault") from error
            return error.fault.name.lower()
        assert len(data) <= self._settings.head_bytes + 4 or not data.strip(b"\r\n"), "a head without an end is held"
        return "unfinished"

    @staticmethod
    def _check(head: ParsedHead, data: bytes) -> None:
        text = data.lstrip(b"\r\n").partition(_END)[0]
        assert head.raw in {b"", text + _END}, "a head is not kept as it was sent"
        lines = text.split(b"\r\n")
        method, target, version = lines[0].split(b" ")
        assert head.method.encode("latin-1") == method
        assert head.target.startswith("/")
        assert head.target.lstrip("/") in target.decode("latin-1")
        assert head.is_http_10 == (version == b"HTTP/1.0")
        sent = [line.partition(b":") for line in lines[1:]]
        names = [name.decode("latin-1").lower() for name, _, _ in sent]
        values = [value.strip(b" \t").decode("latin-1") for _, _, value in sent]
        told = list(zip(names, values, strict=True))
        assert list(head.headers)[: len(told)] == told, "headers are not those that were sent"
        assert [name for name, _ in head.headers[len(told) :]] in ([], ["host"])
        for name, value in head.headers:
            assert _NAME(name), name
            assert not {"\r", "\n", "\0"}.intersection(value)
        assert names.count("host") <= 1
        lengths = [value for name, value in told if name == "content-length"]
        if "transfer-encoding" in names:
            assert head.length is None
            assert not lengths, "two ways to tell a length"
        else:
            assert head.length == (int(lengths[0]) if lengths else 0)
            assert len(lengths) <= 1
            assert not lengths or _DIGITS(lengths[0])
