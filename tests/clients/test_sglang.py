"""SGLang's HiCache over boto3, its `seaweedfs` backend: the calls it makes and the headers that boto3 makes of them.

One object a page, one HEAD a page to learn how long a prefix is stored, and a page that is not of its exact size is no page.
Pages go into an ordinary bucket and into a KV bucket.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError
from client_suite import S3Client, body_of, boto3_client, client_server
from module_paths import ModulePaths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import ServerProcess

BUCKET = "sglang-hicache"
PAGE_BYTES = 1_179_648  # 64 tokens of 36 layers, 8 heads of 32 in two bytes
FRONT = "hicache/meta-llama--Llama-3.1-8B/tp0of2"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("sglang")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[S3Client]:
    made = boto3_client(server)
    with pytest.raises(ClientError) as caught:
        made.head_bucket(Bucket=BUCKET)
    assert caught.value.response["Error"]["Code"] == "404"  # what tells it to make the bucket
    made.create_bucket(Bucket=BUCKET)
    made.head_bucket(Bucket=BUCKET)
    yield made
    made.close()


def pages(count: int, seed: int) -> dict[str, bytes]:
    """Pages under the names that they have: the hash of all tokens so far."""
    found: dict[str, bytes] = {}
    digest = b""
    for number in range(count):
        digest = hashlib.sha256(digest + bytes([seed, number])).digest()
        found[f"{FRONT}/{digest.hex()}"] = body_of(PAGE_BYTES, 1000 * seed + number)
    return found


def is_there(client: S3Client, bucket: str, key: str) -> bool:
    try:
        client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
            return False
        raise
    return True


def read_page(client: S3Client, bucket: str, key: str) -> bytes:
    reply = client.get_object(Bucket=bucket, Key=key)
    with reply["Body"] as stream:
        page: bytes = stream.read()
    assert reply["ContentLength"] == len(page) == PAGE_BYTES
    assert reply["ResponseMetadata"]["HTTPHeaders"]["x-amz-checksum-crc32"]  # boto3 has compared it with the bytes
    return page


@pytest.mark.parametrize("bucket", [BUCKET, "chunks"])
def test_a_prefix_of_pages_is_stored_found_and_read(client: S3Client, bucket: str) -> None:
    stored = pages(12, seed=1)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda item: client.put_object(Bucket=bucket, Key=item[0], Body=item[1]), stored.items()))
        asked = [*stored, f"{FRONT}/{'0' * 64}"]
        assert list(threads.map(lambda key: is_there(client, bucket, key), asked)) == [True] * 12 + [False]
        found = dict(zip(stored, threads.map(lambda key: read_page(client, bucket, key), stored), strict=True))
    assert found == stored


@pytest.mark.parametrize("bucket", [BUCKET, "chunks"])
def test_a_page_that_went_is_a_plain_miss_and_can_be_stored_again(client: S3Client, bucket: str) -> None:
    (key, page), *_ = pages(1, seed=2).items()
    client.put_object(Bucket=bucket, Key=key, Body=page)
    client.delete_object(Bucket=bucket, Key=key)
    assert not is_there(client, bucket, key)
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket=bucket, Key=key)
    assert caught.value.response["Error"]["Code"] == "NoSuchKey"
    client.put_object(Bucket=bucket, Key=key, Body=page)
    assert read_page(client, bucket, key) == page


def test_two_ranks_that_store_one_page_both_succeed_and_the_first_stays(client: S3Client) -> None:
    (key, page), *_ = pages(1, seed=3).items()
    client.put_object(Bucket="chunks", Key=key, Body=page)
    client.put_object(Bucket="chunks", Key=key, Body=page[::-1])
    assert read_page(client, "chunks", key) == page


def test_what_goes_over_the_wire_is_signed_summed_and_asked_for(server: ServerProcess) -> None:
    client = boto3_client(server)
    seen: list[dict[str, str]] = []

    def note(request: object, **_more: object) -> None:
        headers = getattr(request, "headers", {})
        texts = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value) for name, value in headers.items()
        }
        seen.append(texts)

    client.meta.events.register("before-send.s3", note)
    (key, page), *_ = pages(1, seed=4).items()
    try:
        client.put_object(Bucket="chunks", Key=key, Body=page)
        assert read_page(client, "chunks", key) == page
    finally:
        client.close()
    put, get = seen
    assert put["x-amz-content-sha256"] == hashlib.sha256(page).hexdigest()
    assert put["x-amz-checksum-crc32"] == b64encode(zlib.crc32(page).to_bytes(4, "big")).decode()
    assert put["expect"] == "100-continue"
    assert get["x-amz-checksum-mode"] == "ENABLED"
