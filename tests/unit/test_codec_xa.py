"""xa: blocks as its module describes them, on every variant of the CPU library, lossless for every bit pattern; else refused."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_blocks import Fenced, gaussian, launchers
from rans_reference import ESCAPE, costs, encode_stream, xa_alphabet

from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToDecode, BlockToEncode, Coding
from kvobj.tensors.form import Dtype, TensorForm
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.xa import codec

Words = npt.NDArray[Any]

_VARIANTS = launchers()
pytestmark = pytest.mark.skipif(not _VARIANTS, reason="no CPU kernels: no C++ compiler when kvobj was installed")

_DTYPES: Final[dict[Dtype, tuple[type, int, int, int]]] = {
    "bf16": (np.uint16, 8, 7, 254),
    "fp16": (np.uint16, 5, 10, 30),
    "fp8_e4m3": (np.uint8, 4, 3, 15),
    "fp8_e5m2": (np.uint8, 5, 2, 30),
    "fp32": (np.uint32, 8, 23, 254),
}
"""Words, bits of exponent and mantissa, largest finite exponent."""
_SYMBOLS: Final = 24


def _form(words: Words, dtype: Dtype = "bf16") -> TensorForm:
    heads, tokens, dim = words.shape
    return TensorForm("k", dtype, 1, heads, dim, tokens)


def _encoded(launcher: HostLauncher, words: Words, dtype: Dtype = "bf16", fill: int = 0xEE) -> bytes | None:
    form = _form(words, dtype)
    plain, slot = Fenced(words.nbytes), Fenced(codec().slot_bytes(form), fill)
    plain.view[:] = words.tobytes()
    [done] = codec().encode(launcher, Coding(form), [BlockToEncode(0, plain.address, slot.address)])
    assert plain.intact
    assert slot.intact
    assert done.errors == ()
    return None if done.length == STAYS_RAW else bytes(slot.view[: done.length])


def _decoded(launcher: HostLauncher, data: bytes, form: TensorForm) -> bytes | None:
    source, plain = Fenced(len(data)), Fenced(form.block_bytes)
    source.view[:] = data
    [status] = codec().decode(launcher, Coding(form), [BlockToDecode(0, source.address, len(data), plain.address)])
    assert plain.intact
    assert source.intact
    return None if status else bytes(plain.view)


def _words(dtype: Dtype, shape: tuple[int, int, int], seed: int = 0) -> Words:
    """Values of unequal columns, some zeros and some patterns at random."""
    kind, exponent, mantissa, largest = _DTYPES[dtype]
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-3, 1, (shape[0], 1, shape[2])))
    fraction, power = np.frexp(random.standard_normal(shape) * scale)
    power = np.clip(power + largest - 3, 0, largest)
    words = (np.abs(fraction) * 2 - 1) * 2.0**mantissa
    found = words.astype(np.uint64) | power.astype(np.uint64) << mantissa
    found |= (fraction < 0).astype(np.uint64) << (mantissa + exponent)
    found = np.where(random.random(shape) < 0.005, 0, found)
    any_pattern = random.integers(0, 2 ** (1 + exponent + mantissa), shape, dtype=np.uint64)
    return np.where(random.random(shape) < 0.01, any_pattern, found).astype(kind)


def _reference(words: Words, dtype: Dtype) -> bytes:
    """A block as the module's docstring has it."""
    _, exponent, mantissa, largest_finite = _DTYPES[dtype]
    heads, tokens, dim = words.shape
    values, low_bits = tokens * dim, mantissa + 1
    runs = words.reshape(heads, values).astype(np.int64)
    exponents = runs >> mantissa & (1 << exponent) - 1
    tops = np.where(exponents > largest_finite, 0, exponents).max(axis=1)
    alphabet, cost = xa_alphabet(), costs()
    lows, streams, ends = b"", b"", b""
    for run, of_run, top in zip(runs, exponents, tops, strict=True):
        part = run >> (mantissa + exponent) << mantissa | run & (1 << mantissa) - 1
        low = b""
        for first in range(0, values, 32):
            for bit in range(low_bits // 8 * 8, low_bits):
                low += sum(int(v) >> bit & 1 and 1 << j for j, v in enumerate(part[first : first + 32])).to_bytes(
                    4, "little"
                )
        for plane in range(low_bits // 8):
            low += bytes((part >> 8 * plane & 255).astype(np.uint8))
        lows += low + bytes(-len(low) % 4)
        symbols = [d if 0 <= d < _SYMBOLS else ESCAPE for d in (int(top) - of_run).tolist()]
        ids = [alphabet.cheapest(symbols[column::dim], cost) for column in range(dim)]
        streams += encode_stream(alphabet, ids, symbols, of_run.tolist())
        ends += len(streams).to_bytes(4, "little")
    head = ends + bytes(tops.astype(np.uint8).tolist())
    return head + bytes(-len(head) % 16) + lows + streams


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(2, 40, 33), (1, 64, 32), (3, 300, 5), (1, 7, 200)])
def test_blocks_are_those_of_the_description(dtype: Dtype, shape: tuple[int, int, int]) -> None:
    words = _words(dtype, shape)
    expected = _reference(words, dtype)
    for launcher in _VARIANTS.values():
        found = _encoded(launcher, words, dtype)
        assert found == (expected if len(expected) < words.nbytes else None)
        if len(expected) < words.nbytes:
            assert _decoded(launcher, expected, _form(words, dtype)) == words.tobytes()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_what_does_not_shrink_decodes_too(dtype: Dtype) -> None:
    """So small a block is stored RAW, but a reader knows no lower limit."""
    words = _words(dtype, (3, 2, 3))
    for launcher in _VARIANTS.values():
        assert _encoded(launcher, words, dtype) is None
        assert _decoded(launcher, _reference(words, dtype), _form(words, dtype)) == words.tobytes()


