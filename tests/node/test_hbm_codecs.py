"""Chunks that lie coded in device memory, where their namespace says so: over host memory in a GPU's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import real_store
from hbm_world import promoted
from tier_codecs import CHUNK_BYTES, LAYOUT, TOKENS, coded_node, tensor, usable

from kvobj.app.admin_state import NodeView
from kvobj.clock import SystemClock
from kvobj.config.settings import HbmSettings
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import ByteRange

MIB = 2**20
pytestmark = pytest.mark.skipif(not usable("x3"), reason="the kernels are not built")


@pytest.fixture
def with_hbm(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = real_store.node_settings

    def settings(*arguments: object, **named: object) -> object:
        return replace(plain(*arguments, **named), hbm=HbmSettings(16 * MIB, memory="host"))  # type: ignore[arg-type]

    monkeypatch.setattr("kv_driver.node_settings", settings)


@pytest.mark.usefixtures("with_hbm")
@pytest.mark.parametrize("codec", ["x3", "xa"])
async def test_a_chunk_lies_coded_on_the_device_and_is_read_as_it_was_put(
    tmp_path: Path, shm_path: Path, codec: str
) -> None:
    async with promoted(tmp_path, shm_path, codec) as (coded, hbm, key):
        (usage,) = hbm.coded_totals.usage()
        assert (usage.codec, usage.blobs, usage.plain_bytes) == (codec, 1, CHUNK_BYTES)
        assert usage.stored_bytes < 0.75 * CHUNK_BYTES
        assert (await hbm.usage()).used_bytes < 0.75 * CHUNK_BYTES
        view = NodeView(coded.node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "")
        status = (await view.status()).tiers[0]
        assert [(each.codec, each.blobs) for each in status.codecs] == [(codec, 1)]
        answer = await coded.get(key)
        assert (answer.body, answer.headers["x-kvobj-tier"]) == (tensor(1), "hbm")
        chunk = await hbm.get_tensor(await coded.blob_id(key))
        assert chunk is not None
        with chunk:
            assert np.from_dlpack(chunk.view((CHUNK_BYTES,), "uint8")).tobytes() == tensor(1)
        await coded.node.read_tier.promotions_done()
        await coded.drop_from_memory(key)
        await hbm.delete([await coded.blob_id(key)])
        assert hbm.coded_totals.usage() == []
        assert (await hbm.usage()).used_bytes == 0
        assert coded.node.arena.usage().pinned == 0


@pytest.mark.usefixtures("with_hbm")
async def test_every_range_of_the_frame_is_that_of_the_frame_that_was_put(tmp_path: Path, shm_path: Path) -> None:
    async with promoted(tmp_path, shm_path, "x3") as (coded, hbm, key):
        blob_id: BlobId = await coded.blob_id(key)
        home = await coded.node.nvme.get(blob_id)
        assert home is not None
        await home.complete()
        frame = bytes(home.view)
        home.release()
        head = len(frame) - CHUNK_BYTES
        ranges = [(0, len(frame)), (0, 10), (head - 7, head + 9), (head, head + 1), (len(frame) - 5, len(frame))]
        for start, stop in ranges:
            got = await hbm.get(blob_id, ByteRange(start, stop))
            assert got is not None
            assert (bytes(got.view), got.frame_bytes, got.start) == (frame[start:stop], len(frame), start)
            got.release()


@pytest.mark.usefixtures("with_hbm")
async def test_a_chunk_of_a_namespace_without_a_codec_lies_raw(tmp_path: Path, shm_path: Path) -> None:
    async with promoted(tmp_path, shm_path, "raw") as (_coded, hbm, _key):
        assert hbm.coded_totals.usage() == []
        assert (await hbm.usage()).used_bytes > CHUNK_BYTES


@pytest.mark.parametrize("codec", ["zp", "eq4", "h4"])
async def test_what_a_device_does_not_encode_or_is_lossy_is_refused_by_name(
    tmp_path: Path, shm_path: Path, codec: str
) -> None:
    from kv_driver import declaration  # noqa: PLC0415 - a test's own

    async with coded_node(tmp_path, shm_path, codecs={}) as coded:
        value = declaration(layout=LAYOUT, chunk_tokens=TOKENS, codecs={"hbm": codec}, lossy=True)
        answer = (await coded.kv.call("PUT", "namespace=n", value)).answer
        assert (answer.status, b"codecs.hbm: device memory holds raw, x3, xa" in answer.body) == (400, True)
