"""Ten thousand operations through each toxic (a tenth by default): what a bad network and a bad server may do to the remote tier.

However often a request is hit: what was acknowledged is there, once, with the right bytes; what was deleted is gone; no operation
takes longer than its deadline; as soon as the toxic is off all is well again, and one sweep leaves nothing on the server that no
row names. `KVOBJ_TOXIC_OPERATIONS` sets how many (1,000; `make toxics`: 10,000), `KVOBJ_TOXIC_RECORD` a folder for the records.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes_arena import small_arena
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan
from toxic_load import RATES, TierLoad, blob_ids_of
from toxics import Toxic

from kvobj.arena import Arena
from kvobj.clock import SystemClock
from kvobj.config import RemoteSettings
from kvobj.database import Database
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.directory import REMOTE_TABLES, RemoteDirectory
from kvobj.tiers.remote.leftovers import Leftovers
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.verified import Verified

OPERATIONS = int(os.environ.get("KVOBJ_TOXIC_OPERATIONS", "1000"))
SEED = int(os.environ.get("KVOBJ_TOXIC_SEED", "20240229"))
RECORD = os.environ.get("KVOBJ_TOXIC_RECORD")
MIB = 2**20
PART_BYTES = 5 * MIB
DEADLINE_SECONDS = 4.0
TOXICS = [toxic for toxic in Toxic if toxic is not Toxic.SKEWED]  # that one is no weather: test_remote_troubles.py
# Around a part's size; a frame is a little longer than what it carries.
LARGE_SIZES = (PART_BYTES - 100_000, PART_BYTES, 2 * PART_BYTES + 1)


def impatient(settings: RemoteSettings) -> RemoteSettings:
    """Settings under which a thousand operations meet hundreds of faults in seconds. A stall is longer than a loaded machine makes
    by itself: behind the toxic, one of those opened the breaker, and 25 operations failed."""
    return replace(
        settings,
        part_bytes=PART_BYTES,
        connect_timeout_seconds=1.0,
        request_timeout_seconds=1.5,
        operation_timeout_seconds=DEADLINE_SECONDS,
        stall_timeout_seconds=0.6,
    )


@dataclass(frozen=True, slots=True)
class World:
    """One node's remote tier behind the proxy, checked as the read cascade checks it."""

    load: TierLoad
    proxy: FaultProxy
    tier: RemoteTier
    leftovers: Leftovers
    corrupt: set[BlobId]


@asynccontextmanager
async def world_of(store: RemoteStore, arena: Arena, directory: Path, seed: int) -> AsyncIterator[World]:
    metrics = Metrics()
    database = Database.open(
        durable=directory / "durable",
        volatile=directory / "volatile",
        tables=REMOTE_TABLES,
        map_bytes=64 * MIB,
        volatile_map_bytes=8 * MIB,
    )
    async with FaultProxy(store.host, store.port) as proxy:
        bucket = await RemoteBucket.open(
            impatient(store.behind(proxy.port).settings()),
            clock=SystemClock(),
            metrics=metrics,
            run=asyncio.to_thread,
            log=logging.getLogger("test"),
        )
        await bucket.probe()
        names = RemoteNames(store.prefix)
        rows = RemoteDirectory(database)
        tier = RemoteTier(bucket, rows, arena=arena, names=names)
        corrupt: set[BlobId] = set()
        checked = Verified(tier, run=asyncio.to_thread, instruments=TierInstruments(metrics), on_corrupt=corrupt.add)
        load = TierLoad(
            checked,
            arena,
            proxy,
            seed=seed,
            large_sizes=LARGE_SIZES,
            deadline_seconds=DEADLINE_SECONDS,
            corrupt=corrupt,
        )
        leftovers = Leftovers(bucket, rows, names, still_ours=always, clock=SystemClock())
        try:
            yield World(load, proxy, tier, leftovers, corrupt)
        finally:
            await checked.aclose()
            await bucket.aclose()
    await database.aclose()


async def always() -> bool:
    return True


@pytest.fixture
async def arena(shm_path: Path) -> AsyncIterator[Arena]:
    async with small_arena(shm_path, capacity_bytes=256 * MIB) as arena:
        yield arena


@pytest.mark.parametrize("toxic", TOXICS, ids=lambda toxic: toxic.name.lower())
async def test_a_remote_that_misbehaves_loses_nothing_tells_no_lie_and_leaves_nothing(
    kvobj_remote: RemoteStore, arena: Arena, tmp_path: Path, toxic: Toxic
) -> None:
    async with world_of(kvobj_remote, arena, tmp_path, SEED) as world:
        load, tally = world.load, world.load.tally
        await load.run(OPERATIONS // 20)  # so that there is something to read
        assert load.violations == []
        world.proxy.plan = plan = plan_of(toxic)
        await load.run(OPERATIONS, is_under_fire=True)
        world.proxy.plan = NOTHING
        await load.recover(timeout_seconds=20)
        check = load.expect_no_failures()
        await load.run(100)
        await load.read_everything()
        check()

        counts = await world.leftovers.sweep(load.named, world.tier.is_in_flight)
        tally.removed_blobs, tally.aborted_uploads = counts.removed_blobs, counts.aborted_uploads
        on_server = blob_ids_of(kvobj_remote.keys(kvobj_remote.prefix))
        record(plan, load, world.proxy)
        assert load.violations == []
        assert tally.hit >= tally.operations_under_fire / 5, "too few operations met the toxic"
        assert tally.succeeded_under_fire >= tally.operations_under_fire / 4, "hardly anything works"
        assert on_server == dict.fromkeys(load.live, 1)
        assert kvobj_remote.uploads() == []


def plan_of(toxic: Toxic) -> Plan:
    return Plan(
        (toxic,),
        rate=RATES[toxic],
        seed=SEED,
        stall_seconds=0.4,
        outage_seconds=0.15,
        trickle_bytes_per_second=6000.0,
        retry_after_seconds=0,
    )


def record(plan: Plan, load: TierLoad, proxy: FaultProxy) -> None:
    """The run's record, on paper where one is wanted."""
    toxic = plan.toxics[0]
    told = {"toxic": toxic.value, "rate": plan.rate, "seed": SEED, **load.tally.as_dict(), "proxy": proxy.record()}
    print(json.dumps(told))  # noqa: T201 - shown by pytest -s
    if RECORD is not None:
        folder = Path(RECORD)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"tier-{toxic.name.lower()}.json").write_text(json.dumps(told | {"violations": load.violations}))
