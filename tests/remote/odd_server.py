"""A small S3 server in the test's own process that answers as it is told: rightly, unless a script stands ready for the request.

Objects lie in a dict, signatures are not checked. Scripts are taken in order by requests for keys under `t/`, the others (probes)
never meet one. A script is given the request and the connection, and may answer, half-answer, stall, reset or do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import socket
import ssl
import struct
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from kvobj.clock import SystemClock
from kvobj.codec.checksums import crc32c
from kvobj.config import RemoteSettings
from kvobj.metrics import Metrics
from kvobj.tiers.remote import pacing
from kvobj.tiers.remote.bucket import RemoteBucket

BUCKET: Final = "odd"


def date() -> str:
    """Now, as HTTP tells it."""
    return formatdate(usegmt=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def byte_range(self) -> tuple[int, int]:
        """First and last of the range asked for."""
        first, last = self.headers["range"].removeprefix("bytes=").split("-")
        return int(first), int(last)


@dataclass(frozen=True, slots=True)
class Right:
    """The right answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def head(self, **changes: str) -> bytes:
        """Status line and fields, with changes; a value of "" leaves a field out. Names with `_` for `-`."""
        fields = {"content-length": str(len(self.body)), "date": date(), "server": "odd"} | self.headers
        fields |= {name.replace("_", "-"): value for name, value in changes.items()}
        lines = [f"{name}: {value}\r\n" for name, value in fields.items() if value]
        return f"HTTP/1.1 {self.status} X\r\n{''.join(lines)}\r\n".encode()

    def whole(self) -> bytes:
        """All of it."""
        return self.head() + self.body


