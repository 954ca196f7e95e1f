"""Profiles: one canonical object for the same numbers, and nothing else is read as one."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_models import Model
from torch_python import run_with_torch

from kvobj.errors import FrameCorruptError
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import BASIS_ONE, BlockBasis, Profile, ProfileError, Rope, object_key, parse_named

TESTS: Final = Path(__file__).resolve().parents[1]


def small() -> Profile:
    """Of two layers of K and V."""
    identity = np.eye(32).ravel().tolist()
    blocks = [BlockBasis(1.0 + number, [float(number)] * 32, identity) for number in range(4)]
    return Profile.build(TensorForm("kv", "bf16", 2, 2, 16, 8), blocks, Rope.of(1e4, 16))


def test_what_was_built_is_read_back() -> None:
    profile = Profile.parse(small().data)
    assert (profile.kind, profile.layers, profile.heads, profile.head_dim, profile.has_rope) == ("kv", 2, 2, 16, True)
    assert [profile.rms(block) for block in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert np.frombuffer(profile.data, "<f4", 4 * 32, profile.means_at).reshape(4, 32)[3].tolist() == [3.0] * 32
    basis = np.frombuffer(profile.data, "<i2", 32 * 32, profile.bases_at).reshape(32, 32)
    assert np.array_equal(basis, BASIS_ONE * np.eye(32))
    assert profile.digest == blake3(profile.data).digest() == small().digest
    assert object_key(profile.digest) == f"profiles/{profile.digest.hex()}"


def test_tables_turn_by_the_angle_of_any_position() -> None:
    profile = small()
    tables = np.frombuffer(profile.data, "<f4", profile.table_bytes // 4, profile.tables_at).reshape(4, 1024, 8)
    for position, pair in ((0, 0), (777, 3), (1024, 1), (1_048_575, 7)):
        low, high = position % 1024, position // 1024
        a, b, c, d = (tables[0][low, pair], tables[1][low, pair], tables[2][high, pair], tables[3][high, pair])
        angle = position * 1e4 ** (-2 * pair / 16)
        assert abs(a * c - b * d - math.cos(angle)) < 1e-6
        assert abs(b * c + a * d - math.sin(angle)) < 1e-6


def test_only_keys_of_models_with_rope_are_turned() -> None:
    assert [small().is_rotated(block) for block in range(4)] == [True, False, True, False]
    assert Model(2, 32, theta=1e4).profile().is_rotated(0)
    assert not Model(2, 32).profile().is_rotated(0)
    assert not Model(2, 32, kind="v", theta=1e4).profile().is_rotated(0)


def test_it_fits_its_model_whatever_a_chunk_s_tokens_and_dtype_are() -> None:
    assert small().fits(TensorForm("kv", "fp16", 2, 2, 16, 99))
    for other in (
        TensorForm("k", "bf16", 2, 2, 16, 8),
        TensorForm("kv", "bf16", 3, 2, 16, 8),
        TensorForm("kv", "bf16", 2, 1, 32, 8),
    ):
        assert not small().fits(other)


@settings(max_examples=80, deadline=None)
@given(at=st.integers(0, 31), flip=st.integers(1, 255))
def test_a_changed_head_is_refused_or_another_profile_s(at: int, flip: int) -> None:
    data = bytearray(small().data)
    data[at] ^= flip
    with pytest.raises(ProfileError):
        Profile.parse(bytes(data))


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 1000, -128, -1])
def test_cut_and_longer_objects_are_refused(cut: int) -> None:
    with pytest.raises(ProfileError):
        Profile.parse(small().data[:cut])
    with pytest.raises(ProfileError):
        Profile.parse(small().data + b"\0")


@pytest.mark.parametrize(
    ("at", "number"),
    [(32, math.nan), (32, 0.0), (32, -1.0), (32, 1e30), (48, math.inf), (48, math.nan), (48, 2e12)],
)
def test_numbers_that_no_model_has_are_refused(at: int, number: float) -> None:
    data = bytearray(small().data)
    data[at : at + 4] = struct.pack("<f", number)
    with pytest.raises(ProfileError):
        Profile.parse(bytes(data))


def test_entries_of_a_basis_and_of_tables_above_one_are_refused() -> None:
    profile = small()
    for at, packed in (
        (profile.bases_at, struct.pack("<h", BASIS_ONE + 1)),
        (profile.tables_at, struct.pack("<f", 1.5)),
    ):
        data = bytearray(profile.data)
        data[at : at + len(packed)] = packed
        with pytest.raises(ProfileError):
            Profile.parse(bytes(data))


def test_an_object_fetched_by_its_name_is_what_the_name_says() -> None:
    profile = small()
    assert parse_named(profile.data, profile.digest).layers == profile.layers
    with pytest.raises(FrameCorruptError, match="others"):
        parse_named(profile.data[:-1] + b"\1", profile.digest)
    with pytest.raises(FrameCorruptError):
        parse_named(b"no profile", blake3(b"no profile").digest())


@pytest.mark.parametrize(
    ("heads", "dim", "rope", "says"),
    [
        (3, 20, None, "columns"),
        (64, 128, None, "columns"),
        (2, 16, Rope((1.0,)), "frequencies"),
        (32, 1, Rope(()), "pairs"),
    ],
)
def test_models_that_have_no_profile_are_refused(heads: int, dim: int, rope: Rope | None, says: str) -> None:
    columns = heads * dim if heads * dim <= 32 else 0
    block = BlockBasis(1.0, [0.0] * columns, [0.0] * columns**2)
    with pytest.raises(ProfileError, match=says):
        Profile.build(TensorForm("k", "bf16", 1, heads, dim, 8), [block], rope)


def test_torch_makes_the_profile_that_numpy_makes() -> None:
    assert run_with_torch([TESTS / "torch_profile_check.py"]) == "as numpy makes it\n"
