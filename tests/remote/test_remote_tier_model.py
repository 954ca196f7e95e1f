"""Many puts, reads and deletes of a few blobs at the same time, against a server that fails, loses answers and lets callers go.

What a put has returned for is read whole; what a delete has returned for is gone; no byte is wrong; and at the end, when the server
is well again, nothing but what is held lies there after one sweep.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import ManualClock
from fakes_remote import DictBucket, down
from remote_tier_world import NAMES, World, blob, raw_frame, remote_world

from kvobj.errors import TierUnavailableError
from kvobj.ids import BlobId, epoch_of, make_blob_id, sequence_of
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.leftovers import Leftovers

IDS = [blob(n) for n in range(5)]
CALLERS = 6
STEPS = 40
FAILS = 0.15


class UnsoundBucket(DictBucket):
    """Fails one call in some, before it is done, after it is done, or in its middle."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice
        self.is_sound = False

    def _fails(self) -> bool:
        return not self.is_sound and self.dice.random() < FAILS

    async def _pass(self, call: str) -> None:  # noqa: ARG002 - any call may fail
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        if self._fails():
            raise down()

    async def put(self, key: str, body: memoryview) -> str:
        etag = await super().put(key, body)
        if self._fails():
            raise down()
        return etag

    async def delete(self, keys: Sequence[str]) -> None:
        done = [key for key in keys if not self._fails()]
        await super().delete(done)
        if len(done) < len(keys) or self._fails():
            raise down()


def plain_of(blob_id: BlobId) -> bytes:
    return bytes([sequence_of(blob_id)]) * (1000 * (sequence_of(blob_id) + 1))


class Caller:
    """One of those who use the tier; now and then it does not wait for the end of what it asked for."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = dice
        self.done = 0

    async def run(self) -> None:
        for _ in range(STEPS):
            blob_id = self.dice.choice(IDS)
            step = self.dice.choice([self.put, self.read, self.read, self.read_range, self.delete, self.put_and_delete])
            task = asyncio.create_task(step(blob_id))
            if self.dice.random() < 0.15:
                for _ in range(self.dice.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                await task
                self.done += 1
            except (TierUnavailableError, asyncio.CancelledError):
                continue

    async def put(self, blob_id: BlobId) -> None:
        await self.world.put(blob_id, plain_of(blob_id))

    async def read(self, blob_id: BlobId) -> None:
        found = await self.world.read(blob_id)
        assert found is None or found.endswith(plain_of(blob_id))

    async def read_range(self, blob_id: BlobId) -> None:
        frame = await self.world.tier.get(blob_id, ByteRange(300, 400))
        if frame is None:
            return
        try:
            await frame.complete()
            assert bytes(frame.view) == plain_of(blob_id)[:100]
        finally:
            frame.release()

    async def delete(self, blob_id: BlobId) -> None:
        await self.world.tier.delete([blob_id, blob(1000)])

    async def put_and_delete(self, blob_id: BlobId) -> None:
        """With an id that is this caller's alone, so that what was promised can be seen."""
        own = make_blob_id(epoch_of(blob_id), 10_000 + self.dice.randrange(1 << 40))
        frame = await raw_frame(self.world.arena, b"own")
        try:
            encoded = bytes(frame.view)
            await self.world.tier.put(own, frame, NAMES)
        finally:
            frame.release()
        assert self.world.bucket.objects[self.world.key(own)] == encoded
        assert await self.world.tier.missing([own]) == []
        await self.world.tier.delete([own])
        assert self.world.key(own) not in self.world.bucket.objects
        assert await self.world.tier.missing([own]) == [own]


async def ours() -> bool:
    return True


async def no_rest(_: float) -> None:
    return


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_is_lost_wrong_or_left(tmp_path: Path, shm_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with remote_world(tmp_path, shm_path) as world:
        world.bucket = bucket = UnsoundBucket(dice)
        world.tier = world.another(puts_at_once=3)
        callers = [Caller(world, dice) for _ in range(CALLERS)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(caller.run() for caller in callers))
        bucket.is_sound = True
        assert sum(caller.done for caller in callers) > CALLERS * STEPS // 4
        assert not world.tier.in_flight
        held = [blob_id for blob_id in IDS if await world.read(blob_id) is not None]
        assert await world.tier.missing(IDS) == [blob_id for blob_id in IDS if blob_id not in held]

        async def is_named(blob_ids: Sequence[BlobId]) -> set[BlobId]:
            return set(held).intersection(blob_ids)

        leftovers = Leftovers(
            world.bucket, world.directory, world.names, still_ours=ours, clock=ManualClock(), sleep=no_rest
        )
        await leftovers.sweep(is_named, world.tier.is_in_flight)
        assert sorted(world.bucket.objects) == [world.key(blob_id) for blob_id in held]
        assert world.directory.blob_ids() == held
        assert world.directory.totals == (len(held), sum(len(body) for body in world.bucket.objects.values()))
