"""What a signature costs the server: µs of CPU to parse a request's head, target and claim and to verify it, and per chunk.

Each figure stands beside its floor: the hashes that no verifier can leave out, over the same bytes (two SHA-256 and one HMAC of a
request; one SHA-256 and one HMAC of a chunk). Signs by hand like a client, verifies with the server's own parts, in one
thread of one process; the best of many rounds counts, since what is asked is the cost and not the machine's load.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final
from urllib.parse import quote

from command_line import Parser, one_or_more, output_file, run_tool
from rich.console import Console
from rich.table import Table

from kvobj.api.aws_chunked import AwsChunkedSource
from kvobj.api.credential import CredentialParser
from kvobj.api.message import RequestHead
from kvobj.api.request import HostRules, parse_fields, parse_target
from kvobj.api.sigv4 import ChunkSigning, SignatureVerifier
from kvobj.catalog.rows import UserRow
from kvobj.clock import SystemClock

MOST_MICROSECONDS: Final = 25.0
_USER: Final = UserRow("bench", "Bench", "AKBENCHMARK", "a secret of the benchmark only")
_HOST: Final = "127.0.0.1:9000"
_PATH: Final = "/bucket/0123456789abcdef/0123456789abcdef0123456789abcdef.bin"
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
_ROUNDS: Final = 40


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table, in µs of CPU. `most_us`: the target, where there is one."""

    name: str
    parse_us: float
    verify_us: float
    whole_us: float
    floor_us: float
    most_us: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the target is reached, true where there is none."""
        return self.most_us is None or self.whole_us <= self.most_us


def _microseconds(call: Callable[[], object], *, calls: int) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time_ns() - began) / calls)
    return best / 1000


def _signing_key(day: str) -> bytes:
    key = f"AWS4{_USER.secret_key}".encode()
    for piece in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, piece.encode(), "sha256")
    return key


def _signature(canonical: str, stamp: str) -> str:
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{stamp[:8]}/us-east-1/s3/aws4_request\n{digest}"
    return hmac.digest(_signing_key(stamp[:8]), text.encode(), "sha256").hex()


def _signed_head(method: str, headers: dict[str, str], unsigned: dict[str, str], stamp: str) -> tuple[RequestHead, str]:
    digest = headers.setdefault("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    headers |= {"host": _HOST, "x-amz-date": stamp}
    names = sorted(headers)
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    canonical = f"{method}\n{_PATH}\n\n{lines}\n{';'.join(names)}\n{digest}"
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={_USER.access_key}/{stamp[:8]}/us-east-1/s3/aws4_request, "
        f"SignedHeaders={';'.join(names)}, Signature={_signature(canonical, stamp)}"
    )
    fields = {**headers, **unsigned, "authorization": authorization}
    return RequestHead(method, _PATH, tuple(fields.items()), "ID", "127.0.0.1"), canonical


def _presigned_head(stamp: str) -> tuple[RequestHead, str]:
    query = "&".join(
        f"{name}={quote(value, safe='~')}"
        for name, value in (
            ("X-Amz-Algorithm", "AWS4-HMAC-SHA256"),
            ("X-Amz-Credential", f"{_USER.access_key}/{stamp[:8]}/us-east-1/s3/aws4_request"),
            ("X-Amz-Date", stamp),
            ("X-Amz-Expires", "3600"),
            ("X-Amz-SignedHeaders", "host"),
        )
    )
    canonical = f"GET\n{_PATH}\n{query}\nhost:{_HOST}\n\nhost\nUNSIGNED-PAYLOAD"
    target = f"{_PATH}?{query}&X-Amz-Signature={_signature(canonical, stamp)}"
    return RequestHead("GET", target, (("host", _HOST), ("user-agent", "u" * 60)), "ID", "127.0.0.1"), canonical


def _floor_us(canonical: str, *, calls: int) -> float:
    """Two SHA-256 (one of the request, one as long as the string to sign) and one HMAC."""
    request, text, key = canonical.encode(), b"t" * 130, b"k" * 32

    def hashes() -> None:
        hashlib.sha256(request).hexdigest()
        hashlib.sha256(text).hexdigest()
        hmac.digest(key, text, "sha256").hex()

    return _microseconds(hashes, calls=calls)


def _request_figure(name: str, head: RequestHead, canonical: str, *, calls: int) -> Figure:
    rules, parser = HostRules(), CredentialParser(frozenset({"us-east-1"}))
    verifier = SignatureVerifier(SystemClock())
    fields = parse_fields(head)
    target = parse_target(head.target, _HOST, rules)
    credential = parser.parse(fields, target)
    if credential is None:
        raise RuntimeError("the request makes no claim")

    def parse() -> None:
        found = parse_fields(head)
        parser.parse(found, parse_target(head.target, found["host"], rules))

    def verify() -> None:
        verifier.verify(credential, _USER, method=head.method, target=target, fields=fields)

    def whole() -> None:
        found = parse_fields(head)
        parsed = parse_target(head.target, found["host"], rules)
        claim = parser.parse(found, parsed)
        if claim is None:
            raise RuntimeError("the request makes no claim")
        verifier.verify(claim, _USER, method=head.method, target=parsed, fields=found)

    return Figure(
        name,
        _microseconds(parse, calls=calls),
        _microseconds(verify, calls=calls),
        _microseconds(whole, calls=calls),
        _floor_us(canonical, calls=calls),
        MOST_MICROSECONDS,
    )


class _Bytes:
    """A body that is in memory."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self._position = 0
        self.length: int | None = len(data)

    def take_whole(self) -> bytes | None:
        return None

    async def accept(self) -> None:
        """Nobody waits here."""

    async def read_some(self, limit: int) -> bytes:
        """The next bytes."""
        piece = bytes(self._view[self._position : self._position + limit])
        self._position += len(piece)
        return piece

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """Fill the buffer."""
        buffer[:] = self._view[self._position : self._position + len(buffer)]
        self._position += len(buffer)
        on_bytes(len(buffer))


