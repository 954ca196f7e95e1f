"""Frames that a worker reads while they still fill: whenever the bytes come, the worker learns of the last of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from following_world import turns, turns_until
from kv_driver import KvDriver, kv_node

from kvobj.arena import PinnedFrame, Progress
from kvobj.errors import KvobjError, UnavailableError
from kvobj.tiers.in_use import BlobsInUse
from kvobj.workers.held_frames import HeldFrames

MIB = 1024 * 1024
BLOB = b"b" * 16


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as node:
        yield node


class Told:
    """What a worker is told of the one frame that it has."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.errors: list[KvobjError] = []
        in_use = BlobsInUse()
        in_use.hold([BLOB])  # as who opened it did
        self.frames = HeldFrames(
            in_use,
            filled=lambda _, filled: self.filled.append(filled),
            failed=lambda _, error: self.errors.append(error),
        )


async def handed_out(kv: KvDriver, told: Told, progress: Progress) -> int:
    """The handle of a frame that fills."""
    pin = await kv.node.arena.reserve(progress.total, timeout_seconds=5)
    opened = told.frames.hand_out(PinnedFrame(pin, frame_bytes=progress.total, progress=progress), BLOB)
    assert (opened.filled, opened.total) == (progress.filled, progress.total)
    return opened.handle


@pytest.mark.parametrize("passed", range(4))
async def test_the_last_bytes_are_told_also_where_they_come_in_the_turn_in_which_the_frame_was_handed_out(
    kv: KvDriver, passed: int
) -> None:
    told, progress = Told(), Progress(2 * MIB)
    progress.advance(MIB)
    handle = await handed_out(kv, told, progress)
    await turns(passed)
    progress.advance(2 * MIB)
    await turns_until(lambda: told.filled)
    assert told.filled == [2 * MIB]
    told.frames.release([handle])
    assert not len(told.frames)


async def test_a_frame_that_fails_in_that_turn_is_told_as_failed(kv: KvDriver) -> None:
    told, progress = Told(), Progress(2 * MIB)
    handle = await handed_out(kv, told, progress)
    progress.fail(UnavailableError("the remote is gone"))
    await turns_until(lambda: told.errors)
    assert [error.message for error in told.errors] == ["the remote is gone"]
    assert told.filled == []
    told.frames.release([handle])


async def test_what_comes_is_told_in_steps_and_no_more_after_the_release(kv: KvDriver) -> None:
    told, progress = Told(), Progress(2 * MIB)
    handle = await handed_out(kv, told, progress)
    for filled in (1000, MIB // 2, MIB // 2 + 1000, MIB):
        progress.advance(filled)
        await turns(3)
    assert told.filled == [MIB // 2, MIB]
    told.frames.release([handle])
    progress.advance(2 * MIB)
    await turns(3)
    assert told.filled == [MIB // 2, MIB]
