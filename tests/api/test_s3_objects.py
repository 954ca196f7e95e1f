"""Objects: put, get, head, ranges, conditions, metadata, checksums, copies."""

import base64
import hashlib
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from s3_driver import ALICE, BOB, HOST, Driver, FakeBody, presign, seed_of, sign, signed_chunks, unsigned_chunks
from s3_stores import STORES, driver_over

from kvobj.errors import BusyError, StoreFullError

DATA = bytes(range(256)) * 100
MD5 = hashlib.md5(DATA).hexdigest()  # noqa: S324 - what an ETag is
CRC32 = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
STREAMING_UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


async def filled(driver: Driver) -> Driver:
    await driver.put("/bucket", b"")
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return driver


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        yield await filled(empty)


@pytest.fixture
async def fake_driver() -> Driver:
    return await filled(Driver())


async def test_headers_and_metadata_come_back(driver: Driver) -> None:
    await driver.put(
        "/bucket/key",
        DATA,
        content_type="text/plain",
        cache_control="max-age=5",
        content_encoding="aws-chunked,gzip",
        x_amz_meta_Name="v",
        expires="soon",
    )
    for method in ("GET", "HEAD"):
        answer = await driver.request(method, "/bucket/key")
        headers = answer.headers
        assert (headers["etag"], headers["content-type"], headers["cache-control"]) == (
            f'"{MD5}"',
            "text/plain",
            "max-age=5",
        )
        assert (headers["content-encoding"], headers["x-amz-meta-name"], headers["expires"]) == ("gzip", "v", "soon")
        assert headers["accept-ranges"] == "bytes"
        assert headers["x-amz-request-id"]
        assert headers["last-modified"].endswith("GMT")
    head = await driver.request("HEAD", "/bucket/key")
    assert (head.body, head.reply.content_length) == (b"", len(DATA))


async def test_an_empty_object_is_legal(driver: Driver) -> None:
    await driver.put("/bucket/empty", b"")
    answer = await driver.get("/bucket/empty")
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, b"", '"d41d8cd98f00b204e9800998ecf8427e"')
    beyond = await driver.get("/bucket/empty", range="bytes=0-0")
    assert (beyond.status, beyond.headers["content-range"]) == (416, "bytes */0")


