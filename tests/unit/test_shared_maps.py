"""Files of shared memory, mapped at addresses that huge pages fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvobj.buffers import address_of
from kvobj.shared_maps import HUGE_PAGE_BYTES, map_shared


def mapped(path: Path, size_bytes: int, *, is_writable: bool = True) -> memoryview:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, size_bytes)
        return map_shared(descriptor, size_bytes, is_writable=is_writable)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size_bytes", [4096, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 4096])
def test_all_of_a_file_is_shared_by_who_maps_it(tmp_path: Path, size_bytes: int) -> None:
    writer = mapped(tmp_path / "file", size_bytes)
    reader = mapped(tmp_path / "file", size_bytes, is_writable=False)
    assert len(writer) == len(reader) == size_bytes
    writer[:2] = b"ab"
    writer[-2:] = b"yz"
    assert bytes(reader[:2]) + bytes(reader[-2:]) == b"abyz"
    assert (tmp_path / "file").read_bytes()[-2:] == b"yz"
    with pytest.raises(TypeError):
        reader[:2] = b"no"


def test_a_large_file_begins_where_a_huge_page_may(tmp_path: Path) -> None:
    assert address_of(mapped(tmp_path / "file", HUGE_PAGE_BYTES)) % HUGE_PAGE_BYTES == 0


def test_a_view_keeps_what_it_is_of_and_nothing_stays_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "mapped-and-let-go"
    whole = mapped(path, 2 * HUGE_PAGE_BYTES)
    whole[-3:] = b"end"
    part = whole[-3:]
    del whole
    assert bytes(part) == b"end"
    assert path.name in Path("/proc/self/maps").read_text()
    del part
    assert path.name not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_an_os_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="mapped"):
            map_shared(descriptor, HUGE_PAGE_BYTES, is_writable=False)
    finally:
        os.close(descriptor)
