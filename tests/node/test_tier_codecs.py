"""Chunks that lie in tiers in another codec than they are read in: the same bytes come back, whatever happens to the tiers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3
from kv_driver import stream
from tier_codecs import CHUNK_BYTES, LAYER_BYTES, TOKENS, coded_node, lossless, tensor, usable, wait_for

from kvobj.app.admin_state import NodeView
from kvobj.app.node import flush
from kvobj.catalog.rows import Durability
from kvobj.clock import SystemClock
from kvobj.codec.frame import raw_payload_offset
from kvobj.metrics import Metrics
from kvobj.tiers import coded_frames
from kvobj.tiers.coded_blobs import codec_families
from kvobj.tiers.coded_frames import decode_coded
from kvobj.tiers.protocol import ByteRange

CODECS = ("zp", "x3", "xa")


def codec_or_skip(codec: str) -> str:
    if codec != "zp" and not usable(codec):
        pytest.skip(f"{codec} is not usable on this machine")
    return codec


@pytest.mark.parametrize("durability", ["memory", "local"])
@pytest.mark.parametrize("codec", CODECS)
async def test_a_chunk_lies_at_home_in_the_codec_that_its_namespace_says_and_is_read_as_it_was_put(
    tmp_path: Path, shm_path: Path, codec: str, durability: str
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec_or_skip(codec)}) as coded:
        key = await coded.put(1, durability=durability)
        found = await coded.written(key)
        assert found is not None
        assert (found.codec, found.plain_bytes) == (codec, CHUNK_BYTES)
        assert found.stored_bytes < 0.8 * CHUNK_BYTES
        row = await coded.row(key)
        assert (row.durability, row.blobs[0].codec) == (Durability.LOCAL, "raw")
        await coded.drop_from_memory(key)
        answer = await coded.get(key)
        assert (answer.status, answer.body) == (200, tensor(1))
        assert answer.headers["x-kvobj-tier"] == "nvme"


@pytest.mark.parametrize("codec", CODECS)
async def test_a_chunk_that_lies_coded_in_memory_is_read_as_it_was_put(
    tmp_path: Path, shm_path: Path, codec: str
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec_or_skip(codec)}) as coded:
        key = await coded.put(2)
        await flush(coded.node, timeout_seconds=20.0)
        before = (await coded.node.dram.usage()).used_bytes
        await coded.code_in_memory(key)
        assert (await coded.node.dram.usage()).used_bytes < 0.8 * before
        answer = await coded.get(key)
        assert (answer.status, answer.body, answer.headers["x-kvobj-tier"]) == (200, tensor(2), "dram")


async def test_a_chunk_that_comes_back_to_memory_lies_coded_again_once_it_is_cold(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(8)
        await flush(coded.node, timeout_seconds=20.0)
        await coded.code_in_memory(key)
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).headers["x-kvobj-tier"] == "nvme"
        await coded.node.read_tier.promotions_done()
        blob_id = await coded.blob_id(key)
        assert (coded.node.dram.find(blob_id), await coded.node.dram.missing([blob_id])) == (None, [])
        coded.node.dram_transcoding._cold_seconds = 0.0
        await wait_for(lambda: coded.node.dram.find(blob_id) is not None, timeout_seconds=10.0)
        assert (await coded.get(key)).body == tensor(8)


async def test_bytes_that_do_not_shrink_lie_as_they_were_put(tmp_path: Path, shm_path: Path) -> None:
    noise = random.Random(3).randbytes(CHUNK_BYTES)
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "zp"}) as coded:
        key = await coded.put(3, data=noise)
        assert await coded.written(key) is None
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == noise


async def test_a_range_of_a_coded_chunk_is_that_range_of_its_bytes(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(4)
        await coded.written(key)
        await coded.drop_from_memory(key)
        answer = await coded.kv.driver.request("GET", f"/cache/{key}", headers={"range": "bytes=1000-99999"})
        assert (answer.status, answer.body) == (206, tensor(4)[1000:100_000])
        layers = await coded.get(key, "?layers=2-3")
        assert layers.body == tensor(4)[2 * LAYER_BYTES : 4 * LAYER_BYTES]


async def test_a_range_read_from_the_tier_decodes_the_layers_that_it_touches(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(5)
        await coded.written(key)
        await coded.drop_from_memory(key)
        blob_id = await coded.blob_id(key)
        offset = (await coded.row(key)).blobs[0].frame_bytes - CHUNK_BYTES
        for start, stop in ((0, 10), (LAYER_BYTES - 5, LAYER_BYTES + 5), (CHUNK_BYTES - 1, CHUNK_BYTES)):
            frame = await coded.node.read_tier.get(blob_id, ByteRange(offset + start, offset + stop))
            assert frame is not None
            assert bytes(frame.view) == tensor(5)[start:stop]
            frame.release()
        pinned = coded.node.arena.usage().pinned
        assert pinned == (await coded.node.dram.usage()).blobs


async def test_a_restart_adopts_what_lies_coded_in_memory_and_at_home(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec, "nvme": codec}) as coded:
        key = await coded.put(6)
        await coded.written(key)
        await coded.code_in_memory(key)
        blob_id = await coded.blob_id(key)
        told = coded.node.dram.coded_totals.usage()
        coded.node.dram.mark_dirty(blob_id)  # so that the stop leaves the arena
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec, "nvme": codec}) as coded:
        found = coded.node.dram.find(blob_id)
        assert found is not None
        assert (found.codec, found.plain_bytes) == (codec, CHUNK_BYTES)
        assert coded.node.dram.coded_totals.usage() == told
        assert (await coded.get(key)).body == tensor(6)
        at_home = coded.at_home(blob_id)
        assert at_home is not None
        assert at_home.codec == codec
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(6)


async def test_deleting_a_coded_chunk_leaves_nothing_anywhere(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec, "nvme": codec}) as coded:
        key = await coded.put(7)
        await coded.written(key)
        await coded.code_in_memory(key)
        assert (await coded.kv.driver.request("DELETE", f"/cache/{key}")).status == 204
        while await coded.node.reaper.reap_batch():
            pass
        assert coded.node.arena.usage().pinned == 0
        assert coded.node.dram.coded_totals.usage() == []
        assert coded.node.coded_blobs.totals.usage() == []
        assert (await coded.node.nvme.usage()).blobs == 0


async def chunks_held(tmp_path: Path, shm_path: Path, codecs: dict[str, str]) -> tuple[int, int]:
    """How many chunks memory holds after more have been put than fit, and how many bytes of chunks these are."""
    async with coded_node(tmp_path, shm_path, codecs=codecs) as coded:
        for number in range(48):
            key = await coded.put(number, data=tensor(number % 4))
            if number % 4 == 3:
                await flush(coded.node, timeout_seconds=20.0)
            if codecs and await coded.node.coding_rules.of_row(await coded.row(key), "dram"):
                await coded.code_in_memory(key)
        usage = await coded.node.dram.usage()
        return usage.blobs, usage.used_bytes


async def test_memory_holds_more_chunks_where_they_lie_coded(tmp_path: Path, shm_path: Path) -> None:
    plain, plain_used = await chunks_held(tmp_path / "plain", shm_path / "plain", {})
    coded, coded_used = await chunks_held(tmp_path / "coded", shm_path / "coded", {"dram": lossless()})
    assert plain < 48
    assert coded >= 1.3 * plain
    assert coded_used <= 1.05 * plain_used


async def test_status_says_how_much_each_codec_saves_in_each_tier(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec, "nvme": codec}) as coded:
        # However slow the machine: nothing is coded but what this test codes.
        coded.node.dram_transcoding._cold_seconds = 3600.0
        keys = [await coded.put(number) for number in range(3)]
        await coded.written(keys[0])
        await coded.code_in_memory(keys[0])
        view = NodeView(coded.node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "")
        dram, nvme = (await view.status()).tiers
        assert [(each.codec, each.blobs) for each in dram.codecs] == [("raw", 2), (codec, 1)]
        assert [(each.codec, each.blobs, each.plain_bytes) for each in nvme.codecs] == [(codec, 3, 3 * CHUNK_BYTES)]
        assert nvme.codecs[0].ratio > 1.25
        assert dram.plain_bytes > dram.used_bytes
        (blob,) = await view.inspect(await coded.row(keys[0]))
        assert blob.frame is not None
        assert (blob.tiers, blob.frame.codec, blob.frame.plain_bytes) == (("dram", "nvme"), codec, CHUNK_BYTES)
        verified = [each.problem async for each in view.verify("cache")]
        assert verified == [None, None, None]
        gauges = {
            (name, labels["tier"], labels["codec"]): value
            for family in codec_families({"dram": coded.node.dram.coded_totals, "nvme": coded.node.coded_blobs.totals})
            for name, labels, value in family.samples
        }
        assert gauges["kvobj_tier_codec_blobs", "dram", codec] == 1
        assert gauges["kvobj_tier_codec_plain_bytes", "nvme", codec] == 3 * CHUNK_BYTES


async def test_a_codec_that_cannot_be_used_leaves_chunks_plain_and_status_says_why(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_frames, "_unavailable", lambda _codec: "no kernels")
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq4"}, lossy=True) as coded:
        key = await coded.put(1)
        assert await coded.written(key) is None
        view = NodeView(coded.node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "")
        assert "codec eq4 is not used in nvme: no kernels" in (await view.status()).notes


async def test_chunks_that_nobody_asks_for_come_to_lie_coded_by_themselves(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        coded.node.dram_transcoding._cold_seconds = 0.2
        key = await coded.put(1)
        await flush(coded.node, timeout_seconds=20.0)
        blob_id = await coded.blob_id(key)
        await wait_for(lambda: coded.node.dram.find(blob_id) is not None)
        assert (await coded.get(key)).body == tensor(1)
        assert len(coded.node.dram_transcoding) == 0


async def test_chunks_that_an_earlier_process_left_plain_come_to_lie_coded(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(1)  # only in memory, so that the stop leaves the arena
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        coded.node.dram_transcoding._cold_seconds = 0.0
        await coded.node.dram_transcoding.load()
        blob_id = await coded.blob_id(key)
        await wait_for(lambda: coded.node.dram.find(blob_id) is not None)
        assert (await coded.get(key)).body == tensor(1)


async def test_a_match_says_in_which_codec_each_chunk_lies(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec, "nvme": codec}) as coded:
        key = await coded.put(1)
        ids = [key]

        async def told(form: str) -> tuple[str, str]:
            given = bytes.fromhex(key) if form.endswith("msgpack") else ids
            answer = await coded.kv.match("n", form=form, ids=given, detail="chunks")
            (chunk,) = answer.value["chunks"]
            return chunk["tier"], chunk["codec"]

        for form in ("application/json", "application/msgpack"):
            assert await told(form) == ("dram", "raw")
        await coded.written(key)
        await coded.code_in_memory(key)
        for form in ("application/json", "application/msgpack"):
            assert await told(form) == ("dram", codec)
        await coded.drop_from_memory(key)
        for form in ("application/json", "application/msgpack"):
            assert await told(form) == ("nvme", codec)


async def test_a_chunk_of_fewer_tokens_is_coded_with_its_own(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        tokens = TOKENS // 4
        (key,) = coded.namespace.ids([9] * tokens, TOKENS)
        data = tensor(9, CHUNK_BYTES // 4)
        put = await coded.kv.put(key.hex(), data, namespace="n", parent="root", tokens=str(tokens))
        assert put.status == 200
        assert await coded.written(key.hex()) is not None
        await coded.drop_from_memory(key.hex())
        assert (await coded.get(key.hex())).body == data


async def test_a_batch_of_class_local_lies_coded_at_home(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = coded.key(3)
        item: dict[str, object] = {"id": bytes.fromhex(key), "parent": "root", "namespace": "n"}
        answer = await coded.kv.mput(stream([(item, tensor(3))]), x_kvobj_durability="local")
        assert answer.status == 200, answer.value
        assert coded.at_home(await coded.blob_id(key)) is not None


async def test_readers_get_frames_as_they_lie_where_they_take_them(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}) as coded:
        key = await coded.put(1)
        found = await coded.written(key)
        assert found is not None
        plain = await coded.get(key, accept=f"{codec}, raw")
        assert (plain.headers["x-kvobj-codec"], plain.body) == ("raw", tensor(1))  # memory has it plain, and is faster
        await coded.drop_from_memory(key)
        frame = await coded.get(key, accept=f"{codec}, raw")
        assert (frame.status, frame.headers["x-kvobj-codec"], len(frame.body)) == (200, codec, found.stored_bytes)
        assert frame.headers["x-kvobj-digest"] == plain.headers["x-kvobj-digest"]
        assert frame.headers["etag"] != plain.headers["etag"]
        assert "x-kvobj-lossy" not in frame.headers
        raw = memoryview(bytearray(CHUNK_BYTES * 2))
        decode_coded(memoryview(frame.body), raw)
        assert bytes(raw[raw_payload_offset(CHUNK_BYTES) :][:CHUNK_BYTES]) == tensor(1)
        part = await coded.kv.driver.request(
            "GET", f"/cache/{key}", headers={"x-kvobj-accept": codec, "range": "bytes=0-127"}
        )
        assert (part.status, part.body) == (206, frame.body[:128])
        head = await coded.kv.driver.request("HEAD", f"/cache/{key}", headers={"x-kvobj-accept": codec})
        assert (head.headers["x-kvobj-codec"], head.headers["etag"]) == (codec, frame.headers["etag"])
        assert (await coded.get(key, accept="eq4, f8")).status == 404
        assert (await coded.get(key)).body == tensor(1)


async def test_a_frame_that_lies_in_memory_is_sent_as_long_as_it_is(tmp_path: Path, shm_path: Path) -> None:
    """Its extent is longer: extents are whole pages."""
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"dram": codec}) as coded:
        key = await coded.put(1)
        await flush(coded.node, timeout_seconds=20.0)
        await coded.code_in_memory(key)
        answer = await coded.get(key, accept=codec)
        assert (answer.status, answer.headers["x-kvobj-tier"]) == (200, "dram")
        found = coded.node.dram.find(await coded.blob_id(key))
        assert found is not None
        assert found.frame_bytes == len(answer.body) < found.stored_bytes
        raw = memoryview(bytearray(CHUNK_BYTES * 2))
        decode_coded(memoryview(answer.body), raw)
        assert bytes(raw[raw_payload_offset(CHUNK_BYTES) :][:CHUNK_BYTES]) == tensor(1)


async def test_a_batch_of_reads_gets_frames_as_they_lie_where_it_takes_them(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}) as coded:
        coded_key, plain_key = await coded.put(1), await coded.put(2)
        await coded.written(coded_key)
        await coded.drop_from_memory(coded_key)
        _, items = await coded.kv.mget({"ids": [coded_key, plain_key], "accept": [codec, "raw"]})
        assert [item.header["codec"] for item in items] == [codec, "raw"]
        digests = [item.header["digest"] for item in items]
        assert digests == [blake3(tensor(1)).digest(), blake3(tensor(2)).digest()]
        assert items[1].payload == tensor(2)
        assert (await coded.get(coded_key, accept=codec)).body == items[0].payload
        _, only_coded = await coded.kv.mget({"ids": [coded_key, plain_key], "accept": [codec]})
        assert only_coded[0].payload == items[0].payload
        assert not len(coded.node.in_use)
