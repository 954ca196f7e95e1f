"""eq against a slow reading of its docstring (`eq_reference.py`), over shapes, steps and dtypes, on every CPU variant."""

from __future__ import annotations

import numpy as np
import pytest
from eq_reference import cheapest, numbers_of, parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Words, decoded, encoded, form_of, gaussian, launchers, values_of, words_of

from kvobj.tensors import eq
from kvobj.tensors.codec_names import CodecName
from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToEncode, Coding
from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels.launcher import Address

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

EQ57, EQ4, EQ3 = eq.Eq(83, 0), eq.Eq(83, 1), eq.Eq(500, 0)
SINK = 20.0


def with_sinks(words: Words, *tokens: int, dtype: str = "bf16") -> Words:
    values = values_of(words, dtype).copy()
    for token in tokens:
        values[:, token] *= SINK
    return words_of(values, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "codec"),
    [
        ((2, 40, 32), EQ4),
        ((3, 40, 33), EQ57),
        ((1, 97, 7), EQ3),
        ((2, 64, 130), eq.Eq(83, 2)),
        ((1, 33, 576), EQ4),
        ((1, 200, 1), eq.Eq(90, 0)),
        ((2, 48, 64), eq.Eq(20, 3)),
        ((2, 48, 64), eq.Eq(4095, 15)),
    ],
)
def test_blocks_hold_what_the_reference_says_on_every_variant(
    shape: tuple[int, int, int], codec: eq.Eq, dtype: str
) -> None:
    words = with_sinks(gaussian(*shape, seed=sum(shape), dtype=dtype), 0, dtype=dtype)
    numbers = numbers_of(words, codec.base_step, codec.rung, dtype)
    assert numbers.guards == ([0] if shape[2] > 1 else [])  # norms of one channel vary too much for guards
    coding = Coding(form_of(words, dtype))
    blocks = set()
    for launcher in launchers().values():
        done, data, said = encoded(codec, launcher, words, coding)
        assert (done.length != STAYS_RAW) == numbers.shrinks
        if done.length == STAYS_RAW:
            continue
        blocks.add(data)
        assert np.array_equal(said, numbers.decoded)
        status, found = decoded(codec, launcher, data, coding)
        assert status == 0
        assert np.array_equal(found, numbers.decoded)
    if not numbers.shrinks:
        return
    [data] = blocks
    block = parsed(data, *shape)
    assert block.guards == numbers.guards
    assert np.array_equal(block.means, numbers.means)
    assert np.array_equal(block.steps, numbers.steps)
    assert np.array_equal(block.integers, numbers.integers)
    assert np.array_equal(block.rows, words[:, numbers.guards].transpose(1, 0, 2))
    for head, ids in enumerate(block.ids):
        chosen = range(0, shape[2], 5)
        assert [ids[column] for column in chosen] == [cheapest(block.integers[head, :, column]) for column in chosen]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_decodes_to_what_the_reference_and_the_encoder_say(data: st.DataObject) -> None:
    heads, tokens, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 90)), data.draw(st.integers(1, 70))
    codec = eq.Eq(data.draw(st.integers(5, 1500)), data.draw(st.integers(0, 4)))
    dtype = data.draw(st.sampled_from(["bf16", "fp16"]))
    words = gaussian(heads, tokens, dim, seed=data.draw(st.integers(0, 2**32 - 1)), dtype=dtype)
    kind = data.draw(st.sampled_from(["plain", "sinks", "zero head", "constant", "sparse"]))
    if kind == "sinks":
        words = with_sinks(words, *data.draw(st.sets(st.integers(0, tokens - 1), max_size=6)), dtype=dtype)
    elif kind == "zero head":
        words[data.draw(st.integers(0, heads - 1))] = 0
    elif kind == "constant":
        words[:] = words[:, :1]
    elif kind == "sparse":
        words[np.random.default_rng(tokens).random(words.shape) < 0.97] = 0
    numbers = numbers_of(words, codec.base_step, codec.rung, dtype)
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    coding = Coding(form_of(words, dtype))
    done, block, said = encoded(codec, launcher, words, coding)
    assert (done.length != STAYS_RAW) == numbers.shrinks
    if done.length == STAYS_RAW:
        return
    assert done.length < words.nbytes
    assert np.array_equal(said, numbers.decoded)
    status, found = decoded(codec, launcher, block, coding)
    assert status == 0
    assert np.array_equal(found, said)


