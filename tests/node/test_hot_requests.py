"""Small GETs and PUTs that are answered from their bytes: as all are answered, and never where one would be refused."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import socket
import uuid
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_driver import KvDriver, kv_node
from module_paths import ModulePaths
from s3_driver import ALICE, BOB, HOST, ROOT, FakeBody, WallClock, all_headers, presign, sign

from kvobj.api.exchange import S3Settings
from kvobj.api.hot_requests import HotRequests
from kvobj.api.http.plain_head import read_plain
from kvobj.api.message import RepeatedAnswer, Reply, RequestHead
from kvobj.api.service import S3Service
from kvobj.app.front import OneProcess
from kvobj.app.upstreams import Fronted
from kvobj.catalog.rows import ChunkName, ObjectRow, UserRow
from kvobj.errors import KvobjError
from kvobj.metrics import Metrics
from kvobj.store.object_reads import COPIED_BYTES_MAX
from kvobj.store.write_behind import WriteBehind

MEMORY = {"x-kvobj-durability": "memory"}
BUCKETS = ("cache", "files")
FORMS = ("header", "url")
BODY = bytes(range(256)) * 16


class StillClock(WallClock):
    """Stands still, so that what was looked up stays fresh, unless a test turns it."""

    def __init__(self) -> None:
        super().__init__()
        self._began_ms = super().now_ms()

    def now_ms(self) -> int:
        return self._began_ms + self.offset_ms


@dataclass
class Wired:
    """A service, and requests as they come over the wire."""

    kv: KvDriver
    service: S3Service
    clock: StillClock
    ids: int = 0
    answered: int = 0
    handled: list[str] = field(default_factory=list)

    def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        form: str = "header",
        headers: Mapping[str, str] | None = None,
        user: UserRow = ALICE,
        payload: str = "UNSIGNED-PAYLOAD",
    ) -> bytes:
        """As clients write it."""
        named = dict(headers or {})
        if form == "url":
            target = presign(method, target, user=user)
            fields = [("Host", HOST), *named.items()]
        else:
            fields = sign(method, target, body, headers=named, user=user, payload=payload)
        if method == "PUT":
            fields.append(("Content-Length", str(len(body))))
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields])
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body

    async def handle(self, request: bytes) -> Reply:
        """The way of all requests."""
        at = request.index(b"\r\n\r\n") + 4
        read = read_plain(request[:at], {})
        assert read is not None, request
        method, target, fields = read
        self.ids += 1
        head = RequestHead(method, target, tuple(fields.items()), f"{self.ids:016X}", "127.0.0.1", raw=request[:at])
        return await self.service.handle(head, FakeBody(request[at:]))

    def answer(self, request: bytes) -> RepeatedAnswer | None:
        """From its bytes, if it is one of those."""
        assert self.service.hot.looks_like(request) is not None or b"://" in request
        self.ids += 1
        return self.service.hot.answer(request, f"{self.ids:016X}", waited_ms=0)

    async def send(self, request: bytes) -> tuple[object, ...]:
        """As a connection does."""
        answer = self.answer(request)
        if answer is None:
            return await told(await self.handle(request))
        self.answered += 1
        return await told(answer.reply, answer.body)

    async def known(self, request: bytes) -> RepeatedAnswer:
        """The answer from its bytes to a request, after one like it was handled."""
        assert (await self.handle(request)).status == 200
        answer = self.answer(request)
        assert answer is not None
        return answer

    async def rows(self, bucket: str) -> list[Any]:
        found = [row async for row in self.kv.node.catalog.scan_objects() if row.bucket == bucket]
        return [alike(row) for row in sorted(found, key=lambda row: row.key)]


@asynccontextmanager
async def wired_node(data: Path, memory: Path, settings: S3Settings | None = None) -> AsyncIterator[Wired]:
    async with kv_node(data, memory) as kv:
        clock = StillClock()
        service = S3Service(
            kv.node.store,
            settings or S3Settings(host_id="HOST"),
            clock=clock,
            log=logging.getLogger("test"),
            chunks=kv.chunks,
            executor=kv.node.hash_executor,
        )
        yield Wired(kv, service, clock)


@pytest.fixture
async def wired(tmp_path: Path, shm_path: Path) -> AsyncIterator[Wired]:
    async with wired_node(tmp_path, shm_path) as made:
        yield made


@pytest.fixture
async def other(module_paths: ModulePaths, shm_path: Path) -> AsyncIterator[Wired]:
    (shm_path / "other").mkdir()
    async with wired_node(module_paths.mktemp("other"), shm_path / "other") as made:
        yield made


def alike(row: ObjectRow) -> ObjectRow:
    """A row without what no two writes have in common."""
    blobs = tuple(msgspec.structs.replace(blob, blob_id=b"") for blob in row.blobs)
    etag = row.etag if row.bucket == "files" else ""
    return msgspec.structs.replace(row, blobs=blobs, etag=etag, modified_ms=0, sequence=0)


async def told(reply: Reply, body: bytes | None = None) -> tuple[object, ...]:
    headers = dict(all_headers(reply))
    for name in ("x-amz-request-id", "content-length", "last-modified"):
        headers.pop(name, None)
    if headers.get("etag", "").startswith('"kv'):
        del headers["etag"]
    if body is None:
        body = reply.body if isinstance(reply.body, bytes) else None
    if body is None:
        assert not isinstance(reply.body, bytes)
        body = b"".join([bytes(view) async for view in reply.body.views()])
        await reply.body.aclose()
    return reply.status, headers, b"" if reply.status >= 300 else body, reply.log


async def stored(wired: Wired, target: str, body: bytes, **headers: str) -> None:
    assert (await wired.kv.driver.put(target, body, **headers)).status == 200
    await wired.kv.node.sealing.drain()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bucket", BUCKETS)
async def test_the_first_get_of_a_kind_is_the_handlers_and_those_after_it_say_the_same(
    wired: Wired, bucket: str, form: str
) -> None:
    for key, size_bytes in (("a", 1), ("b", 4096), ("c", COPIED_BYTES_MAX)):
        body = (BODY * 4)[:size_bytes]
        checksum = base64.b64encode(zlib.crc32(body).to_bytes(4)).decode()
        await stored(wired, f"/{bucket}/{key}", body, x_amz_checksum_crc32=checksum)
    headers = {"User-Agent": "a client", "Accept-Encoding": "identity"}
    for asked in ({}, {"x-amz-checksum-mode": "enabled"}):
        if form == "url" and asked:
            continue  # a header that is not in the signature
        first = wired.request("GET", f"/{bucket}/a", form=form, headers=headers | asked)
        assert wired.answer(first) is None
        await told(await wired.handle(first))
        for key in "abc":
            request = wired.request("GET", f"/{bucket}/{key}", form=form, headers=headers | asked)
            answer = wired.answer(request)
            assert answer is not None
            assert await told(answer.reply, answer.body) == await told(await wired.handle(request))
            fields = dict(all_headers(answer.reply))
            assert (fields["content-length"], fields["x-amz-id-2"]) == (str(len(answer.body)), "HOST")
            assert ("x-amz-checksum-crc32" in fields) is bool(asked)
            assert (answer.method, answer.bytes_in) == ("GET", 0)
            assert answer.target == request.split(b" ")[1].decode()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bucket", BUCKETS)
async def test_a_put_from_its_bytes_stores_what_the_handler_stores_and_says_the_same(
    wired: Wired, bucket: str, form: str
) -> None:
    said = {**MEMORY, "content-type": "text/plain", "user-agent": "a client"} if form == "header" else {}
    if form == "url":
        said = {"content-type": "text/plain", "user-agent": "a client"}
        assert (await wired.kv.driver.request("DELETE", f"/{bucket}")).status == 204
        kind = {"x-kvobj-bucket-kind": "kv"} if bucket == "cache" else {}
        made = await wired.kv.driver.request("PUT", f"/{bucket}", headers={**kind, **MEMORY})
        assert made.status == 200
    first = wired.request("PUT", f"/{bucket}/first", BODY, form=form, headers=said)
    assert wired.answer(first) is None
    handled = await wired.handle(first)
    request = wired.request("PUT", f"/{bucket}/other", BODY, form=form, headers=said)
    answer = wired.answer(request)
    assert answer is not None
    status, headers, body, log = await told(answer.reply, answer.body)
    assert (status, headers, body) == (await told(handled))[:3]
    assert log == handled.log | {"key": "other"}
    assert dict(all_headers(answer.reply))["content-length"] == "0"
    assert (answer.method, answer.bytes_in, answer.body) == ("PUT", len(BODY), b"")
    one, two = await wired.rows(bucket)
    assert msgspec.structs.replace(one, key="other") == two
    assert two.headers == {"content-type": "text/plain"}
    assert (await wired.kv.driver.get(f"/{bucket}/other")).body == BODY


@pytest.mark.parametrize("form", FORMS)
async def test_no_byte_of_a_get_may_be_another(wired: Wired, form: str) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a", form=form, headers={"user-agent": "a client"})
    await wired.known(request)
    for place in range(len(request)):
        for byte in (request[place] ^ 1, request[place] ^ 0x20, 0x0D, 0x20):
            if byte != request[place]:
                changed = request[:place] + bytes([byte]) + request[place + 1 :]
                assert wired.service.hot.answer(changed, "R", waited_ms=0) is None, (place, changed)
        assert wired.service.hot.answer(request[:place], "R", waited_ms=0) is None
    for more in (b"x", b"\r\n", request):
        assert wired.answer(request + more) is None
    assert wired.answer(request) is not None


@pytest.mark.parametrize("form", FORMS)
async def test_no_byte_of_a_puts_head_may_be_another_and_its_body_is_whole(wired: Wired, form: str) -> None:
    assert (await wired.kv.driver.request("DELETE", "/files")).status == 204
    assert (await wired.kv.driver.request("PUT", "/files", headers=MEMORY)).status == 200
    request = wired.request("PUT", "/files/a", BODY, form=form, headers={"user-agent": "a client"})
    await wired.known(request)
    (row,) = await wired.rows("files")
    for place in range(len(request) - len(BODY)):
        for byte in (request[place] ^ 1, request[place] ^ 0x20, 0x0D):
            if byte != request[place]:
                changed = request[:place] + bytes([byte]) + request[place + 1 :]
                assert wired.service.hot.answer(changed, "R", waited_ms=0) is None, (place, changed)
    for cut in (request[:-1], request[: -len(BODY)], request + b"x", request + request):
        assert wired.answer(cut) is None
    assert await wired.rows("files") == [row]


@pytest.mark.parametrize("place", ["x-amz-date: ", "Signature="])
async def test_letters_where_time_or_signature_is_go_the_way_of_all(wired: Wired, place: str) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a", headers={"user-agent": "a client"})
    await wired.known(request)
    at = request.lower().index(place.lower().encode()) + len(place)
    for letter in ("ü", "٣"):  # a digit to those who take all of Unicode's
        changed = request[:at] + letter.encode() + request[at + len(letter.encode()) :]
        assert len(changed) == len(request)
        assert wired.answer(changed) is None
    assert wired.answer(request) is not None


def calling(request: bytes, call_id: str) -> bytes:
    """The request with the id that SDKs give a call; boto3's do not sign it."""
    head, end, body = request.partition(b"\r\n\r\n")
    said = f"\r\namz-sdk-invocation-id: {call_id}\r\namz-sdk-request: attempt=1"
    return head + said.encode("latin-1") + end + body


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bucket", BUCKETS)
async def test_calls_of_an_sdk_are_known_though_each_has_an_id_of_its_own(wired: Wired, bucket: str, form: str) -> None:
    for method in ("PUT", "GET"):
        headers = MEMORY if method == "PUT" else {}
        first, second = (
            calling(
                wired.request(
                    method,
                    f"/{bucket}/{key}",
                    BODY if method == "PUT" else b"",
                    form="header" if method == "PUT" else form,
                    headers=headers,
                ),
                str(uuid.uuid4()),
            )
            for key in "ab"
        )
        assert wired.answer(first) is None
        assert (await told(await wired.handle(first)))[0] == 200
        answer = wired.answer(second)
        assert answer is not None
        assert answer.body == (b"" if method == "PUT" else BODY)


