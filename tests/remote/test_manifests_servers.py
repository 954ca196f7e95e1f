"""Manifests on real servers, an old one and a new one, through a network that fails: what is settled is there, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fakes import ManualClock
from manifest_world import STORE, WRAPPER, OutboxCatalog, bucket_row, objects_of, put_shared, shared_rows, told_by
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan, Toxic

from kvobj.app.offline_opening import on_pool
from kvobj.clock import SystemClock
from kvobj.config import RemoteSettings
from kvobj.errors import CorruptionError
from kvobj.manifests.compaction import Compaction, ManifestUpkeep, MergeStep
from kvobj.manifests.folder import FixedLineage, ManifestFolder
from kvobj.manifests.journal import ManifestJournal
from kvobj.manifests.reading import find_state
from kvobj.metrics import Metrics
from kvobj.tiers.remote.bucket import RemoteBucket

LOG = logging.getLogger("test")
TOXICS = (
    Toxic.UNAVAILABLE, Toxic.RESET_BODY, Toxic.LOST_REPLY, Toxic.WRONG_BYTE_DOWN, Toxic.TRUNCATED, Toxic.HALF_HEAD,
    Toxic.PRECONDITION, Toxic.CONFLICT,
)  # fmt: skip


@asynccontextmanager
async def folder_on(settings: RemoteSettings, *, epoch: int) -> AsyncIterator[ManifestFolder]:
    with ThreadPoolExecutor(2) as executor:
        bucket = await RemoteBucket.open(
            settings, clock=SystemClock(), metrics=Metrics(), run=on_pool(executor), log=LOG
        )
        try:
            yield ManifestFolder(
                bucket,
                prefix=settings.prefix,
                store_id=STORE,
                identity=FixedLineage(1),
                epoch=epoch,
                run=on_pool(executor),
            )
        finally:
            await bucket.aclose()


async def read_beside(reader: ManifestFolder) -> dict[tuple[str, ...], object]:
    """What is told, read while somebody tidies up: over again where a manifest went meanwhile."""
    for _ in range(10):
        state = await find_state(reader, newest=1)
        try:
            return objects_of(await told_by(reader))
        except CorruptionError:
            assert await find_state(reader, newest=1) != state
    raise AssertionError("the manifests never kept still")


async def test_what_is_settled_through_a_failing_network_is_what_a_reader_finds(
    remote_store: RemoteStore, tmp_path: Path
) -> None:
    plan = Plan(TOXICS, rate=0.2, seed=11)
    async with (
        FaultProxy(remote_store.host, remote_store.port, NOTHING) as proxy,
        OutboxCatalog(tmp_path, ManualClock()) as catalog,
        folder_on(replace(remote_store.settings(), endpoint=f"http://127.0.0.1:{proxy.port}"), epoch=7) as folder,
        folder_on(remote_store.settings(), epoch=0) as reader,
    ):
        compaction = Compaction(
            folder, catalog.outbox, WRAPPER, merge_steps=(MergeStep(span=64, count=8),), snapshot_entries_min=60
        )
        upkeep = ManifestUpkeep(compaction, log=LOG, manifests_between=6, retry_seconds=0.05)
        journal = ManifestJournal(
            outbox=catalog.outbox,
            folder=folder,
            compaction=compaction,
            sealer=WRAPPER,
            clock=ManualClock(),
            log=LOG,
            metrics=Metrics(),
            upkeep=upkeep,
            interval_seconds=0.0,
            retry_seconds=(0.01, 0.2),
        )
        await catalog.create_bucket(bucket_row("one"))
        journal.start()
        upkeep.start()
        try:
            assert await journal.flush(timeout_seconds=20)
            proxy.plan = plan
            for number in range(90):
                await put_shared(catalog, "one", f"key-{number % 40:02d}", number + 1)
                if number % 7 == 6:
                    await catalog.delete("one", [f"key-{number % 40 - 3:02d}"], now_ms=2)
                if await journal.settled(catalog.outbox.position, timeout_seconds=20) and number % 15 == 14:
                    assert await read_beside(reader) == await shared_rows(catalog)
            assert await journal.flush(timeout_seconds=30)
        finally:
            await upkeep.aclose()
            await journal.aclose()
        assert objects_of(await told_by(reader)) == await shared_rows(catalog)
        assert len(proxy.injections) > 10
        # What failed left no more behind than the next pass takes away.
        proxy.plan = NOTHING
        again = Compaction(folder, catalog.outbox, WRAPPER, snapshot_entries_min=1)
        await again.take_snapshot()
        await again.run()
        kinds = [key.rpartition(".")[2] for key in remote_store.keys("store/manifests/")]
        assert sorted(kinds) == ["head", "part"]
        assert objects_of(await told_by(reader)) == await shared_rows(catalog)
