"""Class `shared` while the remote is away, slow, full of stalls, or the node dies at every step on the way there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from module_paths import ModulePaths
from raw_http import RawReply
from remote_servers import RemoteStore, drop_bucket, make_bucket
from s3_proxy import NOTHING, Operation, Plan, Toxic
from server_process import REPOSITORY, ServerProcess, wait_until, write_configuration
from shared_world import AWAY, SHARED, World, settings_for, shared_world

from kvobj.admin.cli import main as admin
from kvobj.store.remote_room import ENTRY_BYTES

BODY = bytes(range(256)) * 300
QUEUE_BYTES = 2**20


@pytest.fixture(scope="module")
def running(module_paths: ModulePaths, kvobj_remote_server: ServerProcess) -> Iterator[World]:
    server = kvobj_remote_server
    store = RemoteStore("kvobj", server.host, server.port, server.credentials(), "outages")
    make_bucket(store)
    try:
        directory = module_paths.mktemp("outages") / "node"
        with shared_world(directory, store, queue_size='"1 MiB"', outbox_size='"64 KiB"') as made:
            yield made
    finally:
        drop_bucket(store)


@pytest.fixture
def world(running: World) -> World:
    """The module's world, well again, with nothing in its queue."""
    running.proxy.plan = NOTHING
    wait_for_return(running)
    wait_until(lambda: running.queued() == 0, timeout_seconds=30, what="an empty queue")
    return running


def wait_for_return(world: World) -> None:
    """Wait until the node knows that the remote answers again."""

    def is_back() -> bool:
        return world.remote()["state"] in {"ok", "degraded"}

    wait_until(is_back, timeout_seconds=30, what="the remote to be well")


def make_down(world: World) -> None:
    """Take the remote away, and wait until the node knows it."""
    world.proxy.plan = AWAY
    number = 0

    def is_down() -> bool:
        nonlocal number
        number += 1
        world.put(f"/always/down-{number}", b"1")
        return bool(world.remote()["state"] == "down")

    wait_until(is_down, timeout_seconds=30, what="the remote to be known as down", pause_seconds=0.2)


def test_without_the_remote_class_shared_is_refused_by_name_and_falls_to_local_by_default(world: World) -> None:
    make_down(world)
    refused = world.put("/plain/named", BODY, SHARED)
    assert (refused.status, refused.code) == (503, "ServiceUnavailable")
    assert "retry-after" in refused.headers
    assert "x-kvobj-durability" not in refused.headers
    assert world.get("/plain/named").status == 404
    fallen = world.put("/safe/default", BODY)
    assert (fallen.status, fallen.headers["x-kvobj-durability"]) == (200, "local")
    assert world.get("/safe/default").body == BODY
    assert world.put("/always/later", BODY).status == 200
    with world.node.raw() as raw:
        assert raw.request("DELETE", "/always/down-1").status == 204
    remote = world.remote()
    assert remote["reason"]
    assert remote["uploads_held_by"]
    assert remote["queue"]["queued_objects"] >= 2
    world.proxy.plan = NOTHING
    world.wait_for_shared("safe", "default")
    world.wait_for_shared("always", "later")
    assert len(world.blobs("safe/default")) == 1
    wait_until(lambda: world.queued() == 0, timeout_seconds=30, what="an empty queue")
    assert world.put("/plain/named", BODY, SHARED).headers["x-kvobj-durability"] == "shared"


def test_an_upload_of_class_shared_is_not_completed_without_the_remote(world: World) -> None:
    with world.node.raw(timeout_seconds=60) as raw:
        begun = raw.request("POST", "/plain/parts", b"", query={"uploads": ""}, headers=SHARED)
        upload_id = begun.body.decode().partition("<UploadId>")[2].partition("<")[0]
        query = {"partNumber": "1", "uploadId": upload_id}
        etag = raw.request("PUT", "/plain/parts", BODY, query=query, payload=BODY).headers["etag"]
        document = (
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
            f"<ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
        ).encode()
        make_down(world)
        refused = raw.request("POST", "/plain/parts", document, query={"uploadId": upload_id}, payload=document)
        assert (refused.status, "x-kvobj-durability" in refused.headers) == (503, False)
        assert raw.request("HEAD", "/plain/parts").status == 404
        world.proxy.plan = NOTHING
        wait_for_return(world)
        whole = raw.request("POST", "/plain/parts", document, query={"uploadId": upload_id}, payload=document)
    assert (whole.status, whole.headers["x-kvobj-durability"]) == (200, "shared")


