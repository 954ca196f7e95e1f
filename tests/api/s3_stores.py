"""S3 behaviour is tested over two stores: the fake one that a test can look into, and a whole node with small tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from real_store import node_settings, running_node
from s3_driver import Driver

STORES = ("fake", "node")


@asynccontextmanager
async def driver_over(store: str, *, data: Path, memory: Path) -> AsyncIterator[Driver]:
    """A driver with no bucket over the store of this name."""
    if store == "fake":
        yield Driver()
        return
    async with running_node(node_settings(data, memory, dram_mib=16, nvme_mib=64)) as node:
        yield Driver(store=node.store)
