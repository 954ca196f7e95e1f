import base64
import hashlib
import zlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.checksums import (
    Announced,
    check_digests,
    check_document,
    check_trailers,
    checksum_headers,
    of_parts,
    parse_announced,
    parse_upload_checksum,
)
from kvobj.api.errors import S3Error
from kvobj.api.sigv4 import Authentication, PayloadMode
from kvobj.catalog.rows import Checksum, Durability, PartRow, UploadRow, UserRow
from kvobj.codec.checksums import Digester

USER = UserRow("u", "U", "AK", "SK")
DATA = b"some bytes to be checked"
CRC32 = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
# The check values that the catalogues of CRCs and FIPS 180 give for the nine digits, and what another XXHash makes of them.
KNOWN = {
    algorithm: base64.b64encode(bytes.fromhex(digest)).decode()
    for algorithm, digest in {
        "CRC32": "cbf43926",
        "CRC32C": "e3069283",
        "CRC64NVME": "ae8b14860a799888",
        "SHA1": "f7c3bc1d808e04732adf679965ccc34ca7ae3441",
        "SHA256": "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
        "SHA512": "d9e6762dd1c8eaf6d61b3c6192fc408d4d6d5f1176d0c29169bc24e71c3f274a"
        "d27fcd5811b313d681f7e55ec02d73d499c95455b6b5bb503acf574fba8ffe85",
        "MD5": "25f9e794323b453885f5181f1b624d0b",
        "XXHASH64": xxhash.xxh64(b"123456789").hexdigest(),
        "XXHASH3": xxhash.xxh3_64(b"123456789").hexdigest(),
        "XXHASH128": xxhash.xxh3_128(b"123456789").hexdigest(),
    }.items()
}


def authentication(mode: PayloadMode = PayloadMode.UNSIGNED, sha256: str | None = None) -> Authentication:
    return Authentication(USER, mode, sha256, None, is_presigned=False)


def computed(announced: Announced, data: bytes = DATA) -> Digester:
    digester = Digester(announced.digests)
    digester.update(memoryview(data))
    return digester


@pytest.mark.parametrize(("algorithm", "value"), KNOWN.items())
def test_known_checksums_of_123456789_are_accepted_and_others_refused(algorithm: str, value: str) -> None:
    announced = parse_announced({f"x-amz-checksum-{algorithm.lower()}": value}, authentication())
    stored = check_digests(announced, announced.value, computed(announced, b"123456789"))
    assert stored == (Checksum(algorithm, value, "FULL_OBJECT"),)
    with pytest.raises(S3Error) as caught:
        check_digests(announced, announced.value, computed(announced, b"123456788"))
    assert caught.value.code == "BadDigest"


def test_the_signed_payload_digest_is_compared() -> None:
    announced = parse_announced({}, authentication(PayloadMode.HASHED, hashlib.sha256(DATA).hexdigest()))
    assert check_digests(announced, None, computed(announced)) == ()
    with pytest.raises(S3Error) as caught:
        check_digests(announced, None, computed(announced, b"other"))
    assert caught.value.code == "XAmzContentSHA256Mismatch"


def test_content_md5_is_compared_and_must_be_one() -> None:
    md5 = base64.b64encode(hashlib.md5(DATA).digest()).decode()  # noqa: S324 - what S3 clients send
    check_document(parse_announced({"content-md5": md5}, authentication()), None, DATA)
    with pytest.raises(S3Error) as caught:
        check_document(parse_announced({"content-md5": md5}, authentication()), None, b"other")
    assert caught.value.code == "BadDigest"
    for value in ("", "abc", "!!!!", base64.b64encode(b"short").decode()):
        with pytest.raises(S3Error) as caught:
            parse_announced({"content-md5": value}, authentication())
        assert caught.value.code == "InvalidDigest"


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-sha1": "x"}, PayloadMode.UNSIGNED),
        ({"x-amz-checksum-crc32": "AAAA"}, PayloadMode.UNSIGNED),
        ({"x-amz-checksum-crc32": "not base64"}, PayloadMode.UNSIGNED),
        ({"x-amz-checksum-md5": "AAAA"}, PayloadMode.UNSIGNED),
        ({"x-amz-trailer": "x-amz-checksum-crc32"}, PayloadMode.UNSIGNED),
        (
            {"x-amz-trailer": "x-amz-checksum-crc32", "x-amz-checksum-crc32": "AAAAAA=="},
            PayloadMode.CHUNKS_UNSIGNED_TRAILER,
        ),
        ({"x-amz-trailer": "x-other"}, PayloadMode.CHUNKS_UNSIGNED_TRAILER),
        ({"x-amz-trailer": "x-amz-checksum-crc32, x-amz-checksum-sha1"}, PayloadMode.CHUNKS_UNSIGNED_TRAILER),
        ({"x-amz-sdk-checksum-algorithm": "SHA1", "x-amz-checksum-crc32": "AAAAAA=="}, PayloadMode.UNSIGNED),
        ({"x-amz-sdk-checksum-algorithm": "XX"}, PayloadMode.UNSIGNED),
    ],
)
def test_contradictory_announcements_are_refused(fields: dict[str, str], mode: PayloadMode) -> None:
    with pytest.raises(S3Error) as caught:
        parse_announced(fields, authentication(mode))
    assert caught.value.code == "InvalidRequest"


