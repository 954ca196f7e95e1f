"""Lossy copies further down their ladder: made for a reader that asks, and at home where settings have come to say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from tier_codecs import CHUNK_BYTES, TOKENS, Coded, coded_node, furthest, tensor, usable, wait_for

from kvobj.app.node import flush
from kvobj.catalog.rows import LossyCopy
from kvobj.ids import BlobId
from kvobj.tensors.codecs import TensorForm, decode_frame, encode_bound, encode_frame, parse_tensor_frame

pytestmark = pytest.mark.skipif(not usable("eq4"), reason="the kernels are not built")

FORM = TensorForm("kv", "bf16", 8, 4, 64, TOKENS, ("layer", "kv", "head", "token", "dim"))


def directly(coded: Coded, plain: bytes, codec: str, fingerprint: bytes) -> bytes:
    del coded
    into = memoryview(bytearray(encode_bound(codec, FORM)))
    return bytes(into[: encode_frame(memoryview(plain), into, codec=codec, form=FORM, fingerprint=fingerprint)])


async def copy_of(coded: Coded, key: str) -> LossyCopy:
    copy = (await coded.row(key)).lossy
    assert copy is not None
    return copy


async def written_lossy(coded: Coded, key: str) -> LossyCopy:
    assert await flush(coded.node, timeout_seconds=20.0)
    await coded.drop_from_memory(key)
    return await copy_of(coded, key)


async def set_codec(coded: Coded, codec: str) -> None:
    await coded.kv.declare("n", layout=_layout(), chunk_tokens=TOKENS, codecs={"nvme": codec}, lossy=True)


def _layout() -> dict[str, object]:
    return {"kind": "kv", "dtype": "bf16", "layers": 8, "kv_heads": 4, "head_dim": 64}


async def test_a_reader_of_a_coarser_codec_gets_the_frame_that_direct_coding_gives(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(1)
        copy = await written_lossy(coded, key)
        stored = await coded.get(key, accept="eq57, eq4")
        assert stored.headers["x-kvobj-codec"] == "eq57"  # what lies there goes before what can be made of it
        head = await coded.kv.driver.request("HEAD", f"/cache/{key}", headers={"x-kvobj-accept": "eq4"})
        answer = await coded.get(key, accept="eq4, raw;max-error=1")
        fingerprint = parse_tensor_frame(memoryview(stored.body), len(stored.body)).fingerprint
        assert answer.body == directly(coded, tensor(1), "eq4", fingerprint)
        assert len(answer.body) < 0.8 * copy.frame_bytes
        assert head.headers["x-kvobj-lossy"] == answer.headers["x-kvobj-lossy"]
        assert answer.headers["x-kvobj-codec"] == "eq4"
        assert answer.headers["etag"] == head.headers["etag"] != stored.headers["etag"]
        frame = memoryview(answer.body)
        parsed, decoded = parse_tensor_frame(frame, len(frame)), bytearray(CHUNK_BYTES)
        decode_frame(frame, parsed, memoryview(decoded))
        assert blake3(decoded).hexdigest() == answer.headers["x-kvobj-lossy-digest"]
        bound = float(answer.headers["x-kvobj-lossy"].removeprefix("eq4;max-error="))
        assert copy.max_error < furthest(bytes(decoded), tensor(1)) <= bound
        assert (await coded.get(key, accept="eq4")).body == answer.body  # made again: the first was sent
        assert (await coded.get(key, accept=f"eq4;max-error={bound / 2}")).status == 404
        assert (await coded.get(key, accept="eq3")).status == 404  # another ladder
        assert await copy_of(coded, key) == copy


async def test_a_bound_alone_is_met_by_the_copy_as_it_is(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(2)
        copy = await written_lossy(coded, key)
        answer = await coded.get(key, accept=f"raw;max-error={copy.max_error}")
        assert (answer.headers["x-kvobj-codec"], blake3(answer.body).digest()) == ("raw", copy.digest)
        frame = await coded.get(key, accept=f"eq4;max-error={copy.max_error}, raw;max-error=1")
        assert blake3(frame.body).digest() == copy.digest  # the coarser frame is further off than it may be


async def test_the_finer_copy_that_is_gone_is_a_lost_chunk_to_who_asks_for_the_coarser(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(3)
        copy = await written_lossy(coded, key)
        assert (await coded.get(key, accept="eq4")).status == 200
        await coded.node.nvme.delete([BlobId(copy.blob_id)])
        assert (await coded.get(key, accept="eq4")).status == 404
        assert await coded.node.catalog.lookup("cache", [key]) == [None]


async def test_settings_further_down_the_ladder_make_the_copies_at_home_coarser(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        keys = [await coded.put(number) for number in range(4)]
        finer = [await written_lossy(coded, key) for key in keys]
        etag = (await coded.get(keys[0], accept="raw;max-error=1")).headers["etag"]
        await set_codec(coded, "eq4")
        await wait_for(lambda: coded.node.home_demotion.counts.done == len(keys))
        assert coded.node.home_demotion.counts.waiting == 0
        for number, (key, before) in enumerate(zip(keys, finer, strict=True)):
            copy = await copy_of(coded, key)
            assert (copy.codec, copy.blob_id != before.blob_id) == ("eq:83/1", True)
            answer = await coded.get(key, accept="eq4")
            fingerprint = parse_tensor_frame(memoryview(answer.body), len(answer.body)).fingerprint
            assert answer.body == directly(coded, tensor(number), "eq4", fingerprint)
            assert len(answer.body) == copy.frame_bytes < before.frame_bytes
        assert (await coded.get(keys[0], accept="raw;max-error=1")).headers["etag"] != etag
        while await coded.node.reaper.reap_batch():
            pass
        assert (await coded.node.nvme.usage()).blobs == len(keys)  # the finer ones are gone
        (usage,) = coded.node.coded_blobs.totals.usage()
        assert (usage.codec, usage.blobs) == ("eq:83/1", len(keys))
        sweep = await coded.node.upkeep.sweep.sweep()
        assert (sweep.leftover_blobs, sweep.lost_rows) == (0, 0)


async def test_who_has_read_the_row_before_its_copy_was_made_coarser_does_not_take_the_chunk_for_lost(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(8)
        await written_lossy(coded, key)
        before = await coded.row(key)
        await set_codec(coded, "eq4")
        await wait_for(lambda: coded.node.home_demotion.counts.done == 1)
        while await coded.node.reaper.reap_batch():
            pass
        assert not await coded.node.upkeep.scrub._lost.note(before, "no tier holds it")
        await coded.node.store.forget_if_lost(before)
        assert (await coded.get(key, accept="eq4")).status == 200


async def test_a_finer_setting_leaves_coarser_copies_as_they_are(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq4"}, lossy=True) as coded:
        key = await coded.put(5)
        copy = await written_lossy(coded, key)
        await set_codec(coded, "eq57")
        await coded.node.home_demotion.step()
        assert coded.node.home_demotion.counts.waiting == 0
        assert await copy_of(coded, key) == copy


async def test_a_chunk_that_is_deleted_while_its_copy_is_made_coarser_leaves_nothing(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(6)
        await written_lossy(coded, key)
        raise_durability = coded.node.catalog.raise_durability
        raised: list[list[bool]] = []

        async def raise_later(rows: object) -> list[bool]:
            assert (await coded.kv.driver.request("DELETE", f"/cache/{key}")).status == 204
            raised.append(await raise_durability(rows))  # type: ignore[arg-type]
            return raised[-1]

        monkeypatch.setattr(coded.node.catalog, "raise_durability", raise_later)
        await set_codec(coded, "eq4")
        await wait_for(lambda: bool(raised) and not coded.node.home_demotion.counts.waiting)
        assert (raised, coded.node.home_demotion.counts.done) == ([[False]], 0)
        while await coded.node.reaper.reap_batch():
            pass
        assert (await coded.node.nvme.usage()).blobs == 0
        assert coded.node.arena.usage().pinned == 0


async def test_a_start_takes_up_what_an_earlier_process_left_finer(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq57"}, lossy=True) as coded:
        key = await coded.put(7)
        await written_lossy(coded, key)
        await coded.node.home_demotion.aclose()
        await set_codec(coded, "eq4")
        assert (await copy_of(coded, key)).codec == "eq:83/0"
    async with coded_node(tmp_path, shm_path, codecs={"nvme": "eq4"}, lossy=True) as coded:
        coded.node.home_demotion.look()  # as `housekeeping` does
        await wait_for(lambda: coded.node.home_demotion.counts.done == 1)
        assert (await copy_of(coded, key)).codec == "eq:83/1"
