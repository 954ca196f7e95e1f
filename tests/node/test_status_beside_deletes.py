"""The status of a node while its buckets are being deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from real_store import node_settings, running_node

from kvobj.app.admin_state import NodeView
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.clock import SystemClock
from kvobj.metrics import Metrics

BUCKETS = 200


async def test_status_is_told_while_buckets_are_being_deleted(tmp_path: Path, shm_path: Path) -> None:
    async with running_node(node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)) as node:
        names = [f"bucket-{number:03d}" for number in range(BUCKETS)]
        made = [
            node.catalog.create_bucket(BucketRow(name, BucketKind.ORDINARY, "root", 0, Durability.LOCAL))
            for name in names
        ]
        await asyncio.gather(*made)
        view = NodeView(node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "direct")
        assert (await view.status()).catalog.buckets == BUCKETS

        async def delete() -> None:
            for name in reversed(names):  # the listing comes to it last
                await node.catalog.delete_bucket(name)

        deleting = asyncio.create_task(delete())
        try:
            while not deleting.done():
                assert (await view.status()).catalog.buckets <= BUCKETS
        finally:
            await deleting
        assert (await view.status()).catalog.buckets == 0
