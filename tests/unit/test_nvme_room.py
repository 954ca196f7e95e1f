"""Reads of nvme where the arena has room, and somebody waits there for more of it in one piece."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_nvme import KIB, MIB, NvmeNode

from kvobj.codec.frame import raw_frame_bytes
from kvobj.errors import BusyError


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    (tmp_path / "node").mkdir()
    node = NvmeNode(tmp_path / "node", shm_path)
    await node.start()
    yield node
    await node.stop()


@pytest.mark.parametrize("size_bytes", [1000, 100 * KIB], ids=["in the database", "in a segment"])
async def test_frames_are_read_while_a_large_reservation_waits_for_a_piece_that_there_is_not(
    node: NvmeNode, size_bytes: int
) -> None:
    arena = node.arena
    encoded = [await node.put(sequence, size_bytes) for sequence in range(40)]
    pins = [await arena.reserve(MIB, timeout_seconds=0) for _ in range(arena.capacity_bytes // MIB)]
    with pytest.raises(BusyError):
        await arena.reserve(raw_frame_bytes(size_bytes), timeout_seconds=0)
    arena.release_many(pins[::2])
    large = asyncio.create_task(arena.reserve(8 * MIB, timeout_seconds=60))
    await asyncio.sleep(0)
    assert await asyncio.gather(*map(node.read, range(40))) == encoded
    assert not large.done()
    arena.release_many(pins[1::2])
    (await large).release()
