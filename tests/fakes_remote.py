"""The parts of a remote tier as its tests need them, and a bucket in memory that waits, fails and lies when told to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from fakes import ManualClock

from kvobj.clock import SystemClock
from kvobj.config.settings import RemoteSettings
from kvobj.database import Database
from kvobj.errors import RemoteRefusedError, TierUnavailableError
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.bucket import RemoteBucket, RemoteObject, RemoteUpload
from kvobj.tiers.remote.capabilities import Capabilities
from kvobj.tiers.remote.directory import REMOTE_TABLES
from kvobj.tiers.remote.health import RemoteHealth, RemoteState

MIB = 1 << 20
LOG = logging.getLogger("tests.remote")

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


def on_thread(work: Callable[[*_Arguments], _Result], /, *arguments: *_Arguments) -> Awaitable[_Result]:
    """A pool as tiers are given one."""
    return asyncio.to_thread(work, *arguments)


def open_database(durable: Path, volatile: Path) -> Database:
    """A small one with the remote directory's tables; the caller closes it."""
    return Database.open(
        durable=durable / "durable",
        volatile=volatile / "volatile",
        tables=REMOTE_TABLES,
        map_bytes=64 * MIB,
        volatile_map_bytes=8 * MIB,
        sync=False,
    )


@asynccontextmanager
async def opened_bucket(settings: RemoteSettings) -> AsyncIterator[RemoteBucket]:
    """The real one, on a real server."""
    bucket = await RemoteBucket.open(settings, clock=SystemClock(), metrics=Metrics(), run=on_thread, log=LOG)
    try:
        yield bucket
    finally:
        await bucket.aclose()


class DictBucket:
    """An `ObjectBucket` in a dict. `errors[call]` is raised by each call of that name while it is there, `gates[call]` waited for
    first; `requests` counts calls. A get fills in four steps, each behind `gates["fill"]` where there is one."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event | asyncio.Semaphore] = {}
        self.requests: list[tuple[str, str]] = []
        self.running = 0
        self.running_max = 0
        self.stops_short = False
        self.capabilities: Capabilities | None = Capabilities(
            server="dict",
            upload_check="none",
            if_absent=True,
            if_match=True,
            delete_if_match=True,
            delete_many=True,
            ranges=True,
            min_part_bytes=0,
        )
        self.health = RemoteHealth("ok", "", ManualClock().now_ms(), "closed", 0.0)

    def count(self, call: str) -> int:
        """How many such calls there were."""
        return sum(each == call for each, _ in self.requests)

    async def _call(self, call: str, key: str) -> None:
        self.requests.append((call, key))
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self._pass(call)
        finally:
            self.running -= 1
        if call in self.errors:
            raise self.errors[call]

    async def _pass(self, call: str) -> None:
        match self.gates.get(call):
            case asyncio.Event() as event:
                await event.wait()
            case asyncio.Semaphore() as turns:
                await turns.acquire()
            case None:
                await asyncio.sleep(0)

    def set_state(self, state: RemoteState) -> None:
        """Let the health say so."""
        self.health = replace(self.health, state=state)

    async def probe(self) -> Capabilities:
        await self._call("probe", "")
        assert self.capabilities is not None
        return self.capabilities

    async def get(self, key: str, byte_range: ByteRange, into: memoryview, on_filled: Callable[[int], None]) -> bool:
        await self._call("get", key)
        found = self.objects.get(key)
        if found is None:
            return False
        total = byte_range.stop - byte_range.start
        filled = 0
        for step in range(1, 5):
            await self._pass("fill")
            if "fill" in self.errors and step > 1:
                raise self.errors["fill"]
            if self.stops_short and step > 1:
                return True
            end = total * step // 4
            into[filled:end] = found[byte_range.start + filled : byte_range.start + end]
            filled = end
            on_filled(filled)
        return True

    async def put(self, key: str, body: memoryview) -> str:
        try:
            await self._call("put", key)
        except asyncio.CancelledError:
            self.requests.append(("put cancelled", key))
            raise
        self.objects[key] = bytes(body)
        return _etag(bytes(body))

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        await self._call("put_small", key)
        found = self.objects.get(key)
        if (if_absent and found is not None) or (if_match and (found is None or _etag(found) != if_match)):
            return None
        self.objects[key] = body
        if "put_small answer" in self.errors:
            raise self.errors["put_small answer"]
        return _etag(body)

    async def get_small(self, key: str, *, max_bytes: int) -> tuple[bytes, str] | None:
        await self._call("get_small", key)
        found = self.objects.get(key)
        return None if found is None else (found[:max_bytes], _etag(found))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call("delete", ",".join(keys))
        for key in keys:
            self.objects.pop(key, None)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[RemoteObject]:
        await self._call("list", prefix)
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > after and key in self.objects:
                yield RemoteObject(key, len(self.objects[key]), _etag(self.objects[key]), 0)

    async def list_uploads(self, prefix: str) -> AsyncIterator[RemoteUpload]:
        await self._call("list_uploads", prefix)
        for upload_id, key in sorted(self.uploads.items()):
            if key.startswith(prefix):
                yield RemoteUpload(key, upload_id, 0)

    async def abort(self, upload: RemoteUpload) -> None:
        await self._call("abort", upload.key)
        self.uploads.pop(upload.upload_id, None)


def down() -> TierUnavailableError:
    """What a bucket raises when its server does not answer."""
    return TierUnavailableError("the remote does not answer")


def refused() -> RemoteRefusedError:
    """What a bucket raises when the server will never do it."""
    return RemoteRefusedError("the remote refuses the credentials", reason="InvalidAccessKeyId")


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
