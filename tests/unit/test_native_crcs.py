"""The native CRCs, by vectors of every width that this CPU has, are those that others make of the same bytes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Final

import make_crc_constants
import pytest
from awscrt import checksums as awscrt  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from kvobj.buffers import address_of
from kvobj.codec import native_crcs
from kvobj.codec.native_crcs import CrcName, native_crc
from kvobj.native import library

CRCS: Final[tuple[CrcName, ...]] = ("crc32", "crc32c", "crc64nvme")
BITS: Final = {"crc32": 32, "crc32c": 32, "crc64nvme": 64}
CHECKS: Final = {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "crc64nvme": 0xAE8B14860A799888}
STREAMED: Final = {16: (16 << 10, 144 << 10), 32: (28 << 10, 252 << 10)}
"""Bytes that CRC-32C goes through in vectors and streams at once, by the width of the vectors."""
LARGE: Final = random.Random(5).randbytes(600_000)

Crc = Callable[[memoryview, int], int]


def _others(name: CrcName) -> Crc:
    crc: Crc = getattr(awscrt, name)
    return crc


def _widths() -> list[int]:
    """Of this CPU's vectors; none where there is no library."""
    native = library()
    return [] if native is None else [width for width in (16, 32, 64) if width <= native.kvobj_crc_width()]


@pytest.fixture(params=_widths(), ids="vectors of {} bytes".format)
def width(request: pytest.FixtureRequest) -> int:
    chosen: int = request.param
    return chosen


def _of_width(name: CrcName, width: int) -> Crc:
    native = library()
    assert native is not None
    function = native["kvobj_crc_of_width"]
    function.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    function.restype = ctypes.c_uint64
    return lambda view, previous: int(function(CRCS.index(name), width, address_of(view), len(view), previous))


@pytest.mark.parametrize("name", CRCS)
def test_the_published_check_values(name: CrcName, width: int) -> None:
    assert _of_width(name, width)(memoryview(b"123456789"), 0) == CHECKS[name]


@pytest.mark.parametrize("name", CRCS)
def test_every_size_from_every_start_after_any_value(name: CrcName, width: int) -> None:
    crc, others, chance = _of_width(name, width), _others(name), random.Random(width)
    for size in range(1101):
        view, previous = memoryview(LARGE)[chance.randrange(64) :][:size], chance.getrandbits(BITS[name])
        assert crc(view, previous) == others(view, previous), size


@pytest.mark.parametrize("width", [width for width in _widths() if width in STREAMED])
def test_sizes_about_those_that_vectors_and_streams_share(width: int) -> None:
    crc, others = _of_width("crc32c", width), _others("crc32c")
    short, long = STREAMED[width]
    for span in (short, 2 * short, long, long + short, 2 * long + 3 * short):
        for more in (-1, 0, 1, 15, 16, 127, 128, 1000):
            view = memoryview(LARGE)[7 : 7 + span + more]
            assert crc(view, 9) == others(view, 9), (span, more)


@given(
    size=st.one_of(st.integers(1, 2000), st.integers(1, len(LARGE))),
    stops=st.lists(st.floats(0, 1), max_size=4),
    start=st.integers(0, 63),
    previous=st.integers(0, 2**64 - 1),
)
@pytest.mark.parametrize("name", CRCS)
def test_any_split_gives_that_of_the_whole(
    name: CrcName, size: int, stops: list[float], start: int, previous: int
) -> None:
    crc, others = native_crc(name), _others(name)
    if crc is None:
        pytest.skip("no native library, or no instruction for it")
    view, value = memoryview(LARGE)[start : start + size], previous % 2 ** BITS[name]
    expected = others(view, value)
    places = [0, *sorted(int(stop * len(view)) for stop in stops), len(view)]
    for at, stop in pairwise(places):
        value = crc(view[at:stop], value)
    assert value == expected


@pytest.mark.parametrize("name", CRCS)
def test_nothing_is_read_before_the_bytes_or_behind_them(name: CrcName, width: int) -> None:
    crc, others = _of_width(name, width), _others(name)
    for size in (1, 15, 16, 17, 63, 64, 100, 127, 128, 255, 256, 1000):
        content = random.Random(size).randbytes(size)
        values = {
            crc(memoryview(fill * 64 + content + fill * 64)[64 : 64 + size], 3) for fill in (b"\x00", b"\xff", b"\x5a")
        }
        assert values == {others(memoryview(content), 3)}


@pytest.mark.parametrize(
    "found", [None, SimpleNamespace(), SimpleNamespace(kvobj_crc_width=lambda: 0)], ids=["none", "older", "slow"]
)
def test_without_library_or_instruction_there_are_none(
    found: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_crcs, "library", lambda: found)
    assert native_crc.__wrapped__("crc32") is None


@pytest.mark.parametrize("wrong", ["value", "width"])
def test_a_kernel_that_is_wrong_on_this_cpu_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all bytes, or by the widest vectors alone."""

    class Function:
        argtypes: object = None
        restype: object = None

        def __init__(self, function: Callable[..., int]) -> None:
            self._function = function

        def __call__(self, *arguments: int) -> int:
            return self._function(*arguments)

    def crc(_at: int, size: int, _previous: int) -> int:
        return CHECKS["crc32"] if size == 9 and wrong == "width" else 1

    class Library:
        kvobj_crc_width = Function(lambda: 64)
        kvobj_crc_of_width = Function(lambda *_: 2)

        def __getitem__(self, _name: str) -> Function:
            return Function(crc)

    monkeypatch.setattr(native_crcs, "library", Library)
    assert native_crc.__wrapped__("crc32") is None


def test_the_constants_are_those_of_the_polynomials() -> None:
    assert make_crc_constants.FILE.read_text() == make_crc_constants.text()
