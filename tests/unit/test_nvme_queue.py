"""Transfers that the kernel carries out by itself: what it refuses, what fails, what is given up, and what is still under way."""

import asyncio
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from fakes_nvme import KIB, MIB, NAMES, FaultyQueue, Gate, NvmeNode, blob, failing, plain_of
from nvme_read_faults import NvmeReadFaults

from kvobj.errors import StoreFullError, TierUnavailableError
from kvobj.tiers.nvme import NvmeTimeouts, kernel_queue, segment_file
from kvobj.tiers.nvme.kernel_queue import SLOTS, KernelQueue, Kind
from kvobj.tiers.protocol import ByteRange


def knows_nowait(directory: Path) -> bool:
    """Whether files in this directory know writes that do not wait at all."""
    with (
        tempfile.TemporaryFile(dir=directory) as file,
        mmap.mmap(-1, mmap.PAGESIZE) as page,
    ):
        file.write(page)
        file.flush()
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            os.pwritev(file.fileno(), [page], 0, os.RWF_NOWAIT)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return True


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    (tmp_path / "node").mkdir()
    node = NvmeNode(tmp_path / "node", shm_path)
    node.disk.has_queue = True
    node.disk.moves_itself = not knows_nowait(tmp_path)
    yield node
    await node.stop()


def queue_of(node: NvmeNode) -> FaultyQueue:
    assert node.disk.queue is not None
    return node.disk.queue


async def start_taking(node: NvmeNode, size_bytes: int = MIB, *, timeouts: NvmeTimeouts | None = None) -> None:
    """A node whose next blobs, so many bytes, lie where the kernel writes without a thread: what spans two runs of blocks it
    refuses. On file systems that refuse all of them, transfers are made by system calls that wait."""
    for moves_itself in (node.disk.moves_itself, True):
        node.disk.moves_itself = moves_itself
        await node.start(capacity_bytes=32 * MIB, segment_bytes=32 * MIB, timeouts=timeouts)
        for sequence in range(90, 96):
            node.disk.calls.clear()
            await node.put(sequence, size_bytes)
            if not node.disk.calls:
                await node.tier.delete([blob(sequence)])
                queue_of(node).begun.clear()
                return
        await node.tier.delete([blob(sequence) for sequence in range(90, 96)])
        await node.stop()
    pytest.fail("no write without a thread")


async def used(node: NvmeNode) -> int:
    return (await node.tier.usage()).used_bytes


class Telling:
    """Tells of a number of transfers of one kind something else than their outcome."""

    def __init__(self, kind: Kind, told: int, *, times: int = 1000) -> None:
        self._kind, self._told, self._times = kind, told, times

    def __call__(self, kind: Kind, result: int) -> int:
        if kind is not self._kind or not self._times:
            return result
        self._times -= 1
        return self._told


class TestWithoutThreads:
    @pytest.mark.parametrize("size_bytes", [100 * KIB, MIB, 3 * MIB, 4 * MIB])
    async def test_a_short_frame_needs_no_thread(self, node: NvmeNode, size_bytes: int) -> None:
        await start_taking(node, size_bytes)
        encoded = await node.put(1, size_bytes)
        assert await node.read(1) == encoded
        assert await node.read(1, ByteRange(5000, 90_001)) == encoded[5000:90_001]
        assert node.disk.calls == []
        assert queue_of(node).begun.count(Kind.WRITE_DURABLY) == 1
        assert node.tier.transfers == "kernel"
        await node.stop()
        await node.start()
        assert await node.read(1) == encoded

    async def test_a_long_frame_is_left_to_threads(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, 8 * MIB)
        assert await node.read(1) == encoded
        assert queue_of(node).begun == []

    async def test_the_first_bytes_are_there_before_the_last_are_read(self, node: NvmeNode) -> None:
        await start_taking(node, 4 * MIB)
        encoded = await node.put(1, 4 * MIB)
        gate = node.disk.fail["read"] = Gate()
        queue_of(node).begun.clear()
        queue_of(node).refuse = lambda _kind: bool(queue_of(node).begun)  # all but the first piece wait on threads
        frame = await node.tier.get(blob(1))
        assert frame is not None
        await frame.ready(256 * KIB)
        assert frame.progress is not None
        assert not frame.progress.done
        assert frame.view[: 256 * KIB] == encoded[: 256 * KIB]
        gate.open()
        await frame.complete()
        assert frame.view == encoded
        frame.release()

    async def test_more_transfers_than_slots_are_all_done(self, node: NvmeNode) -> None:
        await node.start()
        held = dict(enumerate(await asyncio.gather(*(node.put(n, 100 * KIB) for n in range(3 * SLOTS)))))
        read = await asyncio.gather(*(node.read(n) for n in held))
        assert dict(enumerate(read)) == held

    async def test_what_finds_no_slot_does_not_wait_for_one(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, MIB)
        queue = queue_of(node)
        queue.holds = True
        held = [await node.tier.get(blob(1)) for _ in range(SLOTS)]
        assert await node.read(1) == encoded
        queue.let_go()
        for frame in held:
            assert frame is not None
            await frame.complete()
            assert frame.view == encoded
            frame.release()


