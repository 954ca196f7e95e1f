"""The ladder of eq: what is demoted from a finer rung is, byte for byte, what coding the original at the coarser one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_blocks import Fenced, Words, encoded, form_of, gaussian, launchers, values_of, words_of

from kvobj.errors import InvalidRequestError
from kvobj.tensors import codecs, eq
from kvobj.tensors.codec_protocol import BlockToDemote, Coding, EncodedLength
from kvobj.tensors.form import AXES, TensorForm
from kvobj.tensors.kernels.host_launcher import HostLauncher

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")


def demoted(
    codec: eq.Eq, finer: str, launcher: HostLauncher, data: bytes, coding: Coding
) -> tuple[EncodedLength | None, bytes, bytes]:
    form = coding.form
    source, slot, plain = Fenced(len(data)), Fenced(codec.slot_bytes(form)), Fenced(form.block_bytes)
    source.view[:] = data
    [done] = codec.demote(
        launcher, coding, finer, [BlockToDemote(0, source.address, len(data), slot.address, plain.address)]
    )
    assert source.intact
    assert slot.intact
    assert plain.intact
    return done, bytes(slot.view[: done.length]) if done else b"", bytes(plain.view)


def words_for(data: st.DataObject, heads: int, tokens: int, dim: int, dtype: str) -> Words:
    words = gaussian(heads, tokens, dim, seed=data.draw(st.integers(0, 2**32 - 1)), dtype=dtype)
    values = values_of(words, dtype).copy()
    for token in data.draw(st.sets(st.integers(0, tokens - 1), max_size=4)):
        values[:, token] *= data.draw(st.sampled_from([0.01, 20.0]))
    for head in data.draw(st.sets(st.integers(0, heads - 1), max_size=1)):
        values[head] = 0
    return words_of(values, dtype)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_blocks_demote_to_the_bytes_of_direct_coding(data: st.DataObject) -> None:
    heads, tokens, dim = data.draw(st.integers(1, 3)), data.draw(st.integers(20, 80)), data.draw(st.integers(8, 70))
    dtype = data.draw(st.sampled_from(["bf16", "fp16"]))
    base, fine = data.draw(st.integers(8, 1200)), data.draw(st.integers(0, 3))
    coarse = data.draw(st.integers(fine + 1, 6))
    words = words_for(data, heads, tokens, dim, dtype)
    coding = Coding(form_of(words, dtype))
    names = list(launchers())
    launcher, other = (launchers()[data.draw(st.sampled_from(names))] for _ in range(2))
    finer, coarser = eq.Eq(base, fine), eq.Eq(base, coarse)
    first, block, _ = encoded(finer, launcher, words, coding)
    direct, wanted, after = encoded(coarser, other, words, coding)
    assert (first.length == 0) == (direct.length == 0)  # whether a block is RAW is the same along a ladder
    if not first.length:
        return
    done, found, plain = demoted(coarser, finer.name, launcher, block, coding)
    assert done is not None
    assert found == wanted
    assert plain == after.tobytes()
    assert done.errors == direct.errors[fine + 1 :]
    assert direct.errors[: fine + 1] == first.errors


FORMS = [
    TensorForm("kv", "bf16", 3, 2, 64, 48),
    TensorForm("kv", "fp16", 2, 2, 33, 40, ("kv", "layer", "token", "head", "dim")),
    TensorForm("mla", "bf16", 4, 1, 96, 64),
    TensorForm("k", "bf16", 2, 3, 32, 64, AXES),
    TensorForm("v", "bf16", 2, 1, 16, 4),  # too few tokens: RAW blocks
]


def frame_of(plain: bytes, codec: str, form: TensorForm) -> bytes:
    into = bytearray(codecs.encode_bound(codec, form))
    length = codecs.encode_frame(
        memoryview(plain), memoryview(into), codec=codec, form=form, fingerprint=b"f" * 16, first_position=7
    )
    return bytes(into[:length])


def plain_of(form: TensorForm, seed: int) -> bytes:
    words = gaussian(form.kinds * form.layers * form.kv_heads, form.tokens, form.head_dim, seed=seed, dtype=form.dtype)
    words[0, 1, 0] = 0x7F80 if form.dtype == "bf16" and seed else words[0, 1, 0]  # a block that is RAW at each rung
    return words.tobytes()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_frames_demote_to_the_bytes_of_direct_coding_over_any_path(form: TensorForm, seed: int) -> None:
    plain = plain_of(form, seed)
    rungs = [frame_of(plain, f"eq:83/{rung}", form) for rung in range(4)]
    for fine, coarse in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3)):
        into = bytearray(codecs.encode_bound(f"eq:83/{coarse}", form))
        head = codecs.parse_tensor_frame(memoryview(rungs[fine]), len(rungs[fine]))
        length = codecs.demote(memoryview(rungs[fine]), head, memoryview(into), codec=f"eq:83/{coarse}")
        assert into[:length] == rungs[coarse]


def test_certificates_hold_along_the_ladder_and_grow() -> None:
    form = FORMS[0]
    plain = plain_of(form, 0)
    before = values_of(np.frombuffer(plain, np.uint16)).astype(float)
    last = 0.0
    for rung in range(4):
        frame = frame_of(plain, f"eq:83/{rung}", form)
        head = codecs.parse_tensor_frame(memoryview(frame), len(frame))
        into = bytearray(form.plain_bytes)
        codecs.decode_frame(memoryview(frame), head, memoryview(into))
        off = before - values_of(np.frombuffer(bytes(into), np.uint16))
        for kind, most, relative in (
            (0, head.certificate.max_error_k, head.certificate.relative_l2_k),
            (1, head.certificate.max_error_v, head.certificate.relative_l2_v),
        ):
            errors, values = (x.reshape(form.layers, 2, -1)[:, kind] for x in (off, before))
            assert np.abs(errors).max() <= most
            assert np.sqrt((errors**2).sum() / (values**2).sum()) <= relative
        assert head.certificate.max_error > last
        last = head.certificate.max_error


@pytest.mark.parametrize("codec", ["eq57", "eq3", "eq:83/1", "eq:84/2", "x3"])
def test_what_is_no_coarser_rung_of_the_same_ladder_is_refused(codec: str) -> None:
    form = FORMS[0]
    frame = frame_of(plain_of(form, 0), "eq4", form)
    head = codecs.parse_tensor_frame(memoryview(frame), len(frame))
    with pytest.raises(InvalidRequestError, match="not demoted"):
        codecs.demote(memoryview(frame), head, memoryview(bytearray(codecs.encode_bound("eq4", form))), codec=codec)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_changed_and_cut_blocks_demote_to_none_or_within_bounds(data: st.DataObject) -> None:
    words = gaussian(2, 32, 25)
    coding = Coding(form_of(words))
    launcher = data.draw(st.sampled_from(list(launchers().values())))
    _, block, _ = encoded(eq.Eq(83, 0), launcher, words, coding)
    at, flip = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(1, 255))
    changed = block[:at] + bytes([block[at] ^ flip]) + block[at + 1 :]
    demoted(eq.Eq(83, 2), "eq:83/0", launcher, changed, coding)  # fences stand: checked there
    assert demoted(eq.Eq(83, 2), "eq:83/0", launcher, block[:at], coding)[0] is None
