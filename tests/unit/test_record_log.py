"""The record log: what comes back, what a crash or damage costs, what a snapshot replaces."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobj.errors import CorruptionError, StoreFullError, UnavailableError
from kvobj.record_log import LogPosition, RecordLog

# No entry ends in zero bytes: cut off and filled up with zeros it would be whole again.
ENTRIES = st.binary(max_size=200).map(lambda content: content + b"e")
GROUPS = st.lists(st.lists(ENTRIES, min_size=1, max_size=4), min_size=1, max_size=12)


def opened(directory: Path, rotate_bytes: int = 4096) -> RecordLog:
    return RecordLog.open(directory, rotate_bytes=rotate_bytes)


def replayed(directory: Path) -> list[bytes]:
    return list(opened(directory).replay())


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("records-*.log"))


def written(directory: Path, groups: list[list[bytes]], rotate_bytes: int = 4096) -> list[LogPosition]:
    log = opened(directory, rotate_bytes)
    places = [log.append(group) for group in groups]
    log.sync()
    log.close()
    return places


def test_entries_come_back_in_order_over_rotations(tmp_path: Path) -> None:
    groups = [[f"{number}-{place}".encode() * 30 for place in range(3)] for number in range(100)]
    written(tmp_path, groups)
    assert len(files(tmp_path)) > 2
    replay = opened(tmp_path).replay()
    assert list(replay) == [entry for group in groups for entry in group]
    assert (replay.entries, replay.torn_bytes) == (300, 0)


def test_files_and_directory_are_private(tmp_path: Path) -> None:
    written(tmp_path / "log", [[b"a"]])
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert files(tmp_path / "log")[0].stat().st_mode & 0o777 == 0o600


def test_a_reopened_log_goes_on_behind_its_end(tmp_path: Path) -> None:
    written(tmp_path, [[b"a"], [b"b"]])
    written(tmp_path, [[b"c"]])
    assert replayed(tmp_path) == [b"a", b"b", b"c"]


def test_an_open_log_can_be_replayed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([b"a"])
    assert replayed(tmp_path) == [b"a"]
    log.close()


def test_an_empty_log_is_empty(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.is_empty()
    assert log.recover() == LogPosition(0, 0)
    log.append([b""])
    assert not log.is_empty()
    assert list(log.replay()) == [b""]
    log.close()


@settings(max_examples=60)
@given(groups=GROUPS, data=st.data())
def test_a_torn_tail_is_ignored(groups: list[list[bytes]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = written(directory, groups, 1 << 20)
        path = files(directory)[0]
        start = places[-2].offset if len(places) > 1 else 16
        cut = data.draw(st.integers(start, places[-1].offset - 1))
        tail = data.draw(st.sampled_from([b"", b"\0" * 50]))
        path.write_bytes(path.read_bytes()[:cut] + tail)
        expected = [entry for group in groups[:-1] for entry in group]
        replay = opened(directory).replay()
        assert list(replay) == expected
        assert bool(replay.torn_bytes) == bool(path.read_bytes()[start:].rstrip(b"\0"))
        written(directory, [[b"later"]], 1 << 20)
        assert replayed(directory) == [*expected, b"later"]


@settings(max_examples=100)
@given(groups=GROUPS, data=st.data())
def test_a_flipped_bit_is_never_replayed(groups: list[list[bytes]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = written(directory, groups, 1 << 20)
        path = files(directory)[0]
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        last_start = places[-2].offset if len(places) > 1 else 16
        if place < last_start:
            with pytest.raises(CorruptionError):
                replayed(directory)
        else:
            assert replayed(directory) == [entry for group in groups[:-1] for entry in group]


def test_damage_in_an_older_file_is_corruption(tmp_path: Path) -> None:
    written(tmp_path, [[b"x" * 3000] for _ in range(6)])
    older = files(tmp_path)[0]
    older.write_bytes(older.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="offset="):
        replayed(tmp_path)


def test_recover_cuts_off_what_was_not_acknowledged(tmp_path: Path) -> None:
    places = written(tmp_path, [[b"x" * 3000] for _ in range(8)])
    log = opened(tmp_path)
    assert log.recover(since=places[1], upto=places[3]) == places[3]
    log.append([b"later"])
    log.close()
    assert replayed(tmp_path) == [b"x" * 3000] * 4 + [b"later"]


def test_recover_tells_when_the_tail_is_missing(tmp_path: Path) -> None:
    places = written(tmp_path, [[b"a"], [b"b"]], 1 << 20)
    beyond = LogPosition(places[-1].file_number, places[-1].offset + 100)
    log = opened(tmp_path)
    assert log.recover(upto=beyond) == places[-1]
    log.close()


def test_a_group_can_be_taken_back(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([b"a"])
    before = log.end
    log.append([b"b"])
    log.take_back(before)
    log.append([b"c"])
    log.close()
    assert replayed(tmp_path) == [b"a", b"c"]


def test_a_snapshot_replaces_what_came_before(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([b"old"])
    writer = log.begin_snapshot()
    log.append([b"new"])
    writer.append([b"state"])
    assert replayed(tmp_path) == [b"old", b"new"], "until it is finished the old files count"
    number = writer.finish()
    assert list(log.replay()) == [b"state", b"new"]
    log.drop_before(number)
    assert list(log.replay()) == [b"state", b"new"]
    assert len(files(tmp_path)) == 2
    log.close()


def test_an_unfinished_snapshot_leaves_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([b"old"])
    log.begin_snapshot().abandon()
    writer = log.begin_snapshot()
    writer.append([b"state"])
    log.append([b"new"])
    log.close()
    writer.abandon()
    (tmp_path / "snapshot-000009.tmp").write_bytes(b"left by a crash")
    log = opened(tmp_path)
    log.recover()
    log.close()
    assert replayed(tmp_path) == [b"old", b"new"]
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_crash_within_a_rotation_is_harmless(tmp_path: Path) -> None:
    written(tmp_path, [[b"a"]])
    (tmp_path / "records-000002.log").write_bytes(b"\0" * 4096)
    written(tmp_path, [[b"b"]])
    assert replayed(tmp_path) == [b"a", b"b"]


def test_after_a_failed_flush_nothing_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    log.append([b"a"])

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, f"flush of {descriptor}")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(UnavailableError):
        log.sync()
    monkeypatch.undo()
    with pytest.raises(UnavailableError):
        log.sync()
    with pytest.raises(UnavailableError):
        log.append([b"b"])
    log.close()


def test_a_full_disk_refuses_a_group_and_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    log.append([b"a"])
    write = os.pwrite

    def half(descriptor: int, content: bytes, offset: int) -> int:
        if len(content) > 100:
            return write(descriptor, content[:50], offset)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(StoreFullError):
        log.append([b"b" * 100])
    assert log.is_short
    monkeypatch.undo()
    log.append([b"c"])
    log.close()
    assert replayed(tmp_path) == [b"a", b"c"]


def test_without_room_for_a_new_file_the_reserve_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    log.append([b"x" * 5000])

    def fail(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, f"{descriptor} {offset} {length}")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    log.append([b"removal"])
    assert log.is_short
    monkeypatch.undo()
    log.append([b"next"])
    assert not log.is_short
    log.close()
    assert replayed(tmp_path) == [b"x" * 5000, b"removal", b"next"]
    assert len(files(tmp_path)) == 2
