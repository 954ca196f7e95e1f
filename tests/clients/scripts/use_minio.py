"""minio-py: whole objects and parts, listings, deletions of many, copies, compositions, presigned URLs."""

from __future__ import annotations

import io
from datetime import timedelta

import minio
from given import MIB, NAMES, SIZES, body_of, fetch, given, refused, report, same
from minio.commonconfig import ComposeSource, CopySource
from minio.deleteobjects import DeleteObject

PART_BYTES = 5 * MIB

place = given()
client = minio.Minio(
    place.host,
    access_key=place.access_key,
    secret_key=place.secret_key,
    secure=False,
)
if place.is_virtual_hosted:
    client.enable_virtual_style_endpoint()


def read(name: str, **more: int) -> bytes:
    reply = client.get_object(place.bucket, place.key(name), **more)
    try:
        data: bytes = reply.read()
    finally:
        reply.close()
        reply.release_conn()
    return data


assert client.bucket_exists(place.bucket)
assert not client.bucket_exists("no-such-bucket-here")
assert place.bucket in {bucket.name for bucket in client.list_buckets()}

for seed, name in enumerate(NAMES):
    body = body_of(SIZES[seed % len(SIZES)], seed)
    client.put_object(place.bucket, place.key(name), io.BytesIO(body), len(body), metadata={"number": str(seed)})
    same(read(name), body)
    found = client.stat_object(place.bucket, place.key(name))
    assert found.size == len(body)
    assert found.metadata["x-amz-meta-number"] == str(seed)
listed = client.list_objects(place.bucket, prefix=f"{place.prefix}/", recursive=True)
assert [item.object_name for item in listed] == sorted(map(place.key, NAMES), key=str.encode)
assert [item.object_name for item in client.list_objects(place.bucket, prefix=f"{place.prefix}/ü") if item.is_dir] == [
    place.key("ünïcödé/")
]

# a stream of unknown length in parts, ranges of it, its pieces put together on the server
body = body_of(2 * PART_BYTES + 77, 7)
client.put_object(place.bucket, place.key("large"), io.BytesIO(body), -1, part_size=PART_BYTES)
same(read("large"), body)
same(read("large", offset=PART_BYTES - 5, length=10), body[PART_BYTES - 5 : PART_BYTES + 5])
client.copy_object(place.bucket, place.key("copied ü"), CopySource(place.bucket, place.key("large")))
same(read("copied ü"), body)
sources = [
    ComposeSource(place.bucket, place.key("large"), offset=0, length=PART_BYTES + 3),
    ComposeSource(place.bucket, place.key("copied ü"), offset=PART_BYTES + 3),
]
client.compose_object(place.bucket, place.key("composed"), sources)
same(read("composed"), body)

assert (
    fetch(client.presigned_put_object(place.bucket, place.key("by url +"), timedelta(minutes=1)), "PUT", b"put")[0]
    == 200
)
assert fetch(client.presigned_get_object(place.bucket, place.key("by url +"), timedelta(minutes=1))) == (200, b"put")

with refused(minio.error.S3Error) as caught:
    read("absent")
assert caught[0].code == "NoSuchKey"
names = [item.object_name for item in client.list_objects(place.bucket, prefix=f"{place.prefix}/", recursive=True)]
assert len(names) == len(NAMES) + 4
assert list(client.remove_objects(place.bucket, [DeleteObject(str(name)) for name in names])) == []
assert not list(client.list_objects(place.bucket, prefix=f"{place.prefix}/", recursive=True))
client.make_bucket("made-by-minio")
client.remove_bucket("made-by-minio")
report("minio")
