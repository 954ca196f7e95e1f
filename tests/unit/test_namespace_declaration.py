"""Declarations: strict, completed, canonical; sizes; what differs; settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import NamespaceQuota
from kvobj.errors import InvalidRequestError
from kvobj.store.namespace_declaration import differs, identity_of, parse_declaration, settings_of

FULL: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "revision": "main",
    "tokenizer": "t",
    "chunk_tokens": 256,
    "layout": {
        "kind": "kv",
        "dtype": "bf16",
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "order": ["layer", "kv", "head", "token", "dim"],
    },
    "rank": {"tensor": [0, 1], "pipeline": [0, 1]},
    "adapter": None,
    "rope": {"theta": 500000.0, "applied": True},
    "salt": "tenant-a",
    "part_axis": None,
    "ids": "kvobj",
    "codecs": {"dram": "raw", "nvme": "xa", "remote": "xa"},
    "lossy": False,
}
OPAQUE: dict[str, Any] = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign"}


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    result = copy.deepcopy(document)
    *outer, last = path.split(".")
    inner = result
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return result


def without(document: dict[str, Any], path: str) -> dict[str, Any]:
    result = changed(document, path, None)
    *outer, last = path.split(".")
    inner = result
    for name in outer:
        inner = inner[name]
    del inner[last]
    return result


def row_of(document: Mapping[str, object]) -> NamespaceRow:
    declaration = parse_declaration(document)
    return declaration.row(bucket="cache", name="n", wrapped_key=b"w", root=b"r", owner="main", now_ms=3)


def field_refused(document: Mapping[str, object]) -> object:
    with pytest.raises(InvalidRequestError) as caught:
        row_of(document)
    assert str(caught.value.data["field"]) in caught.value.message
    return caught.value.data["field"]


def test_the_example_of_the_api_has_the_size_it_says() -> None:
    assert parse_declaration(FULL).chunk_bytes == 33_554_432


def test_a_row_has_what_was_declared() -> None:
    row = row_of(FULL | {"part_axis": "layer", "access": {"u": "read"}, "quota": {"chunks": 4}})
    assert (row.ids, row.chunk_tokens, row.chunk_bytes, row.part_axis) == ("kvobj", 256, 33_554_432, "layer")
    assert (row.bucket, row.name, row.wrapped_key, row.root, row.owner, row.created_ms) == (
        "cache",
        "n",
        b"w",
        b"r",
        "main",
        3,
    )
    assert row.codecs == {"dram": "raw", "nvme": "xa", "remote": "xa"}
    assert (row.lossy, row.access, row.quota) == (False, {"u": "read"}, NamespaceQuota(chunks=4))
    assert settings_of(row)["quota"] == {"chunks": 4, "size_bytes": None}


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_heads", "expected"),
    [
        ("kv", "bf16", 8, 2 * 2 * 3 * 8 * 5 * 16),
        ("k", "fp16", 8, 2 * 3 * 8 * 5 * 16),
        ("v", "fp32", 2, 4 * 3 * 2 * 5 * 16),
        ("kv", "fp8_e4m3", 8, 2 * 3 * 8 * 5 * 16),
        ("mla", "bf16", 1, 2 * 3 * 5 * 16),
        ("mla", "uint8", None, 3 * 5 * 16),
    ],
)
def test_a_layout_gives_a_full_chunks_size(kind: str, dtype: str, kv_heads: int | None, expected: int) -> None:
    layout = {"kind": kind, "dtype": dtype, "layers": 3, "head_dim": 5} | ({"kv_heads": kv_heads} if kv_heads else {})
    assert parse_declaration(OPAQUE | {"layout": layout}).chunk_bytes == expected


def test_an_opaque_layout_has_no_size() -> None:
    assert parse_declaration(OPAQUE).chunk_bytes is None


@pytest.mark.parametrize("name", ["revision", "tokenizer", "rank", "adapter", "part_axis", "rope"])
def test_a_default_that_is_written_out_changes_nothing(name: str) -> None:
    written = {"rank": {"tensor": [0, 1], "pipeline": [0, 1]}}.get(name)
    bare = {key: value for key, value in FULL.items() if key != name}
    assert parse_declaration(bare).fingerprint == parse_declaration(bare | {name: written}).fingerprint


def test_defaults_are_filled_in() -> None:
    assert identity_of(parse_declaration(OPAQUE).canonical) == OPAQUE | {
        "revision": None,
        "tokenizer": None,
        "rank": {"tensor": [0, 1], "pipeline": [0, 1]},
        "adapter": None,
        "rope": None,
        "salt": "",
        "part_axis": None,
    }
    mla = parse_declaration(OPAQUE | {"layout": {"kind": "mla", "dtype": "bf16", "layers": 1, "head_dim": 1}})
    assert identity_of(mla.canonical)["layout"] == {
        "kind": "mla", "dtype": "bf16", "layers": 1, "kv_heads": 1, "head_dim": 1,
        "order": ["layer", "kv", "head", "token", "dim"],
    }  # fmt: skip


@given(st.permutations(list(FULL)))
def test_the_order_of_fields_does_not_matter(names: list[str]) -> None:
    assert parse_declaration({name: FULL[name] for name in names}).canonical == parse_declaration(FULL).canonical


def test_whole_and_broken_numbers_of_one_value_are_one_declaration() -> None:
    assert parse_declaration(changed(FULL, "rope.theta", 500000)).canonical == parse_declaration(FULL).canonical


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", "m"), ("revision", None), ("tokenizer", "u"), ("chunk_tokens", 128), ("layout.dtype", "fp16"),
        ("layout.layers", 31), ("layout.kv_heads", 4), ("layout.head_dim", 64),
        ("layout.order", ["kv", "layer", "token", "head", "dim"]), ("rank.tensor", [1, 2]), ("rank.pipeline", [0, 2]),
        ("adapter", "sql"), ("rope.theta", 1e4), ("rope.applied", False), ("rope.scaling", {"factor": 8, "type": "llama3"}),
        ("salt", ""), ("part_axis", "kv"), ("ids", "foreign"),
    ],
)  # fmt: skip
def test_each_field_of_the_identity_is_named_when_it_differs(path: str, value: object) -> None:
    one, other = parse_declaration(FULL), parse_declaration(changed(FULL, path, value))
    assert one.fingerprint != other.fingerprint
    assert differs(one.canonical, other.canonical) == differs(other.canonical, one.canonical) == (path,)
    assert differs(one.canonical, one.canonical) == ()


def test_several_fields_that_differ_are_all_named() -> None:
    one = parse_declaration(FULL).canonical
    other = parse_declaration(FULL | {"salt": "", "layout": {"kind": "opaque"}, "rope": None}).canonical
    assert differs(one, other) == (
        "layout.dtype", "layout.head_dim", "layout.kind", "layout.kv_heads", "layout.layers", "layout.order",
        "rope", "rope.applied", "rope.scaling", "rope.theta", "salt",
    )  # fmt: skip
    assert "model" in differs(one, b"")


@pytest.mark.parametrize(
    "settings", [{"codecs": {}}, {"lossy": True}, {"access": {"u": "write"}}, {"quota": {"chunks": 1}}]
)
def test_settings_are_no_part_of_the_identity(settings: dict[str, object]) -> None:
    assert parse_declaration(FULL | settings).fingerprint == parse_declaration(FULL).fingerprint


def test_settings_that_are_not_named_are_left_as_they_are() -> None:
    row = row_of(FULL | {"access": {"u": "write"}, "quota": {"chunks": 4}, "lossy": True})
    bare = {name: value for name, value in FULL.items() if name not in ("codecs", "lossy")}
    assert parse_declaration(bare).settings.over(row) == row
    emptied = parse_declaration(bare | {"access": None, "quota": None, "codecs": None, "lossy": None}).settings.over(
        row
    )
    assert (emptied.access, emptied.quota, emptied.codecs, emptied.lossy) == ({}, NamespaceQuota(), {}, False)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"ids": "sha"}, "ids: 'sha' is none of kvobj, foreign, lmcache, vllm-sha256-cbor, sglang-sha256"),
        ({"codecs": {"disk": "xa"}}, "codecs: 'disk' is none of hbm, dram, nvme, remote"),
        ({"codecs": {"nvme": "zip"}}, "codecs[...]: 'zip' is none of raw, zp, x3, xa, "),
        ({"access": {"a": "admin"}}, "access[...]: 'admin' is none of read, write"),
        ({"layout": {"kind": "kv", "dtype": "float16"}}, "layout.dtype: 'float16' is none of fp32, bf16, fp16, "),
        ({"layout": {"kind": "kv", "order": ["kv", "time"]}}, "layout.order[1]: 'time' is none of layer, kv, head, "),
    ],
)
def test_where_there_is_a_choice_the_refusal_names_it(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_declaration(OPAQUE | document)
    assert caught.value.message.startswith(problem)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({}, "model"),
        (without(FULL, "chunk_tokens"), "chunk_tokens"),
        (without(FULL, "layout.kind"), "layout.kind"),
        (without(FULL, "layout.dtype"), "layout.dtype"),
        (without(FULL, "layout.kv_heads"), "layout.kv_heads"),
        (without(FULL, "rope.theta"), "rope.theta"),
        (FULL | {"modle": "m"}, "modle"),
        (changed(FULL, "layout.heads", 8), "layout.heads"),
        (changed(FULL, "rank.expert", [0, 1]), "rank.expert"),
        (changed(FULL, "rope.base", 1), "rope.base"),
        (FULL | {"model": ""}, "model"),
        (FULL | {"model": 3}, "model"),
        (FULL | {"model": "m" * 1025}, "model"),
        (FULL | {"chunk_tokens": 0}, "chunk_tokens"),
        (FULL | {"chunk_tokens": True}, "chunk_tokens"),
        (FULL | {"chunk_tokens": 256.5}, "chunk_tokens"),
        (FULL | {"chunk_tokens": 2**20 + 1}, "chunk_tokens"),
        (FULL | {"ids": "sha256"}, "ids"),
        (FULL | {"part_axis": "token"}, "part_axis"),
        (changed(FULL, "layout.kind", "kvkv"), "layout.kind"),
        (changed(FULL, "layout.dtype", "float16"), "layout.dtype"),
        (changed(FULL, "layout.layers", -1), "layout.layers"),
        (changed(FULL, "layout.order", ["layer", "kv", "head", "token"]), "layout.order"),
        (changed(FULL, "layout.order", ["layer", "kv", "head", "token", "token"]), "layout.order"),
        (changed(FULL, "layout.order", ["layer", "kv", "head", "token", "dim", "dim"]), "layout.order"),
        (changed(FULL, "rank.tensor", [1, 1]), "rank.tensor"),
        (changed(FULL, "rope.theta", float("inf")), "rope.theta"),
        (changed(FULL, "rope.theta", 0), "rope.theta"),
        (changed(FULL, "layout.head_dim", 2**20), "layout"),
        (OPAQUE | {"layout": {"kind": "opaque", "layers": 2}}, "layout.layers"),
        (OPAQUE | {"layout": {"kind": "mla", "dtype": "bf16", "layers": 1, "head_dim": 1, "kv_heads": 2}}, "layout.kv_heads"),
        (OPAQUE | {"part_axis": "layer"}, "part_axis"),
        (changed(FULL, "layout.kind", "k") | {"part_axis": "kv"}, "part_axis"),
        (FULL | {"ids": "vllm-sha256-cbor", "adapter": "a"}, "adapter"),
        (FULL | {"model": "\ud800"}, "declaration"),
        (OPAQUE | {"codecs": {"nvme": "xa"}}, "codecs.nvme"),
        (FULL | {"codecs": {"nvme": "eq4"}}, "codecs.nvme"),
        (FULL | {"codecs": {"nvme": "ek"}, "lossy": True}, "codecs.nvme"),
        (FULL | {"codecs": {"hbm": "zp"}}, "codecs.hbm"),
        (FULL | {"codecs": {"hbm": "eq4"}, "lossy": True}, "codecs.hbm"),
        (FULL | {"profile": "AB" * 32}, "profile"),
        (FULL | {"profile": "ab" * 31}, "profile"),
        (OPAQUE | {"profile": "ab" * 32}, "profile"),
        (FULL | {"access": {"u": "admin"}}, "access"),
        (FULL | {"quota": {"chunks": -1}}, "quota.chunks"),
        (FULL | {"quota": {"bytes": 1}}, "quota.bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_field(document: dict[str, Any], field: str) -> None:
    refused = field_refused(document)
    assert refused == field or str(refused).startswith(f"{field}.") or str(refused).startswith(f"{field}[")


def test_a_lossy_codec_may_be_chosen_where_it_is_allowed() -> None:
    assert row_of(FULL | {"codecs": {"remote": "eq4"}, "lossy": True}).codecs == {"remote": "eq4"}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*FULL, "access", "quota", "x"]), _VALUES))
def test_any_document_is_taken_or_refused_by_its_type(overrides: dict[str, object]) -> None:
    refusal: InvalidRequestError | None = None
    try:
        declaration = parse_declaration(FULL | overrides)
    except InvalidRequestError as error:
        refusal = error
    else:
        assert parse_declaration(identity_of(declaration.canonical)).canonical == declaration.canonical
    assert refusal is None or refusal.data["field"]
