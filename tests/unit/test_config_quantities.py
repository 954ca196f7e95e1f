"""Sizes, durations and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.config.quantities import (
    SIZE_UNITS,
    parse_duration_seconds,
    parse_listen_address,
    parse_size_bytes,
)
from kvobj.config.settings import ListenAddress


@given(st.integers(0, 10**9), st.sampled_from(sorted(SIZE_UNITS)))
def test_sizes_are_number_times_unit(number: int, unit: str) -> None:
    assert parse_size_bytes(f"{number} {unit}") == number * SIZE_UNITS[unit]
    assert parse_size_bytes(f"{number}{unit}") == number * SIZE_UNITS[unit]


def test_a_fraction_is_fine_if_it_comes_to_whole_bytes() -> None:
    assert parse_size_bytes("1.5 GiB") == 3 * 2**29
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_size_bytes("1.3 B")


@pytest.mark.parametrize("text", ["", "4", "GiB", "-1 GiB", "4 gib", "1e3 B", "4  GiB", "٤ GiB", "4 GiB extra"])
def test_a_size_without_number_or_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500 ms", 0.5), ("30 s", 30.0), ("2 min", 120.0), ("1 h", 3600.0), ("1 d", 86400.0), ("0.5 s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9000", ListenAddress("127.0.0.1", 9000)),
        ("[::1]:0", ListenAddress("::1", 0)),
        ("localhost:65535", ListenAddress("localhost", 65535)),
    ],
)
def test_addresses(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", ":9000", "host", "host:", "host:65536", "::1:9000", "[]:1", "a b:1", "host:-1", "host:٤"]
)
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_listen_address(text)
