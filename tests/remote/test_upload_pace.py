"""Uploads that nobody waits for and readers: how much may be begun, and when."""

from __future__ import annotations

from kvobj.store.remote_pace import BUSY_BYTES_PER_SECOND, DRAIN_SECONDS, PACED_BYTES_PER_SECOND, UploadPace

MIB = 2**20


def begun_in(
    pace: UploadPace, seconds: float, *, read_bytes: int, queued_bytes: int = 0, queued: int = 0, at: float = 1000.0
) -> int:
    """Bytes of uploads of 8 MiB that are begun while so much is read in every 10 ms."""
    begun, step = 0, 0.01
    for number in range(round(seconds / step)):
        now = at + number * step
        if read_bytes:
            pace.note_read(read_bytes)
        for _ in range(16):
            if pace.wait_seconds(now):
                break
            pace.begun(8 * MIB, now, queued_bytes=queued_bytes, queued=queued)
            begun += 8 * MIB
    return begun


def test_where_nobody_reads_nothing_waits() -> None:
    assert begun_in(UploadPace(), 1, read_bytes=0) == 100 * 16 * 8 * MIB


def test_a_few_small_reads_hold_nothing_up() -> None:
    pace = UploadPace()
    begun_in(pace, 0.2, read_bytes=4096)
    assert begun_in(pace, 1, read_bytes=4096, at=1000.2) == 100 * 16 * 8 * MIB


def test_while_much_is_read_uploads_keep_to_a_rate() -> None:
    begun = begun_in(UploadPace(), 10, read_bytes=BUSY_BYTES_PER_SECOND // 50)
    assert 0.8 * PACED_BYTES_PER_SECOND <= begun / 10 <= 1.2 * PACED_BYTES_PER_SECOND


def test_what_is_queued_goes_within_a_minute_however_much_is_read() -> None:
    queued = 8 * 2**30
    begun = begun_in(UploadPace(), 10, read_bytes=BUSY_BYTES_PER_SECOND // 50, queued_bytes=queued)
    assert 0.8 * queued / DRAIN_SECONDS <= begun / 10 <= 1.2 * queued / DRAIN_SECONDS


def test_many_small_objects_go_within_a_minute_too() -> None:
    pace, queued, now, begun = UploadPace(), 200_000, 1000.0, 0
    while now < 1010.0:
        pace.note_read(BUSY_BYTES_PER_SECOND // 50)
        while not pace.wait_seconds(now):
            pace.begun(0, now, queued_bytes=0, queued=queued)
            begun += 1
        now += 0.01
    assert 0.8 * queued / DRAIN_SECONDS <= begun / 10 <= 1.2 * queued / DRAIN_SECONDS


def test_when_the_reading_ends_so_does_the_waiting() -> None:
    pace = UploadPace()
    begun_in(pace, 1, read_bytes=BUSY_BYTES_PER_SECOND // 50)
    begun_in(pace, 0.1, read_bytes=0, at=1001.0)
    assert not pace.wait_seconds(1001.1)
