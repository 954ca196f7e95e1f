"""Heads of requests: signed as each would be by itself, whatever was kept of the one before, and never two fields in one."""

from __future__ import annotations

import hashlib
import hmac
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.client.credentials import Credentials
from kvobj.client.request_head import SignedHeads, field_lines
from kvobj.client.sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD, Mac, encoded_path, encoded_query, signed_headers
from kvobj.errors import InvalidRequestError

KEYS = Credentials("KVA99544DA11E1C9E68E29", "b90940c9be758e330b014b577c1ec7526cec4517")
HOST, REGION = "127.0.0.1:9000", "us-east-1"

requests = st.tuples(
    st.sampled_from(["GET", "PUT", "POST"]),
    st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: f"/bucket/{text}"),
    st.lists(st.tuples(st.sampled_from(["mget", "layers", "é"]), st.text(max_size=4)), max_size=2),
    st.dictionaries(st.sampled_from(["accept", "x-kvobj-pin"]), st.sampled_from(["", "a", "b  c"]), max_size=2),
    st.sampled_from([EMPTY_SHA256, UNSIGNED_PAYLOAD]),
    st.integers(1_790_000_000, 1_790_000_001),
    st.none() | st.integers(0, 9),
)


@given(st.lists(requests, max_size=6))
def test_each_head_of_many_is_signed_as_if_it_were_the_only_one(
    asked: list[tuple[str, str, list[tuple[str, str]], dict[str, str], str, int, int | None]],
) -> None:
    heads = SignedHeads(KEYS, host=HOST, region=REGION)
    for method, path, query, headers, payload, second, length in asked:
        fields = signed_headers(
            KEYS,
            method=method,
            path=path,
            query=query,
            headers={"host": HOST, **headers},
            payload_sha256=payload,
            region=REGION,
            timestamp=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)),
        )
        if length is not None:
            fields["content-length"] = str(length)
        target = encoded_path(path) + (f"?{encoded_query(query)}" if query else "")
        head = heads.head(method, path, query, headers, payload, second=second, length=length)
        first, *lines = head.decode().split("\r\n")
        assert first == f"{method} {target} HTTP/1.1"
        assert lines[-2:] == ["", ""]
        # Fields of different names have no order (RFC 9110 §5.3): what is kept may have another than what was given.
        assert sorted(lines[:-2]) == sorted(f"{name}: {value}" for name, value in fields.items())


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "a\0", "日"])
def test_a_field_that_is_none_is_refused_and_not_kept(value: str) -> None:
    heads = SignedHeads(KEYS, host=HOST, region=REGION)
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            heads.head("GET", "/b/k", (), {"x-kvobj-pin": value}, EMPTY_SHA256, second=1_790_000_000)
        with pytest.raises(InvalidRequestError):
            field_lines({value: "a"})
    assert value.encode() not in heads.head("GET", "/b/k", (), {}, EMPTY_SHA256, second=1_790_000_000)


def test_headers_that_their_owner_changes_are_not_taken_for_those_before() -> None:
    heads = SignedHeads(KEYS, host=HOST, region=REGION)
    headers = {"x-kvobj-pin": "one"}
    first = heads.head("GET", "/b/k", (), headers, EMPTY_SHA256, second=1_790_000_000)
    headers["x-kvobj-pin"] = "two"
    assert b"x-kvobj-pin: one\r\n" in first
    assert b"x-kvobj-pin: two\r\n" in heads.head("GET", "/b/k", (), headers, EMPTY_SHA256, second=1_790_000_000)


@given(st.binary(max_size=64), st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_a_key_hashed_once_gives_the_codes_that_the_standard_library_gives(key: bytes, texts: list[bytes]) -> None:
    mac = Mac(key)
    for text in texts:
        assert mac.hex_of(text) == hmac.new(key, text, hashlib.sha256).hexdigest()


def test_a_key_longer_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="65 bytes"):
        Mac(bytes(65))
