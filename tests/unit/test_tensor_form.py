"""Forms of tensors: what is one, where its blocks and layers lie in the declared order."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import InvalidRequestError
from kvobj.store.namespace_declaration import parse_declaration
from kvobj.tensors.form import AXES, ORDERS, TensorForm

LLAMA = TensorForm(kind="kv", dtype="bf16", layers=4, kv_heads=2, head_dim=8, tokens=6)


def forms() -> st.SearchStrategy[TensorForm]:
    sizes = st.integers(1, 5)
    kinds = st.sampled_from(["kv", "k", "v", "mla"])
    return st.builds(
        lambda kind, heads, **rest: TensorForm(kind=kind, kv_heads=1 if kind == "mla" else heads, **rest),
        kind=kinds,
        heads=sizes,
        dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8", "uint8"]),
        layers=sizes,
        head_dim=sizes,
        tokens=sizes,
        order=st.sampled_from(ORDERS),
    )


def numbered(form: TensorForm) -> npt.NDArray[np.int64]:
    """The index of each element in the plain bytes, as an array whose axes are in the order of `AXES`."""
    count = form.plain_bytes // form.element_bytes
    declared = np.arange(count).reshape(form.shape)
    return declared.transpose([form.order.index(axis) for axis in AXES])


def test_sizes_count_what_a_chunk_holds() -> None:
    assert (LLAMA.kinds, LLAMA.blocks, LLAMA.block_values, LLAMA.block_bytes) == (2, 8, 96, 192)
    assert LLAMA.plain_bytes == 8 * 192
    assert LLAMA.shape == (4, 2, 2, 6, 8)
    latent = TensorForm(kind="mla", dtype="fp8_e4m3", layers=61, kv_heads=1, head_dim=576, tokens=64)
    assert (latent.kinds, latent.blocks, latent.plain_bytes) == (1, 61, 61 * 576 * 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "opaque"), ("kind", "KV"), ("dtype", "float"), ("layers", 0), ("kv_heads", -1), ("head_dim", 2**20 + 1),
        ("tokens", 0), ("tokens", 1.5), ("order", ("layer", "kv", "head", "token")), ("order", (*AXES[:4], "layer")),
        ("order", (*AXES, "dim")),
    ],
)  # fmt: skip
def test_what_no_namespace_can_declare_is_no_form(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(LLAMA, **{field: value})  # type: ignore[arg-type]


def test_a_latent_has_one_head() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        replace(LLAMA, kind="mla")


def test_every_order_has_an_index_and_the_default_is_the_first() -> None:
    assert list(permutations(AXES)) == list(ORDERS)
    assert [replace(LLAMA, order=order).order_index for order in ORDERS] == list(range(120))
    assert LLAMA.order_index == 0


@pytest.mark.parametrize("kind", ["kv", "k", "v"])
def test_a_declared_layout_gives_the_form_that_its_chunks_have(kind: str) -> None:
    order = ["kv", "layer", "token", "head", "dim"]
    layout = {"kind": kind, "dtype": "fp16", "layers": 3, "kv_heads": 4, "head_dim": 64, "order": order}
    declaration = parse_declaration({"model": "m", "chunk_tokens": 16, "layout": layout, "ids": "kvobj"})
    declared = declaration.identity["layout"]
    assert isinstance(declared, dict)
    form = TensorForm.from_layout(declared, 16)
    assert form is not None
    assert form.plain_bytes == declaration.chunk_bytes
    assert form.order == tuple(order)
    assert (form.layers, form.kv_heads, form.head_dim, form.tokens, form.dtype) == (3, 4, 64, 16, "fp16")


def test_a_latent_layout_needs_no_heads_and_a_layout_no_order() -> None:
    form = TensorForm.from_layout({"kind": "mla", "dtype": "bf16", "layers": 2, "head_dim": 576}, 8)
    assert form is not None
    assert (form.kv_heads, form.order) == (1, AXES)


def test_an_opaque_layout_has_no_form() -> None:
    assert TensorForm.from_layout({"kind": "opaque"}, 16) is None


@pytest.mark.parametrize(
    "layout", [{}, {"kind": "kv"}, {"kind": ["kv"]}, {"kind": "kv", "dtype": "bf16", "layers": "4"}]
)
def test_what_is_no_layout_is_refused(layout: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        TensorForm.from_layout(layout, 16)


@given(form=forms())
def test_strides_are_those_of_a_dense_array(form: TensorForm) -> None:
    elements = numbered(form)
    for axis, name in enumerate(AXES):
        if elements.shape[axis] > 1:
            assert np.all(np.diff(elements, axis=axis) == form.strides[name])


@given(form=forms(), data=st.data())
def test_layer_spans_are_the_bytes_of_those_layers_and_no_others(form: TensorForm, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, form.layers - 1))
    last = data.draw(st.integers(first, form.layers - 1))
    spans = form.layer_spans(first, last)
    width = form.element_bytes
    covered = [element for start, stop in spans for element in range(start // width, stop // width)]
    assert covered == sorted(numbered(form)[first : last + 1].ravel().tolist())
    assert sum(stop - start for start, stop in spans) == form.layers_only(range(first, last + 1)).plain_bytes
    if form.is_layer_major:
        assert len(spans) == 1


@given(form=forms())
def test_a_form_says_whether_its_blocks_lie_as_codecs_want_them(form: TensorForm) -> None:
    elements = numbered(form)
    flat = elements.reshape(form.blocks, -1)
    together = all(np.array_equal(np.sort(each), np.arange(each.size) + at * each.size) for at, each in enumerate(flat))
    assert form.is_block_major == together
    assert form.is_head_major == np.array_equal(elements.ravel(), np.arange(elements.size))
    by_layer = elements.reshape(form.layers, -1)
    assert form.is_layer_major == all(each.max() - each.min() == each.size - 1 for each in by_layer)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (2, 1), (0, 4), (4, 4)])
def test_layers_that_there_are_not_have_no_spans(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="no layers"):
        LLAMA.layer_spans(first, last)
