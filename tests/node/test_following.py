"""?follow over a whole node: bytes before their upload ends, and never an end to bytes that are no chunk's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from following_world import DATA, KEY, LAYER_BYTES, SECONDS, Follower, OpenBody, World, layer, turns, turns_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_driver import CHUNK_BYTES, LAYERS, kv_node, payload, stream
from s3_driver import BOB, ROOT, Answer, FakeBody, all_headers

from kvobj.api.following import USER_FOLLOWERS_MAX, FollowedReads
from kvobj.api.http import HttpSettings
from kvobj.api.message import BodyStream
from kvobj.api.object_store import ObjectStore
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import Durability, PartRow
from kvobj.errors import BusyError
from kvobj.store.groups import GroupState, group_upload
from kvobj.store.places import ChunkPlace, GroupPart
from kvobj.store.requests import PutRequest


@pytest.fixture
async def world(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    async with kv_node(tmp_path, shm_path) as kv:
        made = World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))
        yield made
        assert await made.holds_nothing()


# -- one body ----------------------------------------------------------------------------------------------------------


async def test_bytes_of_a_put_leave_before_the_put_ends(world: World) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:700])
        follower = await world.follow()
        assert await follower.has(700) == DATA[:700]
        body.send(DATA[700:701])
        assert await follower.has(701) == DATA[:701]
        assert (put.done(), follower.ended) == (False, None)
        assert follower.reply.headers[2:] == (
            ("content-type", "binary/octet-stream"),
            ("x-kvobj-follow", "uploading"),
            ("x-kvobj-namespace", "plain"),
            ("x-kvobj-parent", "root"),
            ("x-kvobj-tokens", "16"),
            ("x-kvobj-size-bytes", str(CHUNK_BYTES)),
        )
        body.send(DATA[701:])
        assert (await put).status == 200
    assert await follower.end() == (True, DATA)


async def test_a_put_is_followed_from_before_its_first_byte(world: World) -> None:
    async with world.putting(is_held=True) as (body, put):
        follower = await world.follow()
        await turns(20)
        body.may_begin.set()
        body.send(DATA[:10])
        assert await follower.has(10) == DATA[:10]
        assert not put.done()
        body.send(DATA[10:])
        await put
    assert await follower.end() == (True, DATA)


async def test_a_range_of_layers_begins_at_its_first_byte_and_ends_with_the_put(world: World) -> None:
    async with world.putting() as (body, put):
        follower = await world.follow(query="follow&layers=1-2")
        told = dict(follower.reply.headers)
        assert (follower.reply.status, told["content-range"]) == (
            206,
            f"bytes {LAYER_BYTES}-{3 * LAYER_BYTES - 1}/2048",
        )
        body.send(DATA[: LAYER_BYTES + 5])
        assert await follower.has(5) == layer(1)[:5]
        body.send(DATA[LAYER_BYTES + 5 : 3 * LAYER_BYTES + 1])
        assert await follower.has(2 * LAYER_BYTES) == layer(1) + layer(2)
        assert follower.ended is None  # nobody knows yet whether these bytes are a chunk's
        body.send(DATA[3 * LAYER_BYTES + 1 :])
        await put
    assert await follower.end() == (True, layer(1) + layer(2))


async def test_a_stored_chunk_is_followed_as_it_is_read(world: World) -> None:
    assert (await world.kv.put(KEY, DATA, namespace="plain", parent="root")).status == 200
    followed = await world.kv.driver.get(f"/cache/{KEY}?follow")
    read = await world.kv.driver.get(f"/cache/{KEY}")
    assert (followed.status, followed.body, all_headers(followed.reply)[1:]) == (200, DATA, all_headers(read.reply)[1:])
    ranged = await world.kv.driver.get(f"/cache/{KEY}?follow&layers=3-3")
    assert (ranged.status, ranged.body) == (206, layer(3))


async def test_what_nobody_uploads_is_not_there(world: World) -> None:
    for target in (f"/cache/{KEY}?follow", f"/cache/{KEY}?follow&layers=0-0", "/cache/parted/x?follow"):
        answer = await world.kv.driver.get(target)
        assert (answer.status, answer.code) == (404, "NoSuchKey")
    answer = await world.kv.driver.request("HEAD", f"/cache/{KEY}?follow")
    assert answer.status == 404


async def test_ordinary_buckets_have_nothing_to_follow(world: World) -> None:
    answer = await world.kv.driver.get("/files/k?follow")
    assert (answer.status, answer.code) == (400, "InvalidRequest")


async def test_layers_that_the_chunk_will_not_have_are_refused(world: World) -> None:
    async with world.putting():
        answer = await world.kv.driver.get(f"/cache/{KEY}?follow&layers=2-4")
        assert (answer.status, answer.code) == (400, "InvalidRequest")


async def test_a_writer_that_goes_in_the_middle_fails_its_followers(world: World) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:100])
        followers = [await world.follow() for _ in range(3)]
        for follower in followers:
            await follower.has(100)
        body.vanish()
        assert (await put).status == 400
    assert [await follower.end() for follower in followers] == [(False, DATA[:100])] * 3
    assert (await world.ask(f"/cache/{KEY}?follow")).status == 404


async def test_bytes_that_fail_their_checksum_are_never_ended(world: World) -> None:
    async with world.putting(headers={"content-md5": "AAAAAAAAAAAAAAAAAAAAAA=="}) as (body, put):
        body.send(DATA[:-1])
        follower = await world.follow()
        await follower.has(CHUNK_BYTES - 1)
        body.send(DATA[-1:])
        assert (await put).status == 400
    assert (await follower.end())[0] is False


@pytest.mark.parametrize("same", [True, False])
async def test_a_writer_that_loses_to_another_fails_its_followers_unless_the_bytes_are_the_same(
    world: World,
    same: bool,  # noqa: FBT001 - a test's parameter
) -> None:
    other = DATA if same else payload(b"other")
    async with world.putting(headers={"x-kvobj-durability": "local"}) as (slow, first):
        slow.send(DATA[:100])
        follower = await world.follow()
        await follower.has(100)
        async with world.putting(headers={"x-kvobj-durability": "local"}) as (fast, second):
            fast.send(other)
            assert (await second).headers["x-kvobj-existed"] == "false"
        slow.send(DATA[100:])
        assert (await first).headers["x-kvobj-existed"] == "true"
    assert await follower.end() == (same, DATA)
    assert (await world.kv.driver.get(f"/cache/{KEY}")).body == other


async def test_the_writer_that_has_come_furthest_is_followed(world: World) -> None:
    async with world.putting() as (slow, _):
        slow.send(b"x")
        async with world.putting() as (fast, put):
            fast.send(DATA[:50])
            arriving = world.kv.node.store.arriving.of("cache", KEY)
            await turns_until(lambda: arriving[1].filled == 50)
            follower = await world.follow()
            assert await follower.has(50) == DATA[:50]
            fast.send(DATA[50:])
            await put
        assert await follower.end() == (True, DATA)


async def test_a_follower_that_leaves_holds_nothing_and_holds_up_nobody(world: World) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:10])
        follower = await world.follow()
        await follower.has(10)
        pins = world.kv.node.store.arriving.of("cache", KEY)[0]._bytes
        assert pins is not None
        assert pins[0].pins == 2
        await follower.leave()
        assert pins[0].pins == 1
        body.send(DATA[10:])
        assert (await put).status == 200
    assert (await world.kv.driver.get(f"/cache/{KEY}")).body == DATA


async def test_a_follower_that_takes_nothing_holds_up_no_writer(world: World) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:10])
        reply = await world.ask(f"/cache/{KEY}?follow")
        stream = cast("BodyStream", reply.body)
        views = stream.views()
        assert await anext(views) == DATA[:10]
        body.send(DATA[10:])
        assert (await put).status == 200  # while the follower still has the first view, and wants no more
        assert (await world.kv.driver.get(f"/cache/{KEY}")).body == DATA
        assert b"".join([bytes(view) async for view in views]) == DATA[10:]
        await stream.aclose()


async def test_a_delete_of_what_is_still_coming_changes_nothing_and_of_what_has_come_comes_too_late(
    world: World,
) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:10])
        follower = await world.follow()
        await follower.has(10)
        await world.kv.driver.request("DELETE", f"/cache/{KEY}")
        body.send(DATA[10:])
        assert (await put).status == 200
        await world.kv.driver.request("DELETE", f"/cache/{KEY}")
        assert await follower.end() == (True, DATA)


async def test_a_chunk_of_a_batch_is_followed_until_the_batch_is_committed(world: World) -> None:
    ids = world.plain.ids(list(range(32)))
    first, second = (payload(each) for each in ids)
    headers: list[dict[str, object]] = [
        {"id": ids[0], "parent": "root", "namespace": "plain"},
        {"id": ids[1], "parent": ids[0], "namespace": "plain"},
    ]
    whole = stream([(headers[0], first), (headers[1], second)])
    seen: list[Follower] = []

    class Watched(FakeBody):
        async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
            await super().receive_into(buffer, on_bytes)
            if not seen and world.kv.node.store.arriving.of("cache", ids[0].hex()):
                seen.append(await world.follow(ids[0].hex()))

    told = await world.kv.mput(Watched(whole, step=500), payload_hash="UNSIGNED-PAYLOAD")
    assert [item["status"] for item in told.value["items"]] == [200, 200]
    assert await seen[0].end() == (True, first)


async def large_bucket(world: World, codec: str) -> None:
    """Another KV bucket, of this codec. Only a configuration can ask for one."""
    (bucket,) = [each for each in await world.kv.node.catalog.buckets() if each.name == "cache"]
    await world.kv.node.catalog.create_bucket(msgspec.structs.replace(bucket, name="large", codec=codec))


async def put_large(world: World, size_bytes: int) -> tuple[OpenBody, asyncio.Task[Answer], Follower]:
    body = OpenBody(size_bytes)
    put = asyncio.create_task(world.kv.driver.request("PUT", "/large/k", body=body, payload="UNSIGNED-PAYLOAD"))
    await turns_until(lambda: bool(world.kv.node.store.arriving.of("large", "k")))
    follower = Follower(await world.ask("/large/k?follow"))
    follower.start()
    return body, put, follower


@pytest.mark.parametrize("codec", ["raw", "zp"])
async def test_a_body_of_several_blobs_is_followed_blob_by_blob(world: World, codec: str) -> None:
    """An eighth of the arena is the largest blob: of 16 MiB, nearly 2 MiB."""
    await large_bucket(world, codec)
    data = payload(b"large", 5 << 20)
    blob_bytes = world.kv.node.store._rooms._split.blob_plain_bytes_max
    body, put, follower = await put_large(world, len(data))
    body.send(data[:blob_bytes])
    assert await follower.has(blob_bytes) == data[:blob_bytes]
    assert not put.done()
    for start in range(blob_bytes, len(data), blob_bytes):
        body.send(data[start : start + blob_bytes])
    assert (await put).status == 200
    assert await follower.end() == (True, data)


async def test_a_body_that_is_coded_is_followed_as_it_came(world: World) -> None:
    await large_bucket(world, "zp")
    data = payload(b"small", 1 << 20)
    body, put, follower = await put_large(world, len(data))
    body.send(data[:1000])
    assert await follower.has(1000) == data[:1000]
    body.send(data[1000:])
    assert (await put).status == 200
    assert await follower.end() == (True, data)


# -- parts -------------------------------------------------------------------------------------------------------------


async def test_parts_are_sent_in_order_as_each_is_stored(world: World) -> None:
    await world.part(2, LAYERS, layer(2))
    follower = await world.follow()
    assert dict(follower.reply.headers)["x-kvobj-size-bytes"] == str(CHUNK_BYTES)
    await world.part(0, LAYERS, layer(0))
    assert await follower.has(LAYER_BYTES) == layer(0)
    await world.part(3, LAYERS, layer(3))
    assert follower.ended is None
    assert (await world.kv.driver.get(f"/cache/{KEY}")).status == 404
    await world.part(1, LAYERS, layer(1))
    assert await follower.end() == (True, DATA)
    assert (await world.kv.driver.get(f"/cache/{KEY}")).body == DATA


async def test_a_range_of_parts_waits_for_no_others_and_ends_with_its_last(world: World) -> None:
    await world.part(0, LAYERS, layer(0))
    follower = await world.follow(query="follow&layers=2-3")
    await world.part(3, LAYERS, layer(3))
    await world.part(2, LAYERS, layer(2))
    assert await follower.end() == (True, layer(2) + layer(3))
    assert (await world.kv.driver.get(f"/cache/{KEY}")).status == 404


async def test_layers_within_larger_parts_are_cut_out_of_them(world: World) -> None:
    half = CHUNK_BYTES // 2
    await world.part(1, 2, DATA[half:])
    follower = await world.follow(query="follow&layers=1-2")
    await world.part(0, 2, DATA[:half])
    assert await follower.end() == (True, layer(1) + layer(2))


async def test_parts_that_are_given_up_fail_their_followers(world: World) -> None:
    await world.part(0, LAYERS, layer(0))
    follower = await world.follow()
    await follower.has(LAYER_BYTES)
    await world.kv.driver.request("DELETE", f"/cache/{KEY}")
    assert await follower.end() == (False, layer(0))


async def test_parts_that_are_given_up_and_sent_anew_are_not_mixed(world: World) -> None:
    other = payload(b"other")
    await world.part(0, LAYERS, layer(0))
    follower = await world.follow()
    await follower.has(LAYER_BYTES)
    await world.kv.driver.request("DELETE", f"/cache/{KEY}")
    for index in range(LAYERS):
        await world.part(index, LAYERS, layer(index, other))
    assert await follower.end() == (False, layer(0))
    assert (await world.kv.driver.get(f"/cache/{KEY}")).body == other


async def test_a_whole_put_that_overtakes_parts_is_no_continuation_of_them(world: World) -> None:
    await world.part(0, LAYERS, layer(0))
    follower, patient = await world.follow(), await world.follow(query="follow&layers=1-1")
    await follower.has(LAYER_BYTES)
    other = payload(b"other")
    assert (await world.kv.put(KEY, other, namespace="parted", parent="root")).status == 200
    assert await follower.end() == (False, layer(0))
    # Who was sent nothing yet is given what there is now.
    assert await patient.end() == (True, layer(1, other))


async def test_a_follower_of_parts_is_not_kept_waiting_for_ever(world: World) -> None:
    world.kv.node.store.following.progress_seconds = 0.05
    await world.part(0, LAYERS, layer(0))
    follower = await world.follow()
    assert await follower.end() == (False, layer(0))


async def test_followers_of_parts_end_when_the_server_stops(world: World) -> None:
    await world.part(0, LAYERS, layer(0))
    follower = await world.follow()
    await follower.has(LAYER_BYTES)
    world.kv.node.store.following.stop()
    assert await follower.end() == (False, layer(0))


async def hand_on_the_bucket(world: World) -> None:
    """It is deleted, and made anew by Bob."""
    assert (await world.kv.driver.request("DELETE", "/cache")).status == 204
    world.kv.driver.clock.offset_ms -= 5000
    made = await world.kv.driver.request("PUT", "/cache", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
    assert made.status == 200
    await world.kv.declare("plain", user=BOB)


@pytest.mark.parametrize("with_part", [False, True])
async def test_who_follows_parts_into_a_bucket_is_given_nothing_of_its_next_owners(
    world: World,
    with_part: bool,  # noqa: FBT001 - a test's parameter
) -> None:
    if with_part:
        await world.part(0, LAYERS, layer(0))
    else:
        assert (await world.kv.driver.request("POST", f"/cache/{KEY}?uploads")).status == 200
    follower = await world.follow()
    seen = await follower.has(LAYER_BYTES if with_part else 0)
    await turns(20)
    await hand_on_the_bucket(world)
    assert (await world.kv.driver.request("PUT", f"/cache/{KEY}", user=BOB, body=b"of Bob's")).status == 200
    assert await follower.end() == (False, seen)
    read = await world.kv.driver.request("GET", f"/cache/{KEY}?follow", user=BOB)
    assert (read.status, read.body) == (200, b"of Bob's")


async def test_what_is_on_its_way_into_a_bucket_of_before_is_nobodys_to_follow(world: World) -> None:
    async with world.putting() as (body, put):
        body.send(DATA[:100])
        follower = await world.follow()
        await follower.has(100)
        await hand_on_the_bucket(world)
        assert (await world.ask(f"/cache/{KEY}?follow", user=BOB)).status == 404
        body.send(DATA[100:])
        assert (await put).status == 404
        assert (await follower.end())[0] is False


async def test_what_is_on_its_way_into_a_namespace_is_not_followed_in_the_next_of_its_name(world: World) -> None:
    await world.kv.declare("n", ids="foreign")
    async with world.putting(key="n/key", headers={"x-kvobj-namespace": "n"}) as (body, put):
        body.send(DATA[:100])
        follower = await world.follow(key="n/key")
        await follower.has(100)
        assert (await world.kv.call("DELETE", "namespace=n")).status == 200
        await world.kv.declare("n", ids="foreign", access={"bob": "read"})
        assert (await world.ask("/cache/n/key?follow", user=BOB)).status == 404
        body.send(DATA[100:])
        assert (await put).status == 404
        assert (await follower.end())[0] is False


# -- writers of parts who do not agree, or come late -------------------------------------------------------------------


async def part_request(world: World, index: int, count: int) -> PutRequest:
    """A writer's part, of which it has told nobody yet."""
    (bucket,) = [each for each in await world.kv.node.catalog.buckets() if each.name == "cache"]
    namespace = await world.kv.node.catalog.namespaces.namespace("cache", "parted")
    assert namespace is not None
    place = ChunkPlace(namespace, "", namespace.chunk_tokens, GroupPart(index, count))
    return PutRequest(bucket, KEY, CHUNK_BYTES // count, bucket.owner, place=place)


async def store_part(world: World, request: PutRequest, data: bytes) -> GroupState:
    async with await world.kv.node.store.start_put(request) as transfer:
        await transfer.receive(FakeBody(data))
        return await world.kv.node.store.end_group(request, transfer)


async def test_a_writer_that_is_refused_leaves_what_another_has_begun_to_that_and_its_followers(world: World) -> None:
    store = world.kv.node.store
    begun = await store.start_group_part(await part_request(world, 0, LAYERS))
    assert begun.request is not None
    follower = await world.follow()
    refused = await world.part(0, 2, DATA[: CHUNK_BYTES // 2])
    assert (refused.status, refused.code) == (409, "LayoutMismatch")
    assert b"another number of parts" in refused.body
    await turns(20)
    assert follower.ended is None
    await store_part(world, begun.request, layer(0))
    for index in range(1, LAYERS):
        await world.part(index, LAYERS, layer(index))
    assert await follower.end() == (True, DATA)


async def test_a_writer_that_begins_and_never_comes_for_its_body_speaks_for_no_other(world: World) -> None:
    store = world.kv.node.store
    store._uploads.writers._expected_seconds = 0.01
    assert (await store.start_group_part(await part_request(world, 0, LAYERS))).request is not None
    await turns_until(lambda: not store._uploads.writers._inside and not store._uploads.writers._ending)
    half = CHUNK_BYTES // 2
    assert (await world.part(0, 2, DATA[:half])).status == 200
    assert (await world.part(1, 2, DATA[half:])).status == 200


class Interrupted:
    """A catalog, and what others do to it while somebody's look at an upload's parts has begun, once they are told to."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._catalog, name)

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await self._catalog.parts(bucket, key, upload_id)


async def test_parts_of_the_next_upload_are_not_taken_for_those_of_the_one_that_became_the_chunk(world: World) -> None:
    catalog, following = world.kv.node.catalog, world.kv.node.store.following
    request = await part_request(world, 0, LAYERS)
    assert request.place is not None
    assert request.place.group is not None
    following_upload = group_upload(request, request.place, request.place.group, Durability.MEMORY, 1)
    seen = Interrupted(catalog)
    following._catalog = cast("Catalog", seen)

    async def completed_and_begun_anew() -> None:
        """The chunk is made, and a writer who has not seen that yet begins another upload."""
        await world.part(LAYERS - 1, LAYERS, layer(LAYERS - 1))
        await catalog.create_upload(following_upload, made_ms=request.bucket.created_ms)

    for index in range(LAYERS - 2):
        await world.part(index, LAYERS, layer(index))
    follower = await world.follow()
    await follower.has(LAYER_BYTES * (LAYERS - 2))
    await turns(20)
    seen.meanwhile = completed_and_begun_anew
    await world.part(LAYERS - 2, LAYERS, layer(LAYERS - 2))
    assert await follower.end() == (True, DATA)
    await catalog.abort_upload("cache", KEY, following_upload.upload_id, now_ms=1)


async def test_a_writer_that_comes_for_its_body_when_the_chunk_is_whole_is_told_so_and_leaves_no_upload(
    world: World,
) -> None:
    store = world.kv.node.store
    begun = await store.start_group_part(await part_request(world, 0, LAYERS))
    assert begun.request is not None
    for index in range(LAYERS):
        await world.part(index, LAYERS, layer(index))
    state = await store_part(world, begun.request, layer(0, payload(b"other")))
    assert (state.have, state.count, state.existed) == (LAYERS, LAYERS, True)
    assert not (await world.kv.node.catalog.list_uploads("cache", limit=1)).rows
    assert (await world.kv.driver.get(f"/cache/{KEY}")).body == DATA


# -- multipart uploads -------------------------------------------------------------------------------------------------


PIECES = [payload(b"one", 5 << 20), payload(b"two", 5 << 20), payload(b"three", 1000)]


async def upload_part(world: World, upload_id: str, number: int, data: bytes) -> str:
    answer = await world.kv.driver.request("PUT", f"/cache/big?partNumber={number}&uploadId={upload_id}", body=data)
    assert answer.status == 200
    return answer.headers["etag"]


async def begin_upload(world: World) -> str:
    created = await world.kv.driver.request("POST", "/cache/big?uploads")
    upload_id = created.xml.findtext("UploadId")
    assert upload_id is not None
    return upload_id


async def complete(world: World, upload_id: str, etags: dict[int, str]) -> Answer:
    parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{e}</ETag></Part>" for n, e in etags.items())
    document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    return await world.kv.driver.request("POST", f"/cache/big?uploadId={upload_id}", body=document)


async def test_a_multipart_upload_is_followed_part_by_part_and_ends_with_complete(
    tmp_path: Path, shm_path: Path
) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        world = World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))
        upload_id = await begin_upload(world)
        follower = await world.follow("big")
        etags = {2: await upload_part(world, upload_id, 2, PIECES[1])}
        etags = {1: await upload_part(world, upload_id, 1, PIECES[0]), **etags}
        assert await follower.has(10 << 20) == PIECES[0] + PIECES[1]
        etags[3] = await upload_part(world, upload_id, 3, PIECES[2])
        await follower.has((10 << 20) + 1000)
        assert follower.ended is None
        assert (await complete(world, upload_id, etags)).status == 200
        assert await follower.end() == (True, b"".join(PIECES))
        assert await world.holds_nothing()


async def test_a_part_that_is_replaced_or_left_out_fails_who_was_sent_it(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        world = World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))
        upload_id = await begin_upload(world)
        first = await upload_part(world, upload_id, 1, PIECES[0])
        follower = await world.follow("big")
        await follower.has(5 << 20)
        first = await upload_part(world, upload_id, 1, PIECES[1])
        assert await follower.end() == (False, PIECES[0])
        await upload_part(world, upload_id, 2, PIECES[0])
        last = await upload_part(world, upload_id, 3, PIECES[2])
        again = await world.follow("big")
        await again.has((10 << 20) + 1000)
        assert (await complete(world, upload_id, {1: first, 3: last})).status == 200
        assert (await again.end())[0] is False
        upload_id = await begin_upload(world)
        aborted = await world.kv.driver.request("DELETE", f"/cache/big?uploadId={upload_id}")
        assert aborted.status == 204
        assert await world.holds_nothing()


async def test_the_end_of_another_upload_is_no_end_of_the_one_that_is_followed(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        world = World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))
        uploads = [await begin_upload(world), await begin_upload(world)]
        firsts = [await upload_part(world, upload, 1, data) for upload, data in zip(uploads, PIECES[:2], strict=True)]
        follower = await world.follow("big")
        came = await follower.has(5 << 20)
        other = int(came == PIECES[0])
        etags = {1: firsts[other], 2: await upload_part(world, uploads[other], 2, PIECES[2])}
        assert (await complete(world, uploads[other], etags)).status == 200
        assert await follower.end() == (False, came)
        assert await world.holds_nothing()


# -- rights and bounds -------------------------------------------------------------------------------------------------


async def test_who_may_not_read_is_told_what_a_get_tells(world: World) -> None:
    await world.kv.declare("shared", access={"bob": "read"})
    async with world.putting():
        denied = await world.ask(f"/cache/{KEY}?follow", user=BOB)
        assert denied.status == 404  # something in this bucket is granted, this namespace is not
    async with world.putting(headers={"x-kvobj-namespace": "shared"}) as (body, put):
        follower = await world.follow(user=BOB)
        body.send(DATA)
        await put
        assert await follower.end() == (True, DATA)


async def test_who_is_granted_nothing_is_denied(world: World) -> None:
    async with world.putting():
        assert (await world.ask(f"/cache/{KEY}?follow", user=BOB)).status == 403
        assert (await world.ask(f"/cache/{KEY}?follow", user=ROOT)).status == 200


async def test_followers_are_bounded_by_chunk_and_by_user(world: World) -> None:
    reads = FollowedReads(
        cast("ObjectStore", world.kv.node.store),
        chunk_followers_max=2,
        user_followers_max=3,
    )
    leave = [reads._enter(("cache", "a"), "alice"), reads._enter(("cache", "a"), "bob")]
    with pytest.raises(BusyError, match="too many follow this chunk"):
        reads._enter(("cache", "a"), "carol")
    leave += [reads._enter(("cache", "b"), "alice"), reads._enter(("cache", "c"), "alice")]
    with pytest.raises(BusyError, match="the user follows too many"):
        reads._enter(("cache", "d"), "alice")
    for each in leave:
        each()
    assert (reads.followers, len(reads._of_chunk), len(reads._of_user)) == (0, 0, 0)


def test_all_that_one_user_may_follow_leaves_most_connections_to_others() -> None:
    assert HttpSettings().connections >= 4 * USER_FOLLOWERS_MAX


async def test_what_is_on_its_way_is_sent_raw_and_to_who_takes_no_raw_bytes_it_is_not_there(world: World) -> None:
    await world.part(0, LAYERS, layer(0))

    async def asked(query: str, accept: str) -> tuple[int, str | None]:
        answer = await world.kv.driver.request("GET", f"/cache/{KEY}?{query}", headers={"x-kvobj-accept": accept})
        return answer.status, answer.code if answer.status >= 400 else None

    assert await asked("follow&layers=0-0", "x3") == (400, "InvalidRequest")
    assert await asked("follow", "zz") == (404, "NoSuchKey")
    assert await asked("follow&layers=0-0", "x3, raw") == (206, None)
    for index in range(1, LAYERS):
        await world.part(index, LAYERS, layer(index))
    assert await asked("follow&layers=0-0", "x3") == (400, "InvalidRequest")  # stored, it is answered alike
    assert await asked("follow", "zz") == (404, "NoSuchKey")


async def test_one_more_follower_than_the_bound_is_told_to_come_later(world: World) -> None:
    async with world.putting() as (body, put):
        followers = [await world.follow() for _ in range(64)]
        refused = await world.ask(f"/cache/{KEY}?follow")
        assert refused.status == 503
        body.send(DATA)
        await put
        assert [await each.end() for each in followers] == [(True, DATA)] * 64


# -- any order of things -----------------------------------------------------------------------------------------------


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("part"), st.integers(0, LAYERS - 1), st.integers(0, 1)),
        st.tuples(st.just("put"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("delete"), st.just(0), st.just(0)),
        st.tuples(st.just("follow"), st.integers(0, LAYERS - 1), st.integers(0, 1)),
        st.tuples(st.just("leave"), st.just(0), st.just(0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
    ),
    max_size=14,
)


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(events=EVENTS)
def test_whatever_happens_a_stream_that_ends_was_a_chunks_bytes(
    events: list[tuple[str, int, int]], one_node: tuple[asyncio.Runner, World]
) -> None:
    """Two writers with different bytes, parts in any order, whole PUTs, DELETEs, followers of all and of ranges. A stream that ends
    is one chunk that stood; that of a layer is what one of the writers sent as that layer."""
    runner, world = one_node
    runner.run(asyncio.wait_for(_happen(world, events), SECONDS))


VERSIONS = (payload(b"version 0"), payload(b"version 1"))


async def _happen(world: World, events: list[tuple[str, int, int]]) -> None:  # noqa: C901 - one case an event
    key = payload(repr((id(events), events)).encode(), 32).hex()
    await world.kv.driver.request("DELETE", f"/cache/{key}")
    chunks: set[bytes] = set()
    followers: list[tuple[Follower, int | None]] = []

    async def note() -> None:
        answer = await world.kv.driver.get(f"/cache/{key}")
        if answer.status == 200:
            chunks.add(answer.body)

    for kind, first, second in events:
        if kind == "part":
            await world.part(first, LAYERS, layer(first, VERSIONS[second]), key=key)
        elif kind == "put":
            await world.kv.put(key, VERSIONS[first], namespace="parted", parent="root")
        elif kind == "delete":
            await world.kv.driver.request("DELETE", f"/cache/{key}")
        elif kind == "leave" and followers:
            await followers.pop()[0].leave()
        elif kind == "settle":
            await turns(20)
        elif kind == "follow":
            reply = await world.ask(f"/cache/{key}?follow" + (f"&layers={first}-{first}" if second else ""))
            if reply.status != 404:
                follower = Follower(reply)
                follower.start()
                followers.append((follower, first if second else None))
        await note()
    await world.kv.driver.request("DELETE", f"/cache/{key}")
    for follower, of_layer in followers:
        ended, data = await follower.end()
        if ended and of_layer is None:
            assert data in chunks
        elif ended and of_layer is not None:
            assert data in [layer(of_layer, version) for version in VERSIONS]
    await world.kv.driver.request("DELETE", f"/cache/{key}")
    assert world.is_idle()


@pytest.fixture
def one_node(tmp_path: Path, shm_path: Path) -> Iterator[tuple[asyncio.Runner, World]]:
    """A node for all examples, on a loop of its own."""
    with asyncio.Runner() as runner:
        context = kv_node(tmp_path, shm_path)

        async def begin() -> World:
            kv = await context.__aenter__()
            return World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))

        yield runner, runner.run(begin())

        async def end() -> None:
            await context.__aexit__(None, None, None)

        runner.run(end())
