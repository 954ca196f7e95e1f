"""Namespaces of engines' chunks: what is declared, and what they are called. And which prefixes of SGLang's pages count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.connectors.declared import differing
from kvobj.connectors.engine_namespace import EngineFacts, link_settings
from kvobj.connectors.sglang_pages import group_verdict, leading_verdict, part_names, trailing_verdict
from kvobj.errors import ConfigurationError
from kvobj.store.namespace_declaration import identity_of, parse_declaration

FACTS = EngineFacts(engine="vllm", model="org/Model-8B", chunk_tokens=16, others={"dtype": "bf16", "bytes": 4096})
TABLE: dict[str, Any] = {"endpoint": "http://h:1", "bucket": "b", "access_key": "a", "secret_key": "s"}


def named(facts: EngineFacts = FACTS, **more: object) -> str:
    return link_settings({**TABLE, **more}, {}, facts).namespace


def test_the_declaration_is_one_that_a_server_takes() -> None:
    settings = link_settings({**TABLE, "revision": "main", "tenant": "t"}, {}, replace(FACTS, tensor=(1, 4)))
    parsed = parse_declaration(settings.declaration or {})
    assert parsed.identity["model"] == "org/Model-8B"
    assert parsed.identity["revision"] == "main"
    assert parsed.identity["rank"] == {"tensor": (1, 4), "pipeline": (0, 1)}
    assert parsed.identity["salt"] == "tenant=t;engine=vllm;bytes=4096;dtype=bf16"


def test_all_that_is_declared_is_in_the_derived_name() -> None:
    assert named() == named()
    assert named().startswith("vllm-org_Model-8B-")
    others = [
        named(revision="main"),
        named(tenant="t"),
        named(replace(FACTS, model="org/Model-9B")),
        named(replace(FACTS, chunk_tokens=32)),
        named(replace(FACTS, tensor=(0, 2))),
        named(replace(FACTS, tensor=(1, 2))),
        named(replace(FACTS, others={"dtype": "fp8", "bytes": 4096})),
    ]
    assert len({named(), *others}) == len(others) + 1


def test_a_given_name_is_kept_and_ranks_get_a_suffix() -> None:
    assert named(namespace="prod") == "prod"
    assert named(replace(FACTS, tensor=(1, 4), pipeline=(0, 2)), namespace="prod") == "prod.tp1of4.pp0of2"
    assert named(replace(FACTS, context=(1, 2)), namespace="prod") == "prod.cp1of2"
    ranks = replace(FACTS, tensor=(1, 4), pipeline=(0, 2), context=(1, 2), decode_context=(3, 4))
    assert named(ranks, namespace="prod") == "prod.tp1of4.pp0of2.cp1of2.dcp3of4"


def test_what_an_owner_declared_is_compared_with_what_would_be_declared() -> None:
    settings = link_settings({**TABLE, "revision": "main", "declare": False}, {}, replace(FACTS, tensor=(1, 4)))
    assert not settings.declare
    assert settings.declaration is not None
    wanted = settings.declaration
    standing = identity_of(parse_declaration({**wanted, "access": {"engine": "read"}}).canonical)
    assert differing(standing, wanted) == []
    for field, value in (
        ("revision", None),
        ("chunk_tokens", 32),
        ("rank", {"tensor": [2, 4], "pipeline": [0, 1]}),
        ("layout", {"kind": "mla"}),
        ("salt", "tenant=t"),
        ("adapter", "lora"),
        ("part_axis", "layer"),
        ("ids", "lmcache"),
    ):
        assert differing({**standing, field: value}, wanted) == [field]


def test_fields_that_say_nothing_are_those_that_are_not_declared() -> None:
    least = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign"}
    standing = identity_of(parse_declaration(least).canonical)
    assert differing(standing, least) == []
    assert differing(standing, {**least, "revision": None, "lossy": True}) == []
    assert differing({**standing, "salt": "s"}, least) == ["salt"]
    tensor = {"kind": "kv", "dtype": "bf16", "layers": 2, "kv_heads": 2, "head_dim": 8}
    completed = identity_of(parse_declaration({**least, "layout": tensor}).canonical)
    assert differing(completed, {**least, "layout": tensor}) == []
    assert differing(completed, {**least, "layout": {**tensor, "dtype": "fp16"}}) == ["layout"]


def test_an_engine_of_its_own_configuration_has_no_chunks_in_default() -> None:
    for declare in (True, False):
        with pytest.raises(ConfigurationError, match="namespace: default declares nothing"):
            link_settings({**TABLE, "namespace": "default", "declare": declare}, {}, FACTS)


def test_wrong_settings_are_told_with_their_names() -> None:
    with pytest.raises(ConfigurationError, match=r"revision.*declaration.*declare"):
        link_settings({**TABLE, "revision": 1, "declare": "no", "declaration": {}}, {}, FACTS)


@pytest.mark.parametrize(
    ("setting", "more", "facts"),
    [
        ("tenant", {"tenant": "t\ud800"}, FACTS),
        ("tenant", {"tenant": "t\ud800", "namespace": "n"}, FACTS),
        ("revision", {"revision": "\udfff"}, FACTS),
        ("model", {}, replace(FACTS, model="org/\ud800")),
        ("tenant", {}, replace(FACTS, others={"partition": "\ud800"})),
    ],
)
def test_half_a_character_is_told_with_the_setting_that_has_it(
    setting: str, more: dict[str, object], facts: EngineFacts
) -> None:
    with pytest.raises(ConfigurationError, match="a lone surrogate") as told:
        link_settings({**TABLE, **more}, {}, facts)
    (problem,) = told.value.problems
    assert problem.startswith(f"{setting}: ")


def test_parts_and_pools_of_a_page_have_names_of_their_own() -> None:
    assert part_names("k", "", "", "", 1) == ["k"]
    assert part_names("k", "", "", "", 2) == ["k.0of2", "k.1of2"]
    assert part_names("k", "mamba", "tp1of2", "", 2) == ["k.mamba.tp1of2.0of2", "k.mamba.tp1of2.1of2"]
    assert part_names("k", "", "", "page", 1) == ["k.page"]


@given(pages=st.lists(st.booleans(), max_size=30), window=st.integers(1, 5), start=st.integers(0, 4))
def test_a_window_of_states_decides_which_lengths_can_be_restored(pages: list[bool], window: int, start: int) -> None:
    all_pages = [False] * start + pages
    expected = {
        length
        for length in range(1, len(all_pages) + 1)
        if all(all_pages[index] for index in range(max(0, length - window), length))
    }
    verdict = trailing_verdict(pages, start=start, window=window)
    assert verdict.lengths == expected
    assert verdict.pages == max(expected, default=0)


def test_leading_pages_and_groups_of_blocks() -> None:
    assert leading_verdict(2).lengths == {1, 2}
    assert leading_verdict(0).lengths == set()
    assert group_verdict(5, block_pages=8, group_pages=2, pages=100).pages == 16
    assert group_verdict(5, block_pages=8, group_pages=2, pages=10).pages == 10
    assert group_verdict(5, block_pages=8, group_pages=2, pages=100).lengths is None
    assert group_verdict(5, block_pages=0, group_pages=0, pages=100).pages == 0