def test_several_blocks_in_a_call_are_those_of_calls_of_one() -> None:
    [launcher] = list(launchers().values())[:1]
    many = [with_sinks(gaussian(3, 50, 24, seed=seed), seed) for seed in range(3)]
    many[1][0, 0, 0] = 0x7F80  # stays RAW among others
    coding = Coding(form_of(many[0]))
    alone = [encoded(EQ4, launcher, words, coding)[:2] for words in many]
    slots = [np.zeros(many[0].nbytes // 16 + 1, np.complex128) for _ in many]
    blocks = [
        BlockToEncode(number, Address(words.ctypes.data), Address(slot.ctypes.data))
        for number, (words, slot) in enumerate(zip(many, slots, strict=True))
    ]
    together = EQ4.encode(launcher, coding, blocks)
    assert [(done, slot.tobytes()[: done.length]) for done, slot in zip(together, slots, strict=True)] == alone
    assert alone[1][0].length == STAYS_RAW


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("codec", [EQ57, EQ4, eq.Eq(83, 2), EQ3])
def test_the_errors_of_each_step_bound_what_it_did_closely(codec: eq.Eq, dtype: str) -> None:
    words = with_sinks(gaussian(3, 64, 96, seed=4, dtype=dtype), 3, dtype=dtype)
    [launcher] = list(launchers().values())[:1]
    done, _, _ = encoded(codec, launcher, words, Coding(form_of(words, dtype)))
    steps = [words] + [numbers_of(words, codec.base_step, rung, dtype).decoded for rung in range(codec.rung + 1)]
    assert len(done.errors) == codec.rung + 1
    for error, before, after in zip(done.errors, steps, steps[1:], strict=False):
        was = values_of(before, dtype).astype(float)
        difference = was - values_of(after, dtype)
        assert np.abs(difference).max() <= error.max_error <= np.abs(difference).max() * 1.00001
        assert (difference**2).sum() <= error.error_square <= (difference**2).sum() * 1.0001
        assert (was**2).sum() * 0.9999 <= error.before_square <= (was**2).sum()


def test_no_value_is_further_off_than_half_a_step_and_its_rounding() -> None:
    words = gaussian(4, 128, 64, seed=9)
    numbers = numbers_of(words, 83, 0)
    [launcher] = list(launchers().values())[:1]
    _, _, after = encoded(EQ57, launcher, words, Coding(form_of(words)))
    values, back = values_of(words).astype(float), values_of(after).astype(float)
    half = values_of(numbers.steps)[:, None, None] / 2
    assert (np.abs(values - back) <= half * 1.00001 + np.abs(back) * 2.0**-8).all()


@pytest.mark.parametrize(
    ("codec", "bits", "error"),
    [(eq.Eq(90, 0), 5.65, 0.0265), (EQ57, 5.77, 0.0245), (EQ4, 4.15, 0.073), (EQ3, 3.15, 0.145)],
)
def test_gaussian_channels_cost_and_err_what_the_rate_distortion_bound_promises(
    codec: eq.Eq, bits: float, error: float
) -> None:
    """512 tokens of unequal channels; the quarter of a bit that a uniform quantiser is off the bound is in the figures."""
    random = np.random.default_rng(5)
    values = random.standard_normal((4, 512, 128)) * np.exp(0.3 * random.standard_normal((4, 1, 128)))
    words = words_of(values.astype(np.float32))
    [launcher] = list(launchers().values())[:1]
    done, _, after = encoded(codec, launcher, words, Coding(form_of(words)))
    off = values_of(words).astype(float) - values_of(after)
    assert 8 * done.length / words.size <= bits
    assert np.sqrt((off**2).sum() / (values_of(words).astype(float) ** 2).sum()) <= error


def test_overhead_is_below_an_eighth_of_a_bit_at_256_tokens_of_128() -> None:
    """Means .0625, ids .0234, ends and steps .0015, states net of what they carry below .01."""
    words = gaussian(8, 256, 128, seed=2)
    [launcher] = list(launchers().values())[:1]
    _, data, _ = encoded(EQ4, launcher, words, Coding(form_of(words)))
    block = parsed(data, *words.shape)
    from eq_reference import frequencies  # noqa: PLC0415 - here alone

    bits = 0.0
    for head, ids in enumerate(block.ids):
        for column, table in enumerate(ids):
            f = np.array(
                [frequencies(table)[127 + q] if abs(q) < 128 else 0 for q in block.integers[head, :, column].tolist()]
            )
            bits += float(np.where(f > 0, 12 - np.log2(np.maximum(f, 1)), 28).sum())
    assert (8 * len(data) - bits) / words.size <= 0.12


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC1, 0x6000, 0x1F00])
def test_a_block_with_a_value_out_of_range_stays_raw(word: int) -> None:
    """Not finite; a head's largest of 2^65; a head's largest of 2^-65."""
    words = gaussian(2, 40, 40)
    if word == 0x1F00:
        words[1] = 0
    words[1, 39, 39] = word
    for launcher in launchers().values():
        done, data, _ = encoded(EQ4, launcher, words, Coding(form_of(words)))
        assert (done.length, data, done.errors) == (STAYS_RAW, b"", ())