async def test_where_a_calls_id_is_nothing_else_may_stand(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    plain, call_id = wired.request("GET", "/cache/a"), str(uuid.uuid4())
    await told(await wired.handle(calling(plain, call_id)))
    assert wired.answer(calling(plain, str(uuid.uuid4()).upper())) is not None
    others = [
        "x\r\nrange: bytes=0-1\r\nuser-agent: xyz",
        "x\nrange: bytes=0-1\nuser-agent: 12345",
        *(call_id[:at] + other + call_id[at + 1 :] for at in range(len(call_id)) for other in "\r\n\0 :gü"),
        call_id[1:],
        call_id + "0",
    ]
    for other in others:
        assert wired.answer(calling(plain, other)) is None, other
    assert wired.answer(calling(plain, call_id)) is not None


def of_cpp(call_id: str, **more: str) -> dict[str, str]:
    """What aws-sdk-cpp says of a call, and signs."""
    return {
        "amz-sdk-invocation-id": call_id,
        "amz-sdk-request": "attempt=1",
        "content-type": "application/xml",
        "x-amz-api-version": "2006-03-01",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


@pytest.mark.parametrize("bucket", BUCKETS)
async def test_calls_whose_id_is_signed_are_known_too(wired: Wired, bucket: str) -> None:
    for method in ("PUT", "GET"):
        body = BODY if method == "PUT" else b""
        first, second, third = (
            wired.request(method, f"/{bucket}/{key}", body, headers=of_cpp(str(uuid.uuid4()).upper(), **more))
            for more in ({} if method == "GET" else {"x_kvobj_durability": "memory"},)
            for key in "abc"
        )
        assert wired.answer(first) is None
        assert (await told(await wired.handle(first)))[0] == 200
        for request in (second, third):
            answer = wired.answer(request)
            assert answer is not None
            assert answer.body == (b"" if method == "PUT" else BODY)


async def test_a_signed_id_that_is_another_calls_is_refused(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    one, other = str(uuid.uuid4()), str(uuid.uuid4())
    request = wired.request("GET", "/cache/a", headers=of_cpp(one))
    await wired.known(request)
    forged = request.replace(one.encode(), other.encode())
    assert wired.answer(forged) is None
    assert (await wired.handle(forged)).status == 403
    assert wired.answer(wired.request("GET", "/cache/a", headers=of_cpp(other))) is not None


async def test_where_a_signed_id_is_nothing_else_may_stand(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    call_id = str(uuid.uuid4())
    await wired.known(wired.request("GET", "/cache/a", headers=of_cpp(call_id)))
    for other in (*(call_id[:at] + "g" + call_id[at + 1 :] for at in range(len(call_id))), "g" * 36, call_id[1:]):
        request = wired.request("GET", "/cache/a", headers=of_cpp(other))
        assert wired.answer(request) is None, other
        assert (await told(await wired.handle(request)))[2] == BODY
    request = wired.request("GET", "/cache/a", headers=of_cpp(call_id))
    for other in ("x\r\nrange: bytes=0-1\r\nuser-agent: xyz", "x\nrange: bytes=0-1\nuser-agent: 12345"):
        assert wired.answer(request.replace(call_id.encode(), other.encode())) is None
    assert wired.answer(request.replace(b"attempt=1", b"attempt=2")) is None
    assert wired.answer(request) is not None


async def test_calls_that_sign_their_id_and_calls_that_do_not_are_of_two_kinds(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    signed = wired.request("GET", "/cache/a", headers=of_cpp(str(uuid.uuid4())))
    await wired.known(signed)
    said = of_cpp(str(uuid.uuid4()))
    del said["amz-sdk-invocation-id"], said["amz-sdk-request"]
    unsigned = calling(wired.request("GET", "/cache/a", headers=said), str(uuid.uuid4()))
    assert wired.answer(unsigned) is None
    await wired.known(unsigned)
    for _ in range(2):
        assert wired.answer(signed) is not None
        assert wired.answer(unsigned) is not None


async def test_a_put_twice_of_a_chunk_goes_the_way_of_all(wired: Wired) -> None:
    request = wired.request("PUT", "/cache/a", BODY, headers=MEMORY)
    assert (await wired.handle(request)).status == 200
    assert wired.answer(request) is None
    assert dict(all_headers(await wired.handle(request)))["x-kvobj-existed"] == "true"
    assert wired.answer(wired.request("PUT", "/cache/b", BODY, headers=MEMORY)) is not None
    other_size = wired.request("PUT", "/cache/b", BODY[:-1], headers=MEMORY)
    assert wired.answer(other_size) is None
    assert (await wired.handle(other_size)).status == 409


async def test_conditions_are_looked_at_each_time(wired: Wired) -> None:
    said = {**MEMORY, "if-none-match": "*"}
    assert (await wired.handle(wired.request("PUT", "/files/a", BODY, headers=said))).status == 200
    again = wired.request("PUT", "/files/b", BODY, headers=said)
    assert wired.answer(again) is not None
    assert wired.answer(again) is None
    assert (await wired.handle(again)).status == 412


async def test_what_is_of_another_class_is_not_stored_from_its_bytes(wired: Wired) -> None:
    local, memory = ({"x-kvobj-durability": name} for name in ("local", "memory"))
    for key in "ab":
        assert (await wired.handle(wired.request("PUT", f"/cache/{key}", BODY, headers=local))).status == 200
        assert wired.answer(wired.request("PUT", f"/cache/{key}c", BODY, headers=local)) is None
    assert (await wired.handle(wired.request("PUT", "/cache/m", BODY, headers=memory))).status == 200
    assert wired.answer(wired.request("PUT", "/cache/n", BODY, headers=memory)) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("range", "bytes=0-1"),
        ("if-none-match", '"a"'),
        ("origin", "http://a.example"),
        ("connection", "keep-alive, x"),
        ("x-amz-expected-bucket-owner", "alice"),
        ("x-kvobj-accept", "raw"),
        ("x-anything", "1"),
    ],
)
async def test_a_get_that_says_more_goes_the_way_of_all(wired: Wired, name: str, value: str) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a", headers={name: value})
    at = request.index(b"\r\n\r\n") + 4
    if read_plain(request[:at], {}) is not None:
        await told(await wired.handle(request))
    assert wired.answer(request) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-md5", "1B2M2Y8AsgTpgAmY7PhCfg=="),
        ("x-amz-checksum-algorithm", "CRC32C"),
        ("x-amz-meta-a", "b"),
        ("x-amz-acl", "private"),
        ("x-kvobj-want", "digest"),
        ("x-kvobj-parent", "root"),
        ("x-kvobj-hint-tokens", "4096"),
        ("if-match", "*"),
        ("origin", "http://a.example"),
        ("x-anything", "1"),
    ],
)
async def test_a_put_that_says_more_goes_the_way_of_all(wired: Wired, name: str, value: str) -> None:
    said = {**MEMORY, name: value}
    for bucket in BUCKETS:
        await told(await wired.handle(wired.request("PUT", f"/{bucket}/a", BODY, headers=said)))
        assert wired.answer(wired.request("PUT", f"/{bucket}/b", BODY, headers=said)) is None


async def test_a_body_whose_digest_is_signed_is_checked_by_the_way_of_all(wired: Wired) -> None:
    digest = "0" * 64
    request = wired.request("PUT", "/cache/a", BODY, headers=MEMORY, payload=digest)
    assert wired.answer(request) is None
    assert (await wired.handle(request)).status == 400
    assert wired.answer(request) is None


async def test_where_bodies_are_to_be_signed_none_is_stored_from_its_bytes(tmp_path: Path, shm_path: Path) -> None:
    async with wired_node(tmp_path, shm_path, S3Settings(unsigned_payload_needs_tls=True)) as wired:
        request = wired.request("PUT", "/cache/a", BODY, headers=MEMORY)
        assert (await wired.handle(request)).status == 400
        head, _, body = request.partition(b"\r\n\r\n")
        read = read_plain(head + b"\r\n\r\n", {})
        assert read is not None
        by_tls = RequestHead(*read[:2], tuple(read[2].items()), "R", "127.0.0.1", is_tls=True, raw=head + b"\r\n\r\n")
        assert (await wired.service.handle(by_tls, FakeBody(body))).status == 200
        assert wired.answer(wired.request("PUT", "/cache/b", BODY, headers=MEMORY)) is None


async def test_others_and_who_signs_nothing_go_the_way_of_all(wired: Wired) -> None:
    for bucket in BUCKETS:
        await stored(wired, f"/{bucket}/a", BODY)
        await wired.known(wired.request("GET", f"/{bucket}/a", form="url"))
        by_bob = wired.request("GET", f"/{bucket}/a", form="url", user=BOB)
        assert wired.answer(by_bob) is None
        assert (await wired.handle(by_bob)).status == 403
        nobody = f"GET /{bucket}/a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        assert wired.answer(nobody) is None
        assert (await wired.handle(nobody)).status == 403
        assert wired.answer(wired.request("GET", f"/{bucket}/a", form="url", user=ROOT)) is not None


async def test_a_bucket_with_a_policy_or_rules_goes_the_way_of_all(wired: Wired) -> None:
    await stored(wired, "/files/a", BODY)
    read, write = wired.request("GET", "/files/a"), wired.request("PUT", "/files/b", BODY, headers=MEMORY)
    await wired.known(read)
    await wired.known(write)
    deny = b'{"Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:*Object","Resource":"arn:aws:s3:::files/*"}]}'
    assert (await wired.kv.driver.request("PUT", "/files?policy", body=deny)).status == 204
    for request in (read, write):
        assert wired.answer(request) is None
        assert (await wired.handle(request)).status == 403
    assert (await wired.kv.driver.request("DELETE", "/files?policy")).status == 204
    assert wired.answer(read) is not None
    rule = (
        b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Filter/><Expiration><Days>1</Days></Expiration></Rule>"
        b"</LifecycleConfiguration>"
    )
    put = await wired.kv.driver.request("PUT", "/files?lifecycle", body=rule)
    assert put.status == 200, put.body
    for request in (read, write):
        assert wired.answer(request) is None
        assert "x-amz-expiration" in dict(all_headers(await wired.handle(request)))


async def test_a_signature_in_the_header_is_good_for_a_quarter_of_an_hour(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a")
    await wired.known(request)
    fresh = wired.request("GET", "/cache/b")
    for seconds, is_answered in ((800, True), (1000, False), (-1000, False), (0, True)):
        wired.clock.offset_ms = seconds * 1000
        await wired.handle(fresh)  # the copy of the users is fresh again
        assert (wired.answer(request) is not None) is is_answered, seconds
        assert (await wired.handle(request)).status == (200 if is_answered else 403)


async def test_a_presigned_url_is_good_until_it_expires(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a", form="url")
    await wired.known(request)
    for seconds, is_answered in ((50, True), (70, False), (-1000, False), (0, True)):
        wired.clock.offset_ms = seconds * 1000
        await wired.handle(request)
        assert (wired.answer(request) is not None) is is_answered, seconds


@pytest.mark.parametrize("form", FORMS)
async def test_a_user_who_is_another_by_now_goes_the_way_of_all(wired: Wired, form: str) -> None:
    await stored(wired, "/cache/a", BODY)
    request = wired.request("GET", "/cache/a", form=form)
    await wired.known(request)
    (user,) = [user for user in await wired.kv.node.catalog.users() if user.id == ALICE.id]
    await wired.kv.node.catalog.put_user(msgspec.structs.replace(user, secret_key="another" * 6))
    wired.clock.offset_ms = 2_000  # the copy of the users is as old as it may be
    assert wired.answer(request) is None
    assert (await wired.handle(request)).status == 403
    assert wired.answer(request) is None


async def test_a_get_sees_what_was_written_last(wired: Wired) -> None:
    await stored(wired, "/files/a", BODY)
    read = wired.request("GET", "/files/a")
    await wired.known(read)
    for number in range(3):
        write = wired.request("PUT", "/files/a", bytes([number]) * 4096, headers=MEMORY)
        assert (await wired.send(write))[0] == 200
        answer = wired.answer(read)
        assert answer is not None
        assert answer.body == bytes([number]) * 4096
    assert (await wired.kv.driver.request("DELETE", "/files/a")).status == 204
    assert wired.answer(read) is None
    assert (await wired.handle(read)).status == 404
    for verb in ("DELETE", "PUT"):
        await wired.kv.driver.request(verb, "/files")
        assert wired.answer(read) is None
        assert (await wired.handle(read)).status == 404


async def test_long_objects_go_the_way_of_all_and_hold_nothing(wired: Wired) -> None:
    await stored(wired, "/cache/short", BODY)
    await stored(wired, "/cache/long", BODY * 5)
    await wired.known(wired.request("GET", "/cache/short"))
    read = wired.request("GET", "/cache/long")
    for _ in range(2):
        assert wired.answer(read) is None
        assert (await told(await wired.handle(read)))[2] == BODY * 5
    assert wired.answer(wired.request("GET", "/cache/short")) is not None
    assert len(wired.kv.node.in_use) == 0


async def test_a_get_from_its_bytes_rescues_a_chunk_and_leaves_one_that_is_being_claimed(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    read = wired.request("GET", "/cache/a")
    await wired.known(read)
    (row,) = await wired.kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    marks, name = wired.kv.node.catalog._marks, ChunkName("cache", "a", row.blobs[0].blob_id)
    assert marks.add([name], not_before_boot_ms=0) == [True]
    assert wired.answer(read) is not None
    assert not marks.is_marked("cache", "a")
    marks.add([name], not_before_boot_ms=0)
    assert marks.begin_claim(now_boot_ms=1, limit=1) == [name]
    assert wired.answer(read) is None
    marks.end_claim([name])


async def test_whose_signature_is_wrong_rescues_nothing(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    read = wired.request("GET", "/cache/a")
    await wired.known(read)
    (row,) = await wired.kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    marks = wired.kv.node.catalog._marks
    marks.add([ChunkName("cache", "a", row.blobs[0].blob_id)], not_before_boot_ms=0)
    at = read.index(b"Signature=") + len(b"Signature=")
    assert wired.answer(read[:at] + b"0" * 64 + read[at + 64 :]) is None
    assert marks.is_marked("cache", "a")


async def test_heads_that_never_come_twice_are_not_learned_for_long(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    hot = wired.service.hot
    for number in range(400):
        read = wired.request(
            "GET", "/cache/a", headers={"x-forwarded-for": f"10.0.0.{number}", "user-agent": "u" * (number % 90 + 1)}
        )
        await wired.handle(read)
    assert sum(map(len, hot._kinds._by_length.values())) <= 66
    await wired.handle(wired.request("GET", "/cache/a", headers={"user-agent": "u" * 3000}))
    assert wired.answer(wired.request("GET", "/cache/a", headers={"user-agent": "u" * 3000})) is None


@pytest.mark.parametrize("lengths", [1, 90])
async def test_who_comes_again_stays_known_beside_heads_that_never_come_twice_and_they_are_not_learned_for_long(
    wired: Wired, lengths: int
) -> None:
    await stored(wired, "/cache/a", BODY)
    hot = wired.service.hot
    again = wired.request("GET", "/cache/a", headers={"user-agent": "again" + "u" * 20})
    await wired.known(again)
    met: list[object] = []
    for number in range(600):
        agent = f"{number:05}" + "u" * (20 + number % lengths)
        await told(await wired.handle(wired.request("GET", "/cache/a", headers={"user-agent": agent})))
        met += [
            kind for alike in hot._kinds._by_length.values() for kind in alike if not any(kind is one for one in met)
        ]
        assert wired.answer(again) is not None, number
        assert len(hot._kinds._by_length) <= 64
        assert max(map(len, hot._kinds._by_length.values())) <= 4
    assert len(met) <= 1 + 64 + 600 // 256


async def test_where_most_never_come_twice_who_does_is_known_soon_and_makes_room_for_another(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)

    def read(agent: str) -> bytes:
        return wired.request("GET", "/cache/a", headers={"user-agent": agent})

    for number in range(400):
        await told(await wired.handle(read(f"{number:03}" + "u" * (number % 90))))
    one = read("one client")
    tries = 0
    while wired.answer(one) is None:
        await told(await wired.handle(one))
        tries += 1
        assert tries <= 256
    assert tries > 1
    other = read("other")
    await wired.known(other)
    await wired.known(read("a third client"))
    assert wired.answer(one) is not None
    before = [kind for alike in wired.service.hot._kinds._by_length.values() for kind in alike]
    for number in range(50):
        await told(await wired.handle(read(f"{number:03}" + "v" * (50 + number))))
    after = [kind for alike in wired.service.hot._kinds._by_length.values() for kind in alike]
    assert sum(not any(kind is known for known in before) for kind in after) <= 2


async def test_of_a_length_who_never_came_again_gives_way_first(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    reads = [wired.request("GET", "/cache/a", headers={"user-agent": f"agent {number}"}) for number in range(7)]
    for read in reads[:2]:
        await wired.known(read)
    for read in reads[2:6]:
        await told(await wired.handle(read))
    assert [number for number, read in enumerate(reads) if wired.answer(read) is not None] == [0, 1, 4, 5]
    await wired.known(reads[6])  # all came again: the oldest gives way
    assert [number for number, read in enumerate(reads) if wired.answer(read) is not None] == [1, 4, 5, 6]


async def test_an_object_that_is_short_by_now_is_stored_and_read_from_its_bytes_again(wired: Wired) -> None:
    await stored(wired, "/files/a", BODY * 8)
    await stored(wired, "/files/b", BODY)
    await wired.known(wired.request("GET", "/files/b"))
    assert (await wired.handle(wired.request("PUT", "/files/c", BODY, headers=MEMORY))).status == 200
    read = wired.request("GET", "/files/a")
    for _ in range(2):
        assert wired.answer(read) is None
        assert (await told(await wired.handle(read)))[2] == BODY * 8
    await told(await wired.handle(wired.request("HEAD", "/files/a")))
    assert "/files/a" in wired.service.hot._long
    assert wired.answer(wired.request("PUT", "/files/a", BODY, headers=MEMORY)) is not None
    assert (await told(await wired.handle(read)))[2] == BODY
    answer = wired.answer(read)
    assert answer is not None
    assert answer.body == BODY


async def test_targets_of_long_objects_are_remembered_within_bounds(wired: Wired) -> None:
    hot = wired.service.hot
    for key in ("a" * 400, "%C3%A4" * 400):
        await stored(wired, f"/files/{key}", BODY * 8)
        assert (await told(await wired.handle(wired.request("GET", f"/files/{key}"))))[2] == BODY * 8
    assert hot._long == {f"/files/{'a' * 400}"}


@pytest.mark.parametrize("error", [RuntimeError("a defect"), KvobjError("a defect")])
@pytest.mark.parametrize("bucket", BUCKETS)
async def test_what_fails_behind_the_commit_does_not_store_a_second_time(
    wired: Wired, bucket: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {**MEMORY, "if-none-match": "*"}
    assert (await wired.handle(wired.request("PUT", f"/{bucket}/a", BODY, headers=said))).status == 200

    def fail(_behind: WriteBehind, _row: ObjectRow) -> None:
        raise error

    request = wired.request("PUT", f"/{bucket}/b", BODY, headers=said)
    with monkeypatch.context() as broken:
        broken.setattr(WriteBehind, "enqueue", fail)
        with pytest.raises(type(error)):
            wired.answer(request)
    assert [row.key for row in await wired.rows(bucket)] == ["a", "b"]
    assert (await wired.kv.driver.get(f"/{bucket}/b")).body == BODY
    assert wired.answer(request) is None
    assert wired.answer(wired.request("PUT", f"/{bucket}/c", BODY, headers=said)) is not None


async def test_a_server_of_one_process_answers_from_their_bytes_what_comes_again(wired: Wired) -> None:
    node, chunks = wired.kv.node, wired.kv.chunks
    assert chunks is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        front = OneProcess(
            node,
            [listener],
            upstreams=Fronted(node.store, chunks, {}, Metrics()),
            same_host=None,
            tls=None,
            clock=wired.clock,
            metrics=Metrics(),
            log=logging.getLogger("test"),
        )
        await front.start(lambda: None)
        try:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            for form in FORMS:
                for key in "abcd":
                    writer.write(wired.request("PUT", f"/cache/{form}-{key}", BODY, headers=MEMORY))
                    assert await answered(reader) == (200, b"")
                    writer.write(wired.request("GET", f"/cache/{form}-{key}", form=form))
                    assert await answered(reader) == (200, BODY)
            writer.close()
            await writer.wait_closed()
        finally:
            await front.aclose()
    hot = front._http._serving.hot
    assert isinstance(hot, HotRequests)
    kinds = [kind for alike in hot._kinds._by_length.values() for kind in alike]
    assert sorted((kind.method, kind.signed.is_in_header, kind.came_again) for kind in kinds) == [
        ("GET", False, True),
        ("GET", True, True),
        ("PUT", True, True),
    ]


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next reply."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    fields = dict(line.lower().split(": ", 1) for line in head.rstrip("\r\n").split("\r\n")[1:])
    return int(head.split(" ")[1]), await reader.readexactly(int(fields["content-length"]))


async def test_of_many_kinds_the_latest_are_remembered(wired: Wired) -> None:
    await stored(wired, "/cache/a", BODY)
    for number in range(300):
        read = wired.request("GET", "/cache/a", headers={"user-agent": f"{number:03}" + "u" * (number % 90)})
        await wired.known(read)
    kinds = wired.service.hot._kinds._by_length
    assert len(kinds) <= 64
    assert max(map(len, kinds.values())) <= 4


async def test_a_signature_in_another_field_does_not_take_its_place(wired: Wired) -> None:
    def with_agent(request: bytes) -> tuple[bytes, bytes]:
        """The request with its signature in front of where it counts, in a field that is not signed; and the signature."""
        signature = request.partition(b"Signature=")[2][:64]
        return request.replace(
            b"\r\nauthorization: ", b"\r\nuser-agent: Signature=" + signature + b"\r\nauthorization: "
        ), signature

    for key in "ab":
        await stored(wired, f"/cache/{key}", BODY)
    first, signature = with_agent(wired.request("GET", "/cache/a"))
    assert (await wired.handle(first)).status == 200
    second, own = with_agent(wired.request("GET", "/cache/b"))
    head, found, rest = second.rpartition(b"Signature=" + own)
    assert found
    forged = head + b"Signature=" + signature + rest
    assert wired.answer(forged) is None
    assert (await wired.handle(forged)).status == 403


@pytest.mark.parametrize("seed", range(6))
async def test_any_requests_are_answered_alike_both_ways_and_leave_the_same(
    wired: Wired, other: Wired, seed: int
) -> None:
    rng = random.Random(seed)
    said: list[dict[str, str]] = [
        {},
        {"if-none-match": "*"},
        {"content-type": "text/plain"},
        {"x-kvobj-durability": "local"},
        {"x-amz-checksum-mode": "ENABLED"},
        {"x-amz-meta-a": "b"},
        {"range": "bytes=1-3"},
    ]
    for _ in range(250):
        method, bucket = rng.choice(("GET", "PUT", "PUT", "DELETE")), rng.choice(BUCKETS)
        target = f"/{bucket}/{rng.choice(('a', 'b', 'c%20d', 'default/e', 'f/g', '%C3%A4', 'a?versionId=null'))}"
        body = rng.randbytes(1) * rng.choice((0, 1, 4096, 4096, 4096, 16384, 20000)) if method == "PUT" else b""
        headers = {**(MEMORY if method == "PUT" else {}), **rng.choice(({}, {}, rng.choice(said)))}
        form, user = rng.choice(FORMS), rng.choice((ALICE, ALICE, ALICE, ALICE, ROOT, BOB))
        if form == "url":
            headers = {name: value for name, value in headers.items() if not name.startswith("x-")}
        request = wired.request(method, target, body, form=form, headers=headers, user=user)
        if method == "DELETE" or not wired.service.hot.looks_like(request):
            here = await told(await wired.handle(request))
        else:
            here = await wired.send(request)
        there = await told(await other.handle(request))
        await wired.kv.node.sealing.drain()
        await other.kv.node.sealing.drain()
        assert here == there, request[:400]
    assert wired.answered > 10
    for bucket in BUCKETS:
        assert await wired.rows(bucket) == await other.rows(bucket)
