"""Chunks whose home copy is lossy: who says that it takes that gets it, everybody else gets what was put or a miss."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from tier_codecs import CHUNK_BYTES, Coded, coded_node, furthest, lossy, tensor

from kvobj.app.node import flush
from kvobj.app.offline import fsck, rebuild
from kvobj.catalog.rows import Durability, LossyCopy
from kvobj.errors import StoreFullError
from kvobj.ids import BlobId
from kvobj.tensors.codecs import decode_frame, parse_tensor_frame
from kvobj.tiers.coded_frames import own_name


async def written_lossy(coded: Coded, key: str) -> LossyCopy:
    """Write down, and forget the bytes that were put."""
    assert await flush(coded.node, timeout_seconds=20.0)
    copy = (await coded.row(key)).lossy
    assert copy is not None
    await coded.drop_from_memory(key)
    return copy


async def nothing_is_left(coded: Coded) -> None:
    while await coded.node.reaper.reap_batch():
        pass
    assert (await coded.node.nvme.usage()).blobs == 0
    assert coded.node.coded_blobs.totals.usage() == []
    assert coded.node.arena.usage().pinned == 0


async def test_a_lossy_home_copy_is_another_blob_and_a_miss_for_who_does_not_take_it(
    tmp_path: Path, shm_path: Path
) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        key = await coded.put(1)
        assert (await coded.get(key)).body == tensor(1)
        copy = await written_lossy(coded, key)
        row = await coded.row(key)
        assert (row.durability, copy.codec, copy.plain_bytes) == (Durability.LOCAL, own_name(codec), CHUNK_BYTES)
        assert copy.blob_id != row.blobs[0].blob_id
        assert 0 < copy.max_error < 1
        assert copy.frame_bytes < 0.6 * CHUNK_BYTES
        for accept in (None, "raw", "x3, raw", f"{codec};max-error=0.0001", "raw;max-error=0.0001"):
            answer = await (coded.get(key) if accept is None else coded.get(key, accept=accept))
            assert answer.status == 404, accept
        assert await coded.row(key) == row  # none of these misses has taken it for lost
        (told,) = (await coded.kv.match("n", ids=[key], detail="chunks", accept=[codec])).value["chunks"]
        assert (told["tier"], told["codec"]) == ("nvme", codec)


async def test_a_reader_that_takes_the_codec_gets_the_frame_and_decodes_it(tmp_path: Path, shm_path: Path) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        key = await coded.put(2)
        plain_etag = (await coded.get(key)).headers["etag"]
        copy = await written_lossy(coded, key)
        answer = await coded.get(key, accept=f"{codec};max-error={copy.max_error}")
        assert (answer.status, len(answer.body)) == (200, copy.frame_bytes)
        assert answer.headers["x-kvobj-codec"] == codec
        told, _, bound = answer.headers["x-kvobj-lossy"].partition(";max-error=")
        assert told == codec
        assert copy.max_error <= float(bound) <= 1.00001 * copy.max_error
        assert (await coded.get(key, accept=answer.headers["x-kvobj-lossy"])).status == 200
        assert answer.headers["x-kvobj-digest"] == blake3(tensor(2)).hexdigest()
        assert answer.headers["etag"] != plain_etag
        assert not any(name.startswith("x-amz-checksum") for name in answer.headers)
        frame = memoryview(answer.body)
        head, decoded = parse_tensor_frame(frame, len(frame)), bytearray(CHUNK_BYTES)
        decode_frame(frame, head, memoryview(decoded))
        assert blake3(decoded).hexdigest() == answer.headers["x-kvobj-lossy-digest"]
        assert furthest(bytes(decoded), tensor(2)) <= copy.max_error


async def test_a_reader_with_a_bound_gets_what_the_copy_decodes_to(tmp_path: Path, shm_path: Path) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        key = await coded.put(3)
        kept = await coded.get(key, accept="raw;max-error=1")
        assert (kept.body, kept.headers["x-kvobj-codec"]) == (tensor(3), "raw")
        assert "x-kvobj-lossy" not in kept.headers  # what was put is there still
        copy = await written_lossy(coded, key)
        for tier in ("nvme", "dram"):
            answer = await coded.get(key, accept="raw;max-error=1")
            assert (answer.status, answer.headers["x-kvobj-tier"]) == (200, tier)
            assert blake3(answer.body).digest() == copy.digest
            assert answer.headers["x-kvobj-lossy"].startswith(f"{codec};max-error=")
            await coded.node.read_tier.promotions_done()
        decoded = (await coded.get(key, accept="raw;max-error=1")).body
        layers = await coded.get(key, "?layers=1-1", accept="raw;max-error=1")
        assert layers.body == decoded[CHUNK_BYTES // 8 : CHUNK_BYTES // 4]
        _, items = await coded.kv.mget({"ids": [key], "accept": ["raw;max-error=1"]})
        assert (items[0].payload, items[0].header["digest"]) == (decoded, None)
        assert items[0].header["lossy"].startswith(codec)


async def test_class_local_promises_bytes_and_so_lies_lossless_at_home(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(4, durability="local")
        assert (await coded.row(key)).lossy is None
        found = coded.at_home(await coded.blob_id(key))
        assert found is not None
        assert found.codec in {"xa", "x3", "zp"}
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(4)


async def test_deleting_a_chunk_deletes_its_lossy_copy(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(5)
        assert await flush(coded.node, timeout_seconds=20.0)
        assert (await coded.kv.driver.request("DELETE", f"/cache/{key}")).status == 204
        await nothing_is_left(coded)


async def test_a_chunk_that_is_deleted_while_its_lossy_copy_is_written_leaves_nothing(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(6)
        raise_durability = coded.node.catalog.raise_durability

        async def raise_later(rows: object) -> list[bool]:
            assert (await coded.kv.driver.request("DELETE", f"/cache/{key}")).status == 204
            return await raise_durability(rows)  # type: ignore[arg-type]

        monkeypatch.setattr(coded.node.catalog, "raise_durability", raise_later)
        assert await flush(coded.node, timeout_seconds=20.0)
        await nothing_is_left(coded)


async def test_a_copy_that_no_row_could_name_yet_is_named_by_the_next_try(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        raise_durability = coded.node.catalog.raise_durability
        failed: list[int] = []

        async def fail_once(rows: object) -> list[bool]:
            if not failed:
                failed.append(1)
                raise StoreFullError("the catalog is full")
            return await raise_durability(rows)  # type: ignore[arg-type]

        monkeypatch.setattr(coded.node.catalog, "raise_durability", fail_once)
        key = await coded.put(7)
        await written_lossy(coded, key)
        assert failed
        assert (await coded.node.nvme.usage()).blobs == 1


async def test_a_restart_knows_that_memory_may_let_go_of_what_has_a_lossy_copy(tmp_path: Path, shm_path: Path) -> None:
    settings = {"nvme": lossy()}
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:
        key, other = await coded.put(8), coded.key(9)
        assert await flush(coded.node, timeout_seconds=20.0)
        await coded.put(9)  # only in memory, so that the stop leaves the arena
        assert (await coded.row(other)).durability is Durability.MEMORY
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:
        blob_id = await coded.blob_id(key)
        assert blob_id not in coded.node.dram.dirty()
        assert (await coded.get(key)).body == tensor(8)
        await coded.node.dram_transcoding.load()
        assert await coded.blob_id(other) in coded.node.dram.dirty()


async def test_a_lost_lossy_copy_is_a_lost_chunk_once_memory_has_let_go(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(10)
        copy = await written_lossy(coded, key)
        await coded.node.nvme.delete([BlobId(copy.blob_id)])
        assert (await coded.get(key, accept="raw;max-error=1")).status == 404
        (row,) = await coded.node.catalog.lookup("cache", [key])
        assert row is None
        assert (await coded.put(10)) == key


async def test_gc_and_checks_hold_a_chunk_to_its_lossy_copy(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(11)
        await written_lossy(coded, key)
        report = await coded.node.upkeep.sweep.sweep()
        assert (report.leftover_blobs, report.lost_rows) == (0, 0)
        checked = await coded.node.upkeep.copies.check(await coded.row(key))
        assert (checked.problem, checked.hashed_bytes) == (None, CHUNK_BYTES)
        assert (await coded.get(key, accept="raw;max-error=1")).status == 200


async def test_a_lossy_copy_survives_a_rebuild_and_a_check_of_the_stopped_store(tmp_path: Path, shm_path: Path) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        settings = coded.node.settings
        key = await coded.put(12)
        local = await coded.put(13, durability="local")
        copy = await written_lossy(coded, key)
    found: list[object] = []
    checked = await asyncio.to_thread(fsck, settings, lambda kind, finding: found.append((kind, finding)))
    assert checked.problems == 0, found
    assert (await asyncio.to_thread(rebuild, settings, lambda *_: None)).problems == 0
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        row = await coded.row(key)
        assert msgspec.structs.asdict(copy) == msgspec.structs.asdict(row.lossy or copy)
        assert row.lossy is not None
        answer = await coded.get(key, accept="raw;max-error=1")
        assert blake3(answer.body).digest() == copy.digest
        assert (await coded.get(local)).body == tensor(13)
