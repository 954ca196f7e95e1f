"""boto3 against a real server: every operation as an application would call it, over HTTP on loopback."""

from __future__ import annotations

import datetime as dt
import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from client_suite import NAMES, PART_BYTES, S3Client, body_of, boto3_client, client_server
from hypothesis import given, settings
from hypothesis import strategies as st
from module_paths import ModulePaths
from raw_http import RawConnection, RawReply
from server_process import MIB, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUCKET = "boto3-bucket"
ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("boto3")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[S3Client]:
    made = boto3_client(server)
    made.create_bucket(Bucket=BUCKET)
    yield made
    made.close()


def read(client: S3Client, key: str, bucket: str = BUCKET, **more: object) -> bytes:
    with client.get_object(Bucket=bucket, Key=key, **more)["Body"] as stream:
        body: bytes = stream.read()
    return body


def error_of(raised: pytest.ExceptionInfo[ClientError]) -> tuple[str, int]:
    response = raised.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def test_buckets_are_made_listed_headed_and_deleted(client: S3Client) -> None:
    client.create_bucket(Bucket="short-lived")
    assert "short-lived" in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    assert client.head_bucket(Bucket="short-lived")["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert client.get_bucket_location(Bucket="short-lived")["LocationConstraint"] is None
    client.put_object(Bucket="short-lived", Key="one", Body=b"1")
    with pytest.raises(ClientError) as raised:
        client.delete_bucket(Bucket="short-lived")
    assert error_of(raised) == ("BucketNotEmpty", 409)
    client.delete_object(Bucket="short-lived", Key="one")
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(ClientError) as raised:
        client.head_bucket(Bucket="short-lived")
    assert error_of(raised)[1] == 404


@pytest.mark.parametrize("size", [0, 1, 4096, 65_536, 65_537, 262_145, 3 * MIB + 1])
@pytest.mark.parametrize("bucket", [BUCKET, "chunks", "chunks-local"])
def test_what_is_put_is_got(client: S3Client, bucket: str, size: int) -> None:
    body = body_of(size)
    key = f"sizes/{size}"
    put = client.put_object(Bucket=bucket, Key=key, Body=body, ContentType="x/y", Metadata={"colour": "blue"})
    assert read(client, key, bucket) == body
    head = client.head_object(Bucket=bucket, Key=key)
    assert (head["ContentLength"], head["ContentType"], head["Metadata"]) == (size, "x/y", {"colour": "blue"})
    assert head["ETag"] == put["ETag"]
    if bucket == BUCKET:
        assert put["ETag"].strip('"') == hashlib.md5(body).hexdigest()  # noqa: S324 - what S3 says an ETag is


@pytest.mark.parametrize("key", NAMES)
def test_names_come_back_as_they_were_sent(client: S3Client, key: str) -> None:
    client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
    assert read(client, key) == key.encode()
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=key)["Contents"]
    assert [item["Key"] for item in listed] == [key]
    client.delete_object(Bucket=BUCKET, Key=key)


@settings(max_examples=30)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60))
def test_any_printable_name_can_be_put_read_and_deleted(client: S3Client, name: str) -> None:
    key = f"any/{name}"
    client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    assert read(client, key) == b"x"
    client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(ClientError) as raised:
        client.head_object(Bucket=BUCKET, Key=key)
    assert error_of(raised)[1] == 404


@pytest.mark.parametrize(
    ("byte_range", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1000-70000", 1000, 70_001),
        ("bytes=262143-262144", 262_143, 262_145),
        ("bytes=900000-", 900_000, 1_000_000),
        ("bytes=-7", 999_993, 1_000_000),
        ("bytes=5-9999999", 5, 1_000_000),
    ],
)
def test_ranges(client: S3Client, byte_range: str, start: int, stop: int) -> None:
    body = body_of(1_000_000)
    client.put_object(Bucket=BUCKET, Key="ranged", Body=body)
    reply = client.get_object(Bucket=BUCKET, Key="ranged", Range=byte_range)
    with reply["Body"] as stream:
        assert stream.read() == body[start:stop]
    assert reply["ContentRange"] == f"bytes {start}-{stop - 1}/1000000"
    assert reply["ResponseMetadata"]["HTTPStatusCode"] == 206


def test_a_range_past_the_end_is_refused(client: S3Client) -> None:
    client.put_object(Bucket=BUCKET, Key="short", Body=b"12345")
    with pytest.raises(ClientError) as raised:
        client.get_object(Bucket=BUCKET, Key="short", Range="bytes=5-")
    assert error_of(raised) == ("InvalidRange", 416)


