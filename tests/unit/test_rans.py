"""The entropy coder: its streams as the plain Python of `rans_reference` has them. Codecs' tests hold kernels to the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rans_reference import ESCAPE, LANES, decode_stream, encode_stream, xa_alphabet

_STATE_BYTES = 128
_ALPHABET = xa_alphabet()

_runs = st.tuples(
    st.lists(st.integers(0, 63), min_size=1, max_size=40),
    st.lists(st.one_of(st.integers(0, 8), st.integers(0, 23), st.just(ESCAPE)), min_size=1, max_size=300),
)


@settings(max_examples=60, deadline=None)
@given(_runs)
def test_a_stream_gives_back_ids_symbols_and_raw_words(run: tuple[list[int], list[int]]) -> None:
    ids, symbols = run
    raw = [(i * 7919) % 65536 for i in range(len(symbols))]
    stream = encode_stream(_ALPHABET, ids, symbols, raw)
    found_ids, found, words = decode_stream(_ALPHABET, stream, len(ids), len(symbols))
    assert found_ids == ids
    escaped = [_ALPHABET.placed(ids[i % len(ids)], symbol)[2] for i, symbol in enumerate(symbols)]
    assert [ESCAPE if e else s for s, e in zip(symbols, escaped, strict=True)] == found
    assert words == {i: raw[i] for i, e in enumerate(escaped) if e}


def test_a_short_run_needs_no_word() -> None:
    stream = encode_stream(_ALPHABET, [0], [0] * LANES, [0] * LANES)
    assert len(stream) == _STATE_BYTES


def test_the_states_carry_the_last_values_of_a_run() -> None:
    """A state takes 32 bits and carries 24 of them on average; were its first 16 nothing, as where states start from 2^16, 8."""
    symbols = [(i * i) % 4 for i in range(40 * LANES)]
    stream = encode_stream(_ALPHABET, [4], symbols, [0] * len(symbols))
    bits = 6 + sum(12 - math.log2(_ALPHABET.placed(4, symbol)[0]) for symbol in symbols)
    assert bits < 8 * len(stream) < bits + 12 * LANES


def test_a_stream_that_goes_on_is_refused() -> None:
    stream = encode_stream(_ALPHABET, [3], [1] * 500, [0] * 500)
    with pytest.raises(ValueError, match=r"end|missing"):
        decode_stream(_ALPHABET, stream + b"\0\0", 1, 500)


def test_a_stream_that_breaks_off_is_refused() -> None:
    stream = encode_stream(_ALPHABET, [3], [1] * 500, [0] * 500)
    with pytest.raises(ValueError, match=r"end|missing"):
        decode_stream(_ALPHABET, stream[:-2], 1, 500)
