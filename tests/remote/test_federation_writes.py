"""Class `shared` in a bucket with an upstream, however a chunk comes: it stands in both, and the answer is the upstream's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree as ET

import pytest
from blake3 import blake3
from federation_world import AWAY, World, call, ids_of, match, mput, mput_stream, put, put_chain, stored
from kv_driver import CHUNK_BYTES, payload, stream
from raw_http import RawReply
from s3_proxy import NOTHING, Operation, Plan, Toxic
from server_process import MIB, ServerProcess, wait_until

PART_BYTES = CHUNK_BYTES // 2


@pytest.fixture
def world(federated: World) -> Iterator[World]:
    federated.proxy.plan = NOTHING
    yield federated
    federated.proxy.plan = NOTHING


def bytes_of(chunk_id: str) -> bytes:
    return payload(bytes.fromhex(chunk_id))


def upload(server: ServerProcess, path: str, parts: list[bytes], **headers: str) -> RawReply:
    """A multipart upload to its end; `headers` of ours are of its beginning."""
    begun = call(server, "POST", path, query={"uploads": ""}, headers={f"x-kvobj-{k}": v for k, v in headers.items()})
    if begun.status != 200:
        return begun
    upload_id = next(each.text or "" for each in ET.fromstring(begun.body) if each.tag.endswith("UploadId"))  # noqa: S314 - kvobj's
    told = ""
    for number, part in enumerate(parts, start=1):
        reply = call(server, "PUT", path, part, query={"partNumber": str(number), "uploadId": upload_id})
        assert reply.status == 200, reply.body
        told += f"<Part><PartNumber>{number}</PartNumber><ETag>{reply.headers['etag']}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{told}</CompleteMultipartUpload>".encode()
    return call(server, "POST", path, document, query={"uploadId": upload_id})


# -- batches ---------------------------------------------------------------------------------------------------------
def test_a_batch_stands_in_both_and_each_chunk_says_what_was_reached_there(world: World) -> None:
    namespace = world.declare_both("batch")
    ids = ids_of(namespace, 6)
    put_chain(world.far, namespace, ids[:2])
    asked = world.upstream("requests_total", operation="PutChunks")
    items = mput(world.near, namespace, ids, durability="shared")
    assert [(item["status"], item["existed"]) for item in items] == [(200, True)] * 2 + [(200, False)] * 4
    assert {item["durability"] for item in items[2:]} == {"local"}
    assert [item["digest"] for item in items] == [blake3(bytes_of(each)).hexdigest() for each in ids]
    assert {*ids} <= stored(world.near) & stored(world.far)
    assert match(world.far, namespace, ids)["matched"] == 6
    assert world.upstream("requests_total", operation="PutChunks") == asked + 1
    # Other classes stay here.
    others = ids_of(namespace, 2, first=1000)
    assert [item["durability"] for item in mput(world.near, namespace, others)] == ["memory"] * 2
    assert not {*others} & stored(world.far)


def test_a_batch_that_fails_half_way_says_of_each_chunk_what_was_reached_and_a_retry_completes_it(world: World) -> None:
    namespace = world.declare_both("half-way")
    ids = ids_of(namespace, 6)
    put_chain(world.near, namespace, ids[:3])
    # One with metadata, which a stream has no words for, is put by itself.
    headers = {"x-kvobj-namespace": "half-way", "x-kvobj-parent": ids[2], "x-amz-meta-colour": "grün"}
    headers = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    assert call(world.near, "PUT", f"/cache/{ids[3]}", bytes_of(ids[3]), headers=headers).status == 200
    world.proxy.plan = Plan((Toxic.PRECONDITION,), rate=1.0, operations=frozenset({Operation.PUT}), key_part=ids[3])
    items = mput(world.near, namespace, ids, durability="shared")
    assert [item["status"] for item in items] == [200] * 3 + [503] * 3
    assert {*ids} <= stored(world.near)
    assert {*ids} & stored(world.far) == {*ids[:3]}
    world.proxy.plan = NOTHING
    again = mput(world.near, namespace, ids, durability="shared")
    assert [(item["status"], item["existed"]) for item in again] == [(200, True)] * 3 + [(200, False)] * 3
    assert match(world.far, namespace, ids)["matched"] == 6
    told = call(world.far, "HEAD", f"/cache/{ids[3]}").headers["x-amz-meta-colour"]
    assert told == call(world.near, "HEAD", f"/cache/{ids[3]}").headers["x-amz-meta-colour"]


def test_what_the_upstream_refuses_of_a_batch_it_refuses_alone(world: World) -> None:
    namespace = world.declare_both("refused-batch")
    one, two = ids_of(namespace, 3), ids_of(namespace, 2, first=1000)
    put_chain(world.near, namespace, one[:1])
    chunks = [(one[1], one[0]), (one[2], one[1]), (two[0], "root"), (two[1], two[0])]
    body = stream(
        [({"id": each, "parent": parent, "namespace": namespace.name}, bytes_of(each)) for each, parent in chunks]
    )
    items = mput_stream(world.near, body, durability="shared")
    assert [item["status"] for item in items] == [409, 409, 200, 200]
    assert [item["error"]["code"] for item in items[:2]] == ["ParentNotFound"] * 2
    assert {*one, *two} & stored(world.far) == {*two}
    assert {*one, *two} <= stored(world.near)


def test_a_batch_too_large_for_the_upstreams_memory_goes_chunk_by_chunk(world: World) -> None:
    alone = world.upstream("requests_total", operation="PutChunk", outcome="ok")
    bodies = [payload(f"large-{number}".encode(), 2 * MIB) for number in range(3)]
    items = mput_stream(
        world.near,
        stream([({"id": f"large/{number}"}, body) for number, body in enumerate(bodies)]),
        durability="shared",
    )
    assert [(item["status"], item["durability"]) for item in items] == [(200, "local")] * 3
    assert world.upstream("requests_total", operation="PutChunk", outcome="ok") == alone + 3
    assert call(world.far, "GET", "/cache/large/2").body == bodies[2]


def test_a_batch_of_many_goes_in_several_requests(world: World) -> None:
    asked = world.upstream("requests_total", operation="PutChunks", outcome="ok")
    names = [f"many/{number:03}" for number in range(300)]
    items = mput_stream(world.near, stream([({"id": name}, name.encode()) for name in names]), durability="shared")
    assert {(item["status"], item["existed"]) for item in items} == {(200, False)}
    assert world.upstream("requests_total", operation="PutChunks", outcome="ok") == asked + 2
    assert call(world.far, "GET", f"/cache/{names[-1]}").body == names[-1].encode()


def test_a_batch_while_the_upstream_is_known_to_be_away_is_refused_before_it_is_stored(world: World) -> None:
    namespace = world.declare_both("batch-away")
    ids = ids_of(namespace, 2)
    world.proxy.plan = AWAY

    def is_held_back() -> bool:
        call(world.near, "GET", "/cache/none-there")
        return bool(world.status()["is_held_back"])

    wait_until(is_held_back, timeout_seconds=20, what="the breaker to open")
    told = world.status()
    assert (told["state"], told["bucket"], told["remote_bucket"]) == ("down", "cache", "cache")
    assert "503" in told["reason"]
    body = stream([({"id": ids[0], "parent": "root", "namespace": "batch-away"}, bytes_of(ids[0]))])
    refused = call(
        world.near,
        "POST",
        "/cache",
        body,
        query={"mput": ""},
        headers={"content-type": "application/vnd.kvobj.stream", "x-kvobj-durability": "shared"},
    )
    assert refused.status == 503
    assert not {*ids} & stored(world.near)
    world.proxy.plan = NOTHING
    wait_until(
        lambda: call(world.near, "GET", "/cache/none-there").status == 404 and world.status()["state"] == "ok",
        timeout_seconds=20,
        what="it to be asked again",
    )
    assert "503" in world.status()["last_error"]


def test_a_chunk_that_is_written_under_one_still_on_its_way_there_follows_it(world: World) -> None:
    namespace = world.declare_both("on-its-way")
    parent, child = ids_of(namespace, 2)
    match(world.near, namespace, [parent])  # the namespace is known to be the same there
    world.proxy.plan = Plan(
        (Toxic.STALL_HEAD,), rate=1.0, operations=frozenset({Operation.PUT}), key_part=parent, stall_seconds=0.5
    )
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(put, world.near, namespace, parent, "root", durability="shared")
        wait_until(lambda: parent in stored(world.near), timeout_seconds=10, what="the parent to stand here")
        second = put(world.near, namespace, child, parent, durability="shared")
        assert (first.result().status, second.status) == (200, 200)
    assert {parent, child} <= stored(world.far)


# -- uploads, parts, copies ------------------------------------------------------------------------------------------
def test_a_multipart_upload_is_forwarded_whole_when_it_is_completed(world: World) -> None:
    body = payload(b"uploaded", 6 * MIB)
    done = upload(world.near, "/cache/uploaded", [body[: 5 * MIB], body[5 * MIB :]], durability="shared")
    assert (done.status, done.headers["x-kvobj-existed"], done.headers["x-kvobj-durability"]) == (200, "false", "local")
    assert done.headers["x-kvobj-digest"] == blake3(body).hexdigest()
    assert call(world.far, "GET", "/cache/uploaded").body == body
    # There before, by a writer of its own.
    assert call(world.far, "PUT", "/cache/there-before", b"bytes").status == 200
    again = upload(world.near, "/cache/there-before", [b"bytes"], durability="shared")
    assert (again.status, again.headers["x-kvobj-existed"]) == (200, "true")
    # A bucket without an upstream has no class shared.
    assert upload(world.near, "/own/uploaded", [b"bytes"], durability="shared").status == 400


def test_a_chunk_in_parts_is_forwarded_by_the_part_that_makes_it_whole(world: World) -> None:
    namespace = world.declare_both("parted", part_axis="layer")
    (chunk_id,) = ids_of(namespace, 1)
    data = bytes_of(chunk_id)

    def part(index: int) -> RawReply:
        body = data[index * PART_BYTES : (index + 1) * PART_BYTES]
        named = {"namespace": "parted", "parent": "root", "part": f"{index}/2", "durability": "shared"}
        headers = {f"x-kvobj-{name}": value for name, value in named.items()}
        return call(world.near, "PUT", f"/cache/{chunk_id}", body, headers=headers)

    first = part(1)
    assert (first.status, first.headers["x-kvobj-parts"]) == (200, "1/2")
    assert chunk_id not in stored(world.far)
    last = part(0)
    assert (last.status, last.headers["x-kvobj-parts"], last.headers["x-kvobj-existed"]) == (200, "2/2", "false")
    assert last.headers["x-kvobj-durability"] == "local"
    assert call(world.far, "GET", f"/cache/{chunk_id}").body == data
    assert (part(0).status, part(0).headers["x-kvobj-existed"]) == (200, "true")


def test_a_copy_is_forwarded_with_its_metadata(world: World) -> None:
    assert call(world.near, "PUT", "/own/source", b"copied", headers={"x-amz-meta-kind": "k"}).status == 200
    headers = {"x-amz-copy-source": "/own/source", "x-kvobj-durability": "shared"}
    assert call(world.near, "PUT", "/cache/copied", headers=headers).status == 200
    there = call(world.far, "GET", "/cache/copied")
    assert (there.body, there.headers["x-amz-meta-kind"]) == (b"copied", "k")
    # And so it is where it is fetched from there.
    assert call(world.near, "DELETE", "/cache/copied").status == 204
    assert call(world.near, "GET", "/cache/copied").headers["x-amz-meta-kind"] == "k"


def test_an_upload_that_did_not_reach_the_upstream_stands_here_and_may_be_put_again(world: World) -> None:
    world.proxy.plan = Plan((Toxic.PRECONDITION,), rate=1.0, operations=frozenset({Operation.PUT}))
    assert upload(world.near, "/cache/unreached", [b"bytes"], durability="shared").status == 503
    assert "unreached" in stored(world.near) - stored(world.far)
    world.proxy.plan = NOTHING
    again = upload(world.near, "/cache/unreached", [b"bytes"], durability="shared")
    assert (again.status, again.headers["x-kvobj-existed"]) == (200, "false")
    assert "unreached" in stored(world.far)
