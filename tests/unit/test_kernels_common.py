"""What all codecs share in native code: checksums, orders of axes, streams brought to their places, values that are not finite."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Fenced, launchers

from kvobj.tensors.checksums import crc32c_by_table
from kvobj.tensors.head_reports import address_table, words_at
from kvobj.tensors.kernels import build
from kvobj.tensors.kernels.launcher import Address

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.mark.parametrize("variant", list(launchers()))
def test_crc32c_is_that_of_the_definition_at_every_length_and_start(variant: str) -> None:
    crc32c = ctypes.CDLL(str(build.library(variant))).kv_crc32c
    crc32c.restype = ctypes.c_uint32
    crc32c.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)
    data = np.random.default_rng(1).integers(0, 256, 30_000, dtype=np.uint8)
    joined = [
        (3, 767),
        (3, 768),
        (1, 769),
        (0, 12_288),
        (5, 13_100),
        (2, 29_990),
    ]  # what parts of three are done together
    for start, size in [(at % 9, at) for at in range(40)] + joined:
        part = memoryview(data[start : start + size].tobytes())
        for previous in (0, 0xDEADBEEF):
            assert crc32c(data.ctypes.data + start, size, previous) == crc32c_by_table(part, previous), (start, size)


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from((1, 2, 4)),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 90), st.integers(1, 40)),
    order=st.permutations(range(4)),
    batch=st.integers(1, 3),
)
def test_packing_is_a_transposition_and_unpacking_its_inverse(
    width: int, sizes: tuple[int, int, int], order: list[int], batch: int
) -> None:
    # An axis besides the block's three, of which the second index is packed, lies anywhere among them.
    shape = (batch, *sizes)
    declared = (
        np.random.default_rng(2).integers(0, 1 << 8 * width, [shape[axis] for axis in order]).astype(_WORDS[width])
    )
    by_axis = declared.transpose(np.argsort(order))  # a view: [batch, outer, rows, row]
    strides = [each // width for each in by_axis.strides]
    block = np.ascontiguousarray(by_axis[batch - 1])
    for launcher in launchers().values():
        whole, packed = Fenced(declared.nbytes), Fenced(block.nbytes)
        whole.view[:] = declared.tobytes()
        first = whole.address.after((batch - 1) * strides[0] * width)
        warps = -(-sizes[0] * sizes[1] // 64)
        launcher.launch("pack_block", warps, first, packed.address, width, *sizes, *strides[1:])
        assert bytes(packed.view) == block.tobytes()
        assert packed.intact
        whole.view[:] = bytes(declared.nbytes)
        launcher.launch("unpack_block", warps, packed.address, first, width, *sizes, *strides[1:])
        expected = np.zeros_like(declared)
        expected.transpose(np.argsort(order))[batch - 1] = block
        assert bytes(whole.view) == expected.tobytes()
        assert whole.intact


@pytest.mark.parametrize("is_at_end", [False, True])
def test_streams_of_any_lengths_come_to_lie_one_after_the_other(is_at_end: bool) -> None:  # noqa: FBT001
    random = np.random.default_rng(3)
    slot, skip, streams = 48, 5, 70
    lengths = random.integers(0, slot + 1, (3, streams)).astype(np.uint32)
    contents = random.integers(0, 256, (3, streams, slot), dtype=np.uint8)
    for launcher in launchers().values():
        slots, sizes = Fenced(contents.nbytes), Fenced(lengths.nbytes)
        slots.view[:], sizes.view[:] = contents.tobytes(), lengths.tobytes()
        offsets, totals = Fenced(lengths.nbytes), Fenced(4 * 3)
        launcher.launch("place_streams", 3, offsets.address, totals.address, sizes.address, streams)
        assert words_at(launcher, totals.address, 3) == tuple(lengths.sum(axis=1))
        targets = [Fenced(skip + int(total)) for total in lengths.sum(axis=1)]
        table = address_table(launcher, "test.targets", (targets[0].address, 0, targets[2].address))
        launcher.launch(
            "move_streams",
            3 * streams,
            table,
            skip,
            slots.address,
            slot,
            int(is_at_end),
            offsets.address,
            sizes.address,
            streams,
        )
        for at in (0, 2):
            taken = [
                each[slot - size :] if is_at_end else each[:size]
                for each, size in zip(contents[at], lengths[at], strict=True)
            ]  # fmt: skip
            assert bytes(targets[at].view[skip:]) == b"".join(each.tobytes() for each in taken)
            assert targets[at].intact
        assert not targets[1].view.tobytes().strip(b"\xee"), "left out"


@pytest.mark.parametrize(("exponent_bits", "highest_finite"), [(0x7F80, 0x7F7F), (0x7C00, 0x7BFF)])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(exponent_bits: int, highest_finite: int) -> None:
    finite = np.random.default_rng(4).integers(0, highest_finite + 1, (3, 1000)).astype(np.uint16)
    for launcher in launchers().values():
        for place in (0, 1, 31, 32, 500, 998, 999):
            for special in (exponent_bits, exponent_bits | 1, exponent_bits | 0x8000):
                blocks = finite.copy()
                blocks[1, place] = special
                memory = [Fenced(2000) for _ in range(3)]
                for each, block in zip(memory, blocks, strict=True):
                    each.view[:] = block.tobytes()
                table = address_table(launcher, "test.blocks", (each.address for each in memory))
                found = Fenced(12, fill=0)
                launcher.launch("find_nonfinite", 3 * 7, Address(found.address), table, 1000, 7, exponent_bits)
                assert words_at(launcher, found.address, 3) == (0, 1, 0), (place, special)
