"""Fuzz target for headers and parameters: every parser that takes a verified request's fields, and which operation it is.

What must hold: only typed refusals; ranges lie inside their object; what is stored can be sent again without splitting a reply;
dates, keys and tokens come back from their own spelling.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec
from fuzz_framing import require_refusal
from fuzz_message import MessageMutator, parse_message, recorded_messages
from fuzz_signatures import ALICE, RULES, head_of

from kvobj.api.accepting import parse_accept
from kvobj.api.access.source_address import came_by_tls, parse_address, source_address
from kvobj.api.access.stated_acl import acl_of_headers
from kvobj.api.checksums import (
    check_document,
    check_trailers,
    checksum_headers,
    of_parts,
    parse_announced,
    parse_upload_checksum,
)
from kvobj.api.chunk_headers import parse_chunk_headers, parse_pin, refuse_chunk_headers
from kvobj.api.conditions import (
    http_date,
    judge_copy,
    judge_read,
    parse_delete_condition,
    parse_http_date,
    parse_write_condition,
    range_still_holds,
)
from kvobj.api.header_text import from_wire, is_plain, to_wire
from kvobj.api.object_headers import (
    check_no_overrides,
    object_headers,
    parse_durability,
    parse_metadata,
    parse_stored_headers,
    write_headers,
)
from kvobj.api.ranges import parse_copy_range, parse_range
from kvobj.api.request import Target, parse_fields, parse_target
from kvobj.api.routing import decode_token, encode_token, parse_operation
from kvobj.api.settings.attributes import parse_attributes
from kvobj.api.settings.tags import tags_of_header
from kvobj.api.sigv4 import Authentication, PayloadMode
from kvobj.catalog.rows import BucketKind, BucketRow, Checksum, Durability, ObjectRow, PartRow, UploadRow
from kvobj.catalog.setting_rows import LifecycleRule
from kvobj.codec.checksums import Digester
from kvobj.errors import KvobjError

ROW: Final = ObjectRow(
    bucket="bucket",
    key="object",
    blobs=(),
    size_bytes=5,
    etag="5d41402abc4b2a76b9719d911017c592",
    modified_ms=1_767_323_045_000,
    owner="alice",
    durability=Durability.LOCAL,
    headers={"content-type": "text/plain"},
    metadata={"colour": "ü"},
    checksums=(Checksum("CRC32", "NhCmhg=="),),
)
_PROXIES: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
CHUNKS: Final = BucketRow("chunks", BucketKind.KV, "alice", 0, Durability.MEMORY)
BUCKET: Final = BucketRow("bucket", BucketKind.ORDINARY, "alice", 0, Durability.LOCAL)


class FieldTarget:
    """All that is read of a request's target and headers once it is known who sent it."""

    name = "fields"
    modules = (
        "kvobj/api/access/source_address.py",
        "kvobj/api/access/stated_acl.py",
        "kvobj/api/checksums.py",
        "kvobj/api/chunk_headers.py",
        "kvobj/api/conditions.py",
        "kvobj/api/header_text.py",
        "kvobj/api/object_headers.py",
        "kvobj/api/parameters.py",
        "kvobj/api/ranges.py",
        "kvobj/api/routing.py",
        "kvobj/api/kv/routing.py",
    )

    def __init__(self) -> None:
        self._pool = recorded_messages()

    def seeds(self) -> list[bytes]:
        return [message.encode() for message in self._pool]

    def make(self, random: Random) -> bytes:
        return MessageMutator(random, self._pool, []).change(random.choice(self._pool), most=6).encode()

    def run(self, case: bytes) -> str:
        message = parse_message(case)
        if message is None:
            return "no case"
        head = head_of(message)
        try:
            fields = parse_fields(head)
            target = parse_target(head.target, fields.get("host", ""), RULES)
        except KvobjError as error:
            require_refusal(error)
            return "no request"
        refused = [name for name, read in _READERS.items() if not _try(read, fields)]
        refused += [] if _try(lambda _: _read_target(head.method, target, fields), fields) else ["operation"]
        return f"{len(refused)} refuse"


def _try(read: Callable[[dict[str, str]], object], fields: dict[str, str]) -> bool:
    try:
        read(fields)
    except KvobjError as error:
        require_refusal(error)
        return False
    return True


def _read_target(method: str, target: Target, fields: dict[str, str]) -> None:
    operation = parse_operation(method, target, fields)
    assert getattr(operation, "bucket", target.bucket) == target.bucket
    assert getattr(operation, "key", target.key) == target.key
    limit = getattr(operation, "limit", None)
    assert limit is None or 0 <= limit <= 10_000
    token = target.parameters.get("continuation-token")
    if token is not None:
        after = decode_token(token)
        assert decode_token(encode_token(after)) == after


def _read_range(fields: dict[str, str]) -> None:
    for size in (1 << 40, 5, 0):
        found = parse_range(fields.get("range", ""), size)
        assert found is None or 0 <= found[0] < found[1] <= size


def _read_copy_range(fields: dict[str, str]) -> None:
    try:
        start, stop = parse_copy_range(fields.get("x-amz-copy-source-range", "bytes=0-1"), 5)
    except ValueError:
        return
    assert 0 <= start < stop <= 5


def _read_dates(fields: dict[str, str]) -> None:
    for name in ("if-modified-since", "if-unmodified-since", "if-range", "date", "expires", "x-amz-date"):
        seconds = parse_http_date(fields.get(name, ""))
        if seconds is not None and 0 <= seconds < 253_402_300_800:  # the year 10000
            assert parse_http_date(http_date(seconds * 1000)) == seconds


