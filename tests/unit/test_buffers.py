"""Where a buffer's bytes begin, of writable and of read-only ones."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvobj.buffers import address_of


def test_a_writable_view_and_a_read_only_one_of_the_same_bytes_have_one_address() -> None:
    memory = bytearray(b"0123456789")
    view = memoryview(memory)
    assert address_of(view) == address_of(view.toreadonly())
    assert ctypes.string_at(address_of(view[3:]), 4) == b"3456"
    assert address_of(view[3:]) == address_of(view) + 3 == address_of(view.toreadonly()[3:])


def test_a_view_of_wider_items_begins_where_its_bytes_do() -> None:
    view = memoryview(bytearray(64))
    assert address_of(view.cast("Q")) == address_of(view)


def test_mapped_memory_has_the_address_of_its_view() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as view:
        assert address_of(memory) == address_of(view)


def test_an_empty_view_has_an_address_too() -> None:
    view = memoryview(bytearray(8))
    assert address_of(view[8:]) == address_of(view) + 8


@pytest.mark.parametrize("is_writable", [True, False])
def test_bytes_that_are_not_in_one_piece_have_no_address(*, is_writable: bool) -> None:
    view = memoryview(bytearray(8))[::2]
    with pytest.raises(BufferError):
        address_of(view if is_writable else view.toreadonly())


@pytest.mark.parametrize("is_writable", [True, False])
def test_nothing_holds_a_buffer_afterwards(*, is_writable: bool) -> None:
    memory = bytearray(8)
    with memoryview(memory) as view:
        address_of(view if is_writable else view.toreadonly())
    memory.append(0)  # BufferError while somebody has it
