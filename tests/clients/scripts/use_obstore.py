"""obstore, and with it every client of Rust's object_store: parts, conditional writes, ranges, deletions of many."""

from __future__ import annotations

import datetime as dt

import obstore
from given import MIB, NAMES, SIZES, body_of, fetch, given, refused, report, same
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

PART_BYTES = 5 * MIB

place = given()
store = S3Store(
    place.bucket,
    prefix=place.prefix,
    endpoint=place.bucket_endpoint if place.is_virtual_hosted else place.endpoint,
    virtual_hosted_style_request=place.is_virtual_hosted,
    access_key_id=place.access_key,
    secret_access_key=place.secret_key,
    region=place.region,
    client_options={"allow_http": True},
    retry_config={"max_retries": 1},
)

for seed, name in enumerate(NAMES):
    body = body_of(SIZES[seed % len(SIZES)], seed)
    obstore.put(store, name, body, attributes={"Content-Type": "text/plain", "colour": "blue"})
    reply = obstore.get(store, name)
    same(reply.bytes(), body)
    assert reply.attributes["colour"] == "blue"
    assert obstore.head(store, name)["size"] == len(body)
listed = [item["path"] for page in obstore.list(store) for item in page]
assert sorted(listed) == sorted(NAMES), listed
assert obstore.list_with_delimiter(store)["common_prefixes"] == ["ünïcödé"]

# in parts, several at once; one range and several
body = body_of(4 * PART_BYTES + 77, 7)
obstore.put(store, "large", body, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4)
same(obstore.get(store, "large").bytes(), body)
same(obstore.get_range(store, "large", start=PART_BYTES - 5, length=10), body[PART_BYTES - 5 : PART_BYTES + 5])
pieces = obstore.get_ranges(store, "large", starts=[0, 9 * MIB, 17 * MIB], lengths=[10, 300_000, 5])
assert [bytes(piece) for piece in pieces] == [body[:10], body[9 * MIB :][:300_000], body[17 * MIB :][:5]]
with obstore.open_writer(store, "written", buffer_size=PART_BYTES) as writer:
    writer.write(body[: PART_BYTES + 1])
reader = obstore.open_reader(store, "written", buffer_size=MIB)
reader.seek(MIB)
same(reader.read(100), body[MIB : MIB + 100])
reader.close()

# created once, replaced only over what was read
first = obstore.put(store, "once", b"first", mode="create")
with refused(AlreadyExistsError):
    obstore.put(store, "once", b"second", mode="create")
same(obstore.get(store, "once").bytes(), b"first")
obstore.put(store, "once", b"second", mode={"e_tag": first["e_tag"]})
with refused(PreconditionError):
    obstore.put(store, "once", b"third", mode={"e_tag": first["e_tag"]})
same(obstore.get(store, "once").bytes(), b"second")
with refused(PreconditionError):
    obstore.get(store, "once", options={"if_match": first["e_tag"]})

obstore.copy(store, "large", "copied")
obstore.rename(store, "copied", "renamed ü")
same(obstore.get(store, "renamed ü").bytes(), body)
assert fetch(obstore.sign(store, "GET", "renamed ü", dt.timedelta(minutes=1))) == (200, body)
assert fetch(obstore.sign(store, "PUT", "signed", dt.timedelta(minutes=1)), "PUT", b"put")[0] == 200

names = [item["path"] for page in obstore.list(store) for item in page]
assert len(names) == len(NAMES) + 5, names
obstore.delete(store, names)
assert [item for page in obstore.list(store) for item in page] == []
with refused(FileNotFoundError):
    obstore.get(store, "large")
report("obstore")
