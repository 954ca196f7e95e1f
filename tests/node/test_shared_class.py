"""Class `shared`, and what buckets' rules send after it, on a real node with a real remote that is well."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from kv_driver import stream
from module_paths import ModulePaths
from remote_servers import RemoteStore, drop_bucket, make_bucket
from server_process import ServerProcess, wait_until
from shared_world import SHARED, World, shared_world

BODY = bytes(range(256)) * 500


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-workers"])
def world(
    request: pytest.FixtureRequest, module_paths: ModulePaths, kvobj_remote_server: ServerProcess
) -> Iterator[World]:
    server = kvobj_remote_server
    store = RemoteStore("kvobj", server.host, server.port, server.credentials(), f"shared-class-{request.param}")
    make_bucket(store)
    directory: Path = module_paths.mktemp("shared") / "node"
    try:
        with shared_world(directory, store, workers=request.param) as running:
            yield running
    finally:
        drop_bucket(store)


def test_a_shared_put_is_on_the_remote_with_a_manifest_before_it_is_acknowledged(world: World) -> None:
    reply = world.put("/plain/a/b", BODY, SHARED)
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")
    (key,) = world.blobs("plain/a/b")
    assert world.manifests()
    blob = world.store.read(key)
    assert blob is not None
    assert BODY in blob
    assert world.durability("plain", "a/b") == "shared"
    assert world.get("/plain/a/b").body == BODY


def test_an_object_without_bytes_may_be_shared(world: World) -> None:
    reply = world.put("/plain/empty", b"", SHARED)
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")


def test_a_bucket_of_class_shared_asks_for_it_by_itself(world: World) -> None:
    reply = world.put("/safe/object", BODY)
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")
    assert len(world.blobs("safe/object")) == 1


def test_a_multipart_upload_of_class_shared_is_shared_when_it_is_complete(world: World) -> None:
    part = BODY * 50
    with world.node.raw(timeout_seconds=60) as raw:
        begun = raw.request("POST", "/plain/parts", b"", query={"uploads": ""}, headers=SHARED)
        upload_id = begun.body.decode().partition("<UploadId>")[2].partition("<")[0]
        query = {"partNumber": "1", "uploadId": upload_id}
        etag = raw.request("PUT", "/plain/parts", part, query=query, payload=part).headers["etag"]
        assert not world.blobs("plain/parts")
        document = (
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
            f"<ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
        ).encode()
        reply = raw.request("POST", "/plain/parts", document, query={"uploadId": upload_id}, payload=document)
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")
    assert len(world.blobs("plain/parts")) == 1
    assert world.get("/plain/parts").body == part


def test_an_unchanged_client_waits_for_the_class_and_sees_nothing_of_it(world: World) -> None:
    credentials = world.node.credentials()
    client = boto3.client(
        "s3",
        endpoint_url=world.node.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    data = BODY * 100
    client.upload_fileobj(BytesIO(data), "safe", "by-parts")
    client.put_object(Bucket="safe", Key="at-once", Body=BODY, ChecksumAlgorithm="CRC32C")
    for key, body in (("by-parts", data), ("at-once", BODY)):
        assert world.durability("safe", key) == "shared"
        assert client.get_object(Bucket="safe", Key=key)["Body"].read() == body
    client.delete_objects(Bucket="safe", Delete={"Objects": [{"Key": "by-parts"}, {"Key": "at-once"}]})
    wait_until(lambda: not world.blobs("safe/by-parts"), timeout_seconds=20, what="the blobs to go")


def test_a_copy_may_be_shared(world: World) -> None:
    world.put("/plain/original", BODY)
    reply = world.put("/plain/copy", b"", {**SHARED, "x-amz-copy-source": "/plain/original"})
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")
    assert (len(world.blobs("plain/copy")), len(world.blobs("plain/original"))) == (1, 0)


def test_a_shared_chunk_takes_its_ancestors_with_it(world: World) -> None:
    assert world.put("/chunks/c0", BODY, {"x-kvobj-parent": "root"}).headers["x-kvobj-durability"] == "memory"
    assert world.put("/chunks/c1", BODY, {"x-kvobj-parent": "c0"}).status == 200
    assert world.put("/chunks/c2", BODY, {"x-kvobj-parent": "c1", "x-kvobj-durability": "local"}).status == 200
    reply = world.put("/chunks/c3", BODY, {"x-kvobj-parent": "c2", **SHARED})
    assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared")
    assert [world.durability("chunks", f"c{number}") for number in range(4)] == ["shared"] * 4
    assert all(len(world.blobs(f"chunks/c{number}")) == 1 for number in range(4))


def test_a_chunk_that_is_in_memory_is_raised_for_who_puts_it_again_as_shared(world: World) -> None:
    assert world.put("/chunks/known", BODY).headers["x-kvobj-durability"] == "memory"
    reply = world.put("/chunks/known", BODY, SHARED)
    assert reply.headers["x-kvobj-existed"] == "true"
    assert reply.headers["x-kvobj-durability"] == "shared"
    assert len(world.blobs("chunks/known")) == 1


def test_a_replaced_shared_object_leaves_nothing_on_the_remote(world: World) -> None:
    first = world.put("/plain/again", BODY, SHARED)
    (before,) = world.blobs("plain/again")
    second = world.put("/plain/again", BODY + b"!", SHARED)
    assert (first.headers["x-kvobj-durability"], second.headers["x-kvobj-durability"]) == ("shared", "shared")
    wait_until(lambda: before not in world.blobs("plain/again"), timeout_seconds=20, what="the old blob to go")
    assert len(world.blobs("plain/again")) == 1
    assert world.get("/plain/again").body == BODY + b"!"


def test_the_remote_is_told_of_a_removal_before_it_is_acknowledged(world: World) -> None:
    world.put("/plain/gone", BODY, SHARED)
    with world.node.raw() as raw:
        assert raw.request("DELETE", "/plain/gone").status == 204
    wait_until(lambda: not world.remote()["manifests"]["untold_records"], timeout_seconds=5, what="an empty outbox")
    wait_until(lambda: not world.blobs("plain/gone"), timeout_seconds=20, what="the blob to go")


def test_by_the_rule_always_objects_follow_their_acknowledgement(world: World) -> None:
    reply = world.put("/always/object", BODY)
    assert reply.headers["x-kvobj-durability"] == "local"
    world.wait_for_shared("always", "object")
    assert len(world.blobs("always/object")) == 1
    assert world.remote()["queue"]["queued_objects"] == 0


def test_by_the_rule_reused_objects_go_when_they_are_read_again(world: World) -> None:
    world.put("/reused/read", BODY)
    world.put("/reused/left", BODY)

    def is_shared() -> bool:
        world.get("/reused/read")
        return world.durability("reused", "read") == "shared"

    wait_until(is_shared, timeout_seconds=20, what="the object that is read to be shared", pause_seconds=0.2)
    assert not world.blobs("reused/left")


def test_a_batch_of_class_shared_is_shared_whole(world: World) -> None:
    items: list[tuple[dict[str, object], bytes]] = [
        ({"id": f"m{number}", "parent": f"m{number - 1}" if number else "root"}, BODY) for number in range(5)
    ]
    body = stream(items)
    with world.node.raw(timeout_seconds=60) as raw:
        headers = {"content-type": "application/vnd.kvobj.stream", **SHARED}
        reply = raw.request("POST", "/chunks", body, query={"mput": ""}, headers=headers, payload=body)
    assert reply.status == 200, reply.body
    assert reply.body.count(b'"shared"') == 5, reply.body
    assert [len(world.blobs(f"chunks/m{number}")) for number in range(5)] == [1] * 5


def test_status_shows_the_remote(world: World) -> None:
    world.put("/plain/shown", BODY, SHARED)
    remote = world.remote()
    assert (remote["state"], remote["claim"], remote["lineage"]) == ("ok", "claimed", 1)
    assert remote["queue"]["uploaded_objects"] >= 1
    assert remote["queue"]["uploaded_bytes"] > len(BODY)
    assert remote["uploads_held_by"] == ""
    tier = world.node.tier("remote")
    assert (tier["mode"], tier["is_home"]) == ("unbounded", False)
    assert tier["blobs"] >= 1


def test_flush_waits_for_what_is_queued(world: World) -> None:
    for number in range(8):
        world.put(f"/always/flush-{number}", hashlib.sha256(str(number).encode()).digest() * 1000)
    outcome = world.node.admin("POST", "/api/v1/flush")
    assert (outcome["is_done"], outcome["left_to_upload"], outcome["left_in_memory"]) == (True, 0, 0)
    assert [world.durability("always", f"flush-{number}") for number in range(8)] == ["shared"] * 8
