"""A node with an hbm tier, over host memory in a GPU's place; and one that is asked for a GPU that is not there."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hbm_world import hbm_holds, put_at_home
from real_store import MIB, node_settings, running_node

from kvobj.app.admin_state import NodeView
from kvobj.clock import SystemClock
from kvobj.config.settings import HbmSettings, Settings
from kvobj.metrics import Metrics


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    plain = node_settings(tmp_path / "data", shm_path)
    return replace(plain, hbm=HbmSettings(16 * MIB, memory="host"))


async def test_what_is_read_from_home_goes_up_and_is_read_there(settings: Settings) -> None:
    data = random.Random(1).randbytes(3 * MIB + 5)
    async with running_node(settings) as node:
        driver, blob_id = await put_at_home(node, data)
        got = await driver.get("/objects/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (data, "nvme")
        await hbm_holds(node, blob_id)
        await node.read_tier.promotions_done()
        await node.dram.delete([blob_id])
        got = await driver.get("/objects/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (data, "hbm")
        assert node.hbm is not None
        chunk = await node.hbm.get_tensor(blob_id)
        assert chunk is not None
        with chunk:
            assert np.from_dlpack(chunk.view((len(data),), "uint8")).tobytes() == data


async def test_what_is_deleted_leaves_the_tier(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver, blob_id = await put_at_home(node, b"x" * MIB)
        await driver.get("/objects/a")
        await hbm_holds(node, blob_id)
        await driver.request("DELETE", "/objects/a")
        while await node.reaper.reap_batch():
            pass
        assert node.hbm is not None
        assert await node.hbm.missing([blob_id]) == [blob_id]
        assert (await node.hbm.usage()).used_bytes == 0


async def test_status_shows_the_tier_and_what_of_a_gpu_is_here(settings: Settings) -> None:
    async with running_node(settings) as node:
        view = NodeView(node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "")
        status = await view.status()
    assert [tier.name for tier in status.tiers] == ["hbm", "dram", "nvme"]
    assert status.tiers[0].capacity_bytes == 16 * MIB
    assert status.tiers[0].mode == "host"
    assert set(status.gpu) == {"gpu", "compiler", "torch", "CPU kernels"}
    assert all(status.gpu.values())


def test_a_node_that_is_asked_for_a_missing_gpu_does_not_start(tmp_path: Path) -> None:
    configuration = tmp_path / "kvobj.toml"
    tiers = (
        '[[tiers]]\nkind = "hbm"\ncapacity = "1 GiB"\ndevice = 1023\n[[tiers]]\nkind = "dram"\ncapacity = "16 MiB"\n'
    )
    tiers += f'path = "{tmp_path / "dram"}"\n[[tiers]]\nkind = "nvme"\ncapacity = "64 MiB"\n'
    configuration.write_text(f'[server]\nlisten = "127.0.0.1:0"\ndata = "{tmp_path / "data"}"\n{tiers}')
    done = subprocess.run(
        [sys.executable, "-m", "kvobj", "serve", "--config", str(configuration)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "this configuration cannot be used" in done.stderr
    assert "tiers: hbm: " in done.stderr
    assert not (tmp_path / "dram").exists()
