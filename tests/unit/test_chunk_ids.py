"""Chunk ids: the published vectors, computed once more from the rule itself, and what counts as tokens."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import InvalidChunkIdError, InvalidTokensError
from kvobj.ids.chunk_ids import (
    chunk_id,
    chunk_ids,
    fingerprint,
    is_chunk_id,
    namespace_root,
    parse_chunk_id,
    token_bytes,
)
from kvobj.store.namespace_declaration import parse_declaration

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "chunk_ids.json").read_text())[
    "namespaces"
]
KEY = bytes(range(32))
ROOT = b"r" * 32
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def by_the_rule(key: bytes, parent: bytes, tokens: list[int]) -> bytes:
    return blake3(parent + struct.pack(f"<{len(tokens)}I", *tokens), key=key).digest()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["declaration"]["model"])
def test_the_published_vectors(vector: dict[str, Any]) -> None:
    declaration = parse_declaration(vector["declaration"])
    assert declaration.canonical.decode() == vector["canonical"]
    assert declaration.chunk_bytes == vector["chunk_bytes"]
    assert fingerprint(vector["canonical"].encode()).hex() == vector["fingerprint"] == declaration.fingerprint.hex()
    key = bytes.fromhex(vector["namespace_key"])
    root = namespace_root(key, bytes.fromhex(vector["fingerprint"]))
    assert root.hex() == vector["root"]
    tokens = vector.get("tokens", [])
    ids = chunk_ids(
        key, root, token_bytes(tokens), chunk_tokens=vector["declaration"]["chunk_tokens"], partial_last=True
    )
    assert ids.hex() == "".join(vector.get("chunk_ids", []))


@pytest.mark.parametrize("vector", [vector for vector in VECTORS if "tokens" in vector])
def test_the_published_vectors_follow_from_the_rule(vector: dict[str, Any]) -> None:
    key = bytes.fromhex(vector["namespace_key"])
    assert blake3(vector["canonical"].encode()).hexdigest() == vector["fingerprint"]
    parent = blake3(bytes.fromhex(vector["fingerprint"]), key=key).digest()
    assert parent.hex() == vector["root"]
    step = vector["declaration"]["chunk_tokens"]
    spans = [vector["tokens"][at : at + step] for at in range(0, len(vector["tokens"]), step)]
    assert len(spans) == len(vector["chunk_ids"])
    for span, expected in zip(spans, vector["chunk_ids"], strict=True):
        parent = by_the_rule(key, parent, span)
        assert parent.hex() == expected


@given(TOKENS, st.integers(1, 9), st.booleans())
def test_ids_of_a_sequence_are_those_of_its_chunks_one_by_one(
    tokens: list[int],
    chunk_tokens: int,
    partial_last: bool,  # noqa: FBT001 - drawn
) -> None:
    parent, expected = ROOT, b""
    for at in range(0, len(tokens), chunk_tokens):
        span = tokens[at : at + chunk_tokens]
        if len(span) == chunk_tokens or partial_last:
            parent = chunk_id(KEY, parent, token_bytes(span))
            expected += parent
    ids = chunk_ids(KEY, ROOT, token_bytes(tokens), chunk_tokens=chunk_tokens, partial_last=partial_last)
    assert ids == expected


@given(TOKENS, TOKENS)
def test_a_sequence_goes_on_behind_any_of_its_ids(first: list[int], rest: list[int]) -> None:
    whole = chunk_ids(KEY, ROOT, token_bytes(first + rest), chunk_tokens=1)
    head = chunk_ids(KEY, ROOT, token_bytes(first), chunk_tokens=1)
    tail = chunk_ids(KEY, head[-32:] or ROOT, token_bytes(rest), chunk_tokens=1)
    assert head + tail == whole


def test_another_key_names_the_same_tokens_otherwise() -> None:
    tokens = token_bytes([1, 2, 3])
    assert chunk_id(KEY, ROOT, tokens) != chunk_id(bytes(32), ROOT, tokens)


@given(TOKENS)
def test_tokens_may_come_in_any_form(tokens: list[int]) -> None:
    raw = struct.pack(f"<{len(tokens)}I", *tokens)
    forms = [tokens, tuple(tokens), iter(tokens), array("I", tokens), np.array(tokens, dtype=np.uint32).tolist(), raw,
             bytearray(raw), memoryview(raw)]  # fmt: skip
    assert {token_bytes(form) for form in forms} == {raw}


@pytest.mark.parametrize(
    ("tokens", "position"),
    [([-1], 0), ([0, 2**32], 1), ([1, 2, 2**70], 2), ([1, 1.5], 1), ([1, "2"], 1), ([None], 0), ("12", 0)],
)
def test_a_token_id_out_of_range_is_refused_with_its_place(tokens: Iterable[int], position: int) -> None:
    with pytest.raises(InvalidTokensError) as caught:
        token_bytes(tokens)
    assert caught.value.data == {"position": position}


@pytest.mark.parametrize("size_bytes", [1, 2, 3, 5])
def test_bytes_that_are_no_whole_tokens_are_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidTokensError):
        token_bytes(bytes(size_bytes))


def test_an_id_is_parsed_from_its_key() -> None:
    assert parse_chunk_id("0f" * 32) == b"\x0f" * 32
    assert is_chunk_id("0f" * 32)


@pytest.mark.parametrize(
    "key", ["", "0f" * 31, "0f" * 33, "0F" * 32, "0g" * 32, "0f" * 32 + "\n", " " + "0f" * 31 + "0"]
)
def test_what_is_no_id_is_refused(key: str) -> None:
    assert not is_chunk_id(key)
    with pytest.raises(InvalidChunkIdError):
        parse_chunk_id(key)
