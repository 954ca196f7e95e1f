"""What goes wrong around coded chunks costs a hit and never a byte, and leaves no extent behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tier_codecs import CHUNK_BYTES, Coded, coded_node, lossless, tensor

from kvobj.app.node import flush
from kvobj.errors import BusyError, FrameCorruptError
from kvobj.ids import BlobId
from kvobj.store import transcoding
from kvobj.tiers import coded as coded_tier
from kvobj.tiers.coded_frames import decode_coded


async def no_extent_is_left(coded: Coded) -> None:
    """What is pinned is what the dram tier holds."""
    while await coded.node.reaper.reap_batch():
        pass
    assert coded.node.arena.usage().pinned == (await coded.node.dram.usage()).blobs
    assert not len(coded.node.in_use)


def corrupt_count(coded: Coded, tier: str) -> float:
    return float(coded.node.instruments.corrupt_frames.labels(tier)._value.get())


async def damage_at_home(coded: Coded, blob_id: BlobId) -> None:
    """Flip a bit in the middle of the blob's frame, where it lies on disk."""
    found = coded.at_home(blob_id)
    assert found is not None
    frame = await coded.node.nvme.get(blob_id)
    assert frame is not None
    await frame.complete()
    stored = bytes(frame.view)
    frame.release()
    middle = stored[len(stored) // 2 : len(stored) // 2 + 64]
    for path in coded.node.nvme_directory.iterdir():
        content = path.read_bytes()
        at = content.find(middle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([middle[0] ^ 1]))
            return
    raise AssertionError("the frame is in no segment file")


async def test_a_damaged_coded_frame_at_home_is_a_miss_and_counted(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(1)
        await coded.written(key)
        await damage_at_home(coded, await coded.blob_id(key))
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).status == 404
        assert corrupt_count(coded, "nvme") >= 1
        await no_extent_is_left(coded)
        assert await coded.put(1) == key  # the row went with its bytes, so the chunk can be stored again
        assert (await coded.get(key)).body == tensor(1)


async def test_a_damaged_home_copy_is_repaired_from_memory(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(2)
        await coded.written(key)
        await damage_at_home(coded, await coded.blob_id(key))
        checked = await coded.node.upkeep.copies.check(await coded.row(key))
        assert (checked.problem, checked.mismatches, checked.repaired) == (None, 1, 1)
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(2)


async def test_a_damaged_coded_frame_in_memory_is_read_from_home(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(3)
        await flush(coded.node, timeout_seconds=20.0)
        await coded.code_in_memory(key)
        frame = await coded.node.dram.get(await coded.blob_id(key))
        assert frame is not None
        middle = frame.frame_bytes // 2
        frame.writable[middle] ^= 1
        frame.release()
        answer = await coded.get(key)
        assert (answer.body, answer.headers["x-kvobj-tier"]) == (tensor(3), "nvme")
        assert corrupt_count(coded, "dram") == 1
        await coded.node.read_tier.promotions_done()
        assert coded.node.dram.find(await coded.blob_id(key)) is None
        await no_extent_is_left(coded)


async def test_a_reader_keeps_its_plain_extent_while_the_chunk_comes_to_lie_coded(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(4)
        await flush(coded.node, timeout_seconds=20.0)
        reader = await coded.node.store.open(await coded.row(key), 0, CHUNK_BYTES)
        assert reader is not None
        await coded.code_in_memory(key)
        assert b"".join([bytes(view) async for view in reader.views()]) == tensor(4)
        await reader.aclose()
        await no_extent_is_left(coded)


async def test_a_chunk_that_is_deleted_while_it_is_encoded_stays_deleted(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(5)
        await flush(coded.node, timeout_seconds=20.0)
        loop, encode = asyncio.get_running_loop(), transcoding._encode

        def encode_after_delete(*arguments: object) -> int:
            deleting = coded.kv.driver.request("DELETE", f"/cache/{key}")
            asyncio.run_coroutine_threadsafe(deleting, loop).result(10)
            reaping = coded.node.reaper.reap_batch()
            asyncio.run_coroutine_threadsafe(reaping, loop).result(10)
            return encode(*arguments)  # type: ignore[arg-type]

        blob_id = await coded.blob_id(key)
        monkeypatch.setattr(transcoding, "_encode", encode_after_delete)
        await coded.code_in_memory(key)
        assert coded.node.dram.find(blob_id) is None
        assert (await coded.get(key)).status == 404
        await no_extent_is_left(coded)
        assert coded.node.arena.usage().pinned == 0


async def test_an_arena_without_room_leaves_chunks_plain(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless(), "nvme": lossless()}) as coded:
        key = await coded.put(6)
        row = await coded.row(key)
        coding = await coded.node.coding_rules.of_row(row, "dram")
        assert coding is not None

        async def full(*_: object, **__: object) -> object:
            raise BusyError("no room")

        monkeypatch.setattr(coded.node.transcoder, "_reserve", full)
        assert not await coded.node.dram_transcoding.code(await coded.blob_id(key), coding)
        assert await coded.written(key) is None  # written down as it is, and not kept waiting
        assert (await coded.get(key)).body == tensor(6)
        await no_extent_is_left(coded)


async def test_an_encoder_that_fails_leaves_the_chunk_as_it_was_put(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise FrameCorruptError("a codec that cannot read its own writing")

    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        monkeypatch.setattr(transcoding, "_encode", fail)
        key = await coded.put(7)
        assert await coded.written(key) is None
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(7)


async def test_readers_of_one_coded_chunk_share_its_decoding(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(8)
        await coded.written(key)
        await coded.drop_from_memory(key)
        decodings: list[int] = []

        def count(frame: memoryview, into: memoryview, profile: None) -> None:
            decodings.append(1)
            decode_coded(frame, into, profile)

        monkeypatch.setattr(coded_tier, "decode_coded", count)
        answers = await asyncio.gather(*[coded.get(key) for _ in range(5)])
        assert all(answer.body == tensor(8) for answer in answers)
        assert len(decodings) == 1
        await coded.node.read_tier.promotions_done()
        await no_extent_is_left(coded)


async def test_no_room_to_decode_into_is_no_miss(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"dram": lossless()}) as coded:
        key = await coded.put(9)
        await flush(coded.node, timeout_seconds=20.0)
        await coded.code_in_memory(key)
        reserve = coded.node.arena.reserve

        async def full(*_: object, **__: object) -> object:
            raise BusyError("no room")

        monkeypatch.setattr(coded.node.arena, "reserve", full)
        assert (await coded.get(key)).status == 503
        monkeypatch.setattr(coded.node.arena, "reserve", reserve)
        assert (await coded.get(key)).body == tensor(9)
        await no_extent_is_left(coded)
