"""What is told of the disks under a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvobj.app.room_notes import lost_segment_notes, room_notes

MIB = 1 << 20


def with_free(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    real = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=mib * MIB))


def test_where_there_is_room_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 4096)
    assert room_notes(data=tmp_path, nvme=tmp_path, growth_bytes=4096 * MIB) == ()
    assert lost_segment_notes(tmp_path, ()) == ()


def test_a_file_system_that_others_have_filled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 100)
    catalog, tier = room_notes(data=tmp_path, nvme=tmp_path, growth_bytes=1024 * MIB)
    assert (
        catalog == f"the file system of {tmp_path} has 100 MiB free: below 16 MiB nothing new is stored, deletes go on"
    )
    assert "may take 1024 MiB more" in tier
    assert f"{tmp_path} has 100 MiB free" in tier
    with_free(monkeypatch, 15)
    (catalog,) = room_notes(data=tmp_path, nvme=tmp_path, growth_bytes=0)
    assert "15 MiB free: nothing new is stored" in catalog


def test_a_directory_that_is_gone_is_no_full_one(tmp_path: Path) -> None:
    assert room_notes(data=tmp_path / "gone", nvme=tmp_path / "gone", growth_bytes=1) == ()