def test_the_trailer_must_be_the_one_announced() -> None:
    announced = parse_announced(
        {"x-amz-trailer": "x-amz-checksum-crc32"}, authentication(PayloadMode.CHUNKS_UNSIGNED_TRAILER)
    )
    assert check_trailers(announced, {"x-amz-checksum-crc32": CRC32}) == CRC32
    for trailers in ({}, {"x-amz-checksum-sha1": "x"}, {"x-amz-checksum-crc32": CRC32, "more": "1"}):
        with pytest.raises(S3Error) as caught:
            check_trailers(announced, trailers)
        assert caught.value.code == "MalformedTrailerError"


def test_an_unsigned_trailer_mode_without_a_trailer_gets_a_crc64nvme_of_the_server() -> None:
    announced = parse_announced({}, authentication(PayloadMode.CHUNKS_UNSIGNED_TRAILER))
    assert check_trailers(announced, {}) is None
    (stored,) = check_digests(announced, None, computed(announced))
    assert stored.algorithm == "CRC64NVME"


@pytest.mark.parametrize(
    ("algorithm", "kind", "expected"),
    [
        ("CRC32", None, ("CRC32", "COMPOSITE")),
        ("crc32c", "full_object", ("CRC32C", "FULL_OBJECT")),
        ("CRC64NVME", None, ("CRC64NVME", "FULL_OBJECT")),
        ("SHA256", None, ("SHA256", "COMPOSITE")),
        ("SHA256", "FULL_OBJECT", None),
        ("SHA512", None, ("SHA512", "COMPOSITE")),
        ("MD5", "FULL_OBJECT", None),
        ("XXHASH3", None, ("XXHASH3", "COMPOSITE")),
        ("CRC64NVME", "COMPOSITE", None),
        ("MD4", None, None),
        (None, "COMPOSITE", None),
        (None, None, (None, None)),
    ],
)
def test_an_upload_has_an_algorithm_and_a_type_it_can_have(
    algorithm: str | None, kind: str | None, expected: tuple[str | None, str | None] | None
) -> None:
    given_fields = {"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": kind}
    fields = {name: value for name, value in given_fields.items() if value is not None}
    if expected is None:
        with pytest.raises(S3Error):
            parse_upload_checksum(fields)
    else:
        assert parse_upload_checksum(fields) == expected


def part(number: int, data: bytes, algorithm: str) -> PartRow:
    digester = Digester(frozenset({algorithm.lower()}))
    digester.update(memoryview(data))
    return PartRow("u", number, (), len(data), "e", 0, Checksum(algorithm, digester.base64(algorithm.lower())))


def upload(algorithm: str | None, kind: str | None) -> UploadRow:
    return UploadRow("b", "k", "u", 0, "me", Durability.LOCAL, {}, {}, algorithm, kind)


@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=5), st.sampled_from(["CRC32", "CRC32C", "CRC64NVME"]))
def test_a_full_object_checksum_of_parts_is_that_of_their_bytes(pieces: list[bytes], algorithm: str) -> None:
    parts = [part(index + 1, piece, algorithm) for index, piece in enumerate(pieces)]
    whole = part(1, b"".join(pieces), algorithm).checksum
    assert of_parts(upload(algorithm, "FULL_OBJECT"), parts) == (whole,)


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "SHA1", "SHA256", "SHA512", "MD5", "XXHASH128"])
def test_a_composite_checksum_is_that_of_the_parts_checksums(algorithm: str) -> None:
    parts = [part(1, b"one", algorithm), part(2, b"two", algorithm)]
    joined = b"".join(base64.b64decode(each.checksum.value) for each in parts if each.checksum)
    expected = part(1, joined, algorithm).checksum
    assert expected is not None
    assert of_parts(upload(algorithm, "COMPOSITE"), parts) == (Checksum(algorithm, f"{expected.value}-2", "COMPOSITE"),)


def test_parts_without_checksums_make_none() -> None:
    assert of_parts(upload("CRC32", "COMPOSITE"), [part(1, b"a", "CRC32C")]) == ()
    assert of_parts(upload(None, None), [part(1, b"a", "CRC32")]) == ()


def test_reply_headers_tell_value_and_type() -> None:
    assert checksum_headers([Checksum("CRC32", "AAAAAA==")]) == [
        ("x-amz-checksum-crc32", "AAAAAA=="),
        ("x-amz-checksum-type", "FULL_OBJECT"),
    ]
