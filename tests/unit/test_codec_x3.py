"""x3: lossless for every bit pattern, the bytes that its module documents, and a refusal of what is no block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Fenced, gaussian, launchers

from kvobj.tensors import x3
from kvobj.tensors.codec_protocol import STAYS_RAW, BlockToDecode, BlockToEncode, Coding
from kvobj.tensors.form import ELEMENT_BYTES, TensorForm
from kvobj.tensors.kernels.host_launcher import HostLauncher

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

Words = npt.NDArray[Any]
Numbers = npt.NDArray[np.signedinteger[Any]]
_DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
_CODEC = x3.codec()


def _form(words: Words, dtype: str) -> TensorForm:
    heads, tokens, dim = words.shape
    return TensorForm("k", dtype, 1, heads, dim, tokens)  # type: ignore[arg-type]


def _encoded(launcher: HostLauncher, blocks: Sequence[Words], dtype: str, fill: int = 0xEE) -> list[bytes | None]:
    """Each block's bytes, None where it stays RAW."""
    form = _form(blocks[0], dtype)
    plains, slots = [Fenced(form.block_bytes) for _ in blocks], [Fenced(_CODEC.slot_bytes(form), fill) for _ in blocks]
    for plain, words in zip(plains, blocks, strict=True):
        plain.view[:] = words.tobytes()
    asked = [
        BlockToEncode(at, plain.address, slot.address) for at, (plain, slot) in enumerate(zip(plains, slots, strict=True))
    ]  # fmt: skip
    done = _CODEC.encode(launcher, Coding(form), asked)
    assert all(each.intact for each in (*plains, *slots))
    assert not any(each.errors for each in done)
    return [
        None if each.length == STAYS_RAW else bytes(slot.view[: each.length])
        for each, slot in zip(done, slots, strict=True)
    ]  # fmt: skip


def _decoded(launcher: HostLauncher, data: bytes, form: TensorForm) -> bytes | None:
    """The plain bytes, None where the block is refused."""
    source, plain = Fenced(len(data)), Fenced(form.block_bytes)
    source.view[:] = data
    (status,) = _CODEC.decode(launcher, Coding(form), [BlockToDecode(0, source.address, len(data), plain.address)])
    assert plain.intact
    assert bytes(source.view) == data
    return None if status else bytes(plain.view)


def _random_words(heads: int, tokens: int, dim: int, dtype: str, seed: int, *, wild: float = 0.0) -> Words:
    """Gaussian words with a share of random bit patterns."""
    words: Words = gaussian(heads, tokens, dim, seed=seed, dtype="fp16" if dtype != "bf16" else "bf16").astype(
        np.uint32
    )
    if dtype == "fp8_e5m2":
        words >>= 8
    elif dtype == "fp8_e4m3":
        exponent = np.clip((words >> 10 & 31).astype(np.int64) - 8, 0, 15).astype(np.uint32)
        words = (words >> 8 & 0x80) | exponent << 3 | (words >> 7 & 7)
    width = ELEMENT_BYTES[dtype]
    random = np.random.default_rng(seed)
    chosen = random.random(words.shape) < wild
    words[chosen] = random.integers(0, 1 << 8 * width, int(chosen.sum()))
    return words.astype(np.uint16 if width == 2 else np.uint8)


# ---- The module's docstring, slowly ----


def _split(words: Words, dtype: str) -> tuple[Numbers, Numbers | None, Numbers | None, int]:
    """Exponents, low bytes, rest bits and how many they are."""
    x = words.astype(np.int64)
    if dtype == "bf16":
        return x >> 7 & 255, (x >> 15) << 7 | (x & 127), None, 0
    if dtype == "fp16":
        return x >> 10 & 31, x & 255, (x >> 15) << 2 | (x >> 8 & 3), 3
    if dtype == "fp8_e4m3":
        return x >> 3 & 15, None, (x >> 7) << 3 | (x & 7), 4
    return x >> 2 & 31, None, (x >> 7) << 2 | (x & 3), 3


