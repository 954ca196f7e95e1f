"""What background work knows and would lose at a stop: kept in small files, saved now and then and at a clean stop.

Each file is replaced whole (written beside, flushed, renamed). Losing one costs only what its owner has to learn again, so what
cannot be read or written is told in the log and otherwise ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from kvobj.tiers.verified import RunOnPool

SAVE_SECONDS: Final = 300.0
FILE_BYTES_MAX: Final = 4 * 1024 * 1024


class Keeps(Protocol):
    """Has a state of bounded size that is worth keeping."""

    def save(self) -> bytes:
        """The state, as `load` takes it."""
        ...

    def load(self, state: bytes) -> None:
        """Take up a state of an earlier process; one that does not fit is ignored."""
        ...


class StateFiles:
    """One file an owner, in one directory. Event-loop-only; files are touched on the pool."""

    def __init__(self, directory: Path, owners: Mapping[str, Keeps], *, run: RunOnPool, log: logging.Logger) -> None:
        self._directory = directory
        self._owners = dict(owners)
        self._run = run
        self._log = log
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Give every owner what was kept of it."""
        for name, owner in self._owners.items():
            state = await self._tried(partial(_read, self._directory / name), name, "read")
            if state:
                owner.load(state)

    def start(self) -> None:
        """Begin to save every few minutes."""
        self._task = asyncio.create_task(self._save_now_and_then(), name="state-files")

    async def aclose(self) -> None:
        """Save a last time and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            await self.save()

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Save every owner's state now."""
        for name, owner in self._owners.items():
            state = owner.save()
            if len(state) <= FILE_BYTES_MAX:
                await self._tried(partial(_write, self._directory / name, state), name, "written")

    async def _tried(self, work: Callable[[], bytes | None], name: str, what: str) -> bytes | None:
        try:
            return await self._run(work)
        except OSError as error:
            self._log.warning("%s could not be %s: %s", name, what, error)
            return None


def _read(file: Path) -> bytes | None:
    try:
        with file.open("rb") as opened:
            state = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    return state if len(state) <= FILE_BYTES_MAX else None


def _write(file: Path, state: bytes) -> None:
    temporary = file.with_name(file.name + ".new")
    with temporary.open("wb") as out:
        out.write(state)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
