"""Engines' hash chains against vectors: those that the engines' own code made (`golden/engine_chains.json`, which names the
releases), and for Dynamo and llm-d those computed from their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import InvalidTokensError
from kvobj.ids.chunk_ids import token_bytes
from kvobj.ids.engine_chains import aibrix, dynamo, llm_d, lmcache, server, sglang, vllm, xxh3
from kvobj.ids.engine_chains.canonical_cbor import CborValue, canonical_cbor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engine_chains.json").read_text())
TOKENS = [(7919 * i + 13) % 151936 for i in range(40)]
WIDE = [*TOKENS[:20], 2**40 + 7, *TOKENS[20:]]
EIGHT = list(range(1, 9))


def hexed(digests: list[bytes]) -> list[str]:
    return [digest.hex() for digest in digests]


# -- vectors of engines.md: tokens 1..8, blocks of 4 ------------------------------------------------------------------


def test_lmcache_multi_process() -> None:
    assert lmcache.mp_root().hex() == "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b"
    assert hexed(lmcache.mp_chunk_hashes(EIGHT, chunk_tokens=4)) == [
        "6309ed506b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c",
        "98efc76eafb06cfe774c31ff151f300b61a614c27982a211bb8cdbd83a8c0e19",
    ]


def test_lmcache_in_process() -> None:
    root = lmcache.in_process_root("sha256_cbor")
    hashes = lmcache.in_process_chunk_hashes(EIGHT, algorithm="sha256_cbor", root=root, chunk_tokens=4)
    assert [f"{value:016x}" for value in (root, *hashes)] == [
        "9bd96a485ad84efd",
        "522558a1570001db",
        "549fbcf1cac2637b",
    ]


def test_vllm() -> None:
    assert vllm.root_hash("sha256_cbor").hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    assert hexed(vllm.block_hashes(EIGHT, block_tokens=4, algorithm="sha256_cbor")) == [
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
        "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
    ]
    salted = vllm.block_hashes(EIGHT, block_tokens=4, algorithm="sha256_cbor", extras=vllm.Extras(cache_salt="s"))
    assert salted[0].hex() == "01466aa533549120b1e6803a48ef19676640af7ee5c524ca9679178595884d02"


def test_sglang() -> None:
    assert hexed(sglang.page_hashes(EIGHT, page_tokens=4)) == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ]


def test_dynamo() -> None:
    salt = dynamo.salt_hash()
    assert f"{salt:016x}" == "1349cde127705c16"
    first, second = dynamo.hashed_blocks(EIGHT, block_tokens=4, salt=salt)
    assert f"{first.block_hash:016x}" == f"{first.sequence_hash:016x}" == "6f6388e4d51d17a1"
    assert f"{second.block_hash:016x}" == "4475385afa607c29"
    assert f"{second.sequence_hash:016x}" == "afcf710107ed361e"
    assert f"{first.lineage:032x}" == "001bd8e239354745e840000000000000"
    assert f"{second.lineage:032x}" == "006bf3dc4041fb4d87a388e4d51d17a1"


def test_llm_d() -> None:
    assert f"{llm_d.root_key('m'):016x}" == "9ddb2db69f3f452c"
    keys = llm_d.block_keys(EIGHT, model="m", block_tokens=4)
    assert [f"{key:016x}" for key in keys] == ["cbd1586ecc3519c9", "88ca5c4ae336e982"]


# -- what the engines' own code made ---------------------------------------------------------------------------------


def test_lmcache_as_its_multi_process_server_hashes() -> None:
    golden = GOLDEN["lmcache"]["multi_process"]
    assert lmcache.mp_root().hex() == golden["root"]
    assert hexed(lmcache.mp_chunk_hashes(TOKENS, chunk_tokens=16)) == golden["hashes"]


@pytest.mark.parametrize("case", GOLDEN["lmcache"]["in_process"], ids=str)
def test_lmcache_as_its_token_database_hashes(case: dict[str, Any]) -> None:
    hashes = lmcache.in_process_chunk_hashes(
        TOKENS,
        algorithm=case["algorithm"],
        root=lmcache.in_process_root(case["algorithm"], seed=case["seed"]),
        chunk_tokens=16,
        save_unfull_chunk=case["save_unfull_chunk"],
    )
    assert [f"{value:016x}" for value in hashes] == case["hashes"]


@pytest.mark.parametrize(
    "case", GOLDEN["vllm"]["blocks"], ids=lambda case: f"{case['algorithm']}-{case['seed']}-{case['case']}"
)
def test_vllm_as_it_hashes_blocks(case: dict[str, Any]) -> None:
    adapter = case["adapter"]
    extras = vllm.Extras(
        adapter=None if adapter is None else (adapter[0], adapter[1]),
        items=tuple(vllm.Item(*item) for item in case["items"]),
        cache_salt=case["cache_salt"],
        prompt_embeds={int(start): bytes.fromhex(digest) for start, digest in case["prompt_embeds"].items()},
    )
    hashes = vllm.block_hashes(TOKENS, algorithm=case["algorithm"], seed=case["seed"], extras=extras)
    assert hexed(hashes) == case["hashes"]


@pytest.mark.parametrize("case", GOLDEN["sglang"]["pages"], ids=lambda case: case["case"])
def test_sglang_as_it_hashes_pages(case: dict[str, Any]) -> None:
    hashes = sglang.page_hashes(
        WIDE if case["wide"] else TOKENS,
        page_tokens=16,
        parent=sglang.namespace_seed(extra_key=case["extra_key"], cache_salt=case["cache_salt"]),
        bigram=case["bigram"],
    )
    assert hexed(hashes) == case["hashes"]


def test_aibrix_as_its_key_builders_hash() -> None:
    golden = GOLDEN["aibrix"]
    full = TOKENS[:32]
    assert hexed(aibrix.rolling_keys(full, block_tokens=16, hash_128=aibrix.md5_128)) == golden["rolling"]
    assert hexed(aibrix.simple_keys(full, block_tokens=16, hash_128=aibrix.md5_128)) == golden["simple"]


# -- rules that no vector shows --------------------------------------------------------------------------------------


def test_a_block_that_is_not_full_has_no_hash_but_a_last_page_of_sglang_has() -> None:
    assert len(vllm.block_hashes(TOKENS, block_tokens=16)) == 2
    assert len(sglang.page_hashes(TOKENS, page_tokens=16)) == 3
    assert len(sglang.page_hashes(TOKENS, page_tokens=16, partial_last=False)) == 2
    assert vllm.block_hashes([], block_tokens=16) == []


def test_a_chain_goes_on_behind_a_given_parent() -> None:
    whole = lmcache.mp_chunk_hashes(TOKENS, chunk_tokens=4)
    assert lmcache.mp_chunk_hashes(TOKENS[8:], chunk_tokens=4, parent=whole[1]) == whole[2:]
    pages = sglang.page_hashes(TOKENS, page_tokens=4)
    assert sglang.page_hashes(TOKENS[8:], page_tokens=4, parent=pages[1]) == pages[2:]


def test_xxh3_has_no_root_without_a_seed() -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        vllm.root_hash("xxhash_cbor")


def test_chains_of_xxh3_say_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxh3, "xxhash", None)
    with pytest.raises(ImportError, match=r"kvobj\[engines\]"):
        dynamo.salt_hash()
    with pytest.raises(ImportError, match=r"kvobj\[engines\]"):
        vllm.root_hash("xxhash", seed="0")


def test_event_and_offload_forms() -> None:
    digest = bytes(range(0xE0, 0x100))
    assert vllm.event_integer(digest) == 0xF8F9FAFBFCFDFEFF
    assert vllm.offload_key(digest, group=2) == digest + b"\0\0\0\x02"
    assert sglang.event_integer(digest) == 0xE0E1E2E3E4E5E6E7 - 2**64
    assert sglang.event_seed(None) is None
    assert sglang.event_seed("") != sglang.event_seed("s")


def test_sglang_tells_absent_from_empty_and_extra_key_from_salt() -> None:
    pairs = [(None, None), ("", None), (None, ""), ("", ""), ("a", None), (None, "a"), ("a", "b"), ("ab", "")]
    assert len({sglang.namespace_seed(extra_key=extra, cache_salt=salt) for extra, salt in pairs}) == len(pairs)


@pytest.mark.parametrize("token", [-1, 2**63])
def test_sglang_refuses_ids_that_it_has_no_form_for(token: int) -> None:
    with pytest.raises(InvalidTokensError):
        sglang.page_hashes([1, token], page_tokens=4)


def test_lmcache_refuses_ids_that_it_has_no_form_for() -> None:
    with pytest.raises(InvalidTokensError):
        lmcache.mp_chunk_hashes([2**32], chunk_tokens=1)


def test_dynamo_leaves_empty_salt_and_adapter_out() -> None:
    assert dynamo.salt_hash(salt="", adapter="") == dynamo.salt_hash()
    assert dynamo.salt_hash(salt="a") == xxh3.xxh3_64(b'{"salt":"a"}')
    assert dynamo.salt_hash(salt="é", adapter="l") == xxh3.xxh3_64('{"salt":"é","lora_name":"l"}'.encode())


def test_dynamo_hashes_frames_only_in_blocks_that_a_run_touches() -> None:
    plain = dynamo.hashed_blocks(EIGHT, block_tokens=4, salt=7)
    touched = dynamo.hashed_blocks(EIGHT, block_tokens=4, salt=7, runs=[dynamo.Run(0xABCD, offset=5, length=2)])
    assert touched[0] == plain[0]
    frames = (
        b"\0\5\0\0\0" + bytes(8)
        + b"\1\0\0\0\0\xcd\xab" + bytes(6)
        + b"\1\1\0\0\0\xcd\xab" + bytes(6)
        + b"\0\x08\0\0\0" + bytes(8)
    )  # fmt: skip
    assert touched[1].block_hash == xxh3.xxh3_64(frames, 7)


def test_older_releases_of_dynamo_salt_every_step() -> None:
    new = dynamo.hashed_blocks(EIGHT, block_tokens=4, salt=7)
    old = dynamo.hashed_blocks(EIGHT, block_tokens=4, salt=7, steps_are_salted=True)
    assert old[0] == new[0]
    pair = new[0].sequence_hash.to_bytes(8, "little") + new[1].block_hash.to_bytes(8, "little")
    assert old[1].sequence_hash == xxh3.xxh3_64(pair, 7) != new[1].sequence_hash


@pytest.mark.parametrize(
    ("position", "mode", "parent_bits"), [(255, 0, 54), (256, 1, 46), (65535, 1, 46), (65536, 2, 38)]
)
def test_a_lineage_hash_is_laid_out_by_position(position: int, mode: int, parent_bits: int) -> None:
    lineage = dynamo.lineage_hash(position, sequence=0x1122334455667788, parent_sequence=2**64 - 1)
    assert lineage >> 126 == mode
    assert lineage & ((1 << parent_bits) - 1) == (1 << parent_bits) - 1
    assert lineage >> parent_bits & (2**64 - 1) == 0x1122334455667788
    assert (lineage >> (64 + parent_bits)) & ((1 << (62 - parent_bits)) - 1) == position


def test_a_lineage_hash_ends_at_2_to_the_24() -> None:
    with pytest.raises(ValueError, match="16777216"):
        dynamo.lineage_hash(2**24, 1, 1)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_fnv_has_its_published_values(content: bytes, expected: int) -> None:
    assert llm_d.fnv1a_64(content) == expected


def test_llm_d_taints_blocks_with_what_lies_in_them() -> None:
    plain = llm_d.block_keys(EIGHT, model="m", block_tokens=4)
    tainted = llm_d.block_keys(EIGHT, model="m", block_tokens=4, multimodal=[None, ["image"]])
    assert tainted[0] == plain[0]
    assert tainted[1] != plain[1]


_SHAPES: st.SearchStrategy[CborValue] = st.recursive(
    st.none() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30) | st.lists(inner, max_size=30).map(tuple),
    max_leaves=20,
)


@given(_SHAPES)
def test_our_cbor_is_that_of_cbor2(value: CborValue) -> None:
    assert canonical_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("value", [True, 1.5, {}, object()])
def test_our_cbor_refuses_other_shapes(value: CborValue) -> None:
    with pytest.raises(TypeError):
        canonical_cbor(value)


def test_our_cbor_refuses_numbers_of_more_than_64_bits() -> None:
    with pytest.raises(OverflowError):
        canonical_cbor(2**64)


# -- chains that the server computes ---------------------------------------------------------------------------------


def test_the_server_computes_lmcache_whatever_the_salt() -> None:
    keys = server.engine_keys("lmcache", token_bytes(EIGHT), chunk_tokens=4, salt="s")
    assert keys == hexed(lmcache.mp_chunk_hashes(EIGHT, chunk_tokens=4))


@pytest.mark.parametrize("salt", ["", "s"])
def test_the_server_computes_vllm_with_the_namespaces_salt(salt: str) -> None:
    extras = vllm.Extras(cache_salt=salt)
    keys = server.engine_keys("vllm-sha256-cbor", token_bytes(TOKENS), chunk_tokens=16, salt=salt)
    assert keys == hexed(vllm.block_hashes(TOKENS, algorithm="sha256_cbor", extras=extras))


@pytest.mark.parametrize("salt", ["", "s"])
def test_the_server_computes_sglang_with_the_namespaces_salt_and_full_pages_only(salt: str) -> None:
    seed = sglang.namespace_seed(cache_salt=salt) if salt else None
    keys = server.engine_keys("sglang-sha256", token_bytes(TOKENS), chunk_tokens=16, salt=salt)
    assert keys == hexed(sglang.page_hashes(TOKENS[:32], page_tokens=16, parent=seed))
