"""The hbm tier in the memory of a GPU: a whole node, and a server as a process of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import real_store
from hbm_world import hbm_holds, promoted, put_at_home
from raw_http import RawS3
from server_process import ServerProcess, ServerSettings, wait_until
from tier_codecs import CHUNK_BYTES, tensor, usable

from kvobj.config.settings import HbmSettings
from kvobj.gpu import status
from kvobj.gpu.ipc import Exports, Imports
from kvobj.ids import BlobId
from kvobj.tiers.hbm import HbmTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not status().is_usable, reason=f"needs an NVIDIA GPU with CuPy: {status().detail}"),
]
MIB: Final = 1 << 20
OBJECTS: Final = 16
OBJECT_BYTES: Final = 4 * MIB
HBM_MIB: Final = 40


@asynccontextmanager
async def on_the_gpu(tmp_path: Path, shm_path: Path, data: bytes) -> AsyncIterator[tuple[object, HbmTier, BlobId]]:
    """A node of which an object is in device memory and at home."""
    settings = replace(real_store.node_settings(tmp_path / "data", shm_path), hbm=HbmSettings(64 * MIB))
    async with real_store.running_node(settings) as node:
        driver, blob_id = await put_at_home(node, data)
        got = await driver.get("/objects/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (data, "nvme")
        await hbm_holds(node, blob_id)
        await node.read_tier.promotions_done()
        await node.dram.delete([blob_id])
        got = await driver.get("/objects/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (data, "hbm")
        assert node.hbm is not None
        yield node, node.hbm, blob_id


async def test_an_object_is_read_from_the_gpu_and_handed_to_torch_where_it_lies(tmp_path: Path, shm_path: Path) -> None:
    torch = pytest.importorskip("torch")
    data = random.Random(1).randbytes(3 * MIB + 5)
    async with on_the_gpu(tmp_path, shm_path, data) as (_, hbm, blob_id):
        chunk = await hbm.get_tensor(blob_id)
        assert chunk is not None
        with chunk:
            seen = chunk.tensor((len(data),), "uint8")
            assert seen.is_cuda
            assert seen.data_ptr() == chunk.address
            assert seen.cpu().numpy().tobytes() == data
        del seen
        torch.cuda.synchronize()
        assert await hbm.missing([blob_id]) == []


async def test_a_tensor_outlives_the_blobs_place_on_the_gpu(tmp_path: Path, shm_path: Path) -> None:
    pytest.importorskip("torch")
    data = random.Random(2).randbytes(2 * MIB)
    async with on_the_gpu(tmp_path, shm_path, data) as (_, hbm, blob_id):
        chunk = await hbm.get_tensor(blob_id)
        assert chunk is not None
        with chunk:
            seen = chunk.tensor((len(data),), "uint8")
        await hbm.delete([blob_id])
        assert (await hbm.usage()).used_bytes > 0
        assert seen.cpu().numpy().tobytes() == data
        del seen


@pytest.mark.parametrize("codec", ["x3", "xa"])
async def test_a_chunk_lies_coded_on_the_gpu_and_is_read_as_it_was_put(
    tmp_path: Path, shm_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not usable(codec):
        pytest.skip("the kernels are not built")
    plain = real_store.node_settings

    def settings(*arguments: object, **named: object) -> object:
        return replace(plain(*arguments, **named), hbm=HbmSettings(16 * MIB))  # type: ignore[arg-type]

    monkeypatch.setattr("kv_driver.node_settings", settings)
    async with promoted(tmp_path, shm_path, codec) as (coded, hbm, key):
        (usage,) = hbm.coded_totals.usage()
        assert (usage.codec, usage.blobs, usage.plain_bytes) == (codec, 1, CHUNK_BYTES)
        assert (await hbm.usage()).used_bytes < 0.75 * CHUNK_BYTES
        answer = await coded.get(key)
        assert (answer.body, answer.headers["x-kvobj-tier"]) == (tensor(1), "hbm")
        chunk = await hbm.get_tensor(await coded.blob_id(key))
        assert chunk is not None
        with chunk:
            assert chunk.tensor((CHUNK_BYTES,), "uint8").cpu().numpy().tobytes() == tensor(1)


async def test_a_chunk_of_the_tier_is_shown_to_who_opens_its_ticket_only_elsewhere(
    tmp_path: Path, shm_path: Path
) -> None:
    """CUDA opens no handle in the process that made it: what must come out is an error of ours, and nothing held."""
    from kvobj.errors import DeviceError  # noqa: PLC0415 - only here

    data = random.Random(3).randbytes(MIB)
    async with on_the_gpu(tmp_path, shm_path, data) as (_, hbm, blob_id):
        chunk = await hbm.get_tensor(blob_id)
        assert chunk is not None
        exports = Exports(chunk.device)
        ticket = exports.export(chunk, peer="self")
        with pytest.raises(DeviceError):
            Imports(chunk.device, on_closed=lambda _: None).open(ticket)
        assert exports.peer_gone("self") == 1
        chunk.release()


def read_all(raw: RawS3, bodies: list[bytes]) -> list[str]:
    """Every object once, from the last to the first: which tier each came from."""
    tiers = []
    for number in reversed(range(len(bodies))):
        reply = raw.request("GET", f"/objects/{number}")
        assert reply.status == 200
        assert reply.body == bodies[number]
        tiers.append(reply.headers["x-kvobj-tier"])
    return tiers


def test_a_server_serves_from_the_gpu_makes_room_there_and_starts_again(tmp_path: Path) -> None:
    chance = random.Random(4)
    bodies = [chance.randbytes(OBJECT_BYTES) for _ in range(OBJECTS)]
    settings = ServerSettings(
        dram_bytes=32 * MIB, nvme_bytes=512 * MIB, hbm={"capacity": f'"{HBM_MIB} MiB"', "device": "0"}
    )
    with ServerProcess(tmp_path, settings) as server:
        with server.raw(timeout_seconds=120.0) as raw:
            assert raw.request("PUT", "/objects").status == 200
            for number, body in enumerate(bodies):
                assert raw.request("PUT", f"/objects/{number}", body).status == 200
            assert "nvme" in read_all(raw, bodies)
            wait_until(
                lambda: server.tier("hbm")["used_bytes"] >= (HBM_MIB - 8) * MIB,
                timeout_seconds=30.0,
                what="the hbm tier to fill",
            )
            assert "hbm" in [raw.request("GET", f"/objects/{number}").headers["x-kvobj-tier"] for number in range(10)]
            held = server.tier("hbm")
            assert held["mode"] == "cuda"
            assert held["used_bytes"] <= HBM_MIB * MIB
        assert server.terminate() == 0
        server.start()
        assert server.tier("hbm")["blobs"] == 0
        with server.raw(timeout_seconds=120.0) as raw:
            some = range(9)  # what both hold together; the first of them leave memory again
            assert [raw.request("GET", f"/objects/{number}").body for number in some] == bodies[:9]
            wait_until(lambda: server.tier("hbm")["blobs"] > 0, timeout_seconds=30.0, what="promotions")
            found = [raw.request("GET", f"/objects/{number}") for number in reversed(some)]
            assert [reply.body for reply in found] == bodies[8::-1]
            tiers = {reply.headers["x-kvobj-tier"] for reply in found}
        assert "hbm" in tiers
