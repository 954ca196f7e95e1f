import asyncio

import pytest

from kvobj.arena import Extent, Pin, PinnedFrame, Progress
from kvobj.arena.extent import Hold


def pin_of(length: int = 8192) -> Pin:
    memory = memoryview(bytearray(range(256)) * (length // 256))
    return Pin(Hold(Extent(0, 0, length, 1), memory, length, lambda _: None))


async def test_waiters_wake_when_their_bytes_are_there_and_not_before() -> None:
    progress = Progress(100)
    half = asyncio.create_task(progress.wait(50))
    full = asyncio.create_task(progress.wait(1000))
    await asyncio.sleep(0)
    progress.advance(49)
    await asyncio.sleep(0)
    assert not half.done()
    progress.advance(50)
    await half
    assert not full.done()
    assert not progress.done
    progress.advance(100)
    await full
    assert progress.done


async def test_failure_reaches_waiters_now_and_later_but_what_is_there_stays() -> None:
    progress = Progress(100)
    waiting = asyncio.create_task(progress.wait(50))
    await asyncio.sleep(0)
    progress.advance(10)
    progress.fail(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await waiting
    with pytest.raises(OSError, match="gone"):
        await progress.wait(11)
    await progress.wait(10)


async def test_a_cancelled_waiter_does_not_disturb_the_others() -> None:
    progress = Progress(10)
    first = asyncio.create_task(progress.wait(10))
    second = asyncio.create_task(progress.wait(10))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    progress.advance(10)
    await second


def test_a_frame_view_is_read_only_and_its_piece_shows_the_same_bytes() -> None:
    frame = PinnedFrame(pin_of(), frame_bytes=1000, tier="dram")
    assert frame.is_whole
    with pytest.raises(TypeError):
        frame.view[0] = 1
    frame.writable[300] = 7
    piece = frame.piece(300, 10)
    assert (bytes(piece.view[:1]), len(piece.view), piece.start, piece.tier) == (b"\7", 10, 300, "dram")
    assert not piece.is_whole
    frame.release()
    assert piece.pin.pins == 1
    piece.release()


def test_a_piece_read_from_its_aligned_start_knows_its_origin() -> None:
    frame = PinnedFrame(pin_of(4096), frame_bytes=100_000, start=8200, size=100, origin=8192)
    assert bytes(frame.view[:2]) == b"\x08\x09"
    assert frame.share().view == frame.view


@pytest.mark.parametrize(("start", "size", "origin"), [(0, 9000, 0), (10, 5, 20), (995, 10, 0), (0, -1, 0)])
def test_bytes_outside_frame_or_extent_are_refused(start: int, size: int, origin: int) -> None:
    with pytest.raises(ValueError, match="is not in frame"):
        PinnedFrame(pin_of(), frame_bytes=1000 if size != 9000 else 9000, start=start, size=size, origin=origin)


async def test_ready_and_complete_wait_for_the_extent_to_be_filled_that_far() -> None:
    progress = Progress(4096)
    frame = PinnedFrame(pin_of(4096), frame_bytes=50_000, start=8200, size=100, origin=8192, progress=progress)
    ready = asyncio.create_task(frame.ready(50))
    complete = asyncio.create_task(frame.complete())
    await asyncio.sleep(0)
    progress.advance(57)
    await asyncio.sleep(0)
    assert not ready.done()
    progress.advance(58)
    await ready
    assert not complete.done()
    progress.advance(4096)
    await complete
