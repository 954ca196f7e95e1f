"""h4 against a reference of its docstring in numpy, operation by operation in float32, on every variant of the CPU library."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Words, decoded, encoded, form_of, gaussian, launchers, values_of, words_of

from kvobj.tensors import h4
from kvobj.tensors.codec_protocol import STAYS_RAW, Coding
from kvobj.tensors.form import TensorForm

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

Floats = npt.NDArray[np.float32]
LEVELS = np.array([0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590], np.float32)
THRESHOLDS = np.array([0.2582215, 0.5224035, 0.7995495, 1.0992855, 1.4371385, 1.8435315, 2.4008035], np.float32)
SIGN_WORDS = (0xF96746E4, 0xA4CB8964, 0xED533567, 0xE33823F3, 0xE12A2BB7, 0x3E2BF722, 0xACDB634A, 0x68EC9F75)


def signs(dim: int) -> Floats:
    """-1 where the format's bit is set."""
    return np.array([-1 if SIGN_WORDS[d // 32] >> d % 32 & 1 else 1 for d in range(dim)], np.float32)


def transform(v: Floats) -> Floats:
    """Butterflies of distance 1, 2, 4 … along the last axis."""
    apart = 1
    while apart < v.shape[-1]:
        pairs = v.reshape(*v.shape[:-1], -1, 2, apart)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack((a + b, a - b), axis=-2).reshape(v.shape)
        apart *= 2
    return v


def fixed_sum(v: Floats) -> Floats:
    """Along the last axis in the format's order."""
    rows = v.reshape(*v.shape[:-1], -1, 32)
    total = np.zeros_like(rows[..., 0, :])
    for row in range(rows.shape[-2]):
        total = total + rows[..., row, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def reference(words: Words, dtype: str) -> tuple[bytes, Words]:
    """The block, and what it decodes to."""
    x = values_of(words, dtype)
    heads, tokens, dim = words.shape
    one, root = np.float32(1), np.float32(1 / np.sqrt(dim))
    largest = np.abs(x).reshape(heads, -1).max(axis=1).astype(np.float64)
    exponents = [int(np.clip(np.frexp(value)[1] - 1 if value else -127, -100, 126)) for value in largest]
    means = []
    for head, exponent in enumerate(exponents):
        fixed = np.trunc(x[head].astype(np.float64) * 2.0 ** (22 - exponent)).astype(np.int64).sum(axis=0)
        mean = fixed.astype(np.float32) * (one / np.float32(tokens)) * np.float32(2.0 ** (exponent - 22))
        means.append(words_of(mean))
    mean_words = np.array(means)
    mean = values_of(mean_words)[:, None, :]
    v = transform((x - mean) * signs(dim))
    size = np.sqrt(fixed_sum(v * v) * np.float32(1 / dim))
    numbers = (np.abs(v)[..., None] > (THRESHOLDS * size[..., None, None])).sum(axis=-1)
    levels = LEVELS[numbers]
    scale = fixed_sum(np.abs(v) * levels) * (one / fixed_sum(levels * levels)) * root
    halves = scale.astype(np.float16)
    codes = (numbers | np.signbit(v) << 3).astype(np.uint8)
    packed = codes[..., : dim // 2] | codes[..., dim // 2 :] << 4
    back = (
        transform(np.where(np.signbit(v), -levels, levels)) * (halves.astype(np.float32) * root)[..., None] * signs(dim)
        + mean
    )
    head_bytes = mean_words.tobytes() + halves.tobytes()
    return head_bytes + bytes(-len(head_bytes) % 16) + packed.tobytes(), words_of(back, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 5, 64), (2, 70, 128), (2, 9, 256)])
def test_blocks_are_those_of_the_reference_on_every_variant(shape: tuple[int, int, int], dtype: str) -> None:
    words = gaussian(*shape, seed=sum(shape), dtype=dtype)
    block, after = reference(words, dtype)
    for launcher in launchers().values():
        done, data, said = encoded(h4.codec(), launcher, words, Coding(form_of(words, dtype)))
        assert done.length == len(data) == len(block)
        assert data == block
        assert np.array_equal(said, after)
        status, found = decoded(h4.codec(), launcher, data, Coding(form_of(words, dtype)))
        assert status == 0
        assert np.array_equal(found, after)


def test_the_error_is_that_of_sixteen_levels_whatever_the_channels_are() -> None:
    words = gaussian(2, 256, 128, seed=5)
    [launcher] = list(launchers().values())[:1]
    done, data, after = encoded(h4.codec(), launcher, words, Coding(form_of(words)))
    x = values_of(words).astype(float)
    centred = x - x.mean(axis=1, keepdims=True)
    relative = np.sqrt(((values_of(after) - x) ** 2).sum() / (centred**2).sum())
    assert 0.09 < relative < 0.1
    assert 8 * len(data) / words.size <= 4.19
    [error] = done.errors
    assert np.abs(values_of(after) - x).max() <= error.max_error
    assert ((values_of(after) - x) ** 2).sum() <= error.error_square <= ((values_of(after) - x) ** 2).sum() * 1.0001


def test_a_token_is_where_its_number_says() -> None:
    words = gaussian(3, 10, 64)
    form = form_of(words)
    [launcher] = list(launchers().values())[:1]
    _, data, after = encoded(h4.codec(), launcher, words, Coding(form))
    head, token = 2, 7
    mean = values_of(np.frombuffer(data, np.uint16, 64, 2 * head * 64))
    scale = np.frombuffer(data, np.float16, 1, h4.scales_at(form) + 2 * (head * 10 + token)).astype(np.float32)
    packed = np.frombuffer(data, np.uint8, 32, h4.codes_at(form) + (head * 10 + token) * 32)
    codes = np.concatenate((packed & 15, packed >> 4))
    levels = np.where(codes & 8, -LEVELS[codes & 7], LEVELS[codes & 7])
    row = transform(levels) * (scale * np.float32(1 / 8)) * signs(64) + mean
    assert np.array_equal(words_of(row), after[head, token])


@pytest.mark.parametrize("word", [0x7F80, 0xFFFF, 0x7F00])
def test_blocks_with_values_that_are_no_numbers_or_too_large_stay_raw(word: int) -> None:
    words = gaussian(2, 8, 32)
    words[1, 7, 31] = word
    for launcher in launchers().values():
        done, data, _ = encoded(h4.codec(), launcher, words, Coding(form_of(words)))
        assert (done.length, data, done.errors) == (STAYS_RAW, b"", ())


def test_equal_tokens_decode_to_themselves() -> None:
    words = np.repeat(gaussian(2, 1, 64), 20, axis=1)
    for launcher in launchers().values():
        _, _, after = encoded(h4.codec(), launcher, words, Coding(form_of(words)))
        assert np.abs(values_of(after) - values_of(words)).max() <= np.abs(values_of(words)).max() * 2.0**-8


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_and_cut_blocks_refuse_or_decode_within_bounds(data: st.DataObject) -> None:
    words = gaussian(3, 3, 32)
    coding = Coding(form_of(words))
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    _, block, _ = encoded(h4.codec(), launcher, words, coding)
    at, flip = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(1, 255))
    decoded(
        h4.codec(), launcher, block[:at] + bytes([block[at] ^ flip]) + block[at + 1 :], coding
    )  # fences are checked there
    assert decoded(h4.codec(), launcher, block[:at], coding)[0] != 0
    for start, none in (
        (h4.scales_at(coding.form), b"\x00\x7c"),
        (h4.scales_at(coding.form), b"\x00\x80"),
        (0, b"\x80\x7f"),
    ):
        assert decoded(h4.codec(), launcher, block[:start] + none + block[start + 2 :], coding)[0] != 0


def test_what_it_does_not_take_is_refused() -> None:
    assert "head_dim" in (h4.codec().refusal(TensorForm("kv", "bf16", 2, 2, 96, 16)) or "")
    assert "head_dim" in (h4.codec().refusal(TensorForm("mla", "bf16", 2, 1, 576, 16)) or "")
    assert "int8" in (h4.codec().refusal(TensorForm("kv", "int8", 2, 2, 128, 16)) or "")
    assert h4.codec().refusal(TensorForm("kv", "fp16", 2, 2, 128, 16)) is None
