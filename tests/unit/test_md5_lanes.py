"""Sums that are made side by side are those that are made one by one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec import md5_lanes
from kvobj.codec.md5_lanes import md5_digests

# RFC 1321, appendix A.5.
SUITE = {
    b"": "d41d8cd98f00b204e9800998ecf8427e",
    b"a": "0cc175b9c0f1b6a831c399e269772661",
    b"abc": "900150983cd24fb0d6963f7d28e17f72",
    b"message digest": "f96b697d7cb7938d525a2f31aaf161d0",
    b"abcdefghijklmnopqrstuvwxyz": "c3fcd3d76192e4007dfb496cca67e13b",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789": "d174ab98d277d9f5a5611c2c9f419d9f",
    b"1234567890" * 8: "57edf4a22be3c955ac49da2e2107b67a",
}
BLOCK = 64
NOISE = hashlib.shake_128(b"kv").digest(300_000)


def one_by_one(bodies: list[memoryview]) -> list[bytes]:
    return [hashlib.md5(body, usedforsecurity=False).digest() for body in bodies]


def test_the_rfcs_examples_side_by_side() -> None:
    assert md5_lanes.md5_lanes() >= len(SUITE), "the native library has it"
    assert [digest.hex() for digest in md5_digests([memoryview(body) for body in SUITE])] == list(SUITE.values())


@given(
    st.lists(st.tuples(st.integers(0, 100), st.one_of(st.integers(0, 3 * BLOCK), st.integers(0, 100_000))), max_size=20)
)
def test_any_number_of_bodies_of_any_lengths_has_the_sums_of_each(spans: list[tuple[int, int]]) -> None:
    bodies = [memoryview(NOISE)[start : start + size] for start, size in spans]
    assert md5_digests(bodies) == one_by_one(bodies)


def test_without_the_library_the_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [memoryview(NOISE)[start:] for start in range(0, 30_000, 1_000)]
    side_by_side = md5_digests(bodies)
    md5_lanes._native.cache_clear()
    monkeypatch.setattr(md5_lanes, "library", lambda: None)
    try:
        assert md5_lanes.md5_lanes() == 0
        assert md5_digests(bodies) == side_by_side == one_by_one(bodies)
    finally:
        md5_lanes._native.cache_clear()