def test_integers_beyond_sixteen_bits_leave_a_block_raw() -> None:
    words = np.zeros((1, 64, 64), np.uint16)
    words[0, ::2, :] = 0x3F80
    words[0, 7, 5] = 0x4700  # 2^15, in a block without guards: too many tokens are zero
    launcher = next(iter(launchers().values()))
    assert encoded(eq.Eq(500, 0), launcher, words, Coding(form_of(words)))[0].length != STAYS_RAW
    assert encoded(eq.Eq(1, 0), launcher, words, Coding(form_of(words)))[0].length == STAYS_RAW


def test_zeros_decode_to_zeros_and_cost_next_to_nothing() -> None:
    words = np.zeros((2, 256, 64), np.uint16)
    words[1] = 0x8000
    for launcher in launchers().values():
        done, data, after = encoded(EQ4, launcher, words, Coding(form_of(words)))
        assert not values_of(after).any()
        assert len(data) < 2 * 2 * 64 + 600
        assert done.errors[0].max_error == 0


def test_nothing_of_the_memory_before_is_left_in_a_block() -> None:
    words = with_sinks(gaussian(3, 37, 19), 30)
    [launcher] = list(launchers().values())[:1]
    coding = Coding(form_of(words))
    first = encoded(EQ4, launcher, words, coding, fill=0)[1]
    encoded(eq.Eq(500, 0), launcher, gaussian(3, 37, 19, seed=8), coding)  # other things in the working memory
    assert encoded(EQ4, launcher, words, coding, fill=0xFF)[1] == first


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_and_cut_blocks_refuse_or_decode_within_bounds(data: st.DataObject) -> None:
    words = with_sinks(gaussian(2, 32, 25), 5)
    coding = Coding(form_of(words))
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    _, block, _ = encoded(EQ4, launcher, words, coding)
    at, flip = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(1, 255))
    changed = block[:at] + bytes([block[at] ^ flip]) + block[at + 1 :]
    decoded(EQ4, launcher, changed, coding)  # the fences around stand: checked there
    assert decoded(EQ4, launcher, block[:at], coding)[0] != 0
    assert decoded(EQ4, launcher, block + b"\0\0", coding)[0] != 0


def test_each_byte_of_ends_and_guards_that_changes_is_refused() -> None:
    words = with_sinks(gaussian(2, 32, 25), 5)
    coding = Coding(form_of(words))
    _, block, _ = encoded(EQ4, next(iter(launchers().values())), words, coding)
    count_at = 4 * 2 + 2 * 2 + 2 * 2 * 25
    for launcher in launchers().values():
        for at in (*range(8), count_at, count_at + 1, count_at + 3):
            for flip in (1, 0x10, 0x80, 0xFF):
                changed = block[:at] + bytes([block[at] ^ flip]) + block[at + 1 :]
                assert decoded(EQ4, launcher, changed, coding)[0] != 0, at


@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(max_size=3000), variant=st.integers(0, 2))
def test_garbage_never_reaches_beyond_the_block(garbage: bytes, variant: int) -> None:
    launcher = list(launchers().values())[variant % len(launchers())]
    words = gaussian(2, 32, 25)
    decoded(EQ4, launcher, garbage, Coding(form_of(words)))


def test_presets_are_steps_and_other_forms_are_refused() -> None:
    names = {preset: str(CodecName.parse(preset)) for preset in ("eq57", "eq55", "eq4", "eq3")}
    assert names == {"eq57": "eq:83/0", "eq55": "eq:90/0", "eq4": "eq:83/1", "eq3": "eq:500/0"}
    for index in (83, 90, 500, 83 | 1 << 12):
        assert CodecName.parse(eq.codec(index).name).step_index == index
    with pytest.raises(ValueError, match="has a step"):
        eq.codec(1 << 12)
    assert "takes bf16" in (EQ4.refusal(TensorForm("kv", "fp32", 2, 2, 64, 16)) or "")
    assert "tokens" in (EQ4.refusal(TensorForm("kv", "bf16", 2, 2, 64, 32768)) or "")
    assert EQ4.refusal(TensorForm("mla", "bf16", 2, 1, 576, 256)) is None
