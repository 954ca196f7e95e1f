"""What a worker keeps of what it read a moment ago: when it does, what it then answers by itself, and what it must not."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec
import pytest
from module_paths import ModulePaths
from raw_http import RawConnection, RawReply, RawS3
from server_process import MIB, ServerProcess, wait_until
from worker_server import pid_behind, wait_for_workers, worker_server

from kvobj.arena import Extent, Pin, PinnedFrame
from kvobj.arena.extent import Hold
from kvobj.catalog.rows import BlobRef, Durability, ObjectRow, ObjectState
from kvobj.workers.kept_frames import Keeping, KeptFrames

FRAME_BYTES: Final = 8192


def row_of(blob_id: bytes, *, codec: str = "raw", blobs: int = 1) -> ObjectRow:
    blob = BlobRef(blob_id, 4000, 4096, None, codec)
    return ObjectRow("b", blob_id.hex(), (blob,) * blobs, 4000 * blobs, "e", 1, "u", Durability.MEMORY)


class Kept:
    """Kept frames, how often each pin was let go, and what was counted."""

    def __init__(self, *, frames: int = 4, seconds: float = 60.0) -> None:
        self.released: list[int] = []
        self.counted: list[tuple[int, int]] = []
        self.was_counted = asyncio.Event()
        self.frames = KeptFrames(Keeping(frames * FRAME_BYTES, seconds), count_hits=self._count)

    def _count(self, reads: int, size_bytes: int) -> None:
        self.counted.append((reads, size_bytes))
        self.was_counted.set()

    def open(self, row: ObjectRow, *, ago: float = 0.0, tier: str = "dram", start: int = 0) -> None:
        """Open the row's frame once, and let the reader's own pin go."""
        memory = memoryview(bytearray(FRAME_BYTES))
        number = row.blobs[0].blob_id[0]

        def released(hold: Hold) -> None:
            if not hold.pins:
                self.released.append(number)

        pin = Pin(Hold(Extent(0, 0, FRAME_BYTES, number), memory, FRAME_BYTES, released))
        frame = PinnedFrame(pin, frame_bytes=4096, start=start, tier=tier)
        self.frames.note(row, frame, asyncio.get_running_loop().time() - ago)
        frame.release()


async def test_a_frame_is_kept_from_the_second_time_on_that_it_is_opened() -> None:
    kept, row = Kept(), row_of(b"\1")
    kept.open(row)
    assert kept.frames.find(row) is None
    assert kept.released == [1]
    kept.open(row)
    assert kept.frames.find(row) is not None
    assert kept.released == [1]
    kept.frames.clear()
    assert kept.released == [1, 1]
    assert (len(kept.frames), kept.frames.size_bytes) == (0, 0)


async def test_what_is_opened_again_long_after_is_not_kept() -> None:
    kept, row = Kept(seconds=1.0), row_of(b"\1")
    kept.open(row, ago=10.0)
    kept.open(row, ago=0.0)
    assert kept.frames.find(row) is None
    kept.open(row)
    assert kept.frames.find(row) is not None
    kept.frames.clear()


async def test_what_is_kept_is_read_until_its_time_is_over_and_then_given_back_by_itself() -> None:
    kept, row = Kept(seconds=0.2), row_of(b"\1")
    kept.open(row)
    kept.open(row)
    kept.frames.count(4000)
    async with asyncio.timeout(10):
        await kept.was_counted.wait()
    assert kept.frames.find(row) is None
    assert (len(kept.frames), kept.counted, kept.released) == (0, [(1, 4000)], [1, 1])


async def test_a_frame_whose_time_is_over_is_not_read_before_it_is_given_back() -> None:
    kept, row = Kept(seconds=1.0), row_of(b"\1")
    kept.open(row, ago=1.5)
    kept.open(row, ago=1.2)
    assert len(kept.frames) == 1
    assert kept.frames.find(row) is None
    kept.frames.clear()


async def test_no_more_is_kept_than_there_is_room_for_and_the_oldest_goes_first() -> None:
    kept, rows = Kept(frames=2), [row_of(bytes([number])) for number in (1, 2, 3)]
    for row in rows:
        kept.open(row)
        kept.open(row)
    assert [kept.frames.find(row) is not None for row in rows] == [False, True, True]
    assert kept.frames.size_bytes == 2 * FRAME_BYTES
    kept.frames.clear()
    assert sorted(kept.released) == [1, 1, 2, 2, 3, 3]
    small = Kept(frames=0)
    for _ in range(3):
        small.open(rows[0])
    assert not len(small.frames)


@pytest.mark.parametrize(
    ("row", "tier", "start"),
    [
        (msgspec.structs.replace(row_of(b"\1"), state=ObjectState.CONDEMNED), "dram", 0),
        (row_of(b"\1", blobs=2), "dram", 0),
        (row_of(b"\1", codec="stored:x3"), "dram", 0),
        (row_of(b"\1"), "nvme", 0),
        (row_of(b"\1"), "dram", 4),
    ],
    ids=["hidden", "of two blobs", "as it is stored", "from disk", "a piece"],
)
async def test_only_whole_frames_in_memory_of_live_objects_of_one_blob_are_kept(
    row: ObjectRow, tier: str, start: int
) -> None:
    kept = Kept()
    for _ in range(3):
        kept.open(row, tier=tier, start=start)
    assert kept.frames.find(row) is None
    assert not len(kept.frames)


async def test_a_row_that_is_hidden_now_is_not_read_though_its_frame_is_kept() -> None:
    kept, row = Kept(), row_of(b"\1")
    kept.open(row)
    kept.open(row)
    assert kept.frames.find(msgspec.structs.replace(row, state=ObjectState.CONDEMNED)) is None
    kept.frames.clear()


def test_frames_are_kept_for_a_small_part_of_the_grace_time_and_of_dram() -> None:
    assert Keeping.of(dram_bytes=8 * MIB, grace_seconds=30.0, workers=4) == Keeping(MIB // 4, 0.5)
    assert Keeping.of(dram_bytes=8 * MIB, grace_seconds=2.0, workers=1) == Keeping(MIB, 0.2)
    assert Keeping.of(dram_bytes=8 * MIB, grace_seconds=0.0, workers=1).seconds == 0


# -- a real server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with worker_server(module_paths.mktemp("kept"), dram_bytes=256 * MIB) as running:
        yield running


def wait_for_nothing_kept(server: ServerProcess) -> None:
    wait_until(
        lambda: server.status()["queues"]["blobs_in_use"] == 0, timeout_seconds=10, what="frames to be given back"
    )


class Asking:
    """Two connections, each to another worker."""

    def __init__(self, server: ServerProcess, signer: RawS3) -> None:
        self._signer = signer
        self.one = RawConnection(server.host, server.port)
        first = pid_behind(server, self.one)
        self.other = RawConnection(server.host, server.port)
        while pid_behind(server, self.other) == first:
            self.other.close()
            self.other = RawConnection(server.host, server.port)

    def close(self) -> None:
        self.one.close()
        self.other.close()

    def ask(self, connection: RawConnection, method: str, path: str, body: bytes = b"", **headers: str) -> RawReply:
        if method == "PUT":
            headers["content-length"] = str(len(body))
        connection.send(self._signer.head(method, path, headers=headers).head + body)
        return connection.read_reply(has_body=method != "HEAD")


@pytest.fixture
def asking(server: ServerProcess) -> Iterator[Asking]:
    with server.raw() as signer:
        both = Asking(server, signer)
        yield both
        both.close()


@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_what_is_read_again_and_again_is_answered_without_the_store_process(
    server: ServerProcess, asking: Asking, size_bytes: int
) -> None:
    """It is stopped meanwhile. Between two of its answers a loaded machine may let more time pass than frames are kept."""
    path, body = f"/plain/again-{size_bytes}", os.urandom(size_bytes)
    assert asking.ask(asking.one, "PUT", path, body).status == 200

    def is_answered_alone() -> bool:
        for _ in range(4):
            assert asking.ask(asking.one, "GET", path).body == body
        with RawS3(server.host, server.port, server.credentials()) as signer:
            head = signer.head("GET", path).head
        os.kill(server.pid, signal.SIGSTOP)
        try:
            asking.one.send(head)
            asking.one.limit(0.3)
            reply = asking.one.read_reply()
        except TimeoutError:
            os.kill(server.pid, signal.SIGCONT)
            asking.one.limit(30.0)
            assert asking.one.read_reply().body == body
            return False
        finally:
            os.kill(server.pid, signal.SIGCONT)
            asking.one.limit(30.0)
        assert (reply.status, reply.body, reply.headers["x-kvobj-tier"]) == (200, body, "dram")
        return True

    wait_until(is_answered_alone, timeout_seconds=30, what="a read that asks nobody")


@pytest.mark.parametrize("bucket", ["plain", "cache"])
@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_what_another_worker_deletes_is_gone_at_once_though_it_is_kept(
    asking: Asking, bucket: str, size_bytes: int
) -> None:
    for number in range(20):
        path, body = f"/{bucket}/gone-{size_bytes}-{number}", os.urandom(size_bytes)
        assert asking.ask(asking.other, "PUT", path, body).status == 200
        for _ in range(5):
            assert asking.ask(asking.one, "GET", path).body == body
        assert asking.ask(asking.other, "DELETE", path).status == 204
        assert asking.ask(asking.one, "GET", path).status == 404
        assert asking.ask(asking.one, "HEAD", path).status == 404


@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_what_another_worker_replaces_is_read_anew_at_once_though_it_is_kept(asking: Asking, size_bytes: int) -> None:
    path = f"/plain/replaced-{size_bytes}"
    for _ in range(20):
        body = os.urandom(size_bytes)
        assert asking.ask(asking.other, "PUT", path, body).status == 200
        for _ in range(5):
            assert asking.ask(asking.one, "GET", path).body == body


def test_ranges_and_heads_of_what_is_kept_say_what_they_say_of_all_else(asking: Asking) -> None:
    body = os.urandom(300_000)
    asking.ask(asking.one, "PUT", "/cache/parts", body)
    first = asking.ask(asking.one, "GET", "/cache/parts")
    head = asking.ask(asking.one, "HEAD", "/cache/parts")
    told = ("etag", "last-modified", "content-type", "content-length", "x-kvobj-tier")
    for _ in range(5):
        again = asking.ask(asking.one, "GET", "/cache/parts")
        assert (again.status, again.body) == (200, body)
        assert [again.headers.get(name) for name in told] == [first.headers.get(name) for name in told]
        also = asking.ask(asking.one, "HEAD", "/cache/parts")
        assert [also.headers.get(name) for name in told[:4]] == [head.headers.get(name) for name in told[:4]]
    for start in (0, 1, 4096, 299_999):
        for _ in range(3):
            part = asking.ask(asking.one, "GET", "/cache/parts", range=f"bytes={start}-{start + 9999}")
            assert (part.status, part.body) == (206, body[start : start + 10_000])


def test_reads_of_what_is_kept_are_counted_as_reads_of_dram(server: ServerProcess, asking: Asking) -> None:
    def hits() -> float:
        with RawConnection(server.host, server.admin_port) as admin:
            admin.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            page = admin.read_reply().body.decode()
        found = re.search(r'^kvobj_tier_gets_total\{outcome="hit",tier="dram"\} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def all_are_counted(wanted: float) -> bool:
        return hits() == wanted

    wait_for_nothing_kept(server)  # reads are counted by then: a test before may have left some
    for path, size_bytes in (("/plain/counted-short", 100), ("/plain/counted-long", 100_000)):
        body = os.urandom(size_bytes)
        assert asking.ask(asking.one, "PUT", path, body).status == 200
        wanted = hits() + 200
        for _ in range(200):
            assert asking.ask(asking.one, "GET", path).body == body
        wait_until(partial(all_are_counted, wanted), timeout_seconds=10, what="all reads to be counted")


def test_nothing_is_kept_for_long_when_nobody_asks(server: ServerProcess, asking: Asking) -> None:
    asking.ask(asking.one, "PUT", "/cache/held", os.urandom(MIB))
    for connection in (asking.one, asking.other) * 20:
        assert asking.ask(connection, "GET", "/cache/held").status == 200
    assert asking.ask(asking.one, "DELETE", "/cache/held").status == 204
    wait_for_nothing_kept(server)


def test_a_worker_that_is_killed_lets_go_of_what_it_kept(server: ServerProcess) -> None:
    with server.raw() as raw:
        assert raw.request("PUT", "/kept/long", os.urandom(3 * MIB)).status == 200
        with RawConnection(server.host, server.port) as connection:
            victim = pid_behind(server, connection)
            for _ in range(5):
                connection.send(raw.head("GET", "/kept/long").head)
                assert connection.read_reply().status == 200
            os.kill(victim, signal.SIGKILL)
    wait_for_nothing_kept(server)
    wait_for_workers(server, without={victim})
