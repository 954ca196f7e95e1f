"""GetObjectAttributes; checksums of objects and of their parts, wherever they are told; and parts that are read by number."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from awscrt import checksums as crt  # type: ignore[import-untyped]
from s3_worlds import MAIN, PART, S3Client, World, body_of, client_of, refused

ALL = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
TYPES = [
    ("SHA256", "COMPOSITE"),
    ("SHA1", "COMPOSITE"),
    ("CRC32", "COMPOSITE"),
    ("CRC32C", "COMPOSITE"),
    ("CRC32", "FULL_OBJECT"),
    ("CRC32C", "FULL_OBJECT"),
    ("CRC64NVME", "FULL_OBJECT"),
]
BODIES = (b"A" * PART, b"B" * PART, b"C" * 1000)
Place = dict[str, Any]


def raw_value(algorithm: str, data: bytes) -> bytes:
    match algorithm:
        case "CRC32":
            return int(crt.crc32(data)).to_bytes(4, "big")
        case "CRC32C":
            return int(crt.crc32c(data)).to_bytes(4, "big")
        case "CRC64NVME":
            return int(crt.crc64nvme(data)).to_bytes(8, "big")
        case _:
            return hashlib.new(algorithm.lower(), data).digest()


def value_of(algorithm: str, data: bytes) -> str:
    return base64.b64encode(raw_value(algorithm, data)).decode()


def object_value(algorithm: str, kind: str) -> str:
    """The checksum of an object of `BODIES`, without the number of its parts."""
    if kind == "FULL_OBJECT":
        return value_of(algorithm, b"".join(BODIES))
    return value_of(algorithm, b"".join(raw_value(algorithm, body) for body in BODIES))


def client_without_checksums(world: World) -> S3Client:
    """Sends no checksum of its own accord, as older SDKs."""
    return client_of(world.server, MAIN, request_checksum_calculation="when_required")


def uploaded(client: S3Client, place: Place, *bodies: bytes, **more: object) -> dict[str, Any]:
    upload_id = client.create_multipart_upload(**place, **more)["UploadId"]
    parts = []
    for number, body in enumerate(bodies, 1):
        reply = client.upload_part(**place, UploadId=upload_id, PartNumber=number, Body=body)
        told = {name: value for name, value in reply.items() if name.startswith("Checksum") and name != "ChecksumType"}
        parts.append({"PartNumber": number, "ETag": reply["ETag"], **told})
    done: dict[str, Any] = client.complete_multipart_upload(
        **place, UploadId=upload_id, MultipartUpload={"Parts": parts}
    )
    return done


@pytest.fixture
def place(bucket: str) -> Place:
    return {"Bucket": bucket, "Key": "obj"}


def test_an_object_tells_what_it_is_asked_for(world: World, place: Place) -> None:
    etag = world.main.put_object(**place, Body=b"foo")["ETag"]
    told = world.main.get_object_attributes(**place, ObjectAttributes=ALL)
    assert (told["ETag"], told["ObjectSize"], told["StorageClass"]) == (etag.strip('"'), 3, "STANDARD")
    assert not told.keys() & {"ObjectParts", "DeleteMarker", "VersionId"}
    one = world.main.get_object_attributes(**place, ObjectAttributes=["ObjectSize"])
    assert (one["ObjectSize"], "ETag" in one, "Checksum" in one) == (3, False, False)


def test_an_object_tells_its_checksum(world: World, place: Place) -> None:
    value = value_of("SHA256", b"A" * 1024)
    world.main.put_object(**place, Body=b"A" * 1024, ChecksumSHA256=value)
    told = world.main.get_object_attributes(**place, ObjectAttributes=ALL)
    assert told["Checksum"] == {"ChecksumSHA256": value, "ChecksumType": "FULL_OBJECT"}


def test_attributes_of_nothing_and_none_are_refused(world: World, place: Place) -> None:
    with refused(404, "NoSuchKey"):
        world.main.get_object_attributes(**place, ObjectAttributes=ALL)
    world.main.put_object(**place, Body=b"foo")
    with refused(403, "AccessDenied"):
        world.alt.get_object_attributes(**place, ObjectAttributes=ALL)
    for names in ("", "Size"):
        reply = world.raw(
            "GET", f"/{place['Bucket']}/obj", query={"attributes": ""}, headers={"x-amz-object-attributes": names}
        )
        assert (reply.status, reply.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(("algorithm", "kind"), TYPES)
def test_a_checksum_is_told_of_the_object_and_of_each_part(
    world: World, place: Place, algorithm: str, kind: str
) -> None:
    client, name = world.main, f"Checksum{algorithm}"
    begun = client.create_multipart_upload(**place, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    assert begun["ChecksumAlgorithm"] == algorithm
    upload: Place = {**place, "UploadId": begun["UploadId"]}
    values = [value_of(algorithm, body) for body in BODIES]
    parts = []
    for number, (body, value) in enumerate(zip(BODIES, values, strict=True), 1):
        reply = client.upload_part(**upload, PartNumber=number, Body=body, **{name: value})
        assert reply[name] == value
        parts.append({"PartNumber": number, "ETag": reply["ETag"], name: value})
    whole = object_value(algorithm, kind)
    stated = f"{whole}-3" if kind == "COMPOSITE" else whole
    # A client that never saw the first answer asks again, and is told the same.
    done = [
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **{name: stated}) for _ in range(2)
    ]
    for reply in done:
        assert (reply[name], reply["ChecksumType"], reply["ETag"]) == (stated, kind, done[0]["ETag"])
    assert name not in client.head_object(**place)
    head = client.head_object(**place, ChecksumMode="ENABLED")
    assert (head[name], head["ChecksumType"]) == (stated, kind)
    told = client.get_object_attributes(**place, ObjectAttributes=ALL)
    assert told["Checksum"] == {name: whole, "ChecksumType": kind}
    assert told["ObjectParts"]["TotalPartsCount"] == 3
    assert [(each["PartNumber"], each["Size"], each[name]) for each in told["ObjectParts"]["Parts"]] == [
        (number, len(body), value) for number, (body, value) in enumerate(zip(BODIES, values, strict=True), 1)
    ]
    for number, (body, value) in enumerate(zip(BODIES, values, strict=True), 1):
        # boto3 verifies what it is told against what it reads.
        got = client.get_object(**place, PartNumber=number, ChecksumMode="ENABLED")
        assert (got[name], got["ChecksumType"], got["Body"].read() == body) == (value, kind, True)


def test_parts_are_told_in_pages(world: World, place: Place) -> None:
    client = world.main
    done = uploaded(client, place, *([b"x" * PART] * 3), b"y", ChecksumAlgorithm="CRC32")
    told = client.get_object_attributes(**place, ObjectAttributes=ALL, MaxParts=1, PartNumberMarker=2)
    parts = told["ObjectParts"]
    assert (told["ETag"], told["ObjectSize"]) == (done["ETag"].strip('"'), 3 * PART + 1)
    assert [each["PartNumber"] for each in parts["Parts"]] == [3]
    assert (parts["TotalPartsCount"], parts["MaxParts"], parts["PartNumberMarker"]) == (4, 1, 2)
    assert (parts["IsTruncated"], parts["NextPartNumberMarker"]) == (True, 3)
    rest = client.get_object_attributes(**place, ObjectAttributes=ALL, MaxParts=10, PartNumberMarker=3)["ObjectParts"]
    assert ([(each["PartNumber"], each["Size"]) for each in rest["Parts"]], rest["IsTruncated"]) == ([(4, 1)], False)


def test_parts_without_checksums_are_counted_alone(world: World, place: Place) -> None:
    client = client_without_checksums(world)
    uploaded(client, place, b"x")
    told = client.get_object_attributes(**place, ObjectAttributes=ALL)["ObjectParts"]
    assert (told["TotalPartsCount"], "Parts" in told) == (1, False)
    client.close()


@pytest.mark.parametrize("bodies", [(b"x" * PART,), (b"x" * PART, b"y" * PART, b"z")])
def test_parts_are_read_by_number_once_the_object_stands(world: World, place: Place, bodies: tuple[bytes, ...]) -> None:
    client = world.main
    begun = client.create_multipart_upload(**place)["UploadId"]
    client.upload_part(**place, UploadId=begun, PartNumber=1, Body=b"x")
    with refused(404, "NoSuchKey"):
        client.get_object(**place, PartNumber=1)
    done = uploaded(client, place, *bodies)
    for number, body in enumerate(bodies, 1):
        head = client.head_object(**place, PartNumber=number)
        assert (head["PartsCount"], head["ETag"], head["ContentLength"]) == (len(bodies), done["ETag"], len(body))
        assert body_of(client, place["Bucket"], "obj", PartNumber=number) == body
    with refused(416, "InvalidPartNumber"):
        client.get_object(**place, PartNumber=len(bodies) + 1)


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC64NVME", "SHA256"])
def test_what_is_no_checksum_is_told_from_a_wrong_one(world: World, place: Place, algorithm: str) -> None:
    for value, code in (("bad", "InvalidRequest"), (value_of(algorithm, b"other"), "BadDigest")):
        with refused(400, code):
            world.main.put_object(**place, Body=b"A" * 1024, **{f"Checksum{algorithm}": value})
    with refused(404):
        world.main.head_object(**place)


def test_a_wrong_checksum_of_the_object_leaves_the_upload_to_be_completed(world: World, place: Place) -> None:
    client = world.main
    upload: Place = {
        **place,
        "UploadId": client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"],
    }
    part = client.upload_part(**upload, PartNumber=1, Body=b"A" * 1024, ChecksumAlgorithm="SHA256")
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumSHA256": part["ChecksumSHA256"]}]}
    wrong = value_of("SHA256", b"other")
    for value, code in (("bad", "InvalidRequest"), (f"{wrong}-1", "BadDigest")):
        with refused(400, code):
            client.complete_multipart_upload(**upload, MultipartUpload=listed, ChecksumSHA256=value)
    done = client.complete_multipart_upload(**upload, MultipartUpload=listed)
    assert done["ChecksumSHA256"] == value_of("SHA256", raw_value("SHA256", b"A" * 1024)) + "-1"
