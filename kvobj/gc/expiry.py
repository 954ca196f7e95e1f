"""The heartbeat of leases: ends sessions whose holders have gone, records that the catalog is up, and ends quiet time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.clock import Clock, boot_ms
from kvobj.errors import KvobjError

INTERVAL_SECONDS: Final = 1.0
STEP_SESSIONS: Final = 1000


class Expiry(BackgroundWorker):
    """One worker. `on_freed` is called when pins have gone or quiet time has ended: something may be claimable now.
    Event-loop-only."""

    worker_name = "lease-expiry"

    def __init__(self, *, catalog: Catalog, clock: Clock, on_freed: Callable[[], None], log: logging.Logger) -> None:
        super().__init__()
        self._catalog = catalog
        self._clock = clock
        self._on_freed = on_freed
        self._log = log
        self._was_quiet = False
        self.expired_sessions = 0

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
            except KvobjError as error:
                self._log.warning("sessions could not be expired, will retry: %s", error)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def step(self) -> int:
        """One beat; how many sessions ended."""
        leases, now_ms = self._catalog.leases, boot_ms(self._clock)
        await leases.note_alive(now_boot_ms=now_ms)
        ended = 0
        while batch := await leases.expire(now_boot_ms=now_ms, limit=STEP_SESSIONS):
            ended += batch
        self.expired_sessions += ended
        is_quiet = leases.usage().quiet and not leases.end_quiet(now_boot_ms=now_ms)
        if ended or (self._was_quiet and not is_quiet):
            self._on_freed()
        self._was_quiet = is_quiet
        return ended
