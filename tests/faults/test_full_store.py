"""A full disk and a full arena: reads go on, PUT is told 507 or 503, deletes work, and room that comes back is used.

The disk is full by the nvme tier's capacity, and where a small file system can be mounted also for real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raw_http import RawConnection, RawS3

OBJECT_BYTES = 4 * MIB
SMALL_DISK_BYTES = 96 * MIB
FULL = {503, 507}


def body_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * (OBJECT_BYTES // 4)


@contextmanager
def small_file_system(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True)
    size = f"size={SMALL_DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@pytest.fixture(params=["capacity", *(["file system"] if can_mount() else [])])
def full_disk_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ExitStack() as stack:
        if request.param == "capacity":
            place, capacity = tmp_path / "nvme", SMALL_DISK_BYTES
        else:
            place, capacity = stack.enter_context(small_file_system(tmp_path / "disk")) / "nvme", 1024 * MIB
        settings = ServerSettings(
            dram_bytes=64 * MIB,
            nvme_bytes=capacity,
            nvme_path=place,
            nvme_segment_bytes=16 * MIB,
            buckets=(BucketSetting("plain"), BucketSetting("chunks-local", "kv", "local")),
            sections={"limits": {"reserve_timeout": '"1 s"'}},
        )
        yield stack.enter_context(ServerProcess(tmp_path / "server", settings))


def fill(raw: RawS3, bucket: str) -> list[int]:
    """PUT objects until one is refused; the numbers of those that were taken."""
    taken: list[int] = []
    for number in range(SMALL_DISK_BYTES // OBJECT_BYTES * 2):
        reply = raw.request("PUT", f"/{bucket}/object-{number}", body_of(number))
        if reply.status != 200:
            assert reply.status in FULL, reply
            assert reply.code, "a refusal is an S3 error"
            return taken
        taken.append(number)
    raise AssertionError("the disk never became full")


def is_taken(raw: RawS3, path: str, body: bytes) -> bool:
    reply = raw.request("PUT", path, body)
    assert reply.status == 200 or reply.status in FULL, reply
    return reply.status == 200


def test_a_full_disk_is_read_from_deleted_from_and_recovers(full_disk_server: ServerProcess) -> None:
    server = full_disk_server
    pid = server.pid
    with server.raw(timeout_seconds=60) as raw:
        taken = fill(raw, "plain")
        assert len(taken) > 5
        for number in taken:
            reply = raw.request("GET", f"/plain/object-{number}")
            assert reply.status == 200
            assert reply.body == body_of(number)
        assert raw.request("GET", "/plain", query={"list-type": "2"}, payload=None).body.count(b"<Key>") == len(taken)
        refused = raw.request("PUT", "/plain/object-0", body_of(99))
        assert refused.status in FULL
        assert raw.request("GET", "/plain/object-0").body == body_of(0), "a refused overwrite leaves the old object"
        for number in taken[: len(taken) // 2]:
            assert raw.request("DELETE", f"/plain/object-{number}").status == 204
        wait_until(lambda: is_taken(raw, "/plain/after", body_of(7)), timeout_seconds=30, what="room after the deletes")
        assert raw.request("GET", "/plain/after").body == body_of(7)
        for number in taken[len(taken) // 2 :]:
            assert raw.request("GET", f"/plain/object-{number}").body == body_of(number)
    assert server.pid == pid
    server.terminate()
    server.start()
    with server.raw() as raw:
        assert raw.request("GET", "/plain/after").body == body_of(7)


@pytest.fixture
def small_arena_server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        buckets=(BucketSetting("plain"), BucketSetting("chunks", "kv", "memory")),
        sections={"limits": {"reserve_timeout": '"1 s"', "progress_timeout": '"60 s"'}},
    )
    with ServerProcess(tmp_path, settings) as running:
        yield running


def stalled_upload(raw: RawS3, path: str, size: int) -> RawConnection:
    """An upload that holds its room: the head and one byte, once the server has said that it wants the rest."""
    headers = {"content-length": str(size), "expect": "100-continue"}
    connection = raw.connect()
    connection.send(raw.head("PUT", path, headers=headers).head)
    return connection


def test_a_full_arena_says_slow_down_and_reads_go_on(small_arena_server: ServerProcess) -> None:
    server = small_arena_server
    with server.raw() as raw, ExitStack() as stack:
        assert raw.request("PUT", "/plain/warm", body_of(1)).status == 200
        before = server.settled_occupancy()
        held = 0
        for number in range(8):
            connection = stack.enter_context(stalled_upload(raw, f"/plain/stalled-{number}", 16 * MIB))
            reply = connection.read_reply()
            if reply.status == 100:
                held += 1
                continue
            assert reply.status in FULL, reply
            assert reply.code in {"SlowDown", "ServiceUnavailable"}
            break
        else:
            raise AssertionError("eight uploads of 16 MiB were let into an arena of 64 MiB")
        assert held >= 2
        # The arena is full of uploads: what is stored can still be read, and named, and deleted.
        assert raw.request("GET", "/plain/warm").body == body_of(1)
        assert raw.request("HEAD", "/plain/warm").status == 200
        assert raw.request("DELETE", "/plain/absent").status == 204
        stack.close()  # the stalled clients vanish
        server.wait_for_occupancy(before)
        wait_until(lambda: is_taken(raw, "/plain/after", body_of(2)), timeout_seconds=30, what="room in the arena")
        assert raw.request("GET", "/plain/after").body == body_of(2)


def test_what_is_only_in_memory_is_written_down_to_make_room(small_arena_server: ServerProcess) -> None:
    with small_arena_server.raw(timeout_seconds=60) as raw:
        for number in range(60):  # 240 MiB through an arena of 64
            wait_until(
                lambda number=number: is_taken(raw, f"/chunks/object-{number}", body_of(number)),  # type: ignore[misc]
                timeout_seconds=30,
                what="write-behind to make room",
            )
        for number in range(60):
            assert raw.request("GET", f"/chunks/object-{number}").body == body_of(number)
