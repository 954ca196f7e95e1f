"""ek: what it decodes to against a plain model of it in numpy, its gain, its bounds, and that all variants agree bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Words, decoded, encoded, gaussian, launchers, values_of, words_of
from profile_models import Model

from kvobj.errors import InvalidRequestError, UnavailableError
from kvobj.tensors import ek, eq
from kvobj.tensors.codec_protocol import STAYS_RAW, Coding
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import POSITIONS, Profile

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

MODELS = (Model(2, 64, theta=1e4), Model(2, 64), Model(1, 96), Model(12, 32, theta=5e5), Model(3, 32, kind="v"))


@cache
def profile(model: Model) -> Profile:
    """Its profile, made once."""
    return model.profile()


def coding(model: Model, tokens: int, position: int = 0, dtype: str = "bf16") -> Coding:
    """Of a chunk."""
    return Coding(model.form(tokens, dtype), position, 0, profile(model))


def reference(model: Model, words: Words, thousandths: int, position: int) -> Words:
    """What a block without guarded tokens decodes to; float32 operation by operation."""
    held = profile(model)
    heads, tokens, dim = words.shape
    columns = heads * dim
    means = np.frombuffer(held.data, np.float32, columns, held.means_at)
    basis = np.frombuffer(held.data, np.int16, columns**2, held.bases_at).reshape(columns, columns).astype(np.int64)
    step = np.float32(np.float32(thousandths / 1000) * np.float32(held.rms(0)))
    x = values_of(words).transpose(1, 0, 2)
    half, cosine, sine = dim // 2, np.float32(1), np.float32(0)
    if model.rope is not None:
        tables = np.frombuffer(held.data, np.float32, held.table_bytes // 4, held.tables_at).reshape(4, 1024, half)
        at = position + np.arange(tokens)
        a, b, c, d = tables[0][at % 1024], tables[1][at % 1024], tables[2][at // 1024], tables[3][at // 1024]
        cosine, sine = (a * c - b * d)[:, None], (b * c + a * d)[:, None]
        left, right = x[..., :half], x[..., half:]
        x = np.concatenate((left * cosine + right * sine, right * cosine - left * sine), axis=-1)
    y = (x.reshape(tokens, columns) - means) * (np.float32(1) / (step * np.float32(1 / 16)))
    grid = (np.sign(y) * np.floor(np.abs(y).astype(np.float64) + 0.5)).astype(np.int64)
    sums = grid @ basis
    integers = np.sign(sums) * ((np.abs(sums) + (1 << 17)) >> 18)
    back = (integers @ basis.T).astype(np.float32) * (step * np.float32(2.0**-14)) + means
    back = back.reshape(tokens, heads, dim)
    if model.rope is not None:
        left, right = back[..., :half], back[..., half:]
        back = np.concatenate((left * cosine - right * sine, right * cosine + left * sine), axis=-1)
    return words_of(np.ascontiguousarray(back.transpose(1, 0, 2)))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_blocks_decode_to_what_the_reference_says_on_every_variant(model: Model) -> None:
    tokens, position = 43, 1000
    words = model.words(tokens, position=position)
    wanted = reference(model, words, 150, position)
    blocks = set()
    for launcher in launchers().values():
        done, data, said = encoded(ek.codec(150), launcher, words, coding(model, tokens, position))
        assert done.length == len(data) > 0
        status, found = decoded(ek.codec(150), launcher, data, coding(model, tokens, position))
        assert status == 0
        assert np.array_equal(said, wanted)
        assert np.array_equal(found, wanted)
        blocks.add((data, done))
    assert len(blocks) == 1


def test_correlated_columns_cost_less_than_with_eq_at_the_same_error() -> None:
    model, tokens = Model(2, 64, theta=1e4), 256
    words = model.words(tokens)
    launcher = next(iter(launchers().values()))
    done, data, after = encoded(ek.codec(100), launcher, words, coding(model, tokens))
    other, plain, _ = encoded(eq.codec(100), launcher, words, coding(model, tokens))
    assert done.errors[0].error_square < 1.02 * other.errors[0].error_square
    assert len(data) < 0.85 * len(plain)
    difference = (values_of(after) - values_of(words)).astype(float)
    assert np.abs(difference).max() <= done.errors[0].max_error
    assert (difference**2).sum() <= done.errors[0].error_square <= 1.001 * (difference**2).sum()


def test_tokens_unlike_the_others_come_back_as_they_were() -> None:
    model, tokens = Model(2, 64, theta=1e4), 64
    words = model.words(tokens)
    words[:, 0] = words_of(values_of(words[:, 0]) * np.float32(16))
    words[:, 40] = words_of(values_of(words[:, 40]) * np.float32(0.01))
    for launcher in launchers().values():
        done, data, said = encoded(ek.codec(200), launcher, words, coding(model, tokens))
        assert done.length
        status, after = decoded(ek.codec(200), launcher, data, coding(model, tokens))
        assert status == 0
        assert np.array_equal(said, after)
        same = [token for token in range(tokens) if np.array_equal(after[:, token], words[:, token])]
        assert same == [0, 40]


def test_fp16_is_taken_too() -> None:
    model, tokens = Model(2, 64), 32
    words = model.words(tokens, dtype="fp16")
    for launcher in launchers().values():
        done, data, said = encoded(ek.codec(150), launcher, words, coding(model, tokens, dtype="fp16"))
        status, after = decoded(ek.codec(150), launcher, data, coding(model, tokens, dtype="fp16"))
        assert status == 0
        assert np.array_equal(said, after)
        difference = np.abs(values_of(after, "fp16") - values_of(words, "fp16"))
        assert 0 < difference.max() <= done.errors[0].max_error


@pytest.mark.parametrize("word", [0x7F80, 0x7FC0, 0x7F00])
def test_values_that_are_no_numbers_or_far_too_large_keep_a_block_raw(word: int) -> None:
    model, tokens = Model(2, 64), 20
    words = model.words(tokens)
    words[1, 19, 63] = word
    for launcher in launchers().values():
        done, data, _ = encoded(ek.codec(150), launcher, words, coding(model, tokens))
        assert (done.length, data, done.errors) == (STAYS_RAW, b"", ())


def test_values_far_from_the_profile_s_keep_a_block_raw_instead_of_wrapping() -> None:
    model, tokens = Model(2, 64), 32
    words = words_of(values_of(model.words(tokens)) * np.float32(3000))
    for launcher in launchers().values():
        assert encoded(ek.codec(20), launcher, words, coding(model, tokens))[0].length == STAYS_RAW


def test_positions_beyond_the_tables_keep_a_block_raw_and_refuse_to_decode() -> None:
    model, tokens = Model(2, 64, theta=1e4), 32
    launcher = next(iter(launchers().values()))
    words = model.words(tokens)
    assert encoded(ek.codec(150), launcher, words, coding(model, tokens, POSITIONS - 31))[0].length == STAYS_RAW
    done, data, _ = encoded(ek.codec(150), launcher, words, coding(model, tokens))
    assert done.length
    assert decoded(ek.codec(150), launcher, data, coding(model, tokens, POSITIONS - 31))[0] != 0
    assert encoded(
        ek.codec(150), launcher, model.words(tokens, position=POSITIONS - 32), coding(model, tokens, POSITIONS - 32)
    )[0].length


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_changed_and_cut_blocks_refuse_or_decode_within_bounds(data: st.DataObject) -> None:
    model, tokens = Model(2, 32), 37
    words = model.words(tokens)
    words[:, 3] = words_of(values_of(words[:, 3]) * np.float32(30))
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    _, block, _ = encoded(ek.codec(300), launcher, words, coding(model, tokens))
    at = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(block) - 1)))
    changed = bytearray(block)
    changed[at % len(block)] ^= data.draw(st.integers(1, 255))
    decoded(ek.codec(300), launcher, bytes(changed), coding(model, tokens))  # fences are checked there
    assert decoded(ek.codec(300), launcher, block[:at], coding(model, tokens))[0] != 0
    assert decoded(ek.codec(300), launcher, block + bytes(2), coding(model, tokens))[0] != 0


def test_nothing_of_the_memory_before_is_left_in_a_block() -> None:
    model, tokens = Model(2, 64), 30
    launcher = next(iter(launchers().values()))
    words = model.words(tokens)
    blocks = {encoded(ek.codec(150), launcher, words, coding(model, tokens), fill=fill)[1] for fill in (0x00, 0xFF)}
    encoded(ek.codec(90), launcher, gaussian(2, 30, 64, seed=9), coding(model, tokens))
    blocks.add(encoded(ek.codec(150), launcher, words, coding(model, tokens))[1])
    assert len(blocks) == 1


def test_a_profile_of_the_model_is_needed() -> None:
    launcher = next(iter(launchers().values()))
    words = Model(2, 64).words(16)
    for wrong in (None, profile(Model(1, 96)), profile(Model(3, 32, kind="v"))):
        with pytest.raises(InvalidRequestError, match="profile"):
            encoded(ek.codec(150), launcher, words, Coding(Model(2, 64).form(16), 0, 0, wrong))


def test_what_it_does_not_take_is_refused() -> None:
    assert "columns" in (ek.codec(150).refusal(TensorForm("kv", "bf16", 2, 3, 40, 16)) or "")
    assert "columns" in (ek.codec(150).refusal(TensorForm("kv", "bf16", 2, 64, 128, 16)) or "")
    assert "int8" in (ek.codec(150).refusal(TensorForm("kv", "int8", 2, 2, 64, 16)) or "")
    assert ek.codec(150).refusal(TensorForm("mla", "bf16", 2, 1, 576, 16)) is None
    with pytest.raises(UnavailableError):
        ek.codec(150 | 1 << 12)
    with pytest.raises(ValueError, match="step"):
        ek.codec(0)