def test_listing_pages_with_delimiter_and_start_after(client: S3Client) -> None:
    keys = [f"page/{folder}/{number:02d}" for folder in "abc" for number in range(7)] + ["page/root"]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    paginator = client.get_paginator("list_objects_v2")
    pages = list(paginator.paginate(Bucket=BUCKET, Prefix="page/", PaginationConfig={"PageSize": 5}))
    assert [item["Key"] for page in pages for item in page["Contents"]] == sorted(keys)
    assert all(page["KeyCount"] <= 5 for page in pages)
    page = client.list_objects_v2(Bucket=BUCKET, Prefix="page/", Delimiter="/")
    assert [item["Prefix"] for item in page["CommonPrefixes"]] == ["page/a/", "page/b/", "page/c/"]
    assert [item["Key"] for item in page["Contents"]] == ["page/root"]
    page = client.list_objects_v2(Bucket=BUCKET, Prefix="page/", StartAfter="page/c/05")
    assert [item["Key"] for item in page["Contents"]] == ["page/c/06", "page/root"]
    old = client.list_objects(Bucket=BUCKET, Prefix="page/", MaxKeys=3)
    assert (len(old["Contents"]), old["IsTruncated"]) == (3, True)
    versions = client.list_object_versions(Bucket=BUCKET, Prefix="page/root")["Versions"]
    assert [version["VersionId"] for version in versions] == ["null"]


def test_many_are_deleted_at_once_and_absent_ones_do_no_harm(client: S3Client) -> None:
    keys = [f"many/{number}" for number in range(20)]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    reply = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in [*keys, "many/absent"]]})
    assert {item["Key"] for item in reply["Deleted"]} == {*keys, "many/absent"}
    assert client.list_objects_v2(Bucket=BUCKET, Prefix="many/")["KeyCount"] == 0


def test_copy_keeps_or_replaces_metadata(client: S3Client) -> None:
    body = body_of(300_000)
    client.put_object(Bucket=BUCKET, Key="source ü", Body=body, Metadata={"from": "source"})
    source = {"Bucket": BUCKET, "Key": "source ü"}
    client.copy_object(Bucket=BUCKET, Key="copied", CopySource=source)
    assert client.head_object(Bucket=BUCKET, Key="copied")["Metadata"] == {"from": "source"}
    client.copy_object(
        Bucket=BUCKET, Key="again", CopySource=source, Metadata={"from": "me"}, MetadataDirective="REPLACE"
    )
    assert client.head_object(Bucket=BUCKET, Key="again")["Metadata"] == {"from": "me"}
    assert read(client, "copied") == read(client, "again") == body


def test_parts_may_come_out_of_order_and_be_sent_again(client: S3Client) -> None:
    pieces = {1: body_of(PART_BYTES, 1), 2: body_of(PART_BYTES, 2), 3: body_of(12_345, 3)}
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="parts", Metadata={"made": "of parts"})["UploadId"]
    tags: dict[int, str] = {}

    def send(number: int, body: bytes) -> None:
        reply = client.upload_part(Bucket=BUCKET, Key="parts", UploadId=upload, PartNumber=number, Body=body)
        tags[number] = reply["ETag"]

    send(2, body_of(PART_BYTES, 99))
    send(3, pieces[3])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: send(number, pieces[number]), (2, 1)))
    listed = client.list_parts(Bucket=BUCKET, Key="parts", UploadId=upload)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, PART_BYTES), (2, PART_BYTES), (3, 12_345)]
    uploads = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert upload in {entry["UploadId"] for entry in uploads}
    parts = [{"PartNumber": number, "ETag": tags[number]} for number in (1, 2, 3)]
    done = client.complete_multipart_upload(
        Bucket=BUCKET, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert done["ETag"].endswith('-3"')
    assert read(client, "parts") == pieces[1] + pieces[2] + pieces[3]
    assert client.head_object(Bucket=BUCKET, Key="parts")["Metadata"] == {"made": "of parts"}
    assert read(client, "parts", Range=f"bytes={PART_BYTES - 3}-{PART_BYTES + 2}") == pieces[1][-3:] + pieces[2][:3]


def test_a_part_too_small_or_unknown_is_refused_and_abort_forgets(client: S3Client) -> None:
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="small-parts")["UploadId"]
    tags = [
        client.upload_part(Bucket=BUCKET, Key="small-parts", UploadId=upload, PartNumber=number, Body=b"x")["ETag"]
        for number in (1, 2)
    ]
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    with pytest.raises(ClientError) as raised:
        client.complete_multipart_upload(
            Bucket=BUCKET, Key="small-parts", UploadId=upload, MultipartUpload={"Parts": parts}
        )
    assert error_of(raised) == ("EntityTooSmall", 400)
    client.abort_multipart_upload(Bucket=BUCKET, Key="small-parts", UploadId=upload)
    with pytest.raises(ClientError) as raised:
        client.list_parts(Bucket=BUCKET, Key="small-parts", UploadId=upload)
    assert error_of(raised) == ("NoSuchUpload", 404)