class Line:
    """One client's connection."""

    def __init__(self, server: OddServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer
        self.is_open = True
        self.gone = asyncio.Event()

    async def send(self, data: bytes) -> None:
        """Send it all."""
        self.writer.write(data)
        await self.writer.drain()

    async def close(self) -> None:
        """End in good order."""
        self.is_open = False
        self.writer.close()

    async def reset(self) -> None:
        """End without it."""
        self.is_open = False
        bound: socket.socket = self.writer.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def wait_gone(self) -> None:
        """Until the client has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.is_open = False
        self.gone.set()


Script = Callable[[Asked, Line], Awaitable[None]]


async def rightly(asked: Asked, line: Line) -> None:
    """The script that is none."""
    await line.send(line.server.answer(asked).whole())


class OddServer:
    """See the module. `asked` is all that came for keys under `t/`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}  # of objects made of parts
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.scripts: list[Script] = []
        self.always: Script | None = None
        self.asked: list[Asked] = []
        self.connections = 0
        self.knows_crc = True
        self.has_md5_etags = True
        self.port = 0
        self._lines: set[asyncio.Task[None]] = set()

    def of(self, method: str) -> list[Asked]:
        """What came with this method."""
        return [each for each in self.asked if each.method == method]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        self.connections += 1
        line = Line(self, reader, writer)
        try:
            while line.is_open:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")[:-2]
                headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
                method, target, _ = first.split(" ")
                parts = urlsplit(target)
                key = unquote(parts.path.removeprefix(f"/{BUCKET}").lstrip("/"))
                query = dict(parse_qsl(parts.query, keep_blank_values=True))
                length = int(headers.get("content-length", 0))
                is_test = key.startswith("t/")
                if is_test and self.scripts and getattr(self.scripts[0], "is_early", False):
                    asked = Asked(method, key, query, headers, b"")
                else:
                    asked = Asked(method, key, query, headers, await reader.readexactly(length))
                script: Script = rightly
                if is_test:
                    self.asked.append(asked)
                    script = self.scripts.pop(0) if self.scripts else self.always or rightly
                await script(asked, line)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # streams would log a cancelled one
        finally:
            line.gone.set()
            writer.close()
            self._lines.discard(task)

    async def aclose(self) -> None:
        """End what is being served."""
        for task in self._lines:
            task.cancel()
        if self._lines:
            await asyncio.wait(self._lines)

    def answer(self, asked: Asked) -> Right:  # noqa: PLR0911 - one a method
        """What a right server says, and does."""
        match asked.method:
            case "GET" if asked.key and "uploadId" not in asked.query:
                return self._get(asked)
            case "HEAD":
                found = self.objects.get(asked.key)
                if found is None:
                    return Right(404)
                return Right(
                    200,
                    {
                        "content-length": str(len(found)),
                        "etag": self.etags.get(asked.key) or etag(found),
                        "last-modified": date(),
                    },
                )
            case "PUT":
                return self._put(asked)
            case "POST":
                return self._post(asked)
            case "DELETE":
                if "uploadId" in asked.query:
                    gone = self.uploads.pop(asked.query["uploadId"], None)
                    return Right(204) if gone is not None else error(404, "NoSuchUpload")
                self.objects.pop(asked.key, None)
                return Right(204)
            case _:
                return self._list(asked)

    def _get(self, asked: Asked) -> Right:
        found = self.objects.get(asked.key)
        if found is None:
            return error(404, "NoSuchKey")
        if "range" not in asked.headers:
            return Right(200, {"etag": etag(found)}, found)
        first, last = asked.byte_range
        if first >= len(found):
            return error(416, "InvalidRange")
        piece = found[first : last + 1]
        told = f"bytes {first}-{first + len(piece) - 1}/{len(found)}"
        return Right(206, {"etag": etag(found), "content-range": told}, piece)

    def _put(self, asked: Asked) -> Right:
        crc = asked.headers.get("x-amz-checksum-crc32c")
        if (
            self.knows_crc
            and crc is not None
            and crc != b64encode(crc32c(memoryview(asked.body)).to_bytes(4, "big")).decode()
        ):
            return error(400, "BadDigest")
        payload = asked.headers.get("x-amz-content-sha256", "")
        if len(payload) == 64 and payload != hashlib.sha256(asked.body).hexdigest():
            return error(400, "XAmzContentSHA256Mismatch")
        if "partNumber" in asked.query:
            upload = self.uploads.get(asked.query["uploadId"])
            if upload is None:
                return error(404, "NoSuchUpload")
            upload[int(asked.query["partNumber"])] = asked.body
        else:
            is_there = asked.key in self.objects
            if asked.headers.get("if-none-match") == "*" and is_there:
                return error(412, "PreconditionFailed")
            if "if-match" in asked.headers and etag(self.objects.get(asked.key, b"")) != asked.headers["if-match"]:
                return error(412, "PreconditionFailed")
            self.objects[asked.key] = asked.body
        return Right(200, {"etag": etag(asked.body) if self.has_md5_etags else '"opaque"'})

    def _post(self, asked: Asked) -> Right:
        if "uploads" in asked.query:
            upload_id = f"upload-{zlib.crc32(asked.key.encode())}-{len(self.asked)}"
            self.uploads[upload_id] = {}
            return document("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
        if "delete" in asked.query:
            return document("DeleteResult", "")
        parts = self.uploads.pop(asked.query["uploadId"], None)
        if parts is None:
            return error(404, "NoSuchUpload")
        self.objects[asked.key] = b"".join(parts[number] for number in sorted(parts))
        sums = b"".join(_md5(parts[number]).digest() for number in sorted(parts))
        told = self.etags[asked.key] = f'"{_md5(sums).hexdigest()}-{len(parts)}"'
        return document("CompleteMultipartUploadResult", f"<ETag>{escape(told)}</ETag>")

    def _list(self, asked: Asked) -> Right:
        prefix, after = asked.query.get("prefix", ""), asked.query.get("start-after", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page = keys[: int(asked.query.get("max-keys", 1000))]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size></Contents>" for key in page
        )
        return document("ListBucketResult", f"<IsTruncated>{str(len(page) < len(keys)).lower()}</IsTruncated>{entries}")


def _md5(body: bytes) -> hashlib._Hash:
    return hashlib.md5(body, usedforsecurity=False)


def etag(body: bytes) -> str:
    """As S3 has it."""
    return f'"{_md5(body).hexdigest()}"'


def error(status: int, code: str, **headers: str) -> Right:
    """An error document."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Right(status, named, f"<Error><Code>{code}</Code><Message>told so</Message></Error>".encode())


def document(name: str, inside: str) -> Right:
    """A document."""
    xmlns = "http://s3.amazonaws.com/doc/2006-03-01/"
    return Right(200, {}, f'<?xml version="1.0"?><{name} xmlns="{xmlns}">{inside}</{name}>'.encode())


def saying(right: Right) -> Script:
    """A script that answers this."""

    async def script(_: Asked, line: Line) -> None:
        await line.send(right.whole())

    return script


@dataclass(slots=True)
class World:
    """A server and a bucket that speaks to it."""

    server: OddServer
    bucket: RemoteBucket
    metrics: Metrics

    def count(self, name: str, **labels: str) -> float:
        """A metric's value, 0 where there is none."""
        return self.metrics.registry.get_sample_value(f"kvobj_remote_{name}", labels) or 0.0


@asynccontextmanager
async def odd_world(
    *,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    is_probed: bool = True,
    **changes: Any,  # noqa: ANN401 - as the settings have them
) -> AsyncIterator[World]:
    """Both of them; the bucket has been probed, unless told otherwise. `changes` are of its settings; times are short."""
    odd = OddServer()
    listener = await asyncio.start_server(odd.serve, host, 0, ssl=tls)
    odd.port = listener.sockets[0].getsockname()[1]
    chosen = {
        "part_bytes": 64 * 1024,
        "connect_timeout_seconds": 2.0,
        "request_timeout_seconds": 5.0,
        "operation_timeout_seconds": 10.0,
        "stall_timeout_seconds": 0.2,
        "hedge_seconds": 0.0,
    } | changes
    endpoint = f"{'http' if tls is None else 'https'}://{host}:{odd.port}"
    settings = RemoteSettings(endpoint, BUCKET, "access", "secret-key", **chosen)
    metrics = Metrics()
    bucket = await RemoteBucket.open(
        settings, clock=SystemClock(), metrics=metrics, run=run_on_pool, log=logging.getLogger("odd")
    )
    try:
        if is_probed:
            await bucket.probe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pacing, "_BASE_SECONDS", 0.01)  # shorter pauses: what is tested is what comes after them
            yield World(odd, bucket, metrics)
    finally:
        await bucket.aclose()
        listener.close()
        await odd.aclose()
        await listener.wait_closed()


async def run_on_pool(work: Callable[..., Any], /, *arguments: object) -> Any:  # noqa: ANN401 - whatever the work gives
    """See `RunOnPool`."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that differ."""
    return random.Random(seed).randbytes(size)