def _chunk_figure(chunk_bytes: int, count: int, stamp: str) -> Figure:
    """Cost of one signed chunk: framing, hash and signature, without the socket."""
    key, scope, seed = _signing_key(stamp[:8]), f"{stamp[:8]}/us-east-1/s3/aws4_request", "5" * 64
    piece, previous, body = b"c" * chunk_bytes, seed, bytearray()
    for data in (*([piece] * count), b""):
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{stamp}\n{scope}\n{previous}\n{_EMPTY_SHA256}\n{hashlib.sha256(data).hexdigest()}"
        previous = hmac.digest(key, text.encode(), "sha256").hex()
        body += f"{len(data):x};chunk-signature={previous}\r\n".encode() + data + b"\r\n"
    signing, wire, out = ChunkSigning(key, seed, stamp, scope), bytes(body), memoryview(bytearray(chunk_bytes * count))

    async def take(*, is_signed: bool, data: bytes) -> None:
        source = AwsChunkedSource(_Bytes(data), len(out), signing=signing if is_signed else None, with_trailer=False)
        await source.receive_into(out, lambda _count: None)
        await source.finish()

    plain = b"".join([f"{chunk_bytes:x}\r\n".encode() + piece + b"\r\n"] * count) + b"0\r\n\r\n"
    with asyncio.Runner() as runner:
        whole = _microseconds(lambda: runner.run(take(is_signed=True, data=wire)), calls=1) / count
        unsigned = _microseconds(lambda: runner.run(take(is_signed=False, data=plain)), calls=1) / count
    to_sign = b"t" * 320

    def floor() -> None:
        hashlib.sha256(piece).hexdigest()
        hmac.digest(key, to_sign, "sha256").hex()

    floor_us = _microseconds(floor, calls=max(1, 2_000_000 // (chunk_bytes + 1)))
    return Figure(f"signed chunk of {chunk_bytes >> 10} KiB", unsigned, whole - unsigned, whole, floor_us)


def figures(*, calls: int) -> list[Figure]:
    """All figures, in the order of the table. Takes some ten seconds at 1,000 calls a round."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    agent = {"user-agent": "u" * 60, "accept-encoding": "identity", "accept": "*/*"}
    get, get_canonical = _signed_head("GET", {}, dict(agent), stamp)
    put, put_canonical = _signed_head(
        "PUT",
        {
            "content-type": "application/octet-stream",
            "x-amz-sdk-checksum-algorithm": "CRC64NVME",
            "x-amz-checksum-crc64nvme": "AAAAAAAAAAA=",
            "x-amz-meta-model": "a model's name",
            "x-amz-meta-part": "1",
            "x-amz-storage-class": "STANDARD",
        },
        {**agent, "content-length": "4194304", "expect": "100-continue"},
        stamp,
    )
    presigned, presigned_canonical = _presigned_head(stamp)
    return [
        _request_figure("GET, header", get, get_canonical, calls=calls),
        _request_figure("PUT, header, 15 fields", put, put_canonical, calls=calls),
        _request_figure("GET, presigned", presigned, presigned_canonical, calls=calls),
        *(_chunk_figure(size << 10, max(4, 4096 // size), stamp) for size in (8, 64, 1024)),
    ]


def main() -> int:
    """Measure, show, write JSON where asked; 1 where a target is missed and `--check` is given."""
    parser = Parser(__doc__)
    parser.add_argument("--calls", type=one_or_more, default=500, help="calls a round (default 500)")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    measured = figures(calls=arguments.calls)
    table = Table(
        title="Signatures, µs of server CPU",
        caption="of chunks, parse is what an unsigned one costs (framing, copying), verify what its signature adds",
    )
    for column in ("what", "parse", "verify", "whole", "floor", "ratio", "target"):
        table.add_column(column, justify="left" if column in ("what", "target") else "right")
    for figure in measured:
        target = "" if figure.most_us is None else f"at most {figure.most_us:g}: {'met' if figure.is_met else 'MISSED'}"
        table.add_row(
            figure.name,
            *(f"{value:.1f}" for value in (figure.parse_us, figure.verify_us, figure.whole_us, figure.floor_us)),
            f"{figure.whole_us / figure.floor_us:.1f}",
            target,
        )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in measured], indent=2) + "\n")
    return 1 if arguments.check and not all(figure.is_met for figure in measured) else 0


if __name__ == "__main__":
    run_tool(main)