@pytest.mark.parametrize("bucket", [BUCKET, "chunks"])
def test_an_object_larger_than_the_arena_goes_in_and_comes_out(
    client: S3Client, server: ServerProcess, bucket: str
) -> None:
    size = server.settings.dram_bytes * 5 // 4
    block = body_of(MIB)
    digest = hashlib.sha256(block * (size // MIB)).digest()
    client.put_object(Bucket=bucket, Key="huge", Body=block * (size // MIB))
    found = hashlib.sha256()
    with client.get_object(Bucket=bucket, Key="huge")["Body"] as stream:
        while piece := stream.read(MIB):
            found.update(piece)
    assert found.digest() == digest
    middle = size // 2 + 17
    assert read(client, "huge", bucket, Range=f"bytes={middle}-{middle + 99}") == (block * 2)[middle % MIB :][:100]
    client.delete_object(Bucket=bucket, Key="huge")


def test_the_transfer_layer_uploads_and_downloads_in_parallel(client: S3Client, tmp_path: Path) -> None:
    body = body_of(3 * PART_BYTES + 11)
    (tmp_path / "up").write_bytes(body)
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=3)
    for bucket in (BUCKET, "chunks"):
        client.upload_file(str(tmp_path / "up"), bucket, "transferred", Config=config)
        client.download_file(bucket, "transferred", str(tmp_path / "down"), Config=config)
        assert (tmp_path / "down").read_bytes() == body


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checksums_are_stored_returned_and_verified(client: S3Client, algorithm: str) -> None:
    body = body_of(200_000)
    field = f"Checksum{algorithm}"
    put = client.put_object(Bucket=BUCKET, Key="summed", Body=body, ChecksumAlgorithm=algorithm)
    got = client.get_object(Bucket=BUCKET, Key="summed", ChecksumMode="ENABLED")
    with got["Body"] as stream:
        assert stream.read() == body
    assert put[field] == got[field]
    wrong = client.put_object(Bucket=BUCKET, Key="other", Body=body[::-1], ChecksumAlgorithm=algorithm)[field]
    with pytest.raises(ClientError) as raised:
        client.put_object(Bucket=BUCKET, Key="never", Body=body, **{field: wrong})
    assert error_of(raised) == ("BadDigest", 400)
    with pytest.raises(ClientError) as raised:
        client.head_object(Bucket=BUCKET, Key="never")
    assert error_of(raised)[1] == 404


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checksums_of_parts_make_one_of_the_object(client: S3Client, algorithm: str) -> None:
    field = f"Checksum{algorithm}"
    kind = "FULL_OBJECT" if algorithm == "CRC64NVME" else "COMPOSITE"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="summed-parts", ChecksumAlgorithm=algorithm)["UploadId"]
    parts = []
    for number, body in enumerate((body_of(PART_BYTES), b"tail"), 1):
        reply = client.upload_part(
            Bucket=BUCKET,
            Key="summed-parts",
            UploadId=upload,
            PartNumber=number,
            Body=body,
            ChecksumAlgorithm=algorithm,
        )
        parts.append({"PartNumber": number, "ETag": reply["ETag"], field: reply[field]})
    done = client.complete_multipart_upload(
        Bucket=BUCKET, Key="summed-parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    head = client.head_object(Bucket=BUCKET, Key="summed-parts", ChecksumMode="ENABLED")
    assert done[field] == head[field]
    assert head[field].endswith("-2") == (kind == "COMPOSITE")


def test_conditional_writes(client: S3Client) -> None:
    first = client.put_object(Bucket=BUCKET, Key="once", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as raised:
        client.put_object(Bucket=BUCKET, Key="once", Body=b"second", IfNoneMatch="*")
    assert error_of(raised) == ("PreconditionFailed", 412)
    client.put_object(Bucket=BUCKET, Key="once", Body=b"third", IfMatch=first["ETag"])
    with pytest.raises(ClientError) as raised:
        client.put_object(Bucket=BUCKET, Key="once", Body=b"fourth", IfMatch=first["ETag"])
    assert error_of(raised) == ("PreconditionFailed", 412)
    with pytest.raises(ClientError) as raised:
        client.put_object(Bucket=BUCKET, Key="absent", Body=b"x", IfMatch=first["ETag"])
    assert error_of(raised) == ("NoSuchKey", 404)
    assert read(client, "once") == b"third"


def test_conditional_reads(client: S3Client) -> None:
    etag = client.put_object(Bucket=BUCKET, Key="dated", Body=b"x")["ETag"]
    past = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
    assert read(client, "dated", IfMatch=etag, IfModifiedSince=past) == b"x"
    for condition, status in (
        ({"IfNoneMatch": etag}, 304),
        ({"IfMatch": '"other"'}, 412),
        ({"IfUnmodifiedSince": past}, 412),
    ):
        with pytest.raises(ClientError) as raised:
            client.get_object(Bucket=BUCKET, Key="dated", **condition)
        assert error_of(raised)[1] == status
    assert client.head_object(Bucket=BUCKET, Key="dated")["LastModified"] > past


def test_the_first_writer_of_a_chunk_wins(client: S3Client) -> None:
    first = client.put_object(Bucket="chunks", Key="chunk", Body=b"first")
    again = client.put_object(Bucket="chunks", Key="chunk", Body=b"other")
    assert again["ResponseMetadata"]["HTTPHeaders"]["x-kvobj-existed"] == "true"
    assert again["ETag"] == first["ETag"]
    assert len(first["ETag"].strip('"')) != 32, "no client may take it for an MD5"
    with pytest.raises(ClientError) as raised:
        client.put_object(Bucket="chunks", Key="chunk", Body=b"longer than the first")
    assert error_of(raised)[1] == 409
    assert read(client, "chunk", "chunks") == b"first"


def fetch(url: str, method: str = "GET", body: bytes = b"") -> RawReply:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    head = (
        f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with RawConnection(parts.hostname, parts.port) as connection:
        connection.send(head.encode() + body)
        return connection.read_reply()


def test_presigned_urls_put_and_get_and_a_changed_one_is_refused(client: S3Client) -> None:
    place = {"Bucket": BUCKET, "Key": "presigned ü"}
    assert fetch(client.generate_presigned_url("put_object", Params=place), "PUT", b"by url").status == 200
    url = client.generate_presigned_url("get_object", Params=place, ExpiresIn=60)
    assert fetch(url).body == b"by url"
    refused = fetch(url.replace("presigned", "presigneD"))
    assert (refused.status, refused.code) == (403, "SignatureDoesNotMatch")
    assert fetch(url, "PUT", b"x").status == 403


@pytest.fixture
def localhost_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names under `localhost` lead home; not every resolver knows that."""
    resolve = socket.getaddrinfo

    def resolve_localhost(host: str, *rest: object, **named: object) -> object:
        return resolve("127.0.0.1" if host.endswith("localhost") else host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_localhost)


@pytest.mark.usefixtures("localhost_names")
def test_virtual_hosted_style(server: ServerProcess, client: S3Client) -> None:
    hosted = boto3_client(server, endpoint=f"http://localhost:{server.port}", s3={"addressing_style": "virtual"})
    try:
        hosted.put_object(Bucket=BUCKET, Key="hosted/ü key", Body=b"hosted")
        assert read(hosted, "hosted/ü key") == b"hosted"
        assert [item["Key"] for item in hosted.list_objects_v2(Bucket=BUCKET, Prefix="hosted/")["Contents"]] == [
            "hosted/ü key"
        ]
    finally:
        hosted.close()
    assert read(client, "hosted/ü key") == b"hosted"


def test_a_wrong_secret_is_refused(server: ServerProcess) -> None:
    stranger = boto3_client(server)
    stranger._request_signer._credentials.secret_key = "not-the-secret-key-of-anyone"
    try:
        with pytest.raises(ClientError) as raised:
            stranger.put_object(Bucket=BUCKET, Key="stolen", Body=b"x")
        assert error_of(raised) == ("SignatureDoesNotMatch", 403)
    finally:
        stranger.close()
