"""Copies between mapped memory and rooms, by one thread and by several, and pages that are made ready in the background."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvobj.buffers import address_of
from kvobj.same_host import copying
from kvobj.same_host.copying import Copiers, Piece
from kvobj.same_host.descriptors import staging_memory
from kvobj.same_host.mapping import Mapping
from kvobj.same_host.touching import Toucher

MIB = 1024 * 1024
SIZE = 24 * MIB


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    descriptor = staging_memory(SIZE)
    try:
        yield Mapping(descriptor, SIZE, is_writable=True)
    finally:
        os.close(descriptor)


def pieces_of(mapping: Mapping, room: memoryview, *bounds: int) -> list[Piece]:
    base = address_of(room)
    return [
        Piece(base + start, mapping.address(start), stop - start, mapping, start) for start, stop in pairwise(bounds)
    ]


@pytest.fixture(params=["native", "piece by piece"])
def way(request: pytest.FixtureRequest, mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """How batches are copied, those of this size by helpers, too."""
    monkeypatch.setattr(copying, "HELPED_BYTES", 4 * MIB)
    if request.param == "native":
        assert copying._copy_pieces is not None
        mapping.touch(0, SIZE)  # what is not ready is copied piece by piece
    else:
        monkeypatch.setattr(copying, "_copy_pieces", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_byte_of_every_piece_is_copied_and_no_other(mapping: Mapping, helpers: int) -> None:
    content = os.urandom(SIZE)
    mapping.room[:] = content
    room = memoryview(bytearray(SIZE))
    # small ones, one that is cut with a rest, and a last byte that nobody asked for
    Copiers(helpers).copy_all(pieces_of(mapping, room, 0, 1, 4097, 5 * MIB + 3, 19 * MIB + 7, SIZE - 1))
    assert room[: SIZE - 1] == content[: SIZE - 1]
    assert room[SIZE - 1] == 0


@pytest.mark.usefixtures("way")
def test_a_batch_within_the_caches_is_copied_to_the_byte(mapping: Mapping) -> None:
    content = os.urandom(MIB)
    mapping.room[7 : 7 + MIB] = content
    room = memoryview(bytearray(MIB + 2))
    piece = Piece(address_of(room) + 1, mapping.address(7), MIB, mapping, 7)
    Copiers(1).copy_all([piece])
    assert room == b"\0" + content + b"\0"


@pytest.mark.usefixtures("way")
def test_helpers_serve_one_batch_after_another(mapping: Mapping) -> None:
    copiers = Copiers(2)
    for number in range(1, 6):
        mapping.room[:] = bytes([number]) * SIZE
        room = memoryview(bytearray(SIZE))
        copiers.copy_all(pieces_of(mapping, room, 0, 8 * MIB, 16 * MIB, SIZE))
        assert bytes(room) == bytes([number]) * SIZE


def test_touching_changes_no_byte_and_may_be_done_again(mapping: Mapping) -> None:
    mapping.room[5 * MIB] = 7
    for _ in range(2):
        mapping.touch(3 * MIB, 4 * MIB)
        mapping.touch(SIZE - 1, 1)
        mapping.touch(0, 0)
    assert bytes(mapping.room).count(0) == SIZE - 1
    assert mapping.room[5 * MIB] == 7


def test_the_background_keeps_no_mapping_alive() -> None:
    descriptor = staging_memory(SIZE)
    mapping = Mapping(descriptor, SIZE, is_writable=True)
    os.close(descriptor)
    known, toucher = weakref.ref(mapping), Toucher()
    toucher._waiting.append(known)
    del mapping
    assert known() is None
    toucher._run()
    assert not toucher._waiting