def _read_metadata(fields: dict[str, str]) -> None:
    stored, metadata = parse_stored_headers(fields), parse_metadata(fields)
    for value in (*stored.values(), *map(to_wire, metadata.values())):
        assert is_plain(value)
        assert not {"\r", "\n"}.intersection(value)
    for value in metadata.values():
        assert to_wire(value).isascii()
        value.encode()  # catalogs keep UTF-8


def _read_replies(fields: dict[str, str]) -> None:
    overrides = {f"response-{name}": value for name, value in fields.items()}
    name = from_wire(fields.get("x-kvobj-namespace", ""))
    chunk = msgspec.structs.replace(
        ROW,
        namespace=name,
        parent=f"{name}/x" if "range" in fields else None,
        tokens=len(fields) % 3,
        digest=b"d" * 32,
        checksums=(),
    )
    headers = object_headers(ROW, BUCKET, overrides={}, with_checksums=False)
    headers += write_headers(ROW, BUCKET, existed=False, durability=Durability.LOCAL)
    headers += write_headers(chunk, CHUNKS, existed=True, durability=Durability.MEMORY)
    if is_plain(name):  # what a PUT names has been checked
        headers += object_headers(chunk, CHUNKS, overrides={}, with_checksums=True)
    old = msgspec.structs.replace(BUCKET, lifecycle=(LifecycleRule('r\r\n"ü', enabled=True, expire_days=1),))
    headers += object_headers(ROW, old, overrides={}, with_checksums=False)
    headers += write_headers(ROW, old, existed=False, durability=Durability.LOCAL)
    headers += object_headers(ROW, BUCKET, overrides=overrides, with_checksums=True)
    for name, value in headers:
        (name + value).encode("latin-1")
        assert not {"\r", "\n", "\0"}.intersection(value)


def _read_source(fields: dict[str, str]) -> None:
    assert source_address("127.0.0.1", fields, ()) == "127.0.0.1", "a header is believed"
    assert parse_address(source_address("127.0.0.1", fields, _PROXIES)) is not None
    came_by_tls("127.0.0.1", fields, _PROXIES)


def _read_announced(fields: dict[str, str], mode: PayloadMode) -> None:
    digest = hashlib.sha256(b"hello").hexdigest() if mode is PayloadMode.HASHED and "range" not in fields else None
    authentication = Authentication(ALICE, mode, digest, None, is_presigned=False)
    announced = parse_announced(fields, authentication, default_algorithm="CRC32" if "x-amz-date" in fields else None)
    trailers: dict[str, str] = {}
    if announced.in_trailer or "origin" in fields:
        value = fields.get("content-md5", "NhCmhg==")
        trailers = {f"x-amz-checksum-{(announced.algorithm or 'CRC32').lower()}": value}
    value_given = check_trailers(announced, trailers)
    check_document(announced, value_given, b"hello")


def _read_checksums(fields: dict[str, str]) -> None:
    """What an upload's headers say, and the checksum of parts that have that algorithm's or another."""
    algorithm, kind = parse_upload_checksum(fields)
    upload = UploadRow(
        "bucket", "key", "UP", 0, "alice", Durability.LOCAL, checksum_algorithm=algorithm, checksum_type=kind
    )
    digester = Digester(frozenset({(algorithm or "CRC32").lower()}))
    digester.update(memoryview(b"hello"))
    own = Checksum(algorithm or "CRC32", digester.base64((algorithm or "CRC32").lower()))
    other = None if "range" in fields else Checksum("SHA1", "qvTGHdzF6KLavt4PO0gs2a6pQ00=")
    for second in (own, other):
        parts = [PartRow("UP", number, (), 5, "e", 0, checksum=each) for number, each in ((1, own), (2, second))]
        for _, value in checksum_headers(of_parts(upload, parts if "x-amz-date" in fields else ())):
            value.encode("ascii")


_READERS: Final[dict[str, Callable[[dict[str, str]], object]]] = {
    "range": _read_range,
    "copy range": _read_copy_range,
    "dates": _read_dates,
    "metadata": _read_metadata,
    "replies": _read_replies,
    "announced hashed": lambda fields: _read_announced(fields, PayloadMode.HASHED),
    "announced unsigned": lambda fields: _read_announced(fields, PayloadMode.UNSIGNED),
    "announced trailer": lambda fields: _read_announced(fields, PayloadMode.CHUNKS_UNSIGNED_TRAILER),
    "upload checksum": _read_checksums,
    "tags": tags_of_header,
    "attributes": parse_attributes,
    "acl": lambda fields: acl_of_headers(fields, owner="alice", bucket_owner="bob", on_bucket="range" in fields),
    "source address": _read_source,
    "overrides": lambda fields: check_no_overrides({f"response-{name}": "x" for name in fields}),
    "durability": parse_durability,
    "read condition": lambda fields: judge_read(fields, ROW),
    "copy condition": lambda fields: judge_copy(fields, ROW),
    "write condition": parse_write_condition,
    "delete condition": parse_delete_condition,
    "if-range": lambda fields: range_still_holds(fields.get("if-range"), ROW),
    "chunk": parse_chunk_headers,
    "no chunk": refuse_chunk_headers,
    "pin": parse_pin,
    "accept": parse_accept,
}
