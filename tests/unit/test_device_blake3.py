"""The kernels' BLAKE3 is the package's, whatever the length and on every variant of the CPU library."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Fenced, launchers

from kvobj.tensors.device_blake3 import LONGEST, digests

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

EDGES = (
    0,
    1,
    3,
    4,
    63,
    64,
    65,
    1023,
    1024,
    1025,
    2048,
    2049,
    3072,
    31 * 1024 + 7,
    32 * 1024,
    32 * 1024 + 1,
    65 * 1024 + 3,
    300_000,
)


@pytest.mark.parametrize("length", EDGES)
def test_digests_are_those_of_the_package(length: int) -> None:
    source = random.Random(length)
    inputs = [Fenced(length) for _ in range(3)]
    for each in inputs:
        each.view[:] = source.randbytes(length)
    wanted = [blake3(each.view).digest() for each in inputs]
    for launcher in launchers().values():
        assert digests(launcher, [each.address for each in inputs], length) == wanted


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=9000), variant=st.integers(0, 2))
def test_digests_of_anything_are_those_of_the_package(data: bytes, variant: int) -> None:
    held = Fenced(len(data))
    held.view[:] = data
    launcher = list(launchers().values())[variant % len(launchers())]
    assert digests(launcher, [held.address], len(data)) == [blake3(data).digest()]


def test_no_inputs_have_no_digests_and_lengths_are_bounded() -> None:
    launcher = next(iter(launchers().values()))
    assert digests(launcher, [], 10) == []
    with pytest.raises(ValueError, match="length"):
        digests(launcher, [], LONGEST + 1)
