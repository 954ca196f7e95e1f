"""Small objects of class `memory` that are stored in one step: as by a transfer, in one commit, and not where it would refuse."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from kv_driver import CHUNK_BYTES, KvDriver, Namespace, kv_node
from module_paths import ModulePaths
from s3_driver import Answer, FakeBody, unsigned_chunks
from server_process import BucketSetting, ServerProcess, ServerSettings
from tier_codecs import TOKENS, lossy, tensor

from kvobj.app.node import flush
from kvobj.catalog.flight_keys import bucket_key, row_key
from kvobj.catalog.rows import BlobRef, CommitMode, Durability, ObjectRow
from kvobj.database import WriteView
from kvobj.ids import BlobId
from kvobj.tiers.dram import DRAM_BLOBS

MEMORY = {"x-kvobj-durability": "memory"}
BUCKETS = ("cache", "files")


class ComingBody(FakeBody):
    """A body of which nothing is there yet when it is looked at."""

    def take_whole(self) -> bytes | None:
        return None


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as node:
        yield node


@pytest.fixture
async def other(module_paths: ModulePaths, shm_path: Path) -> AsyncIterator[KvDriver]:
    (shm_path / "other").mkdir()
    async with kv_node(module_paths.mktemp("other"), shm_path / "other") as node:
        yield node


async def put(
    kv: KvDriver,
    target: str,
    data: bytes,
    *,
    at_once: bool = True,
    headers: dict[str, str] | None = None,
    payload: str | None = None,
) -> Answer:
    body = FakeBody(data) if at_once else ComingBody(data)
    signed = hashlib.sha256(data).hexdigest() if payload is None else payload
    return await kv.driver.request("PUT", target, body=body, headers={**MEMORY, **(headers or {})}, payload=signed)


def commits(kv: KvDriver) -> int:
    """How many volatile commits there have been."""
    return int(kv.node.catalog._database._volatile.lmdb.info()["last_txnid"])


async def row_of(kv: KvDriver, bucket: str, key: str) -> ObjectRow | None:
    (row,) = await kv.node.catalog.lookup(bucket, [key])
    return row


def alike(row: ObjectRow | None, bucket: str) -> Any:  # noqa: ANN401 - to be compared
    """A row without what no two writes have in common."""
    if row is None:
        return None
    blobs = tuple(msgspec.structs.replace(blob, blob_id=b"") for blob in row.blobs)
    etag = row.etag if bucket == "files" else ""
    return msgspec.structs.replace(row, blobs=blobs, etag=etag, modified_ms=0, sequence=0)


def told(answer: Answer) -> tuple[object, ...]:
    names = {"x-amz-request-id", "etag"}
    headers = {name: value for name, value in answer.headers.items() if name not in names}
    return answer.status, headers, answer.code if answer.status >= 300 else answer.body, answer.reply.log


async def state(kv: KvDriver) -> tuple[object, ...]:
    """What the node holds once nothing is left to be deleted."""
    while await kv.node.reaper.reap_batch():
        pass
    usages = [await kv.node.catalog.bucket_usage(bucket) for bucket in BUCKETS]
    usage = await kv.node.dram.usage()
    return usages, usage.blobs, usage.used_bytes, kv.node.arena.usage().reserved_bytes, kv.node.dram.dirty_bytes


def stated(rng: random.Random, bucket: str, data: bytes) -> dict[str, str]:
    """Headers of a write, some of which refuse it."""
    digest, parent = hashlib.sha256(data).digest(), rng.choice("abcdefghz")
    choices: list[dict[str, str]] = [
        {},
        {"if-none-match": "*"},
        {"if-match": "*"},
        {"content-md5": base64.b64encode(bytes(16)).decode()},
        {"x-amz-checksum-sha256": base64.b64encode(digest).decode()},
        {"x-amz-checksum-sha256": base64.b64encode(digest[::-1]).decode()},
        {"x-amz-sdk-checksum-algorithm": "CRC32C"},
        {"content-type": "text/plain", "x-amz-meta-a": "b", "x-kvobj-want": "digest"},
        {"x-kvobj-durability": "local"},
    ]
    if bucket == "cache":
        choices.append({"x-kvobj-parent": parent, "x-kvobj-tokens": "16"})
    else:
        choices.append({"x-amz-tagging": "a=b", "x-amz-acl": "public-read"})
    return rng.choice(choices)


@pytest.mark.parametrize("bucket", BUCKETS)
async def test_a_long_object_of_class_memory_becomes_visible_in_one_commit_and_is_sealed_after_it(
    kv: KvDriver, bucket: str
) -> None:
    data, before = random.Random(5).randbytes(1 << 20), commits(kv)
    assert (await put(kv, f"/{bucket}/a", data)).status == 200
    assert commits(kv) == before + 1
    row = await row_of(kv, bucket, "a")
    assert row is not None
    assert kv.node.dram.dirty() == [row.blobs[0].blob_id]
    await kv.node.sealing.drain()
    assert kv.node.dram.is_sealed(BlobId(row.blobs[0].blob_id))
    assert (await kv.driver.get(f"/{bucket}/a")).body == data
    assert await flush(kv.node, timeout_seconds=20)
    assert kv.node.dram.dirty() == []


@pytest.mark.parametrize("bucket", BUCKETS)
async def test_a_long_object_waits_for_what_is_in_flight_of_its_bucket(kv: KvDriver, bucket: str) -> None:
    database, data, may_end = kv.node.catalog._database, random.Random(6).randbytes(1 << 20), threading.Event()

    def held(_: WriteView) -> None:
        may_end.wait()

    in_flight = asyncio.ensure_future(database.write(held, [bucket_key(bucket)]))
    try:
        writing = asyncio.ensure_future(put(kv, f"/{bucket}/a", data))
        while not database.is_in_flight([row_key(bucket, "a")]):
            assert not writing.done()
            await asyncio.sleep(0)
    finally:
        may_end.set()
    await in_flight
    assert (await writing).status == 200
    assert (await kv.driver.get(f"/{bucket}/a")).body == data


@pytest.mark.parametrize("bucket", BUCKETS)
async def test_a_small_object_of_class_memory_becomes_visible_in_one_commit(kv: KvDriver, bucket: str) -> None:
    before = commits(kv)
    assert (await put(kv, f"/{bucket}/a", b"x" * 4096)).status == 200
    assert commits(kv) == before + 1
    assert (await put(kv, f"/{bucket}/b", b"x" * 4096, at_once=False)).status == 200
    assert commits(kv) == before + 2
    for key in "ab":
        assert (await kv.driver.get(f"/{bucket}/{key}")).body == b"x" * 4096
    assert alike(await row_of(kv, bucket, "a"), bucket) == msgspec.structs.replace(
        alike(await row_of(kv, bucket, "b"), bucket), key="a"
    )


@pytest.mark.parametrize("seed", range(6))
async def test_writes_at_once_leave_what_transfers_leave(kv: KvDriver, other: KvDriver, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        bucket = rng.choice(BUCKETS)
        key, size_bytes = rng.choice("abcdefgh"), rng.choice((0, 1, 300, 4096, 65_536, 65_537))
        data = rng.randbytes(size_bytes)
        headers = stated(rng, bucket, data)
        if rng.random() < 0.2:
            answers = [await each.driver.request("DELETE", f"/{bucket}/{key}") for each in (kv, other)]
        else:
            answers = [
                await put(each, f"/{bucket}/{key}", data, at_once=each is kv, headers=headers) for each in (kv, other)
            ]
        assert told(answers[0]) == told(answers[1])
        rows = [alike(await row_of(each, bucket, key), bucket) for each in (kv, other)]
        assert rows[0] == rows[1]
    for each in (kv, other):
        await each.node.sealing.drain()
    assert await state(kv) == await state(other)
    pages = [await each.node.catalog.history.read("cache", after=0) for each in (kv, other)]
    events = [[(event.type, event.keys) for event in page.events] for page in pages]
    assert events[0] == events[1]


async def test_what_a_transfer_refuses_is_not_stored_at_once_and_leaves_nothing(kv: KvDriver) -> None:
    await put(kv, "/cache/a", b"x" * 1000)
    limited = await kv.declare("limited", quota={"chunks": 1})
    await kv.driver.request("PUT", "/files/a", body=b"x", headers=MEMORY)
    first = limited.ids(range(32))
    await store_chunk(kv, limited, first[0], 200)
    before = await state(kv)
    for target, headers, status in (
        ("/cache/a", {"if-none-match": "*"}, 412),
        ("/files/a", {"if-none-match": "*"}, 412),
        ("/files/b", {"if-match": "*"}, 404),
        ("/cache/b", {"x-kvobj-parent": "nothing"}, 409),
        ("/cache/a", {}, 409),
        ("/files/c", {"content-md5": base64.b64encode(bytes(16)).decode()}, 400),
    ):
        answer = await put(kv, target, b"y" * 999, headers=headers)
        assert (answer.status, target) == (status, target)
    await store_chunk(kv, limited, limited.ids(range(100, 116))[0], 403)
    assert await state(kv) == before


async def store_chunk(kv: KvDriver, namespace: Namespace, chunk_id: bytes, status: int) -> None:
    headers = {"x-kvobj-namespace": namespace.name, "x-kvobj-parent": "root"}
    answer = await put(kv, f"/cache/{chunk_id.hex()}", bytes(CHUNK_BYTES), headers=headers)
    assert answer.status == status, answer.body


async def test_objects_that_were_stored_at_once_outlive_the_process(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path) as kv:
        for bucket in BUCKETS:
            assert (await put(kv, f"/{bucket}/a", bucket.encode() * 500)).status == 200
    async with kv_node(tmp_path, shm_path) as kv:
        for bucket in BUCKETS:
            assert (await kv.driver.get(f"/{bucket}/a")).body == bucket.encode() * 500


async def test_who_watches_a_key_is_woken_by_a_write_at_once(kv: KvDriver) -> None:
    watch = kv.node.store.arriving.watch("cache", "a")
    turn = watch.turn
    assert (await put(kv, "/cache/a", b"x" * 100)).status == 200
    assert watch.turn > turn
    kv.node.store.arriving.unwatch(watch)


def framed(data: bytes, crc: int) -> tuple[bytes, dict[str, str], str]:
    """Body, headers and payload of a write whose bytes are framed and end with a checksum."""
    trailer = ("x-amz-checksum-crc32", base64.b64encode(crc.to_bytes(4, "big")).decode())
    headers = {
        "x-amz-trailer": trailer[0],
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(len(data)),
    }
    return unsigned_chunks([data], [trailer]), headers, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


DATA = bytes(range(256)) * 16
SENT: dict[str, tuple[bytes, dict[str, str], str | None, int, int]] = {
    "another payload was signed": (DATA, {}, hashlib.sha256(b"").hexdigest(), 400, 0),
    "framed": (*framed(DATA, zlib.crc32(DATA)), 200, 1),
    "framed with a wrong trailer": (*framed(DATA, 0), 400, 0),
    "the client waits for a word": (DATA, {"expect": "100-continue"}, None, 200, 1),
    "not signed": (DATA, {}, "UNSIGNED-PAYLOAD", 200, 1),
}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("how", SENT)
async def test_however_a_body_is_sent_the_outcome_is_a_transfers(
    kv: KvDriver, other: KvDriver, how: str, bucket: str
) -> None:
    data, headers, payload, status, in_commits = SENT[how]
    before = commits(kv)
    answer = await put(kv, f"/{bucket}/a", data, headers=headers, payload=payload)
    assert (answer.status, commits(kv) - before) == (status, in_commits)
    ordinary = await put(other, f"/{bucket}/a", data, at_once=False, headers=headers, payload=payload)
    assert told(answer) == told(ordinary)
    rows = [alike(await row_of(each, bucket, "a"), bucket) for each in (kv, other)]
    assert rows[0] == rows[1]
    assert (rows[0] is not None) == (status == 200)
    assert await state(kv) == await state(other)


@pytest.mark.parametrize("bucket", BUCKETS)
async def test_a_body_that_is_answered_by_what_stands_is_not_taken(kv: KvDriver, bucket: str) -> None:
    assert (await put(kv, f"/{bucket}/a", DATA)).status == 200
    before = await state(kv), commits(kv)
    for headers in ({}, {"if-none-match": "*"}) if bucket == "cache" else ({"if-none-match": "*"}, {"if-match": "x"}):
        answer = await put(kv, f"/{bucket}/a", DATA, headers=headers)
        assert (answer.status, answer.request_body.unread_bytes) == (412 if headers else 200, len(DATA))
    assert (await state(kv), commits(kv)) == before


async def test_in_a_full_database_nothing_is_stored_at_once_either(kv: KvDriver) -> None:
    database, junk = kv.node.catalog._database, bytes(16)

    def write(change: Callable[[WriteView], object]) -> None:
        for _ in range(100):  # whether there is room is looked at every so often
            database.write_volatile(change)

    assert (await put(kv, "/files/a", DATA)).status == 200
    before = await state(kv)
    database.write_volatile(lambda view: view.put(DRAM_BLOBS, junk, bytes(60 << 20)))
    write(lambda _: None)
    for bucket in BUCKETS:
        answers = [await put(kv, f"/{bucket}/b", DATA, at_once=at_once) for at_once in (True, False)]
        assert [answer.status for answer in answers] == [507, 507]
        assert told(answers[0]) == told(answers[1])
        assert await row_of(kv, bucket, "b") is None
    database.write_volatile(lambda view: view.delete(DRAM_BLOBS, junk))
    write(lambda _: None)
    assert await state(kv) == before
    assert (await kv.driver.get("/files/a")).body == DATA
    for bucket in BUCKETS:
        assert (await put(kv, f"/{bucket}/b", DATA)).status == 200


async def chunk_with_a_lossy_copy(kv: KvDriver, size_bytes: int) -> ObjectRow:
    """A chunk of class `memory` that lies in memory as it was sent, and was written down with loss."""
    layout = {"kind": "kv", "dtype": "bf16", "layers": 2, "kv_heads": 1, "head_dim": size_bytes // (8 * TOKENS)}
    lossy_namespace = await kv.declare("n", layout=layout, chunk_tokens=TOKENS, codecs={"nvme": lossy()}, lossy=True)
    key = lossy_namespace.ids([1] * TOKENS, TOKENS)[0].hex()
    assert (await put(kv, f"/cache/{key}", tensor(1, size_bytes), headers=ROOT)).status == 200
    assert await flush(kv.node, timeout_seconds=20)
    row = await row_of(kv, "cache", key)
    assert row is not None
    assert row.lossy is not None
    return row


ROOT = {"x-kvobj-namespace": "n", "x-kvobj-parent": "root"}


@pytest.mark.parametrize("at_once", [True, False])
async def test_bytes_of_a_chunk_with_a_lossy_copy_are_not_replaced_by_anothers(kv: KvDriver, at_once: bool) -> None:  # noqa: FBT001
    size_bytes = 32_768
    row = await chunk_with_a_lossy_copy(kv, size_bytes)
    before = await state(kv)
    answer = await put(kv, f"/cache/{row.key}", tensor(2, size_bytes), at_once=at_once, headers=ROOT)
    assert (answer.status, answer.headers["x-kvobj-existed"]) == (200, "true")
    assert (await kv.driver.get(f"/cache/{row.key}")).body == tensor(1, size_bytes)
    assert await row_of(kv, "cache", row.key) == row
    assert await state(kv) == before


async def test_a_commit_at_once_of_a_first_writer_replaces_no_live_row(kv: KvDriver) -> None:
    row = await chunk_with_a_lossy_copy(kv, 32_768)
    catalog, (blob,) = kv.node.catalog, row.blobs
    again = msgspec.structs.replace(row, lossy=None, durability=Durability.MEMORY, blobs=(renamed(blob),))
    mode, beside = CommitMode.FIRST_WRITER_WINS, list[WriteView]().append
    assert catalog.commit_at_once(again, mode=mode, now_ms=row.modified_ms, beside=beside) is None
    assert await row_of(kv, "cache", row.key) == row
    outcome = await catalog.commit(again, mode=mode, now_ms=row.modified_ms)
    assert not outcome.existed, "who looks beforehand whether its bytes are gone may bring them back"


def renamed(blob: BlobRef) -> BlobRef:
    """The same blob by another name of this process."""
    return msgspec.structs.replace(blob, blob_id=blob.blob_id[:8] + b"\xff" * (len(blob.blob_id) - 8))


def test_objects_that_were_stored_at_once_outlive_a_server_that_is_killed(tmp_path: Path) -> None:
    buckets = (BucketSetting("files"), BucketSetting("cache", "kv", "memory"))
    # The first of each bucket and size is handled step by step, and those like it are answered from their bytes.
    bodies = {
        f"/{bucket}/{size}-{number}": bucket.encode() * size + b"%d" % number
        for bucket in BUCKETS
        for size in (1, 60, 800, 5_000, 13_000)
        for number in range(3)
    }
    with ServerProcess(tmp_path / "server", ServerSettings(buckets=buckets)) as server:
        with server.raw() as raw:
            for target, data in bodies.items():
                answer = raw.request("PUT", target, data, headers=MEMORY)
                assert (answer.status, answer.headers["x-kvobj-durability"]) == (200, "memory")
        server.kill()
        server.start()
        with server.raw() as raw:
            for target, data in bodies.items():
                answer = raw.request("GET", target, payload=None)
                assert (answer.status, answer.body) == (200, data)


async def test_a_writer_that_goes_at_any_point_leaves_a_whole_chunk_or_none(kv: KvDriver) -> None:
    node, stored = kv.node, 0
    for steps in range(3, 43):
        key, data = f"k{steps}", bytes([steps]) * 100_000
        assert (await put(kv, f"/cache/other{steps}", b"goes")).status == 200
        await node.sealing.drain()
        assert await flush(node, timeout_seconds=60)
        # A durable change of its key is under way: the commit goes to the durable writer, too, and is waited for.
        going = asyncio.create_task(node.store.delete("cache", [f"other{steps}", key]))
        for _ in range(3):
            await asyncio.sleep(0)
        writing = asyncio.create_task(put(kv, f"/cache/{key}", data, at_once=False, payload="UNSIGNED-PAYLOAD"))
        for _ in range(steps):
            await asyncio.sleep(0)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        await going
        await node.sealing.drain()
        assert await flush(node, timeout_seconds=60)
        row = await row_of(kv, "cache", key)
        if row is not None:
            stored += 1
            assert (row.durability, row.digest) == (Durability.LOCAL, blake3(data).digest())
            assert (await kv.driver.get(f"/cache/{key}")).body == data
    assert stored
    assert node.dram.dirty_bytes == 0
