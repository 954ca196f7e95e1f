"""smart-open: streams of unknown length up in parts, down with seeks, through boto3's own client."""

from __future__ import annotations

import boto3
from botocore.config import Config
from given import MIB, body_of, given, refused, report, same
from smart_open import open as open_any
from smart_open import s3

place = given()
client = boto3.client(
    "s3",
    endpoint_url=place.endpoint,
    aws_access_key_id=place.access_key,
    aws_secret_access_key=place.secret_key,
    region_name=place.region,
    config=Config(s3={"addressing_style": "virtual" if place.is_virtual_hosted else "path"}),
)
parameters = {"client": client, "min_part_size": 5 * MIB}
body = body_of(11 * MIB + 77)
with open_any(place.uri("stream"), "wb", transport_params=parameters) as stream:
    for start in range(0, len(body), 100_000):
        stream.write(body[start : start + 100_000])
with open_any(place.uri("stream"), "rb", transport_params={"client": client}) as stream:
    same(stream.read(), body)
    stream.seek(7 * MIB)
    same(stream.read(100), body[7 * MIB : 7 * MIB + 100])
with open_any(place.uri("text.gz"), "w", transport_params=parameters, encoding="utf-8") as text:
    text.writelines(f"строка {number}\n" for number in range(1000))
with open_any(place.uri("text.gz"), "r", transport_params={"client": client}, encoding="utf-8") as text:
    assert [line.rstrip("\n") for line in text] == [f"строка {number}" for number in range(1000)]
with open_any(place.uri("empty"), "wb", transport_params=parameters) as stream:
    pass
with open_any(place.uri("empty"), "rb", transport_params={"client": client}) as stream:
    same(stream.read(), b"")
with refused(OSError) as caught:
    open_any(place.uri("absent"), "rb", transport_params={"client": client})
assert "NoSuchKey" in str(caught[0])
found = dict(s3.iter_bucket(place.bucket, prefix=f"{place.prefix}/", client_kwargs={"endpoint_url": place.endpoint}))
assert sorted(found) == [place.key("empty"), place.key("stream"), place.key("text.gz")]
same(found[place.key("stream")], body)
report("smart_open", "boto3")
