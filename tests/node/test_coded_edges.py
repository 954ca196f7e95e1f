"""Chunks that lie coded, at the edges: readers that leave, bytes that are put again, damage before encoding, short memory."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from kv_driver import kv_node, stream
from s3_driver import Answer
from tier_codecs import CHUNK_BYTES, LAYOUT, TOKENS, Coded, coded_node, lossless, lossy, tensor

from kvobj.app.node import flush
from kvobj.app.offline import fsck
from kvobj.catalog.rows import Durability
from kvobj.ids import BlobId
from kvobj.tiers import coded as coded_tier
from kvobj.tiers.coded_frames import decode_coded


async def test_a_reader_that_leaves_while_its_chunk_is_decoded_frees_no_memory_that_is_written_to(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}) as coded:
        key = await coded.put(1)
        await coded.written(key)
        await coded.drop_from_memory(key)
        begun, may_end = threading.Event(), threading.Event()

        def decode_when_told(*arguments: Any) -> None:  # noqa: ANN401 - as they come
            begun.set()
            assert may_end.wait(10)
            decode_coded(*arguments)

        monkeypatch.setattr(coded_tier, "decode_coded", decode_when_told)
        reading = asyncio.ensure_future(coded.get(key))
        assert await asyncio.to_thread(begun.wait, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert coded.node.arena.usage().pinned > 0  # the thread writes there still
        may_end.set()
        async with asyncio.timeout(10):
            while coded.node.arena.usage().pinned:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        monkeypatch.undo()
        assert (await coded.get(key)).body == tensor(1)


async def only_a_lossy_copy(coded: Coded, key: str) -> None:
    """Written down and evicted."""
    assert await flush(coded.node, timeout_seconds=20.0)
    assert (await coded.row(key)).lossy is not None
    await coded.drop_from_memory(key)


async def nothing_else_is_held(coded: Coded, blobs: int) -> None:
    while await coded.node.reaper.reap_batch():
        pass
    assert (await coded.node.nvme.usage()).blobs == blobs
    report = await coded.node.upkeep.sweep.sweep()
    assert (report.leftover_blobs, report.lost_rows) == (0, 0)


async def test_a_chunk_whose_bytes_are_gone_but_for_a_lossy_copy_is_stored_when_it_is_put_again(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(2)
        first = await coded.row(key)
        await only_a_lossy_copy(coded, key)
        assert (await coded.get(key)).status == 404
        answer = await coded.kv.put(key, tensor(2), namespace="n", parent="root", durability="memory")
        assert (answer.status, answer.headers["x-kvobj-existed"]) == (200, "false")
        assert (await coded.get(key)).body == tensor(2)
        answer = await coded.kv.put(key, tensor(2), namespace="n", parent="root", durability="memory")
        assert answer.headers["x-kvobj-existed"] == "true"  # it is there now
        row = await coded.row(key)
        assert (row.lossy, row.sequence > first.sequence) == (None, True)
        await only_a_lossy_copy(coded, key)
        assert (await coded.get(key, accept="raw;max-error=1")).status == 200
        await nothing_else_is_held(coded, 1)


async def test_a_chunk_in_a_chain_that_is_put_again_keeps_what_follows_on_it(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        names = [name.hex() for name in coded.namespace.ids([5] * (3 * TOKENS), TOKENS)]
        for number, (name, parent) in enumerate(zip(names, ["root", *names], strict=False)):
            answer = await coded.kv.put(name, tensor(number), namespace="n", parent=parent, durability="memory")
            assert answer.status == 200
        assert await flush(coded.node, timeout_seconds=20.0)
        for name in names:
            await coded.drop_from_memory(name)
        answer = await coded.kv.put(names[1], tensor(1), namespace="n", parent=names[0], durability="memory")
        assert answer.headers["x-kvobj-existed"] == "false"
        found = await coded.kv.match("n", ids=names, accept=[lossy(), "raw"])
        assert found.value["matched"] == 3
        assert (await coded.get(names[1])).body == tensor(1)
        assert (await coded.get(names[2])).status == 404
        assert await flush(coded.node, timeout_seconds=20.0)
        assert (await coded.kv.driver.request("DELETE", f"/cache/{names[0]}")).status == 204
        await nothing_else_is_held(coded, 0)


async def test_class_local_is_not_answered_for_by_a_lossy_copy(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(3)
        assert await flush(coded.node, timeout_seconds=20.0)
        assert (await coded.row(key)).lossy is not None
        assert await coded.put(3, durability="local") == key
        assert (await coded.row(key)).lossy is None
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(3)
        await nothing_else_is_held(coded, 1)


async def test_many_chunks_put_at_once_bring_back_those_whose_bytes_are_gone(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        names = coded.namespace.ids([6] * (2 * TOKENS), TOKENS)
        items: list[tuple[dict[str, object], bytes]] = [
            ({"id": name, "parent": parent, "namespace": "n", "size_bytes": CHUNK_BYTES}, tensor(number))
            for number, (name, parent) in enumerate(zip(names, ["root", *names], strict=False))
        ]
        existed = []
        for _ in range(3):
            answer = await coded.kv.mput(stream(items), x_kvobj_durability="memory")
            assert answer.status == 200, answer.value
            existed.append([each["existed"] for each in answer.value["items"]])
            if len(existed) == 1:
                for name in names:
                    await only_a_lossy_copy(coded, name.hex())
        assert existed == [[False, False], [False, False], [True, True]]
        assert (await coded.get(names[1].hex())).body == tensor(1)


async def test_no_lossy_copy_is_made_of_bytes_that_were_damaged_in_memory(tmp_path: Path, shm_path: Path) -> None:
    settings = {"nvme": lossy()}
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:
        damaged, sound = await coded.put(4), await coded.put(5)
        await coded.node.sealing.drain()
        frame = await coded.node.dram.get(await coded.blob_id(damaged))
        assert frame is not None
        frame.writable[frame.frame_bytes // 2] ^= 1
        frame.release()
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:  # adopts both
        assert coded.node.recovery.rows == 2
        assert await flush(coded.node, timeout_seconds=20.0)
        assert (await coded.get(damaged, accept="raw;max-error=1")).status == 404
        assert (await coded.row(sound)).lossy is not None
        assert await coded.put(4) == damaged
        assert (await coded.get(damaged)).body == tensor(4)


@pytest.mark.parametrize("tier", ["nvme", "dram"])
async def test_more_readers_of_coded_chunks_than_memory_has_room_for_take_turns(
    tmp_path: Path, shm_path: Path, tier: str
) -> None:
    layout = {"kind": "kv", "dtype": "bf16", "layers": 32, "kv_heads": 2, "head_dim": 128}
    tokens = 56
    size_bytes = 2 * 32 * 2 * 128 * tokens * 2  # all but an eighth of the arena, which is the most that a blob may be
    async with kv_node(tmp_path, shm_path, dram_mib=16) as kv:
        namespace = await kv.declare("n", layout=layout, chunk_tokens=tokens, codecs={tier: lossless()})
        coded = Coded(kv, namespace)
        keys = [namespace.ids([number] * tokens, tokens)[0].hex() for number in range(20 if tier == "nvme" else 5)]
        for number, key in enumerate(keys):
            answer = await kv.put(key, tensor(number % 2, size_bytes), namespace="n", parent="root", durability="local")
            assert answer.status == 200
            if tier == "dram":
                await coded.code_in_memory(key)
            else:
                await coded.drop_from_memory(key)
        answers = await asyncio.gather(*[coded.get(key) for key in keys for _ in range(2)])
        assert [answer.status for answer in answers] == [200] * (2 * len(keys))
        for index, answer in enumerate(answers):
            assert answer.body == tensor(index // 2 % 2, size_bytes)


async def test_each_representation_has_its_own_etag_and_says_what_it_varies_by(tmp_path: Path, shm_path: Path) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}) as coded:
        key = await coded.put(6)
        await coded.written(key)
        plain = (await coded.get(key)).headers
        assert "vary" not in plain

        async def ask(method: str = "GET", **headers: str) -> Answer:
            await coded.node.read_tier.promotions_done()
            await coded.drop_from_memory(key)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await coded.kv.driver.request(method, f"/cache/{key}", headers=named)

        frame = await ask(x_kvobj_accept=f"{codec}, raw")
        own, others = frame.headers["etag"], plain["etag"]
        assert own != others
        assert frame.headers["vary"] == "x-kvobj-accept"
        assert (await ask("HEAD", x_kvobj_accept=codec)).headers["etag"] == own
        for etag, of_plain, of_frame in ((others, 304, 200), (own, 200, 304)):
            assert (await ask(if_none_match=etag)).status == of_plain
            answer = await ask(if_none_match=etag, x_kvobj_accept=codec)
            assert (answer.status, answer.headers["vary"]) == (of_frame, "x-kvobj-accept")
        assert (await ask(if_match=own)).status == 412
        assert (await ask(if_match=others, x_kvobj_accept=codec)).status == 412
        part = await ask(range="bytes=100-199", x_kvobj_accept=codec, if_range=own)
        assert (part.status, part.body) == (206, frame.body[100:200])
        assert part.headers["content-range"] == f"bytes 100-199/{len(frame.body)}"
        whole = await ask(range="bytes=100-199", x_kvobj_accept=codec, if_range=others)
        assert (whole.status, whole.body) == (200, frame.body)


@pytest.mark.parametrize("loses_memory", [False, True])
async def test_a_process_that_ends_after_bytes_were_put_again_has_them_or_the_copy_of_before(
    tmp_path: Path, shm_path: Path, *, loses_memory: bool
) -> None:
    settings = {"nvme": lossy()}
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:
        key = await coded.put(7)
        await only_a_lossy_copy(coded, key)
        copy = (await coded.row(key)).lossy
        assert await coded.put(7) == key
        assert (await coded.row(key)).durability is Durability.MEMORY
        of_node = coded.node.settings
    report = await asyncio.to_thread(fsck, of_node, lambda *_: None)
    assert (report.problems, report.leftover_blobs) == (0, 0)
    if loses_memory:
        shutil.rmtree(shm_path / "arena")
    async with coded_node(tmp_path, shm_path, codecs=settings, lossy=True) as coded:
        row = await coded.row(key)
        if loses_memory:
            assert row.lossy == copy
            assert (await coded.get(key)).status == 404
        else:
            assert (await coded.get(key)).body == tensor(7)
            await only_a_lossy_copy(coded, key)
        assert (await coded.get(key, accept="raw;max-error=1")).status == 200
        await nothing_else_is_held(coded, 1)


async def test_a_chunk_that_came_in_parts_is_put_again_in_parts(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=16) as kv:
        codecs = {"nvme": lossy()}
        namespace = await kv.declare(
            "n", layout=LAYOUT, chunk_tokens=TOKENS, codecs=codecs, lossy=True, part_axis="layer"
        )
        coded = Coded(kv, namespace)
        key, half = coded.key(8), CHUNK_BYTES // 2

        async def put_parts() -> list[tuple[int, str]]:
            answers = []
            for index in range(2):
                data = tensor(8)[index * half : (index + 1) * half]
                answers.append(
                    await kv.put(key, data, namespace="n", parent="root", durability="memory", part=f"{index}/2")
                )
            return [(answer.status, answer.headers["x-kvobj-parts"]) for answer in answers]

        assert await put_parts() == [(200, "1/2"), (200, "2/2")]
        assert (await coded.get(key)).body == tensor(8)
        await only_a_lossy_copy(coded, key)
        assert (await coded.get(key)).status == 404
        assert await put_parts() == [(200, "1/2"), (200, "2/2")]
        assert (await coded.get(key)).body == tensor(8)
        assert await put_parts() == [(200, "2/2"), (200, "2/2")]  # it stands
        await only_a_lossy_copy(coded, key)
        await nothing_else_is_held(coded, 1)


async def test_a_writer_in_parts_who_is_promised_that_bytes_last_is_not_answered_by_a_lossy_copy(
    tmp_path: Path, shm_path: Path
) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=16) as kv:
        codecs = {"nvme": lossy()}
        namespace = await kv.declare(
            "n", layout=LAYOUT, chunk_tokens=TOKENS, codecs=codecs, lossy=True, part_axis="layer"
        )
        coded = Coded(kv, namespace)
        key, half = coded.key(8), CHUNK_BYTES // 2

        async def put_parts(durability: str) -> list[str]:
            told = []
            for index in range(2):
                data = tensor(8)[index * half : (index + 1) * half]
                answer = await kv.put(key, data, namespace="n", parent="root", durability=durability, part=f"{index}/2")
                assert answer.status == 200
                told.append(answer.headers["x-kvobj-parts"])
            return told

        assert await put_parts("memory") == ["1/2", "2/2"]
        assert await flush(coded.node, timeout_seconds=20.0)
        assert (await coded.row(key)).lossy is not None
        assert await put_parts("memory") == ["2/2", "2/2"]  # its bytes are in memory yet
        assert await put_parts("local") == ["1/2", "2/2"]
        row = await coded.row(key)
        assert (row.lossy, row.durability) == (None, Durability.LOCAL)
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(8)


async def test_a_chunk_whose_bytes_are_in_memory_outlives_the_loss_of_its_lossy_copy(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(9)
        assert await flush(coded.node, timeout_seconds=20.0)
        row = await coded.row(key)
        assert row.lossy is not None
        await coded.node.nvme.delete([BlobId(row.lossy.blob_id)])
        await coded.node.upkeep.scrub.run_pass()
        assert (await coded.node.upkeep.sweep.sweep()).lost_rows == 0
        await coded.node.store.forget_if_lost(row)
        assert (await coded.get(key)).body == tensor(9)
        await coded.drop_from_memory(key)
        assert (await coded.node.upkeep.sweep.sweep()).lost_rows == 1


async def test_a_chunk_is_not_taken_for_lost_by_who_read_its_row_before_its_copy_was_made(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        key = await coded.put(9)
        stale = await coded.row(key)
        await only_a_lossy_copy(coded, key)
        await coded.node.store.forget_if_lost(stale)
        assert not await coded.node.upkeep.scrub._lost.note(stale, "no tier holds it")
        assert (await coded.get(key, accept="raw;max-error=1")).status == 200
