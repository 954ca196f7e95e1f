import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from fakes_nvme import KIB, MIB, NAMES, RECORD_KEY, Gate, NvmeNode, blob, failing, plain_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from module_paths import ModulePaths

from kvobj.arena import PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import raw_frame_bytes, raw_payload_offset
from kvobj.errors import TierUnavailableError
from kvobj.tiers.nvme import rebuild_directory
from kvobj.tiers.nvme.early_write import EarlyWrite


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    (tmp_path / "node").mkdir()
    node = NvmeNode(tmp_path / "node", shm_path)
    yield node
    await node.stop()


class Arriving:
    """A frame of which the payload comes bit by bit and the head last, as in a PUT."""

    def __init__(self, node: NvmeNode, sequence: int, plain: bytes, frame: PinnedFrame, early: EarlyWrite) -> None:
        self._node, self._sequence, self.plain = node, sequence, plain
        self.frame, self.early = frame, early
        self._arrived = 0

    @classmethod
    async def begin(cls, node: NvmeNode, sequence: int, size_bytes: int) -> "Arriving":
        frame_bytes = raw_frame_bytes(size_bytes)
        frame = PinnedFrame(await node.arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
        frame.writable[:] = b"\xee" * frame_bytes  # what an earlier user of the extent left there
        early = node.tier.begin_put(blob(sequence), frame, head_bytes=raw_payload_offset(size_bytes))
        assert early is not None
        return cls(node, sequence, plain_of(sequence, size_bytes), frame, early)

    async def arrive(self, upto: int) -> None:
        offset = raw_payload_offset(len(self.plain))
        upto = min(upto, len(self.plain))
        self.frame.writable[offset + self._arrived : offset + upto] = self.plain[self._arrived : upto]
        self._arrived = upto
        self.early.advance(offset + upto)
        await asyncio.sleep(0)

    async def put(self) -> bytes:
        """Seal and put; the frame's bytes."""
        codec_named("raw").encode(memoryview(self.plain), self.frame.writable, digest=blake3(self.plain).digest())
        encoded = bytes(self.frame.view)
        try:
            await self._node.tier.put(blob(self._sequence), self.frame, NAMES)
        finally:
            self.frame.release()
        return encoded


async def used(node: NvmeNode) -> int:
    return (await node.tier.usage()).used_bytes


@given(st.integers(2 * MIB, 20 * MIB), st.lists(st.integers(100 * KIB, 5 * MIB), min_size=1, max_size=12))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_however_a_frame_arrives_what_is_held_is_the_frame(
    module_paths: ModulePaths, shm_path: Path, size_bytes: int, steps: list[int]
) -> None:
    node = NvmeNode(module_paths.mktemp("node"), shm_path)
    await node.start()
    try:
        arriving = await Arriving.begin(node, 1, size_bytes)
        upto = 0
        while upto < size_bytes:
            for step in steps:
                upto += step
                await arriving.arrive(upto)
        encoded = await arriving.put()
        assert await node.read(1) == encoded
        assert node.arena.usage().reserved_bytes == 0
        await node.tier.delete([blob(1)])
        assert await used(node) == 0
    finally:
        await node.stop()


async def test_the_payload_is_on_the_disk_before_its_last_byte_came(node: NvmeNode) -> None:
    await node.start()
    arriving = await Arriving.begin(node, 1, 8 * MIB)
    node.disk.calls.clear()
    gate = Gate()
    gate.open()
    node.disk.fail["write"] = gate
    await arriving.arrive(4 * MIB)
    await asyncio.to_thread(gate.reached.wait, 10)
    assert "write" in node.disk.calls
    assert "flush" not in node.disk.calls
    assert await node.tier.missing([blob(1)]) == [blob(1)]
    await arriving.put()
    assert node.disk.calls[-1] == "flush"
    assert node.disk.calls.count("flush") == 1
    assert await node.tier.missing([blob(1)]) == []


async def test_a_process_that_dies_before_the_put_leaves_no_blob_and_all_the_room(node: NvmeNode) -> None:
    await node.start()
    kept = await node.put(7, 3 * MIB)
    before = await used(node)
    arriving = await Arriving.begin(node, 1, 6 * MIB)
    await arriving.arrive(6 * MIB)
    # Everything but the record page and the head is on its way; the process ends here.
    arriving.early.abandon()
    arriving.frame.release()
    await node.stop()
    await node.start(open_tier=False)
    found = [
        each.blob_id
        async for each in rebuild_directory(
            node.directory, database=node.database, record_key=RECORD_KEY, removed=frozenset()
        )
    ]
    await node.open_tier()
    assert found == [blob(7)]
    assert await used(node) == before
    assert await node.read(7) == kept


async def test_an_abandoned_write_gives_room_and_extent_back_once_its_thread_is_done(node: NvmeNode) -> None:
    await node.start()
    gate = Gate()
    arriving = await Arriving.begin(node, 1, 8 * MIB)
    node.disk.fail["write"] = gate
    await arriving.arrive(4 * MIB)
    await asyncio.to_thread(gate.reached.wait, 10)
    arriving.early.abandon()
    arriving.early.abandon()
    arriving.frame.release()
    assert node.arena.usage().reserved_bytes > 0
    assert await used(node) > 0
    gate.open()
    await node.tier.aclose()
    assert node.arena.usage().reserved_bytes == 0
    assert await used(node) == 0


async def test_a_medium_that_fails_early_fails_the_put_which_then_holds_nothing(node: NvmeNode) -> None:
    await node.start()
    arriving = await Arriving.begin(node, 1, 8 * MIB)
    node.disk.fail["write"] = failing(errno.EIO)
    await arriving.arrive(8 * MIB)
    with pytest.raises(TierUnavailableError):
        await arriving.put()
    del node.disk.fail["write"]
    assert await node.tier.missing([blob(1)]) == [blob(1)]
    assert await used(node) == 0
    assert node.arena.usage().reserved_bytes == 0
    assert [segment.failed for segment in node.tier.segments] == [True]


async def test_a_put_of_another_extent_writes_it_all_itself(node: NvmeNode) -> None:
    await node.start()
    arriving = await Arriving.begin(node, 1, 4 * MIB)
    await arriving.arrive(2 * MIB)
    encoded = await node.put(1, 4 * MIB)
    assert await node.read(1) == encoded
    arriving.early.advance(4 * MIB)
    arriving.early.abandon()
    arriving.frame.release()
    assert await node.read(1) == encoded
    await node.tier.delete([blob(1)])
    assert await used(node) == 0


async def test_a_closing_tier_waits_for_what_was_begun_and_gives_it_up(node: NvmeNode) -> None:
    await node.start()
    arriving = await Arriving.begin(node, 1, 8 * MIB)
    await arriving.arrive(5 * MIB)
    await node.tier.aclose()
    await arriving.arrive(8 * MIB)
    with pytest.raises(TierUnavailableError, match="closed"):
        await arriving.put()
    assert node.arena.usage().reserved_bytes == 0
    frame = await node.make_frame(plain_of(2, 4 * MIB))
    assert node.tier.begin_put(blob(2), frame, head_bytes=512) is None
    frame.release()


async def test_a_put_begun_just_before_the_close_takes_nothing_over_that_the_close_gave_up(node: NvmeNode) -> None:
    await node.start()
    gate = Gate()
    arriving = await Arriving.begin(node, 1, 8 * MIB)
    node.disk.fail["write"] = gate
    await arriving.arrive(4 * MIB)
    await asyncio.to_thread(gate.reached.wait, 10)
    # In this order within one turn of the loop: what the put goes on with has not run yet when the tier closes.
    put = asyncio.create_task(arriving.put())
    closed = asyncio.create_task(node.tier.aclose())
    await asyncio.sleep(0)
    gate.open()
    encoded = await put
    await closed
    assert node.arena.usage().reserved_bytes == 0
    place = node.place(1)
    assert place is not None
    assert await used(node) == place.extent_bytes
    await node.stop()
    await node.start()
    assert await node.read(1) == encoded


async def test_small_frames_and_a_full_tier_are_left_to_the_put(node: NvmeNode) -> None:
    await node.start(capacity_bytes=16 * MIB, segment_bytes=16 * MIB)
    small = await node.make_frame(plain_of(1, MIB))
    assert node.tier.begin_put(blob(1), small, head_bytes=512) is None
    small.release()
    await node.put(2, 10 * MIB + 3 * KIB)
    large = await node.make_frame(plain_of(3, 8 * MIB))
    before = await used(node)
    assert node.tier.begin_put(blob(3), large, head_bytes=1024) is None
    assert await used(node) == before
    large.release()
