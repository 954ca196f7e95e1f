"""PUTs whose heads say what one before said: they store what all do, and are refused what all are."""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from awscrt import checksums  # type: ignore[import-untyped]
from s3_driver import ALICE, BOB, FakeBody, all_headers, sign, unsigned_chunks
from test_hot_requests import BUCKETS, FORMS, MEMORY, Wired, calling, of_cpp, told, wired_node

from kvobj.api.exchange import S3Settings
from kvobj.api.hot_requests import KnownWrite
from kvobj.api.http.plain_head import read_plain
from kvobj.api.message import Reply, RequestHead
from kvobj.catalog.rows import UserRow

SIZE_BYTES = 200_000
ONE, TWO = (bytes([number, number + 1]) * (SIZE_BYTES // 2) for number in (1, 7))
TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


@pytest.fixture
async def wired(tmp_path: Path, shm_path: Path) -> AsyncIterator[Wired]:
    async with wired_node(tmp_path, shm_path) as made:
        yield made


def crc64(body: bytes) -> str:
    return base64.b64encode(checksums.crc64nvme(body).to_bytes(8, "big")).decode()


def with_crc(body: bytes) -> dict[str, str]:
    return {**MEMORY, "x-amz-checksum-crc64nvme": crc64(body)}


def head_of(request: bytes) -> RequestHead:
    at = request.index(b"\r\n\r\n") + 4
    read = read_plain(request[:at], {})
    assert read is not None, request[:at]
    method, target, fields = read
    return RequestHead(method, target, tuple(fields.items()), "R", "127.0.0.1", raw=request[:at])


def known(wired: Wired, request: bytes) -> KnownWrite | None:
    return wired.service.hot.write_of(head_of(request))


async def served(wired: Wired, request: bytes) -> Reply:
    """As a connection has it served whose client sends the body behind the head."""
    at = request.index(b"\r\n\r\n") + 4
    return await wired.service.handle(head_of(request), FakeBody(request[at:], step=65_536))


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("says", [with_crc, lambda _: MEMORY], ids=["checksum", "no checksum"])
async def test_a_known_put_stores_and_says_what_the_first_of_its_kind_did(
    wired: Wired, bucket: str, says: Callable[[bytes], dict[str, str]]
) -> None:
    more = {"content-type": "text/plain", "user-agent": "a client"}
    said = [says(body) | more for body in (ONE, TWO)]
    says_crc = "x-amz-checksum-crc64nvme" in said[0]
    first = wired.request("PUT", f"/{bucket}/first", ONE, headers=said[0])
    assert known(wired, first) is None
    status, headers, _, log = await told(await served(wired, first))
    again = wired.request("PUT", f"/{bucket}/other", TWO, headers=said[1])
    found = known(wired, again)
    assert found is not None
    assert (found.request.key, found.announced.value) == ("other", crc64(TWO) if says_crc else None)
    reply = await told(await served(wired, again))
    assert isinstance(headers, dict)
    assert isinstance(log, dict)
    changed = {"x-amz-checksum-crc64nvme": crc64(TWO)} if says_crc else {}
    etag = {"etag": reply[1]["etag"]} if bucket == "files" and isinstance(reply[1], dict) else {}
    assert reply == (status, headers | changed | etag, b"", log | {"key": "other"})
    assert status == 200
    await wired.kv.node.sealing.drain()
    one, two = await wired.rows(bucket)
    assert (
        msgspec.structs.replace(
            one, key="other", blobs=two.blobs, digest=two.digest, etag=two.etag, checksums=two.checksums
        )
        == two
    )
    assert two.headers == {"content-type": "text/plain"}
    assert [each.value for each in two.checksums] == ([crc64(TWO)] if says_crc else [])
    assert (await wired.kv.driver.get(f"/{bucket}/other")).body == TWO


async def test_a_put_of_an_sdk_is_known_though_each_call_has_an_id_of_its_own(wired: Wired) -> None:
    for key, body in (("a", ONE), ("b", TWO)):
        request = calling(wired.request("PUT", f"/cache/{key}", body, headers=with_crc(body)), str(uuid.uuid4()))
        found = known(wired, request)
        assert (found is not None) is (key == "b")
        assert found is None or found.announced.value == crc64(body)
        assert (await served(wired, request)).status == 200
        assert (await wired.kv.driver.get(f"/cache/{key}")).body == body


@pytest.mark.parametrize("says", [with_crc, lambda _: MEMORY], ids=["checksum", "no checksum"])
async def test_a_put_that_signs_its_calls_id_is_known(wired: Wired, says: Callable[[bytes], dict[str, str]]) -> None:
    for key, body in (("a", ONE), ("b", TWO)):
        call_id, other = str(uuid.uuid4()).upper(), str(uuid.uuid4()).upper()
        request = wired.request("PUT", f"/cache/{key}", body, headers=says(body) | of_cpp(call_id))
        found = known(wired, request)
        assert (found is not None) is (key == "b")
        assert found is None or found.announced.value == says(body).get("x-amz-checksum-crc64nvme")
        forged = request.replace(call_id.encode(), other.encode())
        assert known(wired, forged) is None
        assert (await served(wired, forged)).status == 403
        assert (await served(wired, request)).status == 200
        assert (await wired.kv.driver.get(f"/cache/{key}")).body == body


async def test_a_presigned_put_is_known_whatever_it_stores(wired: Wired) -> None:
    # The class is the bucket's own: a header that says so would have to be signed.
    kind = {"x-kvobj-bucket-kind": "kv", **MEMORY}
    assert (await wired.kv.driver.request("PUT", "/lasting", headers=kind)).status == 200
    for key, body in (("a", ONE), ("b", TWO)):
        request = wired.request("PUT", f"/lasting/{key}", body, form="url")
        assert (known(wired, request) is not None) is (key == "b")
        assert (await served(wired, request)).status == 200
        assert (await wired.kv.driver.get(f"/lasting/{key}")).body == body


@pytest.mark.parametrize("framing", ["content-length", "transfer-encoding"])
async def test_an_aws_chunked_put_is_known_and_its_trailer_is_checked(wired: Wired, framing: str) -> None:
    async def served_so(request: bytes) -> Reply:
        at = request.index(b"\r\n\r\n") + 4
        is_chunked = framing == "transfer-encoding"
        return await wired.service.handle(head_of(request), FakeBody(request[at:], chunked=is_chunked))

    def request(key: str, body: bytes, trailer: str) -> bytes:
        pieces = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]
        framed = unsigned_chunks(pieces, [("x-amz-checksum-crc64nvme", trailer)])
        said = MEMORY | {
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": str(len(body)),
            "x-amz-trailer": "x-amz-checksum-crc64nvme",
        }
        made = wired.request("PUT", f"/cache/{key}", framed, headers=said, payload=TRAILER)
        length = f"Content-Length: {len(framed)}".encode()
        return made if framing == "content-length" else made.replace(length, b"Transfer-Encoding: chunked")

    assert (await served_so(request("a", ONE, crc64(ONE)))).status == 200
    second, wrong = request("b", TWO, crc64(TWO)), request("c", TWO, crc64(ONE))
    for each, status in ((second, 200), (wrong, 400)):
        assert known(wired, each) is not None
        assert (await served_so(each)).status == status
    assert [row.key for row in await wired.rows("cache")] == ["a", "b"]
    assert (await wired.kv.driver.get("/cache/b")).body == TWO


@pytest.mark.parametrize("form", FORMS)
async def test_no_byte_of_a_known_head_may_be_another(wired: Wired, form: str) -> None:
    assert (await wired.kv.driver.request("DELETE", "/files")).status == 204
    assert (await wired.kv.driver.request("PUT", "/files", headers=MEMORY)).status == 200
    said = {"user-agent": "a client"} | (with_crc(ONE) if form == "header" else {})
    request = wired.request("PUT", "/files/a", ONE, form=form, headers=said)
    assert (await served(wired, request)).status == 200
    head = head_of(request)
    assert wired.service.hot.write_of(head) is not None
    for place in range(len(head.raw)):
        for byte in (head.raw[place] ^ 1, head.raw[place] ^ 0x20, 0x0D):
            changed = head.raw[:place] + bytes([byte]) + head.raw[place + 1 :]
            read = read_plain(changed, {}) if byte != head.raw[place] else None
            if read is not None:  # else it never gets there
                other = RequestHead(*read[:2], tuple(read[2].items()), "R", "127.0.0.1", raw=changed)
                assert wired.service.hot.write_of(other) is None, (place, changed)


async def test_a_checksum_that_is_another_is_refused_and_nothing_is_stored(wired: Wired) -> None:
    assert (await served(wired, wired.request("PUT", "/cache/a", ONE, headers=with_crc(ONE)))).status == 200
    wrong = wired.request("PUT", "/cache/b", TWO, headers=with_crc(ONE))
    assert known(wired, wrong) is not None
    reply = await served(wired, wrong)
    assert isinstance(reply.body, bytes)
    assert (reply.status, b"<Code>BadDigest</Code>" in reply.body) == (400, True)
    no_base64 = {**MEMORY, "x-amz-checksum-crc64nvme": crc64(TWO)[:-2] + "!="}
    refused = wired.request("PUT", "/cache/c", TWO, headers=no_base64)
    assert known(wired, refused) is None
    assert (await served(wired, refused)).status == 400
    assert [row.key for row in await wired.rows("cache")] == ["a"]
    usage = wired.kv.node.arena.usage()
    assert usage.pinned == len(await wired.rows("cache"))


async def test_a_chunk_that_stands_answers_a_known_put_and_another_size_is_refused(wired: Wired) -> None:
    assert (await served(wired, wired.request("PUT", "/cache/a", ONE, headers=MEMORY))).status == 200
    again = wired.request("PUT", "/cache/a", TWO, headers=MEMORY)
    assert known(wired, again) is not None
    assert dict(all_headers(await served(wired, again)))["x-kvobj-existed"] == "true"
    assert (await wired.kv.driver.get("/cache/a")).body == ONE
    shorter = ONE[: SIZE_BYTES - 2]
    assert (await served(wired, wired.request("PUT", "/cache/b", shorter, headers=MEMORY))).status == 200
    over = wired.request("PUT", "/cache/a", shorter, headers=MEMORY)
    assert known(wired, over) is not None
    assert (await served(wired, over)).status == 409


async def test_conditions_of_a_known_put_are_looked_at_each_time(wired: Wired) -> None:
    said = {**MEMORY, "if-none-match": "*"}
    assert (await served(wired, wired.request("PUT", "/files/a", ONE, headers=said))).status == 200
    again = wired.request("PUT", "/files/b", TWO, headers=said)
    for status in (200, 412):
        assert known(wired, again) is not None
        assert (await served(wired, again)).status == status


async def test_a_user_who_is_another_by_now_is_not_known(wired: Wired) -> None:
    request = wired.request("PUT", "/cache/a", ONE, headers=MEMORY)
    assert (await served(wired, request)).status == 200
    assert known(wired, request) is not None
    (user,) = [user for user in await wired.kv.node.catalog.users() if user.id == ALICE.id]
    await wired.kv.node.catalog.put_user(msgspec.structs.replace(user, secret_key="another" * 6))
    wired.clock.offset_ms = 2_000  # the copy of the users is as old as it may be
    for _ in range(2):
        assert known(wired, request) is None
        assert (await served(wired, request)).status == 403


async def test_who_may_not_do_all_with_the_bucket_goes_the_way_of_all(wired: Wired) -> None:
    for bucket in BUCKETS:
        said = [sent(user) for user in (ALICE, BOB)]
        requests = [put_by(f"/{bucket}/a", each, user) for each, user in zip(said, (ALICE, BOB), strict=True)]
        assert [(await served(wired, each)).status for each in requests] == [200, 403]
        assert [known(wired, each) is not None for each in requests] == [True, False]
    deny = b'{"Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:*Object","Resource":"arn:aws:s3:::files/*"}]}'
    assert (await wired.kv.driver.request("PUT", "/files?policy", body=deny)).status == 204
    request = put_by("/files/b", sent(ALICE), ALICE)
    assert known(wired, request) is None
    assert (await served(wired, request)).status == 403


def sent(user: UserRow) -> dict[str, str]:
    return {**MEMORY, "user-agent": user.id.ljust(8)[:8].strip() or "nobody"}


def put_by(target: str, headers: dict[str, str], user: UserRow) -> bytes:
    fields = [*sign("PUT", target, headers=headers, user=user, payload="UNSIGNED-PAYLOAD")]
    fields.append(("content-length", str(SIZE_BYTES)))
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields])
    return f"PUT {target} HTTP/1.1\r\n{lines}\r\n".encode() + ONE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-md5", "1B2M2Y8AsgTpgAmY7PhCfg=="),
        ("x-amz-meta-a", "b"),
        ("x-amz-acl", "private"),
        ("x-amz-tagging", "a=b"),
        ("x-amz-expected-bucket-owner", "alice"),
        ("x-kvobj-want", "digest"),
        ("x-kvobj-parent", "root"),
        ("if-match", "*"),
        ("origin", "http://a.example"),
        ("x-anything", "1"),
    ],
)
async def test_a_long_put_that_says_more_goes_the_way_of_all(wired: Wired, name: str, value: str) -> None:
    said = {**MEMORY, name: value}
    for bucket in BUCKETS:
        await told(await served(wired, wired.request("PUT", f"/{bucket}/a", ONE, headers=said)), b"")
        assert known(wired, wired.request("PUT", f"/{bucket}/b", ONE, headers=said)) is None