async def test_a_range_is_a_206_and_several_are_the_whole(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    part = await driver.get("/bucket/key", range="bytes=10-19")
    assert (part.status, part.body, part.headers["content-range"]) == (206, DATA[10:20], f"bytes 10-19/{len(DATA)}")
    assert (await driver.get("/bucket/key", range="bytes=-5")).body == DATA[-5:]
    assert (await driver.get("/bucket/key", range="bytes=0-1,5-6")).body == DATA
    small = await driver.get("/bucket/key", range=f"bytes=0-{1 << 23}")
    assert (small.status, small.body) == (206, DATA)
    past = await driver.get("/bucket/key", range=f"bytes={len(DATA)}-")
    assert (past.status, past.code, past.headers["content-range"]) == (416, "InvalidRange", f"bytes */{len(DATA)}")
    head = await driver.request("HEAD", "/bucket/key", headers={"range": "bytes=0-9"})
    assert (head.status, head.reply.content_length) == (206, 10)
    assert (await driver.get("/bucket/key", range="bytes=0-9", if_range='"other"')).body == DATA


async def test_read_conditions_answer_304_and_412(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    same = await driver.get("/bucket/key", if_none_match=f'"{MD5}"')
    assert (same.status, same.body, same.headers["etag"]) == (304, b"", f'"{MD5}"')
    other = await driver.get("/bucket/key", if_match='"x"')
    assert (other.status, other.code) == (412, "PreconditionFailed")
    assert (await driver.get("/bucket/key", if_match=f'"{MD5}"', range="bytes=0-3")).status == 206


async def test_conditions_are_evaluated_after_authorisation_only(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    for headers in ({"if-none-match": "*"}, {"if-match": "x"}, {"if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"}):
        assert (await driver.request("GET", "/bucket/key", headers=headers, user=BOB)).status == 403
        anonymous = await driver.send("GET", "/bucket/key", [("host", HOST), *headers.items()])
        assert (anonymous.status, anonymous.code) == (403, "AccessDenied")
        assert (await driver.request("GET", "/bucket/absent", headers=headers, user=BOB)).status == 403


async def test_conditional_writes_decide_before_the_body(driver: Driver) -> None:
    headers = {"if-none-match": "*", "expect": "100-continue"}
    assert (await driver.request("PUT", "/bucket/key", body=DATA, headers=headers)).status == 200
    body = FakeBody(DATA)
    refused = await driver.request("PUT", "/bucket/key", body=body, headers=headers, payload="UNSIGNED-PAYLOAD")
    assert (refused.status, refused.code) == (412, "PreconditionFailed")
    assert not body.accepted
    assert refused.reply.close
    assert (await driver.put("/bucket/key", b"new", if_match=f'"{MD5}"')).status == 200
    assert (await driver.put("/bucket/key", b"new", if_match=f'"{MD5}"')).status == 412
    absent = await driver.put("/bucket/absent", b"new", if_match="*")
    assert (absent.status, absent.code) == (404, "NoSuchKey")


async def test_a_conditional_delete_takes_only_the_etag_it_names(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    refused = await driver.request("DELETE", "/bucket/key", headers={"if-match": '"x"'})
    assert (refused.status, refused.code) == (412, "PreconditionFailed")
    assert (await driver.request("DELETE", "/bucket/key", headers={"if-match": f'"{MD5}"'})).status == 204
    assert (await driver.request("DELETE", "/bucket/key")).status == 204


async def test_a_put_without_any_length_is_a_411(driver: Driver) -> None:
    answer = await driver.request("PUT", "/bucket/key", with_length=False)
    assert (answer.status, answer.code) == (411, "MissingContentLength")
    body = FakeBody(DATA, chunked=True)
    answer = await driver.request("PUT", "/bucket/key", body=body, payload="UNSIGNED-PAYLOAD")
    assert (answer.status, answer.reply.close, body.accepted) == (411, True, False)
    answer = await driver.request("PUT", "/bucket/key", body=FakeBody(b"x"), payload=STREAMING_UNSIGNED)
    assert answer.status == 411


async def test_room_is_known_before_100_continue(fake_driver: Driver) -> None:
    for error, status, code in ((BusyError("busy"), 503, "SlowDown"), (StoreFullError("full"), 507, "StoreFull")):
        fake_driver.fake.refuse_put = error
        body = FakeBody(DATA)
        answer = await fake_driver.request(
            "PUT", "/bucket/key", body=body, headers={"expect": "100-continue"}, payload="UNSIGNED-PAYLOAD"
        )
        assert (answer.status, answer.code, answer.reply.close, body.accepted) == (status, code, True, False)


async def test_a_short_unread_body_is_left_to_be_drained_and_a_long_one_closes(driver: Driver) -> None:
    for size_bytes, closes in ((1000, False), (300 * 1024, True)):
        body = FakeBody(b"x" * size_bytes)
        answer = await driver.request("PUT", "/absent/key", body=body, payload="UNSIGNED-PAYLOAD")
        assert (answer.status, answer.reply.close, body.accepted) == (404, closes, False)


async def test_a_wrong_payload_digest_leaves_nothing(fake_driver: Driver) -> None:
    answer = await fake_driver.request("PUT", "/bucket/key", body=DATA, payload=hashlib.sha256(b"other").hexdigest())
    assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    assert (await fake_driver.get("/bucket/key")).status == 404
    assert fake_driver.fake.open_transfers == 0


async def test_a_truncated_body_leaves_nothing(fake_driver: Driver) -> None:
    answer = await fake_driver.request(
        "PUT", "/bucket/key", body=FakeBody(DATA, length=len(DATA) + 1), payload="UNSIGNED-PAYLOAD"
    )
    assert (answer.status, answer.code) == (400, "IncompleteBody")
    assert (await fake_driver.get("/bucket/key")).status == 404
    assert fake_driver.fake.open_transfers == 0


async def test_checksums_are_verified_stored_and_returned_when_asked(driver: Driver) -> None:
    put = await driver.put("/bucket/key", DATA, x_amz_checksum_crc32=CRC32, x_amz_sdk_checksum_algorithm="CRC32")
    assert (put.headers["x-amz-checksum-crc32"], put.headers["x-amz-checksum-type"]) == (CRC32, "FULL_OBJECT")
    assert "x-amz-checksum-crc32" not in (await driver.get("/bucket/key")).headers
    asked = await driver.get("/bucket/key", x_amz_checksum_mode="ENABLED")
    assert asked.headers["x-amz-checksum-crc32"] == CRC32
    partial = await driver.get("/bucket/key", x_amz_checksum_mode="ENABLED", range="bytes=0-3")
    assert "x-amz-checksum-crc32" not in partial.headers
    wrong = await driver.put("/bucket/wrong", DATA + b"x", x_amz_checksum_crc32=CRC32)
    assert (wrong.status, wrong.code) == (400, "BadDigest")
    md5 = base64.b64encode(hashlib.md5(b"other").digest()).decode()  # noqa: S324 - what S3 clients send
    assert (await driver.put("/bucket/wrong", DATA, content_md5=md5)).code == "BadDigest"
    assert (await driver.get("/bucket/wrong")).status == 404


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_trailer_checksum_is_verified_also_inside_transfer_encoding_chunked(
    driver: Driver, *, chunked: bool
) -> None:
    headers = {
        "x-amz-trailer": "x-amz-checksum-crc32",
        "x-amz-decoded-content-length": str(len(DATA)),
        "content-encoding": "aws-chunked",
    }
    body = FakeBody(unsigned_chunks([DATA], [("x-amz-checksum-crc32", CRC32)]), chunked=chunked)
    put = await driver.request("PUT", "/bucket/key", body=body, headers=headers, payload=STREAMING_UNSIGNED)
    assert (put.status, put.headers["x-amz-checksum-crc32"]) == (200, CRC32)
    got = await driver.get("/bucket/key", x_amz_checksum_mode="ENABLED")
    assert (got.body, got.headers["x-amz-checksum-crc32"]) == (DATA, CRC32)
    assert "content-encoding" not in got.headers
    for trailers, code in (([], "MalformedTrailerError"), ([("x-amz-checksum-crc32", "AAAAAA==")], "BadDigest")):
        body = FakeBody(unsigned_chunks([DATA], trailers), chunked=chunked)
        bad = await driver.request("PUT", "/bucket/bad", body=body, headers=headers, payload=STREAMING_UNSIGNED)
        assert (bad.status, bad.code) == (400, code)
    assert (await driver.get("/bucket/bad")).status == 404


@pytest.mark.parametrize("with_trailer", [True, False])
async def test_signed_chunks_are_verified_before_anything_is_visible(driver: Driver, *, with_trailer: bool) -> None:
    mode = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" + ("-TRAILER" if with_trailer else "")
    headers = {"x-amz-decoded-content-length": str(len(DATA)), "content-encoding": "aws-chunked"}
    if with_trailer:
        headers["x-amz-trailer"] = "x-amz-checksum-crc32"
    fields = sign("PUT", "/bucket/key", headers=headers, payload=mode)
    seed, stamp = seed_of(fields)
    pieces = [DATA[:8192], DATA[8192:20000], DATA[20000:]]
    trailer = ("x-amz-checksum-crc32", CRC32) if with_trailer else None
    wire = signed_chunks(pieces, user=ALICE, seed=seed, stamp=stamp, trailer=trailer)
    forged = wire.replace(DATA[8192:8200], b"tampered", 1)
    refused = await driver.send("PUT", "/bucket/key", fields, forged)
    assert (refused.status, refused.code) == (403, "SignatureDoesNotMatch")
    other = signed_chunks(pieces, user=BOB, seed=seed, stamp=stamp, trailer=trailer)
    assert (await driver.send("PUT", "/bucket/key", fields, other)).code == "SignatureDoesNotMatch"
    assert (await driver.get("/bucket/key")).status == 404
    assert (await driver.send("PUT", "/bucket/key", fields, wire)).status == 200
    assert (await driver.get("/bucket/key")).body == DATA


async def test_a_decoded_length_that_does_not_match_is_refused(driver: Driver) -> None:
    for length in (len(DATA) - 1, len(DATA) + 1):
        headers = {"x-amz-decoded-content-length": str(length)}
        answer = await driver.request(
            "PUT", "/bucket/key", body=FakeBody(unsigned_chunks([DATA])), headers=headers, payload=STREAMING_UNSIGNED
        )
        assert (answer.status, answer.code) == (400, "IncompleteBody")


async def test_unsigned_trailer_mode_without_a_trailer_stores_a_crc64nvme(driver: Driver) -> None:
    headers = {"x-amz-decoded-content-length": str(len(DATA))}
    put = await driver.request(
        "PUT", "/bucket/key", body=FakeBody(unsigned_chunks([DATA])), headers=headers, payload=STREAMING_UNSIGNED
    )
    assert (put.status, "x-amz-checksum-crc64nvme" in put.headers) == (200, True)


async def test_metadata_is_bounded_and_non_ascii_leaves_as_rfc_2047(fake_driver: Driver) -> None:
    assert (await fake_driver.put("/bucket/key", b"", x_amz_meta_a="x" * 2048)).code == "MetadataTooLarge"
    fields = sign("PUT", "/bucket/key", headers={"x-amz-meta-a": "plain"})
    assert (await fake_driver.send("PUT", "/bucket/key", fields)).status == 200
    row = fake_driver.fake.catalog.objects["bucket", "key"]
    row.metadata["a"] = "é"
    assert (await fake_driver.get("/bucket/key")).headers["x-amz-meta-a"] == "=?UTF-8?B?w6k=?="


async def test_response_overrides_are_taken_and_cannot_split_a_reply(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA, content_type="text/plain")
    target = presign("GET", "/bucket/key?response-content-type=image%2Fpng&response-content-disposition=attachment")
    got = await driver.send("GET", target, [("host", HOST)])
    assert (got.status, got.headers["content-type"], got.headers["content-disposition"]) == (
        200,
        "image/png",
        "attachment",
    )
    for value in ("a%0D%0ASet-Cookie%3A%20b", "a%0Ab", "a%00b"):
        split = await driver.get(f"/bucket/key?response-content-type={value}")
        assert (split.status, split.code) == (400, "InvalidArgument")


async def test_a_response_override_is_sent_in_latin_1_or_refused(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    target = "/bucket/key?response-content-disposition="
    got = await driver.get(f"{target}attachment%3B%20filename%3D%22gr%C3%BC%C3%9Fe.txt%22")
    assert (got.status, got.headers["content-disposition"]) == (200, 'attachment; filename="grüße.txt"')
    for value in ("%E6%96%87.txt", "%C2%85", "%E2%80%A8"):
        refused = await driver.get(f"{target}{value}")
        assert (refused.status, refused.code) == (400, "InvalidArgument")


async def test_metadata_with_line_ends_is_refused(driver: Driver) -> None:
    fields = [
        (name, value.replace("MARK", "a\r\nb"))
        for name, value in sign("PUT", "/bucket/key", headers={"x-amz-meta-a": "MARK"})
    ]
    assert (await driver.send("PUT", "/bucket/key", fields)).status in (400, 403)
    assert (await driver.get("/bucket/key")).status == 404


async def test_internal_headers_of_a_client_are_not_taken(fake_driver: Driver) -> None:
    await fake_driver.put(
        "/chunks/key",
        DATA,
        x_kvobj_digest="00" * 32,
        x_kvobj_tier="hbm",
        x_kvobj_existed="true",
        x_amz_replication_status="REPLICA",
        x_minio_internal="1",
    )
    row = fake_driver.fake.catalog.objects["chunks", "key"]
    assert (row.headers, row.metadata) == ({}, {})
    got = await fake_driver.get("/chunks/key")
    assert got.headers["x-kvobj-digest"] != "00" * 32
    assert got.headers["x-kvobj-tier"] == "dram"


async def test_keys_with_any_character_are_stored_and_listed(driver: Driver) -> None:
    keys = {
        "<&>": "/bucket/%3C%26%3E",
        "\x01": "/bucket/%01",
        "a b+c": "/bucket/a%20b%2Bc",
        "é~": "/bucket/%C3%A9~",
        "a//b": "/bucket/a//b",
    }
    for target in keys.values():
        assert (await driver.put(target, b"x")).status == 200
        assert (await driver.get(target)).body == b"x"
    listed = await driver.get("/bucket?list-type=2&encoding-type=url")
    assert sorted(unquote(key) for key in listed.texts("Contents/Key")) == sorted(keys)
    assert b"&#x1;" in (await driver.get("/bucket")).body


async def test_a_lost_chunk_is_a_plain_miss_and_a_lost_object_an_error(fake_driver: Driver) -> None:
    await fake_driver.put("/chunks/key", DATA)
    await fake_driver.put("/bucket/key", DATA)
    fake_driver.fake.blobs.clear()
    chunk, ordinary = await fake_driver.get("/chunks/key"), await fake_driver.get("/bucket/key")
    assert (chunk.status, chunk.code) == (404, "NoSuchKey")
    assert (ordinary.status, ordinary.code) == (500, "InternalError")


async def test_an_rdma_token_is_declined_and_stores_nothing(driver: Driver) -> None:
    answer = await driver.put("/bucket/key", b"", x_amz_rdma_token="1:2:3")
    assert (answer.status, answer.headers["x-amz-rdma-reply"]) == (200, "501")
    assert (await driver.get("/bucket/key")).status == 404


async def test_ids_are_in_header_and_body_and_the_log_knows_user_and_operation(driver: Driver) -> None:
    answer = await driver.get("/bucket/absent")
    assert answer.xml.findtext("RequestId") == answer.headers["x-amz-request-id"]
    assert answer.xml.findtext("HostId") == answer.headers["x-amz-id-2"]
    assert (answer.reply.log["operation"], answer.reply.log["user"], answer.reply.log["error"]) == (
        "GetObject",
        "alice",
        "NoSuchKey",
    )


async def test_a_defect_is_an_internal_error_and_closes(fake_driver: Driver) -> None:
    fake_driver.fake.refuse_put = RuntimeError("a defect with details")
    answer = await fake_driver.put("/bucket/key", b"x")
    assert (answer.status, answer.code, answer.reply.close) == (500, "InternalError", True)
    assert b"details" not in answer.body


# -- copies ------------------------------------------------------------------------------------------------------
async def test_a_copy_keeps_or_replaces_headers_and_metadata(driver: Driver) -> None:
    await driver.put(
        "/bucket/source%20key", DATA, content_type="text/plain", x_amz_meta_a="1", x_amz_checksum_crc32=CRC32
    )
    copied = await driver.put("/bucket/copy", b"", x_amz_copy_source="/bucket/source%20key")
    assert (copied.status, copied.xml.findtext("ETag"), copied.xml.findtext("ChecksumCRC32")) == (
        200,
        f'"{MD5}"',
        CRC32,
    )
    got = await driver.get("/bucket/copy")
    assert (got.body, got.headers["content-type"], got.headers["x-amz-meta-a"]) == (DATA, "text/plain", "1")
    await driver.put(
        "/bucket/copy",
        b"",
        x_amz_copy_source="bucket/source%20key",
        x_amz_metadata_directive="REPLACE",
        x_amz_meta_b="2",
    )
    got = await driver.get("/bucket/copy")
    assert ("x-amz-meta-a" in got.headers, got.headers["x-amz-meta-b"], got.headers["content-type"]) == (
        False,
        "2",
        "binary/octet-stream",
    )
    summed = await driver.put(
        "/bucket/copy", b"", x_amz_copy_source="bucket/source%20key", x_amz_checksum_algorithm="SHA256"
    )
    assert summed.xml.findtext("ChecksumSHA256") == base64.b64encode(hashlib.sha256(DATA).digest()).decode()


async def test_a_copy_to_itself_must_change_something(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    assert (await driver.put("/bucket/key", b"", x_amz_copy_source="/bucket/key")).code == "InvalidRequest"
    answer = await driver.put(
        "/bucket/key", b"", x_amz_copy_source="/bucket/key", x_amz_metadata_directive="REPLACE", x_amz_meta_a="1"
    )
    assert answer.status == 200
    assert (await driver.get("/bucket/key")).body == DATA


async def test_every_failed_copy_source_condition_is_a_412(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    for name, value in (
        ("if_match", '"x"'),
        ("if_none_match", f'"{MD5}"'),
        ("if_modified_since", "Fri, 01 Jan 2100 00:00:00 GMT"),
        ("if_unmodified_since", "Sat, 01 Jan 2000 00:00:00 GMT"),
    ):
        answer = await driver.put(
            "/bucket/copy", b"", x_amz_copy_source="/bucket/key", **{f"x_amz_copy_source_{name}": value}
        )
        assert (answer.status, answer.code) == (412, "PreconditionFailed"), name
    assert (
        await driver.put("/bucket/copy", b"", x_amz_copy_source="/bucket/key", x_amz_copy_source_if_match=MD5)
    ).status == 200


async def test_reading_the_source_of_a_copy_needs_the_right_to(driver: Driver) -> None:
    await driver.put("/bucket/secret", DATA)
    await driver.request("PUT", "/bobs-bucket", user=BOB)
    source = {"x-amz-copy-source": "/bucket/secret"}
    assert (await driver.request("PUT", "/bobs-bucket/copy", headers=source, user=BOB)).code == "AccessDenied"
    created = await driver.request("POST", "/bobs-bucket/copy?uploads", user=BOB)
    upload_id = created.xml.findtext("UploadId")
    part = await driver.request("PUT", f"/bobs-bucket/copy?partNumber=1&uploadId={upload_id}", headers=source, user=BOB)
    assert part.code == "AccessDenied"
    crossed = {"x-amz-copy-source": "/bobs-bucket/../bucket/secret"}
    assert (await driver.request("PUT", "/bobs-bucket/copy", headers=crossed, user=BOB)).code == "InvalidURI"
    assert (await driver.put("/bucket/copy", b"", x_amz_copy_source="/bucket/absent")).code == "NoSuchKey"


# -- kv buckets --------------------------------------------------------------------------------------------------
async def test_a_live_chunk_answers_for_another_of_its_size_without_reading_it(driver: Driver) -> None:
    first = await driver.put("/chunks/id", DATA)
    assert re.fullmatch(r'"kv[0-9a-f]{24}-1"', first.headers["etag"]), "what follows the hyphen is a number to clients"
    assert (first.headers["x-kvobj-existed"], first.headers["x-kvobj-durability"]) == ("false", "memory")
    body = FakeBody(b"y" * len(DATA))
    again = await driver.request(
        "PUT", "/chunks/id", body=body, payload="UNSIGNED-PAYLOAD", headers={"expect": "100-continue"}
    )
    assert (again.status, again.headers["x-kvobj-existed"], again.headers["etag"]) == (
        200,
        "true",
        first.headers["etag"],
    )
    assert (body.accepted, again.reply.close) == (False, True)
    small = FakeBody(b"y" * len(DATA))
    assert not (await driver.request("PUT", "/chunks/id", body=small, payload="UNSIGNED-PAYLOAD")).reply.close
    assert (await driver.get("/chunks/id")).body == DATA


async def test_a_live_chunk_of_another_size_is_a_conflict(driver: Driver) -> None:
    await driver.put("/chunks/id", DATA)
    answer = await driver.put("/chunks/id", DATA + b"x")
    assert (answer.status, answer.code) == (409, "ImmutableChunk")
    answer = await driver.put("/chunks/id", DATA, if_none_match="*")
    assert (answer.status, answer.code) == (412, "PreconditionFailed")


async def test_the_durability_reached_is_told(driver: Driver) -> None:
    put = await driver.put("/chunks/id", DATA, x_kvobj_durability="local")
    assert put.headers["x-kvobj-durability"] == "local"
    got = await driver.get("/chunks/id")
    assert (got.headers["x-kvobj-durability"], len(got.headers["x-kvobj-digest"]), got.headers["x-kvobj-tier"]) == (
        "local",
        64,
        "dram",
    )
    assert (await driver.put("/chunks/other", DATA, x_kvobj_durability="forever")).code == "InvalidArgument"
    assert (await driver.put("/chunks/other", DATA, x_kvobj_durability="shared")).code == "InvalidRequest"


async def test_an_announced_digest_never_stands_in_for_the_bytes(driver: Driver) -> None:
    # Who only knows a digest cannot learn whether another user stored it: what counts is the key, in one's own bucket.
    await driver.put("/chunks/id", DATA)
    await driver.request("PUT", "/bobs-chunks", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
    digest = (await driver.get("/chunks/id")).headers["x-kvobj-digest"]
    answer = await driver.request("PUT", "/bobs-chunks/id", user=BOB, body=b"", headers={"x-kvobj-digest": digest})
    assert answer.headers["x-kvobj-existed"] == "false"
    assert (await driver.request("GET", "/bobs-chunks/id", user=BOB)).body == b""
