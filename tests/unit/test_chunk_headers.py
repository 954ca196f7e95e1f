"""Headers that tell of a chunk: what is taken from a PUT, and what is told again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.chunk_headers import (
    PLACE_HEADERS,
    ChunkHeaders,
    chunk_headers,
    parse_chunk_headers,
    parse_pin,
    refuse_chunk_headers,
)
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.errors import InvalidTokensError
from kvobj.store.places import GroupPart


def row(**changes: object) -> ObjectRow:
    fields: dict[str, object] = {
        "bucket": "b", "key": "k", "blobs": (), "size_bytes": 1, "etag": "e", "modified_ms": 1, "owner": "o",
        "durability": Durability.MEMORY,
    }  # fmt: skip
    return ObjectRow(**(fields | changes))  # type: ignore[arg-type]


def test_a_request_without_headers_of_ours_names_no_place() -> None:
    assert parse_chunk_headers({"content-type": "x", "x-kvobj-durability": "memory"}) == ChunkHeaders()


def test_every_header_is_taken_as_it_is_meant() -> None:
    fields = {
        "x-kvobj-namespace": " llama8b ",
        "x-kvobj-parent": "schlüssel".encode().decode("latin-1"),
        "x-kvobj-tokens": "17",
        "x-kvobj-part": "0/4",
    }
    assert parse_chunk_headers(fields) == ChunkHeaders("llama8b", "schlüssel", 17, GroupPart(0, 4))


@pytest.mark.parametrize("value", ["", "  ", "a\x01b", "n" * 1025])
def test_what_is_no_name_is_refused(value: str) -> None:
    for header in ("x-kvobj-namespace", "x-kvobj-parent"):
        with pytest.raises(S3Error) as caught:
            parse_chunk_headers({header: value})
        assert caught.value.code == "InvalidArgument"
        assert caught.value.data["ArgumentName"] == header


@pytest.mark.parametrize("value", ["0", "-1", "+1", "1.0", "01", "1 2", "x", "", "99999999999", "\uff11"])
def test_what_is_no_number_of_tokens_is_refused(value: str) -> None:
    with pytest.raises(InvalidTokensError):
        parse_chunk_headers({"x-kvobj-tokens": value})


@pytest.mark.parametrize(
    "value", ["", "1", "1/1", "4/4", "-1/4", "0/0", "00/1", "0/10001", "0/4/4", "0 /4", "a/b", "0/\uff14"]
)
def test_what_is_no_part_is_refused(value: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_chunk_headers({"x-kvobj-part": value})
    assert caught.value.code == "InvalidArgument"


@given(st.dictionaries(st.sampled_from(sorted(PLACE_HEADERS)), st.text(max_size=20)))
def test_no_header_makes_anything_but_a_place_or_a_refusal(fields: dict[str, str]) -> None:
    try:
        headers = parse_chunk_headers(fields)
    except (S3Error, InvalidTokensError):
        return
    assert (headers.part is None) == ("x-kvobj-part" not in fields)
    assert headers.part is None or 0 <= headers.part.index < headers.part.count <= 10_000
    assert headers.tokens is None or headers.tokens >= 1


def test_ordinary_buckets_take_no_place() -> None:
    refuse_chunk_headers({"x-kvobj-durability": "local"})
    with pytest.raises(S3Error, match="x-kvobj-parent"):
        refuse_chunk_headers({"x-kvobj-parent": "root"})


def test_a_pin_is_sixteen_bytes_in_hex() -> None:
    assert parse_pin({}) is None
    assert parse_pin({"x-kvobj-pin": "0a" * 16}) == b"\x0a" * 16
    for value in ("", "0A" * 16, "0a" * 15, "0a" * 17):
        with pytest.raises(S3Error):
            parse_pin({"x-kvobj-pin": value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"namespace": "default"}, []),
        ({"namespace": "default", "parent": "other/key"}, [("x-kvobj-parent", "other/key")]),
        (
            {"namespace": "ns", "parent": "", "tokens": 256},
            [("x-kvobj-namespace", "ns"), ("x-kvobj-parent", "root"), ("x-kvobj-tokens", "256")],
        ),
        ({"namespace": "ns", "parent": "ns/ns/k"}, [("x-kvobj-namespace", "ns"), ("x-kvobj-parent", "ns/k")]),
        ({"namespace": "default", "parent": "a\r\nx-evil: 1"}, []),
    ],
)
def test_a_chunk_tells_its_place_as_a_put_would_name_it(
    changes: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    assert chunk_headers(row(**changes)) == expected