def _tops(exponents: Numbers) -> list[int]:
    """Of one head, [token][dim]."""
    tokens, dim = exponents.shape
    tokens_a_row = 128 // dim if dim < 128 and 128 % dim == 0 else 1
    rows = [exponents[at : at + tokens_a_row] for at in range(0, tokens, tokens_a_row)]
    chunks = [rows[at : at + 64] for at in range(0, len(rows), 64)]
    if len(chunks) > 1 and len(chunks[-1]) < 32:
        chunks.pop()
    tops = []
    for column in range(dim):
        maxima = [
            max((int(row[place][column]) for row in chunk if place < len(row)), default=0)
            for chunk in chunks
            for place in range(tokens_a_row)
        ]
        counted = sorted(each for each in maxima if each)
        tops.append(max(6, counted[(len(counted) - 1) // 2]) if counted else 6)
    return tops


def _field(values: Numbers, bits: int) -> bytes:
    """Up to 1,024 values in rows of 128 bytes."""
    padded = np.zeros(1024, np.int64)
    padded[: len(values)] = values
    columns = [sum(int(padded[column + 128 * at]) << bits * at for at in range(8)) for column in range(128)]
    return b"".join(bytes(each >> 8 * row & 255 for each in columns) for row in range(bits))


def _reference(words: Words, dtype: str) -> bytes | None:
    heads = words.shape[0]
    exponents, lows, rests, rest_bits = _split(words, dtype)
    top_bytes = ends = before = codes = low_bytes = rest_bytes = escaped_bytes = b""
    for head in range(heads):
        tops = _tops(exponents[head])
        top_bytes += bytes(tops)
        run = exponents[head].ravel()
        code = np.tile(np.array(tops), words.shape[1]) - run
        escapes = (code < 0) | (code > 6)
        code[escapes] = 7
        earlier = [int(escapes[:at].sum()) for at in range(0, len(run), 2048)]
        if max(earlier) > 0xFFFF:
            return None
        escaped_bytes += bytes(run[escapes].tolist())
        before += b"".join(each.to_bytes(2, "little") for each in earlier)
        ends += len(escaped_bytes).to_bytes(4, "little")
        for at in range(0, len(run), 1024):
            codes += _field(code[at : at + 1024], 3)
            if rests is not None:
                rest_bytes += _field(rests[head].ravel()[at : at + 1024], rest_bits)
        if lows is not None:
            low_bytes += bytes(lows[head].ravel().tolist()) + bytes(-len(run) % 4)
    first = top_bytes + bytes(-len(top_bytes) % 4) + ends + before
    made = first + bytes(-len(first) % 16) + codes + low_bytes + rest_bytes + escaped_bytes
    return made if len(made) < words.nbytes else None


@pytest.mark.parametrize("dtype", _DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 3),
        st.integers(1, 150),
        st.one_of(st.sampled_from((1, 16, 32, 64, 128, 256)), st.integers(1, 200)),
    ),
    wild=st.sampled_from((0.0, 0.01, 0.2)),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_are_the_bytes_that_the_module_documents_on_every_variant_and_decode_to_the_values(
    dtype: str, shape: tuple[int, int, int], wild: float, seed: int
) -> None:
    words = _random_words(*shape, dtype, seed, wild=wild)
    expected = _reference(words, dtype)
    for variant, launcher in launchers().items():
        assert _encoded(launcher, [words], dtype) == [expected], variant
        if expected is not None:
            assert _decoded(launcher, expected, _form(words, dtype)) == words.tobytes(), variant


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_bit_pattern_survives(dtype: str) -> None:
    patterns = np.arange(1 << 8 * ELEMENT_BYTES[dtype])
    words = _random_words(4, 1024, 256, dtype, 3)
    words.ravel()[:: words.size // len(patterns)] = patterns
    for variant, launcher in launchers().items():
        (data,) = _encoded(launcher, [words], dtype)
        assert data is not None, variant
        assert _decoded(launcher, data, _form(words, dtype)) == words.tobytes(), variant


def test_gaussian_channels_of_unequal_gain_shrink_by_1_4_counting_everything() -> None:
    words = gaussian(8, 256, 128, seed=5)
    for launcher in launchers().values():
        (data,) = _encoded(launcher, [words], "bf16")
        assert data is not None
        assert words.nbytes / len(data) >= 1.4


def test_tokens_that_are_all_zero_do_not_spoil_the_windows() -> None:
    words = gaussian(4, 256, 128, seed=6)
    words[:, 100:] = 0
    (launcher, *_) = launchers().values()
    (data,) = _encoded(launcher, [words], "bf16")
    assert data is not None
    tops = np.frombuffer(data, np.uint8, 4 * 128).reshape(4, 128)
    exponents = words >> 7 & 255
    assert (tops >= exponents.max(axis=1) - 3).all()


def test_blocks_of_one_call_are_coded_as_if_alone_whatever_the_memory_held() -> None:
    blocks = [gaussian(3, 100, 48, seed=seed) for seed in range(4)]
    blocks[2] = np.random.default_rng(1).integers(0, 1 << 16, blocks[2].shape).astype(np.uint16)  # does not shrink
    form = _form(blocks[0], "bf16")
    for launcher in launchers().values():
        together = _encoded(launcher, blocks, "bf16")
        assert [data is None for data in together] == [False, False, True, False]
        assert together == [_encoded(launcher, [block], "bf16", fill=0x11)[0] for block in blocks]
        coded = [data for data in together if data is not None]
        sources, plains = [Fenced(len(data)) for data in coded], [Fenced(form.block_bytes) for _ in coded]
        for source, data in zip(sources, coded, strict=True):
            source.view[:] = data
        asked = [
            BlockToDecode(at, source.address, len(data) - (at == 1), plain.address)
            for at, (source, data, plain) in enumerate(zip(sources, coded, plains, strict=True))
        ]
        assert _CODEC.decode(launcher, Coding(form), asked) == [0, 1, 0]
        assert bytes(plains[0].view) == blocks[0].tobytes()
        assert bytes(plains[2].view) == blocks[3].tobytes()


def test_a_head_with_more_escapes_than_16_bits_count_stays_raw() -> None:
    words = gaussian(1, 2048, 128, seed=8)
    words[:, 1::5] &= 0x807F  # every fifth and fourth token: exponent 0
    (launcher, *_) = launchers().values()
    (few,) = _encoded(launcher, [words], "bf16")
    assert few is not None, "52,428 escapes"
    words[:, 2::5] &= 0x807F
    assert _encoded(launcher, [words], "bf16") == [None], "104,857, though it would shrink"


@pytest.mark.parametrize("dtype", _DTYPES)
def test_any_changed_byte_or_length_is_refused_or_decodes_within_its_block(dtype: str) -> None:
    words = _random_words(2, 32, 64, dtype, 9, wild=0.01)
    form = _form(words, dtype)
    (launcher, *others) = launchers().values()
    (data,) = _encoded(launcher, [words], dtype)
    assert data is not None
    for length in (*range(0, len(data), 37), len(data) - 1):
        assert _decoded(launcher, data[:length], form) is None, length
    assert _decoded(launcher, data + b"\0", form) is None
    changed = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8 if at % 3 else 0xFF
        found = _decoded(launcher, bytes(damaged), form)
        changed += found != words.tobytes()
        for other in others if at % 8 == 0 else ():
            assert (_decoded(other, bytes(damaged), form) is None) == (found is None)
    assert changed >= 0.9 * len(data), "padding alone may change, and what an escape has above the dtype's exponent"


@pytest.mark.parametrize("field", ["ends", "before"])
def test_counts_of_escapes_that_do_not_fit_are_refused(field: str) -> None:
    words = _random_words(2, 64, 64, "bf16", 10, wild=0.01)
    (launcher, *_) = launchers().values()
    (data,) = _encoded(launcher, [words], "bf16")
    assert data is not None
    at, width = (2 * 64, 4) if field == "ends" else (2 * 64 + 4 * 2, 2)
    for value in (0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF):
        damaged = data[:at] + (value & (1 << 8 * width) - 1).to_bytes(width, "little") + data[at + width :]
        if damaged != data:
            assert _decoded(launcher, damaged, _form(words, "bf16")) is None, value


@pytest.mark.parametrize("dtype", ["fp32", "int8", "uint8"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    refusal = _CODEC.refusal(TensorForm("kv", dtype, 1, 1, 64, 64))  # type: ignore[arg-type]
    assert refusal is not None
    assert dtype in refusal


@pytest.mark.parametrize("kind", ["kv", "k", "v", "mla"])
def test_every_kind_is_taken(kind: str) -> None:
    assert _CODEC.refusal(TensorForm(kind, "bf16", 2, 1, 576, 256)) is None  # type: ignore[arg-type]
