"""A whole node of small tiers in temporary directories, for tests that want the real store without sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from s3_driver import ALICE, BOB, ROOT

from kvobj.app.node import Node, open_node
from kvobj.clock import SystemClock
from kvobj.config.settings import (
    CatalogSettings,
    DramSettings,
    NvmeSettings,
    RootCredentials,
    ServerSettings,
    Settings,
    UserSettings,
)
from kvobj.data_directory import DataDirectory
from kvobj.metrics import Metrics

MIB = 2**20


def node_settings(data: Path, memory: Path, *, dram_mib: int = 64, nvme_mib: int = 256) -> Settings:
    """A node in `data` with its arena in `memory`; its users are those of `s3_driver`."""
    return Settings(
        server=ServerSettings(data=data),
        users=tuple(
            UserSettings(user.id, user.display_name, user.access_key, user.secret_key) for user in (ALICE, BOB)
        ),
        root_credentials=RootCredentials(ROOT.access_key, ROOT.secret_key),
        catalog=CatalogSettings(map_bytes=256 * MIB, volatile_map_bytes=64 * MIB),
        dram=DramSettings(capacity_bytes=dram_mib * MIB, path=memory / "arena", region_bytes=dram_mib * MIB),
        nvme=NvmeSettings(capacity_bytes=nvme_mib * MIB, segment_bytes=nvme_mib * MIB),
    )


@asynccontextmanager
async def running_node(settings: Settings) -> AsyncIterator[Node]:
    """The node, stopped without a flush at the end: what is only in memory stays in the arena."""
    with DataDirectory.open(settings.server.data) as data:
        async with open_node(
            settings, data, clock=SystemClock(), metrics=Metrics(), log=logging.getLogger("test")
        ) as node:
            yield node
