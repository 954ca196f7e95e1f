"""Metering: what a tier did is what is counted, by tier, and errors pass through."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import DictTier, Fault, FaultyTier, ManualClock
from fakes_arena import put_plain, read_whole, small_arena

from kvobj.errors import StoreFullError, TierUnavailableError
from kvobj.ids import make_blob_id
from kvobj.metrics import Metrics
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.metered import Metered

BLOB = make_blob_id(1, 1)


async def test_hits_misses_errors_and_bytes_are_counted(shm_path: Path) -> None:
    async with small_arena(shm_path) as arena:
        metrics = Metrics()
        faulty = FaultyTier(DictTier(arena, name="medium"), arena)
        tier = Metered(faulty, instruments=TierInstruments(metrics), clock=ManualClock())
        encoded = await put_plain(tier, arena, BLOB, bytes(5000))
        assert await read_whole(tier, BLOB) == encoded
        assert await tier.get(make_blob_id(1, 2)) is None
        faulty.faults = {
            ("get", 3): Fault(error=TierUnavailableError("down")),
            ("put", 2): Fault(error=StoreFullError("full")),
        }
        with pytest.raises(TierUnavailableError):
            await tier.get(BLOB)
        with pytest.raises(StoreFullError):
            await put_plain(tier, arena, BLOB, bytes(5000))
        await tier.delete([BLOB])
        await tier.aclose()

        def counted(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(f"kvobj_tier_{name}", {"tier": "medium", **labels})

        assert [counted("gets_total", outcome=each) for each in ("hit", "miss", "error")] == [1, 1, 1]
        assert [counted("puts_total", outcome=each) for each in ("done", "error")] == [1, 1]
        assert [counted("bytes_total", direction=each) for each in ("in", "out")] == [len(encoded)] * 2
        assert counted("deleted_blobs_total") == 1
        assert counted("get_latency_seconds_count") == 2


async def test_two_tiers_share_instruments(shm_path: Path) -> None:
    async with small_arena(shm_path) as arena:
        metrics = Metrics()
        instruments = TierInstruments(metrics)
        for name in ("one", "two"):
            tier = Metered(DictTier(arena, name=name), instruments=instruments, clock=ManualClock())
            assert await tier.get(BLOB) is None
        rendered = metrics.render().decode()
        assert 'kvobj_tier_gets_total{outcome="miss",tier="one"} 1.0' in rendered
        assert 'kvobj_tier_gets_total{outcome="miss",tier="two"} 1.0' in rendered
        assert metrics.value("kvobj_tier_gets_total", tier="one", outcome="miss") == 1
        assert metrics.value("kvobj_tier_gets_total", tier="one") == 0
        assert metrics.value("kvobj_no_such_thing") == 0