def test_a_shared_put_that_does_not_get_there_in_time_says_that_it_is_local(world: World) -> None:
    world.proxy.plan = Plan((Toxic.UNAVAILABLE_BARE,), rate=1.0, key_part="blobs/")
    reply = world.put("/plain/late", BODY, SHARED)
    assert (reply.status, reply.code) == (503, "ServiceUnavailable")
    assert reply.headers["x-kvobj-durability"] == "local"
    assert b"not on the remote tier yet" in reply.body
    assert world.get("/plain/late").body == BODY
    world.proxy.plan = NOTHING
    world.wait_for_shared("plain", "late")


def test_a_flush_that_cannot_be_done_says_so_and_exits_1(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    make_down(world)
    access = ["--endpoint", f"http://127.0.0.1:{world.node.admin_port}", "--data", str(world.node.data)]
    assert admin([*access, "flush", "--timeout", "0.5"], environment={}) == 1
    assert "objects to upload" in capsys.readouterr().err
    assert admin([*access, "flush", "--local"], environment={}) == 0
    assert admin([*access, "status"], environment={}) == 0
    assert "down" in capsys.readouterr().out
    world.proxy.plan = NOTHING
    assert admin([*access, "flush"], environment={}) == 0


def test_the_queue_is_bounded_and_writers_are_told_to_slow_down(world: World) -> None:
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, stall_seconds=60.0, key_part="blobs/")
    big = bytes(QUEUE_BYTES // 2 - ENTRY_BYTES)
    assert [world.put(f"/always/big-{number}", big).status for number in range(2)] == [200, 200]
    for path, headers in (("/always/one-more", {}), ("/safe/one-more", {}), ("/plain/one-more", SHARED)):
        reply = world.put(path, big, headers)
        assert (reply.status, reply.code) == (503, "SlowDown"), path
    assert world.put("/plain/other", big).status == 200
    world.proxy.plan = NOTHING

    def has_room() -> bool:
        return world.put("/always/one-more", big).status == 200

    wait_until(has_room, timeout_seconds=30, what="room in the queue")


def test_what_the_remote_is_not_told_of_is_bounded_and_what_would_add_to_it_is_told_to_slow_down(world: World) -> None:
    assert world.put("/plain/told", BODY, SHARED).status == 200
    make_down(world)

    def tagging(count: int) -> bytes:
        tags = "".join(f"<Tag><Key>{number}</Key><Value>{'v' * 256}</Value></Tag>" for number in range(count))
        return f"<Tagging><TagSet>{tags}</TagSet></Tagging>".encode()

    with world.node.raw() as raw:

        def tag(path: str, count: int = 10) -> RawReply:
            document = tagging(count)
            return raw.request("PUT", path, document, query={"tagging": ""}, payload=document)

        replies = [tag("/plain", 40) for _ in range(8)]
        assert {reply.status for reply in replies[:4]} <= {200, 204}
        assert (replies[-1].status, replies[-1].code) == (503, "SlowDown")
        told = world.remote()["manifests"]
        assert told["untold_bytes"] >= told["untold_limit_bytes"] == 2**16
        assert told["untold_bytes"] < 2**16 + 2 * len(tagging(40))
        refused = [tag("/plain/told"), raw.request("PUT", "/new-bucket", payload=None)]
        assert [(reply.status, reply.code) for reply in refused] == [(503, "SlowDown")] * 2
        # What needs no word to the remote goes on, and so does what takes something away.
        assert world.put("/plain/local", BODY).status == 200
        assert tag("/plain/local").status == 200
        assert world.get("/plain/local").body == BODY
        assert raw.request("DELETE", "/plain/told").status == 204
        world.proxy.plan = NOTHING
        wait_until(lambda: tag("/plain").status in {200, 204}, timeout_seconds=30, what="room in the outbox")
    assert world.put("/plain/told", BODY, SHARED).headers["x-kvobj-durability"] == "shared"


def test_what_is_deleted_while_the_remote_is_away_leaves_the_queue(world: World) -> None:
    make_down(world)
    big = bytes(QUEUE_BYTES // 2 - 32 * ENTRY_BYTES)
    assert [world.put(f"/always/gone-{number}", big).status for number in range(2)] == [200, 200]
    assert world.put("/always/gone-2", big).code == "SlowDown"
    queued = world.queued()
    with world.node.raw() as raw:
        assert raw.request("DELETE", "/always/gone-0").status == 204
    assert world.put("/always/gone-1", b"small").status == 200
    assert world.queued() == queued - 1
    assert world.put("/always/gone-2", big).status == 200


def test_a_removal_waits_a_little_for_a_slow_remote_and_is_no_error(world: World) -> None:
    for key in ("slow-1", "slow-2"):
        assert world.put(f"/plain/{key}", BODY, SHARED).headers["x-kvobj-durability"] == "shared"
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, stall_seconds=60.0, key_part="manifests/")
    began = time.monotonic()
    with world.node.raw() as raw:
        assert raw.request("DELETE", "/plain/slow-1").status == 204
    assert 1.5 < time.monotonic() - began < 10
    assert world.get("/plain/slow-1").status == 404
    make_down(world)
    began = time.monotonic()
    with world.node.raw() as raw:
        assert raw.request("DELETE", "/plain/slow-2").status == 204
    assert time.monotonic() - began < 1.5
    world.proxy.plan = NOTHING
    wait_until(lambda: not world.blobs("plain/slow-1"), timeout_seconds=40, what="the blob to go")
    wait_until(lambda: not world.remote()["manifests"]["untold_records"], timeout_seconds=20, what="an empty outbox")


def test_a_node_starts_without_its_remote_and_catches_up(tmp_path: Path, kvobj_remote: RemoteStore) -> None:
    with shared_world(tmp_path / "node", kvobj_remote, plan=AWAY) as world:
        assert world.node.start_seconds < 15
        assert world.put("/always/early", BODY).status == 200
        assert world.put("/safe/early", BODY).headers["x-kvobj-durability"] == "local"
        assert world.put("/plain/early", BODY, SHARED).status == 503
        assert world.remote()["claim"] == "unclaimed"
        world.proxy.plan = NOTHING
        world.wait_for_shared("always", "early")
        world.wait_for_shared("safe", "early")
        assert world.remote()["claim"] == "claimed"


STEPS = {
    "upload": Plan((Toxic.STALL_BODY,), rate=1.0, stall_seconds=60.0, key_part="blobs/"),
    "upload-reply": Plan((Toxic.STALL_HEAD,), rate=1.0, stall_seconds=60.0, key_part="blobs/"),
    "manifest": Plan((Toxic.STALL_HEAD,), rate=1.0, stall_seconds=60.0, key_part="manifests/"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_dies_on_the_way_goes_on_at_its_next_start(world: World, step: str) -> None:
    assert world.put("/plain/first", BODY, SHARED).status == 200  # the first snapshot is there
    world.proxy.plan = plan = STEPS[step]
    before = len(world.proxy.injections)
    replies: list[RawReply] = []

    def put() -> None:
        try:
            replies.append(world.put(f"/plain/killed-{step}", BODY, SHARED))
        except OSError:
            return

    writer = threading.Thread(target=put, daemon=True)
    writer.start()
    wait_until(
        lambda: any(plan.key_part in each.key for each in world.proxy.injections[before:]),
        timeout_seconds=20,
        what=f"the step {step} to begin",
    )
    world.node.kill()
    writer.join(20)
    assert not replies
    world.proxy.plan = NOTHING
    world.node.start()
    world.wait_for_shared("plain", f"killed-{step}")
    assert world.get(f"/plain/killed-{step}").body == BODY
    assert len(world.blobs(f"plain/killed-{step}")) == 1
    assert world.put(f"/plain/killed-{step}", BODY, SHARED).headers["x-kvobj-durability"] == "shared"
    wait_until(lambda: not world.remote()["manifests"]["untold_records"], timeout_seconds=10, what="an empty outbox")


def test_a_clean_stop_does_not_wait_for_the_remote(world: World) -> None:
    make_down(world)
    world.put("/always/left", BODY)
    began = time.monotonic()
    assert world.node.terminate() == 0
    assert time.monotonic() - began < 10
    world.proxy.plan = NOTHING
    world.node.start()
    world.wait_for_shared("always", "left")


def test_a_prefix_that_is_another_stores_ends_the_start(tmp_path: Path, kvobj_remote: RemoteStore) -> None:
    with shared_world(tmp_path / "one", kvobj_remote) as world:
        assert world.put("/plain/mine", BODY, SHARED).status == 200
    other = ServerProcess(tmp_path / "other", settings_for(kvobj_remote))
    try:
        write_configuration(
            other.configuration,
            other.settings,
            data=other.data,
            dram_path=other.shared_memory,
            listen="127.0.0.1:0",
            admin_port=other.admin_port,
        )
        command = [sys.executable, "-m", "kvobj", "serve", "--config", str(other.configuration)]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert b"belongs to another store" in ended.stderr
    finally:
        other.close()


def test_a_rule_that_is_changed_sends_what_was_there_before(world: World) -> None:
    for number in range(5):
        assert world.put(f"/plain/old-{number}", BODY).headers["x-kvobj-durability"] == "local"
    assert not world.blobs("plain/old-0")
    access = ["--endpoint", f"http://127.0.0.1:{world.node.admin_port}", "--data", str(world.node.data)]
    assert admin([*access, "bucket", "set", "plain", "--remote", "always"], environment={}) == 0
    for number in range(5):
        world.wait_for_shared("plain", f"old-{number}")
    assert Operation.PUT in world.proxy.requests
