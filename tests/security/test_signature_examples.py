"""The signatures that AWS publishes, on its own examples and with their clock: through the verifier and through the whole service.

Source: Amazon S3 API reference, "Examples: Signature Calculations in AWS Signature Version 4", "Authenticating Requests: Using
Query Parameters", "Transferring Payload in Multiple Chunks" and "Including Trailing Headers". The key pair is the documentation's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from s3_driver import Answer, Driver, FakeBody, WallClock

from kvobj.api.exchange import S3Settings
from kvobj.api.request import HostRules
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, UserRow

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
EXAMPLE = UserRow("example", "Example", ACCESS_KEY, "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
BEGIN_MS = 1_369_353_600_000  # 2013-05-24T00:00:00Z
SCOPE = "20130524/us-east-1/s3/aws4_request"
BUCKET_HOST = "examplebucket.s3.amazonaws.com"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
CONTENT = b"Welcome to Amazon S3."
PRESIGNED = (
    "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2F"
    "aws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature="
    "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)


class ExampleClock(WallClock):
    def now_ms(self) -> int:
        return BEGIN_MS + self.offset_ms


@dataclass(frozen=True, slots=True)
class Example:
    """A request of the documentation: what is signed besides host, date and digest, and its signature."""

    method: str
    target: str
    signature: str
    headers: dict[str, str] = field(default_factory=dict)
    host: str = BUCKET_HOST
    digest: str = EMPTY_SHA256
    unsigned: tuple[str, ...] = ()

    def fields(self) -> list[tuple[str, str]]:
        fields = {
            "host": self.host,
            "x-amz-date": "20130524T000000Z",
            "x-amz-content-sha256": self.digest,
            **self.headers,
        }
        names = ";".join(sorted(name for name in fields if name not in self.unsigned))
        fields["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{SCOPE},SignedHeaders={names},Signature={self.signature}"
        )
        return list(fields.items())


GET_RANGE = Example(
    "GET",
    "/test.txt",
    "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    {"range": "bytes=0-9"},
)
PUT_OBJECT = Example(
    "PUT",
    "/test%24file.text",
    "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
    digest=hashlib.sha256(CONTENT).hexdigest(),
)
GET_LIFECYCLE = Example("GET", "/?lifecycle", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543")
LIST_OBJECTS = Example(
    "GET", "/?max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
)
CHUNKED = Example(
    "PUT",
    "/examplebucket/chunkObject.txt",
    "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    {
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": "66560",
        "content-length": "66824",
    },
    host="s3.amazonaws.com",
    digest="STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
)
CHUNK_SIGNATURES = (
    "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
)
TRAILER = Example(
    "PUT",
    "/examplebucket/chunkObject.txt",
    "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    {
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": "66560",
        "x-amz-trailer": "x-amz-checksum-crc32c",
    },
    host="s3.amazonaws.com",
    digest="STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
)
TRAILER_CHUNK_SIGNATURES = (
    "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
    "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
    "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
)
TRAILER_LINES = (
    b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
)


def chunks(signatures: tuple[str, ...], trailer: bytes = b"") -> bytes:
    pieces = (b"a" * 65536, b"a" * 1024)
    out = b"".join(
        f"{len(piece):x};chunk-signature={signature}\r\n".encode() + piece + b"\r\n"
        for piece, signature in zip(pieces, signatures, strict=False)
    )
    return out + f"0;chunk-signature={signatures[2]}\r\n".encode() + trailer + b"\r\n"


@pytest.fixture
async def driver() -> Driver:
    made = Driver(settings=S3Settings(host_rules=HostRules(domains=("s3.amazonaws.com",))), clock=ExampleClock())
    made.fake.catalog.user_rows = {EXAMPLE.id: EXAMPLE}
    await made.fake.catalog.create_bucket(
        BucketRow("examplebucket", BucketKind.ORDINARY, EXAMPLE.id, BEGIN_MS, Durability.LOCAL)
    )
    return made


async def send(driver: Driver, example: Example, body: bytes | FakeBody = b"") -> Answer:
    return await driver.send(example.method, example.target, example.fields(), body, with_length=False)


async def test_the_published_put_then_get_with_a_range(driver: Driver) -> None:
    assert (await send(driver, PUT_OBJECT, CONTENT)).status == 200
    assert driver.fake.catalog.objects["examplebucket", "test$file.text"].size_bytes == len(CONTENT)
    assert (await send(driver, GET_RANGE)).code == "NoSuchKey"
    driver.fake.catalog.objects["examplebucket", "test.txt"] = driver.fake.catalog.objects[
        "examplebucket", "test$file.text"
    ]
    answer = await send(driver, GET_RANGE)
    assert (answer.status, answer.body) == (206, CONTENT[:10])


async def test_the_published_put_of_another_body_stores_nothing(driver: Driver) -> None:
    answer = await send(driver, PUT_OBJECT, CONTENT[:-1] + b"!")
    assert answer.code == "XAmzContentSHA256Mismatch"
    assert not driver.fake.catalog.objects


async def test_the_published_requests_for_a_lifecycle_and_a_listing_are_signed_rightly(driver: Driver) -> None:
    assert (await send(driver, GET_LIFECYCLE)).code not in ("SignatureDoesNotMatch", "AccessDenied")
    assert (await send(driver, LIST_OBJECTS)).xml.findtext("MaxKeys") == "2"


async def test_the_published_presigned_url_holds_for_its_day(driver: Driver) -> None:
    host = [("host", BUCKET_HOST)]
    assert (await driver.send("GET", PRESIGNED, host)).code == "NoSuchKey"
    driver.clock.offset_ms = 86_400_000
    assert (await driver.send("GET", PRESIGNED, host)).code == "NoSuchKey"
    driver.clock.offset_ms += 1
    expired = await driver.send("GET", PRESIGNED, host)
    assert (expired.status, expired.code) == (403, "AccessDenied")
    assert expired.xml.findtext("X-Amz-Expires") == "86400"
    assert expired.xml.findtext("Expires") == "2013-05-25T00:00:00Z"


async def test_the_published_upload_in_chunks(driver: Driver) -> None:
    body = chunks(CHUNK_SIGNATURES)
    assert len(body) == 66824
    assert (await send(driver, CHUNKED, body)).status == 200
    row = driver.fake.catalog.objects["examplebucket", "chunkObject.txt"]
    assert (row.size_bytes, row.etag) == (66560, hashlib.md5(b"a" * 66560).hexdigest())  # noqa: S324 - an ETag


@pytest.mark.parametrize("which", range(3))
async def test_each_signature_of_the_published_chunks_counts(driver: Driver, which: int) -> None:
    signature = CHUNK_SIGNATURES[which]
    wrong = signature[:-1] + ("0" if signature[-1] != "0" else "1")
    body = chunks((*CHUNK_SIGNATURES[:which], wrong, *CHUNK_SIGNATURES[which + 1 :]))
    assert (await send(driver, CHUNKED, body)).code == "SignatureDoesNotMatch"
    assert not driver.fake.catalog.objects


async def test_the_published_upload_with_a_trailer(driver: Driver) -> None:
    body = chunks(TRAILER_CHUNK_SIGNATURES, TRAILER_LINES)
    assert (await send(driver, TRAILER, body)).status == 200
    checksums = driver.fake.catalog.objects["examplebucket", "chunkObject.txt"].checksums
    assert [checksum.algorithm for checksum in checksums] == ["CRC32C"]


@pytest.mark.parametrize(
    ("old", "new"), [(b"sOO8", b"tOO8"), (b"signature:d81f", b"signature:e81f"), (TRAILER_LINES, b"")]
)
async def test_the_published_trailer_counts(driver: Driver, old: bytes, new: bytes) -> None:
    body = chunks(TRAILER_CHUNK_SIGNATURES, TRAILER_LINES).replace(old, new)
    assert (await send(driver, TRAILER, body)).status in (400, 403)
    assert not driver.fake.catalog.objects


@pytest.mark.parametrize("example", [GET_RANGE, PUT_OBJECT, GET_LIFECYCLE, LIST_OBJECTS, CHUNKED, TRAILER])
async def test_no_published_signature_holds_for_another_method(driver: Driver, example: Example) -> None:
    other = "PUT" if example.method == "GET" else "GET"
    answer = await driver.send(other, example.target, example.fields())
    assert answer.code == "SignatureDoesNotMatch"
