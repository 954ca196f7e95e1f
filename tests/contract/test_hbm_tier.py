"""The hbm tier over host memory in a GPU's place: the contract of tiers, and what is its own."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from tensor_cases import CASES
from tier_contract import MIB, NAMES, MakeFrame, RawRead, TierContract, blob, plain_of, put_plain, read_whole

from kvobj.arena import Arena, PinnedFrame
from kvobj.errors import StoreFullError, TierUnavailableError
from kvobj.gpu.codec_copies import DeviceCodecs
from kvobj.gpu.copies import Copies
from kvobj.gpu.device import CopyKind
from kvobj.gpu.host_device import HostDevice, HostStream
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.registered import RegisteredMemory
from kvobj.gpu.tensors import DeviceChunk
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.policy import LruPolicy
from kvobj.tensors.codecs import encode_bound, encode_frame
from kvobj.tiers.hbm import HbmTier

CAPACITY = 64 * MIB


class Parts:
    """A tier with everything under it within reach."""

    def __init__(self, arena: Arena, *, capacity: int = CAPACITY, deadline: float = 30) -> None:
        self.device = HostDevice(capacity + 64 * MIB)
        self.pool = DevicePool(self.device, capacity_bytes=capacity, slab_bytes=16 * MIB)
        self.copies = Copies(self.device, deadline_seconds=deadline)
        self.registered = RegisteredMemory(self.device, log=logging.getLogger("test"))
        self.metrics = Metrics()
        self.tier = HbmTier(
            arena,
            self.device,
            self.pool,
            copies=self.copies,
            registered=self.registered,
            codecs=DeviceCodecs(self.device),
            policy=LruPolicy(),
            metrics=self.metrics,
        )


@pytest.fixture
async def parts(arena: Arena) -> AsyncIterator[Parts]:
    parts = Parts(arena)
    yield parts
    await parts.tier.aclose()


class TestHbmTier(TierContract):
    @pytest.fixture
    def tier(self, parts: Parts) -> HbmTier:
        return parts.tier

    @pytest.fixture
    def raw_read(self, parts: Parts) -> RawRead:
        async def read(blob_id: BlobId) -> bytes | None:
            entry = parts.tier._entries.get(blob_id)
            return None if entry is None else ctypes.string_at(entry.pin.address, entry.frame_bytes)

        return read

    async def test_a_tensor_is_the_plain_bytes_where_they_lie(
        self, parts: Parts, arena: Arena, make_frame: MakeFrame
    ) -> None:
        plain = plain_of(1, 300_000)
        await put_plain(parts.tier, make_frame, blob(1), plain)
        with await _tensor(parts, blob(1)) as chunk:
            seen = np.from_dlpack(chunk.view((300_000,), "uint8"))
            assert seen.tobytes() == plain
            assert seen.ctypes.data == chunk.address
            assert chunk.address % 256 == 0
        assert await parts.tier.get_tensor(blob(2)) is None
        del seen
        await parts.tier.delete([blob(1)])
        assert parts.pool.usage().extents == 0
        assert arena.usage().reserved_bytes == 0

    async def test_a_tensor_outlives_the_blobs_place_in_the_tier(self, parts: Parts, make_frame: MakeFrame) -> None:
        plain = plain_of(1, 100_000)
        await put_plain(parts.tier, make_frame, blob(1), plain)
        with await _tensor(parts, blob(1)) as chunk:
            seen = np.from_dlpack(chunk.view((100_000,), "uint8"))
        await parts.tier.delete([blob(1)])
        for sequence in range(2, 10):
            await put_plain(parts.tier, make_frame, blob(sequence), plain_of(sequence, 100_000))
        assert seen.tobytes() == plain
        assert parts.pool.usage().extents == 9
        del seen
        assert parts.pool.usage().extents == 8

    async def test_what_was_used_least_recently_makes_room(self, arena: Arena, make_frame: MakeFrame) -> None:
        parts = Parts(arena, capacity=4 * MIB)
        for sequence in (1, 2, 3):
            await put_plain(parts.tier, make_frame, blob(sequence), plain_of(sequence, MIB))
        assert await read_whole(parts.tier, blob(1)) is not None
        await put_plain(parts.tier, make_frame, blob(4), plain_of(4, MIB))
        assert await parts.tier.missing([blob(n) for n in (1, 2, 3, 4)]) == [blob(2)]
        await parts.tier.aclose()

    async def test_what_a_reader_holds_is_no_room(self, arena: Arena, make_frame: MakeFrame) -> None:
        parts = Parts(arena, capacity=2 * MIB)
        await put_plain(parts.tier, make_frame, blob(1), plain_of(1, MIB))
        chunk = await _tensor(parts, blob(1))
        frame = await make_frame(blob(2), plain_of(2, MIB + MIB // 2))
        with pytest.raises(StoreFullError):
            await parts.tier.put(blob(2), frame, NAMES)
        chunk.release()
        await parts.tier.put(blob(2), frame, NAMES)
        frame.release()
        assert await parts.tier.missing([blob(1), blob(2)]) == [blob(1)]
        await parts.tier.aclose()

    async def test_a_frame_larger_than_the_tier_evicts_nothing(self, arena: Arena, make_frame: MakeFrame) -> None:
        parts = Parts(arena, capacity=MIB)
        await put_plain(parts.tier, make_frame, blob(1), plain_of(1, 1000))
        frame = await make_frame(blob(2), plain_of(2, 2 * MIB))
        with pytest.raises(StoreFullError):
            await parts.tier.put(blob(2), frame, NAMES)
        frame.release()
        assert await parts.tier.missing([blob(1)]) == []
        await parts.tier.aclose()

    async def test_a_tensor_frame_is_decoded_where_it_lies(self, parts: Parts, arena: Arena) -> None:
        case = CASES["kv-paged"]
        plain = case.make(case.form)
        into = memoryview(bytearray(encode_bound("x3", case.form)))
        frame_bytes = encode_frame(memoryview(plain), into, codec="x3", form=case.form)
        frame = PinnedFrame(await arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
        frame.writable[:] = into[:frame_bytes]
        await parts.tier.put(blob(1), frame, NAMES)
        frame.release()
        assert await read_whole(parts.tier, blob(1)) == bytes(into[:frame_bytes])
        with await _tensor(parts, blob(1)) as chunk:
            assert np.from_dlpack(chunk.view((len(plain),), "uint8")).tobytes() == plain
            assert parts.pool.usage().extents == 2
        assert parts.pool.usage().extents == 1

    async def test_a_blob_deleted_while_it_is_put_is_not_there(self, parts: Parts, make_frame: MakeFrame) -> None:
        frame = await make_frame(blob(1), plain_of(1, MIB))
        gate = threading.Event()
        _stream(parts).run(gate.wait)
        putting = asyncio.create_task(parts.tier.put(blob(1), frame, NAMES))
        await until(lambda: bool(parts.tier._putting))
        await parts.tier.delete([blob(1)])
        gate.set()
        await putting
        frame.release()
        assert await parts.tier.get(blob(1)) is None
        assert parts.pool.usage().extents == 0

    async def test_a_cancelled_put_lets_go_only_when_the_device_has(
        self, parts: Parts, arena: Arena, make_frame: MakeFrame
    ) -> None:
        frame = await make_frame(blob(1), plain_of(1, MIB))
        gate = threading.Event()
        _stream(parts).run(gate.wait)
        putting = asyncio.create_task(parts.tier.put(blob(1), frame, NAMES))
        await until(lambda: parts.copies.in_flight_bytes > 0)
        frame.release()
        putting.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not putting.done()
        assert arena.usage().pinned == 1
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert arena.usage().pinned == 0
        assert parts.pool.usage().extents == 0

    async def test_memory_that_a_hanging_device_may_use_is_never_used_again(
        self, arena: Arena, make_frame: MakeFrame
    ) -> None:
        parts = Parts(arena, deadline=0.2)
        frame = await make_frame(blob(1), plain_of(1, MIB))
        gate = threading.Event()
        _stream(parts).run(gate.wait)
        with pytest.raises(TierUnavailableError):
            await parts.tier.put(blob(1), frame, NAMES)
        frame.release()
        assert arena.usage().pinned == 1
        assert parts.pool.usage().extents == 1
        assert await parts.tier.missing([blob(1)]) == [blob(1)]
        gate.set()
        await parts.tier.aclose()

    async def test_the_arena_is_pinned_region_by_region_and_let_go_at_the_end(
        self, parts: Parts, make_frame: MakeFrame
    ) -> None:
        frames = [await make_frame(blob(n), plain_of(n, 3 * MIB)) for n in range(4)]
        for sequence, frame in enumerate(frames):
            await parts.tier.put(blob(sequence), frame, NAMES)
        await asyncio.to_thread(parts.registered.wait)
        assert parts.device.registered_bytes == 16 * MIB
        for frame in frames:
            frame.release()
        await parts.tier.aclose()
        assert parts.device.registered_bytes == 0

    async def test_figures_say_what_is_in_device_memory(self, parts: Parts, make_frame: MakeFrame) -> None:
        await put_plain(parts.tier, make_frame, blob(1), plain_of(1, 1000))
        registry = parts.metrics.registry
        assert registry.get_sample_value("kvobj_hbm_reserved_bytes") == 1280
        assert (await parts.tier.usage()).mode == "host"
        (await _tensor(parts, blob(1))).release()
        assert registry.get_sample_value("kvobj_hbm_tensors_total") == 1


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; fails in the end rather than hang."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is on another thread
            await asyncio.sleep(0)


def _stream(parts: Parts) -> HostStream:
    stream = parts.copies._lanes[CopyKind.TO_DEVICE]._stream
    assert isinstance(stream, HostStream)
    return stream


async def _tensor(parts: Parts, blob_id: BlobId) -> DeviceChunk:
    chunk = await parts.tier.get_tensor(blob_id)
    assert chunk is not None
    return chunk