async def test_where_bodies_are_to_be_signed_no_put_is_known(tmp_path: Path, shm_path: Path) -> None:
    async with wired_node(tmp_path, shm_path, S3Settings(unsigned_payload_needs_tls=True)) as wired:
        request = wired.request("PUT", "/cache/a", ONE, headers=MEMORY)
        by_tls = msgspec.structs.replace(head_of(request), is_tls=True)
        assert (await wired.service.handle(by_tls, FakeBody(ONE))).status == 200
        assert known(wired, request) is None
        assert (await served(wired, request)).status == 400


async def test_a_get_with_a_known_puts_fields_is_a_get(wired: Wired) -> None:
    request = wired.request("PUT", "/cache/a", ONE, headers=MEMORY)
    assert (await served(wired, request)).status == 200
    head = head_of(request)
    read = RequestHead("GET", head.target, head.headers, "R", "127.0.0.1", raw=b"GET" + head.raw[3:])
    assert wired.service.hot.write_of(read) is None
    assert (await wired.service.handle(read, FakeBody(ONE))).status == 403


async def test_long_puts_that_can_never_be_known_take_no_place_of_others(wired: Wired) -> None:
    for number in range(80):
        said = {"x-kvobj-durability": "local", "user-agent": f"client {number}"}
        assert (await served(wired, wired.request("PUT", f"/files/{number}", ONE, headers=said))).status == 200
    assert (await served(wired, wired.request("PUT", "/files/short", b"short", headers=MEMORY))).status == 200
    await wired.known(wired.request("GET", "/files/short"))