class TestRefusals:
    @pytest.mark.parametrize("kind", [Kind.WRITE_DURABLY, Kind.READ])
    @pytest.mark.parametrize("told", [-errno.EAGAIN, -errno.EOPNOTSUPP, -errno.EINVAL, 0, 8192])
    async def test_what_the_kernel_refuses_or_stops_short_is_done_by_threads_and_not_soon_asked_for_again(
        self, node: NvmeNode, told: int, kind: Kind
    ) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.result = Telling(kind, told)
        encoded = await node.put(1, MIB)
        assert await node.read(1) == encoded
        assert ({"write", "flush"} if kind is Kind.WRITE_DURABLY else {"read"}) <= set(node.disk.calls)
        assert not any(segment.failed for segment in node.tier.segments)
        queue.result = None
        is_final = told in {-errno.EOPNOTSUPP, -errno.EINVAL}
        asked = len(queue.begun)
        if kind is Kind.READ:
            assert await node.read(1) == encoded
            assert len(queue.begun) == asked
        else:
            await node.tier.delete([blob(1)])
            await node.put(1, MIB)
            assert len(queue.begun) == asked
        assert await node.read(1, ByteRange(5000, 90_001)) == encoded[5000:90_001]
        assert (len(queue.begun) > asked) == (not is_final)

    @pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
    async def test_a_kernel_that_knows_no_such_transfers_is_asked_once_a_segment(
        self, node: NvmeNode, error: int
    ) -> None:
        await node.start()
        queue = queue_of(node)
        queue.refuse = lambda _kind: True
        queue.refusal = error
        held = {n: await node.put(n, MIB) for n in range(3)}
        assert {n: await node.read(n) for n in held} == held
        assert queue.asked == [Kind.WRITE_DURABLY]
        assert node.tier.transfers == "threads: this file system makes no transfer without waiting"

    async def test_reads_of_a_file_that_the_kernel_knows_no_such_transfers_of_ask_once(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, MIB)
        queue = queue_of(node)
        queue.asked.clear()
        queue.refuse = lambda _kind: True
        queue.refusal = errno.EOPNOTSUPP
        assert [await node.read(1) for _ in range(3)] == [encoded] * 3
        assert queue.asked == [Kind.READ]

    async def test_what_was_refused_for_the_moment_goes_to_the_kernel_again(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, MIB)
        queue = queue_of(node)
        queue.result = Telling(Kind.READ, -errno.EAGAIN, times=1)
        queue.asked.clear()
        node.disk.calls.clear()
        for _ in range(10):
            assert await node.read(1) == encoded
        assert node.disk.calls.count("read") == 1 + segment_file._SKIPPED_FIRST
        assert len(queue.asked) == 10 - segment_file._SKIPPED_FIRST

    async def test_what_is_refused_each_time_is_asked_for_ever_more_seldom_but_never_given_up(
        self, node: NvmeNode
    ) -> None:
        await node.start()
        file = node.tier._space._segments[0].file
        asked_at = []
        for ask in range(1000):
            if file.may_queue(4096, 8192, writes=True):
                asked_at.append(ask)
                file.note_outcome(4096, 8192, -errno.EAGAIN, writes=True)
        gaps = [later - earlier - 1 for earlier, later in pairwise(asked_at)]
        assert gaps[:6] == [2, 4, 8, 16, 32, 64]
        assert set(gaps[6:]) == {64}
        assert file.may_queue(4096, 8192, writes=False)
        assert file.may_queue(8192, 8192, writes=True)

    async def test_a_transfer_that_was_done_is_no_longer_held_to_be_refused(self, node: NvmeNode) -> None:
        await node.start()
        file = node.tier._space._segments[0].file
        for refused in (-errno.EAGAIN, 4096):
            file.note_outcome(4096, 8192, refused, writes=True)
            assert not file.may_queue(4096, 8192, writes=True)
            file.note_outcome(4096, 4096, 4096, writes=True)  # a shorter one says nothing
            assert not file.may_queue(4096, 8192, writes=True)
            file.note_outcome(4096, 8192, 8192, writes=True)
            assert file.refused == {}

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EINTR, errno.EIO])
    async def test_what_failed_for_other_reasons_is_not_remembered(self, node: NvmeNode, error: int) -> None:
        await node.start()
        file = node.tier._space._segments[0].file
        file.note_outcome(4096, 8192, -error, writes=True)
        assert file.may_queue(4096, 8192, writes=True)
        assert file.refused == {}

    async def test_remembered_refusals_are_bounded(self, node: NvmeNode) -> None:
        await node.start()
        file = node.tier._space._segments[0].file
        for offset in range(0, 10_000 * 4096, 4096):
            file.note_outcome(offset, 8192, -errno.EAGAIN, writes=True)
            assert len(file.refused) <= 4096
        offset = 9_999 * 4096
        may_queue = [file.may_queue(offset, length, writes=True) for length in (4096, 8192, 12288)]
        assert may_queue == [True, False, False]

    @pytest.mark.parametrize("kind", list(Kind))
    async def test_what_cannot_be_begun_is_done_by_threads(self, node: NvmeNode, kind: Kind) -> None:
        await node.start()
        queue_of(node).refuse = lambda asked: asked is kind
        held = dict(enumerate(await asyncio.gather(*(node.put(n, 300 * KIB) for n in range(8)))))
        assert {n: await node.read(n) for n in held} == held

    async def test_a_flush_that_the_kernel_refuses_is_done_by_a_thread(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.refuse = lambda kind: kind is Kind.FLUSH
        queue.refusal = errno.EINVAL
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
        await queue.reached(4)
        queue.let_go()
        held = dict(enumerate(await asyncio.gather(*puts)))
        assert {n: await node.read(n) for n in held} == held
        assert "flush" in node.disk.calls
        assert not any(segment.failed for segment in node.tier.segments)

    async def test_buffered_files_are_never_given_to_the_kernel_s_queue(self, node: NvmeNode) -> None:
        node.disk.refuse_direct_at_open = True
        await node.start()
        encoded = await node.put(1, MIB)
        assert await node.read(1) == encoded
        assert queue_of(node).begun == []
        assert node.tier.transfers == "threads: buffered I/O"

    async def test_where_the_kernel_gives_no_queue_threads_do_it_all(
        self, node: NvmeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel_queue, "SLOTS", 1 << 24)  # more than any system grants
        await node.start()
        assert node.disk.queue is None
        encoded = await node.put(1, MIB)
        assert await node.read(1) == encoded
        assert {"write", "flush", "read"} <= set(node.disk.calls)
        assert "io_setup" in node.tier.transfers

    async def test_without_native_code_there_is_no_queue(self, node: NvmeNode, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_queue, "library", lambda: None)
        assert KernelQueue.open() is None
        await node.start()
        assert node.tier.transfers.startswith("threads: no native library")


class TestFailures(NvmeReadFaults):
    async def test_a_failing_medium_fails_the_progress_and_leaves_no_pin(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, 4 * MIB)
        for good in range(2):
            left = [good]

            def told(_kind: Kind, result: int, left: list[int] = left) -> int:
                left[0] -= 1
                return result if left[0] >= 0 else -errno.EIO

            queue_of(node).result = told
            with pytest.raises(TierUnavailableError, match="Input/output error"):
                await node.read(1)
        queue_of(node).result = None
        assert await node.read(1) == encoded
        await node.tier.aclose()
        assert node.arena.usage().reserved_bytes == 0

    async def test_a_failed_write_fails_the_segment_and_holds_nothing(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
        encoded = await node.put(1, MIB)
        queue_of(node).result = Telling(Kind.WRITE_DURABLY, -errno.EIO, times=1)
        with pytest.raises(TierUnavailableError):
            await node.put(2, MIB)
        assert (await node.read(2), await node.read(1)) == (None, encoded)
        other = await node.put(3, MIB)
        place = node.place(3)
        assert place is not None
        assert place.segment == 1
        assert await node.read(3) == other
        assert [segment.failed for segment in node.tier.segments] == [True, False]

    async def test_a_full_disk_at_a_write_is_what_the_thread_that_tries_again_says(self, node: NvmeNode) -> None:
        await node.start()
        queue = queue_of(node)
        queue.result = Telling(Kind.WRITE, -errno.ENOSPC)
        # Beside a flush that runs on a thread, writes do not flush themselves.
        gate = node.disk.fail["flush"] = Gate()
        long = asyncio.create_task(node.put(9, 8 * MIB))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        before = await used(node)
        node.disk.fail["write"] = failing(errno.ENOSPC)
        with pytest.raises(StoreFullError):
            await node.put(1, MIB)
        assert (await used(node), await node.read(1)) == (before, None)
        del node.disk.fail["write"]
        short = asyncio.create_task(node.put(1, MIB))
        gate.open()
        await long
        assert await short == await node.read(1)
        assert Kind.WRITE in queue.begun
        assert not any(segment.failed for segment in node.tier.segments)

    @pytest.mark.parametrize("error", [errno.ENOMEM, errno.EINTR, errno.EIO])
    async def test_an_error_that_may_be_the_flush_s_fails_all_beside_it_and_is_the_last(
        self, node: NvmeNode, error: int
    ) -> None:
        await start_taking(node)
        before = await used(node)
        queue = queue_of(node)
        queue.result = Telling(Kind.WRITE_DURABLY, -error, times=1)
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
        await queue.reached(4)
        assert queue.begun == [Kind.WRITE_DURABLY, *[Kind.WRITE] * 3]
        node.disk.calls.clear()
        queue.let_go()
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {TierUnavailableError}
        assert (await used(node), node.arena.usage().reserved_bytes) == (before, 0)
        assert Kind.FLUSH not in queue.asked
        assert node.disk.calls == []
        assert [segment.failed for segment in node.tier.segments] == [True]

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
    async def test_a_full_disk_refuses_all_that_is_not_flushed_yet_and_is_over_when_there_is_room(
        self, node: NvmeNode, error: int
    ) -> None:
        await start_taking(node)
        kept = await node.put(50, MIB)
        before = await used(node)
        queue = queue_of(node)
        queue.begun.clear()
        queue.result = Telling(Kind.WRITE_DURABLY, -error, times=2)
        for _ in range(2):
            queue.holds = True
            puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
            await queue.reached(4)
            assert queue.begun == [Kind.WRITE_DURABLY, *[Kind.WRITE] * 3]
            queue.begun.clear()
            queue.let_go()
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            # Of those beside it nobody knows whether the flush that may have failed was to cover them.
            assert [type(outcome) for outcome in outcomes] == [StoreFullError] * 4
            assert (await used(node), node.arena.usage().reserved_bytes) == (before, 0)
        assert Kind.FLUSH not in queue.asked
        assert not any(segment.failed for segment in node.tier.segments)
        held = {n: await node.put(n, 100 * KIB) for n in range(4)}
        assert {n: await node.read(n) for n in held} == held
        assert await node.read(50) == kept
        assert {place.segment for n in held if (place := node.place(n)) is not None} == {0}

    async def test_what_a_thread_wrote_beside_a_full_disk_is_not_told_durable(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.result = Telling(Kind.WRITE_DURABLY, -errno.ENOSPC, times=1)
        queue.holds = True
        short = asyncio.create_task(node.put(1, MIB))
        await queue.reached(1)
        gate = node.disk.fail["write"] = Gate()
        long = asyncio.create_task(node.put(2, 8 * MIB))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        queue.let_go()
        with pytest.raises(StoreFullError):
            await short
        gate.open()
        with pytest.raises(StoreFullError):
            await long
        assert (await node.read(1), await node.read(2)) == (None, None)
        assert "flush" not in node.disk.calls
        held = {n: await node.put(n, size_bytes) for n, size_bytes in ((1, MIB), (2, 8 * MIB))}
        assert {n: await node.read(n) for n in held} == held

    async def test_a_frame_begun_early_before_the_disk_was_full_is_not_told_durable(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue = queue_of(node)
        frame = await node.make_frame(plain_of(1, 4 * MIB))
        early = node.tier.begin_put(blob(1), frame, head_bytes=512)
        assert early is not None
        early.advance(3 * MIB)
        queue.result = Telling(Kind.WRITE_DURABLY, -errno.ENOSPC, times=1)
        with pytest.raises(StoreFullError):
            await node.put(2, MIB)
        with pytest.raises(StoreFullError):
            await node.tier.put(blob(1), frame, NAMES)
        assert await node.read(1) is None
        await node.tier.put(blob(1), frame, NAMES)
        assert await node.read(1) == bytes(frame.view)
        frame.release()
        assert not any(segment.failed for segment in node.tier.segments)

    @pytest.mark.parametrize(
        "error", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP]
    )
    async def test_whatever_a_flush_ended_in_is_not_tried_again(self, node: NvmeNode, error: int) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.result = Telling(Kind.FLUSH, -error)
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
        await queue.reached(4)
        queue.let_go()
        first, *others = await asyncio.gather(*puts, return_exceptions=True)
        assert isinstance(first, bytes)
        is_full = error in {errno.ENOSPC, errno.EDQUOT}
        assert {type(outcome) for outcome in others} == {StoreFullError if is_full else TierUnavailableError}
        assert queue.asked.count(Kind.FLUSH) == 1
        assert "flush" not in node.disk.calls
        assert [segment.failed for segment in node.tier.segments] == [True]

    async def test_after_a_write_that_was_not_flushed_none_beside_it_is_acknowledged(self, node: NvmeNode) -> None:
        await start_taking(node)
        before = await used(node)
        queue = queue_of(node)
        queue.result = Telling(Kind.WRITE_DURABLY, -errno.EIO, times=1)
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
        await queue.reached(4)
        assert queue.begun == [Kind.WRITE_DURABLY, *[Kind.WRITE] * 3]
        queue.let_go()
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TierUnavailableError] * 4
        assert (await used(node), node.arena.usage().reserved_bytes) == (before, 0)
        assert Kind.FLUSH not in queue.begun
        assert "flush" not in node.disk.calls

    async def test_a_failed_flush_fails_all_who_wait_for_it_and_is_the_last(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.result = Telling(Kind.FLUSH, -errno.EIO, times=1)
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(4)]
        await queue.reached(4)
        queue.let_go()
        first, *others = await asyncio.gather(*puts, return_exceptions=True)
        assert isinstance(first, bytes)
        assert [type(outcome) for outcome in others] == [TierUnavailableError] * 3
        assert await node.read(0) == first
        assert queue.begun.count(Kind.FLUSH) == 1
        assert [segment.failed for segment in node.tier.segments] == [True]

    async def test_names_too_long_for_a_record_are_an_error_and_hold_nothing(self, node: NvmeNode) -> None:
        await start_taking(node)
        before = await used(node)
        names = type(NAMES)(bucket="bucket", key="k" * 5000)
        for _ in range(SLOTS + 1):
            with pytest.raises(ValueError, match="names"):
                await node.put(1, MIB, names=names)
        assert (await used(node), node.arena.usage().reserved_bytes) == (before, 0)
        await node.put(1, MIB)
        assert queue_of(node).begun == [Kind.WRITE_DURABLY]


class TestFlushes:
    async def test_writes_beside_each_other_share_a_flush(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue = queue_of(node)
        queue.holds = True
        puts = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(6)]
        await queue.reached(6)
        assert not any(put.done() for put in puts)
        queue.let_go()
        await asyncio.gather(*puts)
        assert queue.begun[:6] == [Kind.WRITE_DURABLY, *[Kind.WRITE] * 5]
        assert set(queue.begun[6:]) == {Kind.FLUSH}
        assert len(queue.begun[6:]) <= 2

    async def test_a_flush_on_a_thread_covers_what_the_kernel_wrote_meanwhile(self, node: NvmeNode) -> None:
        await start_taking(node)
        gate = node.disk.fail["flush"] = Gate()
        long = asyncio.create_task(node.put(1, 8 * MIB))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        short = asyncio.create_task(node.put(2, MIB))
        queue = queue_of(node)
        queue.holds = True
        await queue.reached(1)
        queue.let_go()
        assert queue.begun == [Kind.WRITE]
        assert not short.done()
        gate.open()
        await asyncio.gather(long, short)
        assert node.disk.calls.count("flush") == 2


class TestGivingUp:
    async def test_a_read_that_nobody_wants_any_more_keeps_its_extent_until_the_kernel_is_done(
        self, node: NvmeNode
    ) -> None:
        await start_taking(node, 4 * MIB)
        before = await used(node)
        await node.put(1, 4 * MIB)
        queue_of(node).holds = True
        frame = await node.tier.get(blob(1))
        assert frame is not None
        waiting = asyncio.create_task(frame.complete())
        await queue_of(node).reached(2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        frame.release()
        await node.tier.delete([blob(1)])
        assert node.arena.usage().reserved_bytes > 0
        assert await used(node) > before
        queue_of(node).let_go()
        await node.tier._tasks.wait(10)
        assert (await used(node), node.arena.usage().reserved_bytes) == (before, 0)

    async def test_a_put_that_nobody_wants_any_more_holds_nothing(self, node: NvmeNode) -> None:
        await start_taking(node)
        before = await used(node)
        queue_of(node).holds = True
        frame = await node.make_frame(plain_of(1, MIB))
        putting = asyncio.create_task(node.tier.put(blob(1), frame, NAMES))
        await queue_of(node).reached(1)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        frame.release()
        assert node.arena.usage().reserved_bytes > 0
        assert await used(node) > before
        queue_of(node).let_go()
        await node.tier.delete([blob(1)])
        assert (await used(node), await node.read(1)) == (before, None)
        assert node.arena.usage().reserved_bytes == 0

    async def test_a_put_that_another_caller_still_wants_goes_on(self, node: NvmeNode) -> None:
        await start_taking(node)
        queue_of(node).holds = True
        frame = await node.make_frame(plain_of(1, MIB))
        first, second = (asyncio.create_task(node.tier.put(blob(1), frame, NAMES)) for _ in range(2))
        await queue_of(node).reached(1)
        first.cancel()
        queue_of(node).let_go()
        await second
        assert await node.read(1) == bytes(frame.view)
        frame.release()
        assert queue_of(node).begun.count(Kind.WRITE_DURABLY) == 1

    async def test_what_hangs_fails_at_its_deadline_and_keeps_its_room_until_it_ends(self, node: NvmeNode) -> None:
        await start_taking(node, timeouts=NvmeTimeouts(io_seconds=0.05))
        await node.put(1, MIB)
        held = await used(node)
        queue_of(node).holds = True
        with pytest.raises(TierUnavailableError, match="deadline"):
            await node.read(1)
        with pytest.raises(TierUnavailableError, match="deadline"):
            await node.put(2, MIB)
        assert await used(node) > held
        assert node.arena.usage().reserved_bytes > 0
        queue_of(node).let_go()
        await node.tier._tasks.wait(10)
        assert (await used(node), node.arena.usage().reserved_bytes) == (held, 0)
        assert await node.put(2, MIB) == await node.read(2)

    @pytest.mark.parametrize("has_queue", [True, False])
    async def test_a_delete_waits_for_a_hanging_put_no_longer_than_its_caller_does(
        self, node: NvmeNode, *, has_queue: bool
    ) -> None:
        node.disk.has_queue = has_queue
        await node.start(capacity_bytes=32 * MIB, segment_bytes=32 * MIB, timeouts=NvmeTimeouts(io_seconds=0.1))
        gate = node.disk.fail["write"] = Gate()
        if has_queue:
            queue_of(node).holds = True
        putting = asyncio.create_task(node.put(2, MIB))
        if has_queue:
            await queue_of(node).reached(1)
        else:
            assert await asyncio.to_thread(gate.reached.wait, 10)
        deleting = asyncio.create_task(node.tier.delete([blob(2)]))
        with pytest.raises(TierUnavailableError, match="deadline"):
            await putting
        await deleting
        assert await used(node) > 0
        gate.open()
        if has_queue:
            queue_of(node).let_go()
        await node.tier._tasks.wait(10)
        assert (await used(node), node.arena.usage().reserved_bytes) == (0, 0)
        assert await node.read(2) is None

    async def test_a_late_end_of_a_hanging_put_is_not_taken_for_the_next_one_s(self, node: NvmeNode) -> None:
        await start_taking(node, timeouts=NvmeTimeouts(io_seconds=0.5))
        before = await used(node)
        queue = queue_of(node)
        queue.holds = True
        with pytest.raises(TierUnavailableError, match="deadline"):
            await node.put(2, MIB)
        await queue.reached(1)
        late, queue._held = queue._held, []
        node.tier._placing._io_timeout_seconds = 30
        held = await used(node) - before
        again = asyncio.create_task(node.put(2, MIB))
        await queue.reached(1)
        assert await used(node) == before + 2 * held
        queue._held, mine = late, queue._held
        queue.let_go()
        assert await used(node) == before + held
        assert not again.done()
        assert node.place(2) is None
        queue._held = mine
        queue.let_go()
        assert await again == await node.read(2)
        assert (await used(node), node.arena.usage().reserved_bytes) == (before + held, 0)

    @pytest.mark.parametrize("size_bytes", [MIB, 10 * KIB])
    async def test_a_put_that_cannot_be_begun_leaves_its_id_free(self, node: NvmeNode, size_bytes: int) -> None:
        await node.start(timeouts=NvmeTimeouts(io_seconds=0.3))
        frame = await node.make_frame(plain_of(1, size_bytes))
        frame.release()
        with pytest.raises(RuntimeError, match="released"):
            await node.tier.put(blob(1), frame, NAMES)
        assert await used(node) == 0
        assert await node.put(1, size_bytes) == await node.read(1)

    async def test_a_put_that_finds_no_threads_holds_nothing(self, node: NvmeNode) -> None:
        node.disk.has_queue = False
        await node.start()
        node.tier._io.writers.shutdown()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shutdown"):
                await node.put(1, MIB)
            assert (await used(node), node.arena.usage().reserved_bytes) == (0, 0)


class TestClosing:
    async def test_a_closing_tier_waits_for_what_is_under_way(self, node: NvmeNode) -> None:
        await start_taking(node)
        await node.put(1, MIB)
        queue = queue_of(node)
        queue.holds = True
        reading = await node.tier.get(blob(1))
        assert reading is not None
        reading.release()
        putting = asyncio.create_task(node.put(2, MIB))
        await queue.reached(2)
        closing = asyncio.create_task(node.tier.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        assert not queue.is_ended
        queue.let_go()
        await closing
        assert queue.is_ended
        await putting
        assert node.arena.usage().reserved_bytes == 0

    async def test_what_never_ends_is_left_behind_with_its_extent(self, node: NvmeNode) -> None:
        await start_taking(node, timeouts=NvmeTimeouts(io_seconds=0.05))
        await node.put(1, MIB)
        queue = queue_of(node)
        queue.holds = True
        reading = await node.tier.get(blob(1))
        assert reading is not None
        reading.release()
        await node.tier.aclose()
        assert not queue.is_ended
        assert node.arena.usage().reserved_bytes > 0
        queue.let_go()
        assert node.arena.usage().reserved_bytes == 0


async def test_an_outcome_that_its_taker_fails_over_holds_up_no_other(tmp_path: Path) -> None:
    queue = KernelQueue.open()
    assert queue is not None
    loop = asyncio.get_running_loop()
    told: asyncio.Future[object] = loop.create_future()
    loop.set_exception_handler(lambda _loop, context: told.set_result(context["exception"]))
    (tmp_path / "file").write_bytes(b"x" * 8192)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    ended: asyncio.Future[int] = loop.create_future()
    failure = ValueError("not taken")

    def fail(_result: int) -> None:
        raise failure

    takers = [fail, ended.set_result]
    for on_done in takers:
        slot = queue.take()
        assert slot is not None
        assert queue.begin(slot, Kind.FLUSH, descriptor, on_done) == 0  # which every file system knows
    assert await ended == 0
    assert await told is failure
    taken = [queue.take() for _ in range(SLOTS + 1)]
    assert taken.count(None) == 1
    queue.close()
    queue.close()
    os.close(descriptor)
