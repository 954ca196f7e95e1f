"""f8 against a reference of its docstring in numpy, over all words and shapes, on every variant of the CPU library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Words, decoded, encoded, form_of, gaussian, launchers, values_of, words_of

from kvobj.tensors import f8
from kvobj.tensors.codec_protocol import STAYS_RAW, Coding
from kvobj.tensors.form import TensorForm

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

E4M3 = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(0x7F)],
    np.float32,
)


def reference(words: Words, dtype: str) -> tuple[bytes, Words]:
    """The block, and what it decodes to."""
    values = values_of(words, dtype)
    heads = len(words)
    largest = np.abs(values).reshape(heads, -1).max(axis=1)
    scales = np.maximum(largest * np.float32(1 / 448), np.float32(2.0**-120)).astype(np.float32)
    inverse = (np.float32(1) / scales).astype(np.float32)
    scaled = (values * inverse[:, None, None]).astype(np.float32)
    midpoints = (E4M3[1:].astype(np.float64) + E4M3[:-1]) / 2
    sizes = np.abs(scaled).astype(np.float64)
    codes = np.searchsorted(midpoints, sizes, side="left")  # on a midpoint: the lower
    at_midpoint = np.isin(sizes, midpoints)
    codes += at_midpoint & (codes % 2 == 1)  # then the even one
    signs = np.signbit(scaled)
    back = (np.where(signs, -E4M3[codes], E4M3[codes]) * scales[:, None, None]).astype(np.float32)
    head = scales.tobytes() + bytes(-4 * heads % 16)
    return head + (codes | signs << 7).astype(np.uint8).tobytes(), words_of(back, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 33, 64), (5, 16, 96)])
def test_blocks_are_those_of_the_reference_on_every_variant(shape: tuple[int, int, int], dtype: str) -> None:
    words = gaussian(*shape, seed=sum(shape), dtype=dtype)
    block, after = reference(words, dtype)
    for launcher in launchers().values():
        done, data, said = encoded(f8.codec(), launcher, words, Coding(form_of(words, dtype)))
        assert done.length == len(data)
        assert data == block
        assert np.array_equal(said, after)
        status, found = decoded(f8.codec(), launcher, data, Coding(form_of(words, dtype)))
        assert status == 0
        assert np.array_equal(found, after)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_finite_word_is_coded_as_the_reference_says(dtype: str) -> None:
    finite = np.array(
        [word for word in range(65536) if (word & 0x7FFF) < (0x7F80 if dtype == "bf16" else 0x7C00)], np.uint16
    )
    by_exponent = finite[
        np.argsort(finite & 0x7FFF, kind="stable")
    ]  # each head has values of like sizes, so that codes vary
    words = by_exponent[: len(by_exponent) // 512 * 512].reshape(-1, 4, 128)
    block, after = reference(words, dtype)
    for launcher in launchers().values():
        _, data, said = encoded(f8.codec(), launcher, words, Coding(form_of(words, dtype)))
        assert data == block
        assert np.array_equal(said, after)


def test_the_certificate_bounds_what_was_done_closely() -> None:
    words = gaussian(4, 64, 128, seed=3)
    [launcher] = list(launchers().values())[:1]
    done, _, after = encoded(f8.codec(), launcher, words, Coding(form_of(words)))
    [error] = done.errors
    before, difference = values_of(words).astype(float), (values_of(words) - values_of(after)).astype(float)
    assert np.abs(difference).max() <= error.max_error <= np.abs(difference).max() * 1.00001
    assert (difference**2).sum() <= error.error_square <= (difference**2).sum() * 1.0001
    assert (before**2).sum() * 0.9999 <= error.before_square <= (before**2).sum()
    assert np.sqrt(error.error_square / error.before_square) < 0.03


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC1])
def test_a_block_with_a_value_that_is_not_finite_stays_raw(word: int) -> None:
    words = gaussian(2, 8, 40)
    words[1, 7, 39] = word
    for launcher in launchers().values():
        done, data, _ = encoded(f8.codec(), launcher, words, Coding(form_of(words)))
        assert (done.length, data) == (STAYS_RAW, b"")
        assert not done.errors


def test_zeros_decode_to_zeros() -> None:
    words = np.zeros((2, 3, 8), np.uint16)
    words[1] = 0x8000
    for launcher in launchers().values():
        done, data, after = encoded(f8.codec(), launcher, words, Coding(form_of(words)))
        assert np.array_equal(after, words)
        assert done.errors[0].max_error == 0
        assert np.array_equal(decoded(f8.codec(), launcher, data, Coding(form_of(words)))[1], words)


def test_nothing_of_the_memory_before_is_left_in_a_block() -> None:
    words = gaussian(3, 4, 9)
    [launcher] = list(launchers().values())[:1]
    blocks = {encoded(f8.codec(), launcher, words, Coding(form_of(words)), fill=fill)[1] for fill in (0x00, 0xFF)}
    assert len(blocks) == 1


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 0.0, 1e-38, 3e38])
def test_scales_that_no_encoder_writes_are_refused(scale: float) -> None:
    words = gaussian(2, 4, 8)
    coding = Coding(form_of(words))
    for launcher in launchers().values():
        _, data, _ = encoded(f8.codec(), launcher, words, coding)
        broken = data[:4] + np.float32(scale).tobytes() + data[8:]
        assert decoded(f8.codec(), launcher, broken, coding)[0] != 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_and_cut_blocks_refuse_or_decode_within_bounds(data: st.DataObject) -> None:
    words = gaussian(3, 3, 11)
    coding = Coding(form_of(words))
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    _, block, _ = encoded(f8.codec(), launcher, words, coding)
    at, flip = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(1, 255))
    changed = block[:at] + bytes([block[at] ^ flip]) + block[at + 1 :]
    status, _ = decoded(f8.codec(), launcher, changed, coding)  # the fences around stand: checked there
    if at >= 16 and changed[at] & 0x7F == 0x7F:
        assert status != 0
    assert decoded(f8.codec(), launcher, block[:at], coding)[0] != 0
    assert decoded(f8.codec(), launcher, block + b"\0", coding)[0] != 0


def test_forms_of_engines_own_fp8_and_of_others_are_refused() -> None:
    for dtype, says in (("fp8_e4m3", "as it comes"), ("fp32", "takes bf16"), ("int8", "takes bf16")):
        assert says in (f8.codec().refusal(TensorForm("kv", dtype, 2, 2, 64, 16)) or "")  # type: ignore[arg-type]
    assert f8.codec().refusal(TensorForm("mla", "fp16", 2, 1, 576, 16)) is None
