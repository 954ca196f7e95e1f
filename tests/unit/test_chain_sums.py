"""Chain sums: what is summed, that native code and its pure twin agree, and that order and membership tell."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj import native
from kvobj.ids import chain_sums
from kvobj.ids.chain_sums import extend, id_lanes, key_lanes, running_sums, running_sums_pure

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "chunk_ids.json").read_text())["chain_sums"]


def lanes_of(*keys: str) -> bytes:
    return b"".join(map(key_lanes, keys))


def test_the_published_vectors() -> None:
    lanes = lanes_of(*VECTORS["keys"])
    assert lanes.hex() == "".join(VECTORS["lanes"])
    assert running_sums(lanes).hex() == "".join(VECTORS["sums"])


def test_a_chunk_id_has_the_lanes_of_its_first_half() -> None:
    assert key_lanes("0123456789abcdef" * 4).hex() == "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "key", ["0123456789ABCDEF" * 4, "ab" * 31, "ab" * 33, "ab" * 32 + "\n", "ü" * 64, "llama/" + "ab" * 32]
)
def test_any_other_key_has_the_lanes_of_its_hash(key: str) -> None:
    assert key_lanes(key) == blake3(key.encode()).digest()[:16]


@given(st.binary(max_size=16 * 50).map(lambda raw: raw[: len(raw) // 16 * 16]))
def test_a_sum_is_that_of_its_lanes_weighted_by_position(lanes: bytes) -> None:
    values = list(struct.iter_unpack("<QQ", lanes))
    sums = running_sums(lanes)
    for end in range(1, len(values) + 1):
        expected = [sum((j + 1) * pair[lane] for j, pair in enumerate(values[:end])) % 2**64 for lane in (0, 1)]
        assert sums[16 * (end - 1) : 16 * end] == struct.pack("<QQ", *expected)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=40))
def test_extending_chunk_by_chunk_gives_the_running_sums(names: list[bytes]) -> None:
    chain_sum, sums = b"", b""
    for depth, lanes in enumerate(names):
        chain_sum = extend(chain_sum, depth, lanes)
        sums += chain_sum
    assert sums == running_sums(b"".join(names)) == running_sums_pure(b"".join(names))


@given(st.binary(max_size=32 * 20).map(lambda raw: raw[: len(raw) // 32 * 32]))
def test_lanes_of_ids_are_those_of_their_keys(ids: bytes) -> None:
    keys = [ids[at : at + 32].hex() for at in range(0, len(ids), 32)]
    assert id_lanes(ids) == lanes_of(*keys)


def test_order_and_membership_change_the_sum() -> None:
    a, b, c = "a", "b", "c"  # named by hashes, as ids are
    sums = {
        running_sums(lanes_of(*keys))[-16:] for keys in ([a, b, c], [b, a, c], [a, c, b], [a, b], [a, b, b], [b, c])
    }
    assert len(sums) == 6


def test_nothing_sums_to_nothing() -> None:
    assert running_sums(b"") == running_sums_pure(b"") == id_lanes(b"") == b""


@pytest.mark.skipif(native.library() is None, reason="needs the native library: make native")
def test_the_native_library_is_what_sums() -> None:
    assert chain_sums._native_running_sums is not None
    assert chain_sums._native_id_lanes is not None


def test_the_pure_functions_do_where_there_is_no_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, ids = bytes(range(64)), bytes(range(96))
    expected = running_sums(lanes), id_lanes(ids)
    monkeypatch.setattr(chain_sums, "_native_running_sums", None)
    monkeypatch.setattr(chain_sums, "_native_id_lanes", None)
    assert (running_sums(lanes), id_lanes(ids)) == expected