_sizes = st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 140))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(_DTYPES)), _sizes, st.integers(0, 2**32), st.integers(0, 255))
def test_every_shape_comes_back_and_every_variant_agrees(
    dtype: Dtype, sizes: tuple[int, int, int], seed: int, fill: int
) -> None:
    words = _words(dtype, sizes, seed)
    blocks = {_encoded(launcher, words, dtype, fill) for launcher in _VARIANTS.values()}
    assert len(blocks) == 1
    [block] = blocks
    if block is not None:
        decoded = {_decoded(launcher, block, _form(words, dtype)) for launcher in _VARIANTS.values()}
        assert decoded == {words.tobytes()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_every_bit_pattern_survives(dtype: Dtype) -> None:
    """Each once, among values that make the block shrink."""
    kind, exponent, mantissa, _ = _DTYPES[dtype]
    every: Words = np.arange(2 ** (1 + exponent + mantissa)).astype(kind)
    words = np.tile(_words(dtype, (1, 8, 256)), (1, max(64, 8 * every.size // 256) // 8, 1))
    words.reshape(-1)[: every.size] = np.random.default_rng(1).permutation(every)
    for launcher in _VARIANTS.values():
        block = _encoded(launcher, words, dtype)
        assert block is not None
        assert _decoded(launcher, block, _form(words, dtype)) == words.tobytes()


def test_random_words_stay_raw() -> None:
    words = np.random.default_rng(0).integers(0, 65536, (2, 64, 32)).astype(np.uint16)
    assert {_encoded(launcher, words) for launcher in _VARIANTS.values()} == {None}


def test_a_block_of_zeros_shrinks_to_low_parts_and_states() -> None:
    words = np.zeros((2, 512, 64), np.uint16)
    for launcher in _VARIANTS.values():
        block = _encoded(launcher, words)
        assert block is not None
        assert len(block) < words.size * 1.1
        assert _decoded(launcher, block, _form(words)) == words.tobytes()


def test_a_gaussian_block_takes_the_bits_that_were_promised() -> None:
    words = gaussian(8, 256, 128)
    block = _encoded(next(iter(_VARIANTS.values())), words)
    assert block is not None
    assert 16 * words.size / (8 * len(block)) >= 1.48


def test_many_blocks_in_one_call_are_as_each_by_itself() -> None:
    launcher = next(iter(_VARIANTS.values()))
    every = [_words("bf16", (3, 40, 48), seed) for seed in range(5)]
    form = _form(every[0])
    plain, slots = [Fenced(words.nbytes) for words in every], [Fenced(codec().slot_bytes(form)) for _ in every]
    for words, to in zip(every, plain, strict=True):
        to.view[:] = words.tobytes()
    asked = [BlockToEncode(at, p.address, s.address) for at, (p, s) in enumerate(zip(plain, slots, strict=True))]
    lengths = [done.length for done in codec().encode(launcher, Coding(form), asked)]
    assert [bytes(s.view[:n]) for s, n in zip(slots, lengths, strict=True)] == [
        _encoded(launcher, words) for words in every
    ]
    outs = [Fenced(form.block_bytes) for _ in every]
    back = [
        BlockToDecode(at, s.address, n, o.address)
        for at, (s, n, o) in enumerate(zip(slots, lengths, outs, strict=True))
    ]
    slots[2].view[lengths[2] - 1] ^= 1
    assert [bool(status) for status in codec().decode(launcher, Coding(form), back)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert bytes(outs[4].view) == every[4].tobytes()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_damaged_streams_and_tables_are_refused_and_never_reach_beyond_the_block(dtype: Dtype) -> None:
    """Not noticed, but by the container's checksum: low parts, raw words, an id of a table that is another's shifted."""
    words = _words(dtype, (2, 40, 33))
    for launcher in _VARIANTS.values():
        block = _encoded(launcher, words, dtype) or _reference(words, dtype)
        form = _form(words, dtype)
        ends = 4 * form.kv_heads
        streams = len(block) - int.from_bytes(block[ends - 4 : ends], "little")
        taken = 0
        for at in (*range(ends), *range(streams, len(block))):
            damaged = bytearray(block)
            damaged[at] ^= 1 << at % 8
            found = _decoded(launcher, bytes(damaged), form)
            assert found != words.tobytes()
            taken += found is not None
        assert taken < 0.05 * (len(block) - streams)
        for length in (*range(0, streams, 97), *range(streams, len(block), 31)):
            assert _decoded(launcher, block[:length], form) is None
        assert _decoded(launcher, block + b"\0\0", form) is None


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=700), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))
def test_any_bytes_are_refused_or_decode_within_the_block(data: bytes, heads: int, tokens: int, dim: int) -> None:
    form = TensorForm("k", "bf16", 1, heads, dim, tokens)
    assert len({_decoded(launcher, data, form) is None for launcher in _VARIANTS.values()}) == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_stay_raw(dtype: Dtype) -> None:
    words = np.zeros((1, 64, 64), np.uint8)
    launcher = next(iter(_VARIANTS.values()))
    assert codec().refusal(_form(words, dtype)) is None
    assert _encoded(launcher, words, dtype) is None
    assert _decoded(launcher, bytes(64), _form(words, dtype)) is None
