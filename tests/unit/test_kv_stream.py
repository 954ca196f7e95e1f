"""What the client makes of bytes on the wire: streams of chunks, documents, errors in each of their forms; never a surprise."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_driver import parse_stream

from kvobj.client.errors import answer_error
from kvobj.client.kv_stream import HEADER_BYTES_MAX, chunk_stream, header_length, parse_header
from kvobj.client.kv_values import DEFAULT, MatchAnswer, Namespace, NewChunk
from kvobj.client.transport import read_answer
from kvobj.errors import (
    AccessDeniedError,
    BusyError,
    InvalidChunkIdError,
    KvobjError,
    NamespaceConflictError,
    NoSuchSessionError,
    NotFoundError,
    ParentNotFoundError,
    PinLimitExceededError,
    QuotaExceededError,
    StoreFullError,
    UnavailableError,
)

_names = st.one_of(st.binary(min_size=32, max_size=32), st.text(min_size=1, max_size=20))
_chunks = st.builds(
    NewChunk,
    id=_names,
    data=st.binary(max_size=300),
    parent=st.one_of(st.none(), _names),
    tokens=st.one_of(st.none(), st.integers(1, 2**32 - 1)),
    digest=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
)


@given(st.lists(_chunks, max_size=5))
def test_a_stream_of_chunks_says_all_of_them_in_order(chunks: list[NewChunk]) -> None:
    items = parse_stream(b"".join(chunk_stream("space", chunks)))
    assert [item.payload for item in items] == [bytes(chunk.data) for chunk in chunks]
    for index, (item, chunk) in enumerate(zip(items, chunks, strict=True)):
        told = {"i": index, "id": chunk.id, "namespace": "space", "size_bytes": len(chunk.data)}
        optional = {"parent": chunk.parent, "tokens": chunk.tokens, "digest": chunk.digest}
        assert item.header == told | {name: value for name, value in optional.items() if value is not None}


@given(st.binary(max_size=200))
def test_a_header_of_any_bytes_is_read_or_refused(raw: bytes) -> None:
    try:
        header = parse_header(raw)
    except UnavailableError:
        return
    assert msgspec.msgpack.decode(raw).get("i", 0) == header.i


@pytest.mark.parametrize("length", [0, HEADER_BYTES_MAX + 1, 2**32 - 1])
def test_a_header_of_impossible_length_is_refused(length: int) -> None:
    with pytest.raises(UnavailableError):
        header_length(length.to_bytes(4, "little"))


@pytest.mark.parametrize("body", [b"", b"<html>", msgspec.msgpack.encode({"matched": "many"}), b"\xc1"])
def test_an_answer_that_is_none_of_ours_is_told_as_such(body: bytes) -> None:
    with pytest.raises(UnavailableError):
        read_answer(body, MatchAnswer)


def document(code: str, detail: dict[str, object]) -> dict[str, object]:
    return {"error": {"code": code, "message": "no", "resource": "/b", "request_id": "1", "detail": detail}}


@pytest.mark.parametrize("form", ["application/json", "application/msgpack"])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchSession", NoSuchSessionError),
        (409, "ParentNotFound", ParentNotFoundError),
        (403, "PinLimitExceeded", PinLimitExceededError),
        (403, "QuotaExceeded", QuotaExceededError),
        (400, "InvalidChunkId", InvalidChunkIdError),
        (507, "StoreFull", StoreFullError),
        (503, "SlowDown", BusyError),
        (503, "of a later version", UnavailableError),
        (404, "of a later version", NotFoundError),
    ],
)
def test_an_error_is_typed_by_its_code_and_else_by_its_status(
    form: str, status: int, code: str, kind: type[KvobjError]
) -> None:
    value = document(code, {"parent": "ab", "message": "not the message", "code": "nor the code"})
    body = json.dumps(value).encode() if form == "application/json" else msgspec.msgpack.encode(value)
    error = answer_error(status, body, content_type=form)
    assert type(error) is kind
    assert (error.message, error.data["code"], error.data["status"]) == ("no", code, status)
    assert error.data["parent"] == "ab"


def test_an_error_in_xml_is_read_with_what_it_names() -> None:
    body = (
        b"<?xml version='1.0'?><Error><Code>NamespaceConflict</Code><Message>m</Message><Differs>a,b</Differs></Error>"
    )
    error = answer_error(409, body, content_type="application/xml")
    assert isinstance(error, NamespaceConflictError)
    assert error.data["differs"] == ["a", "b"]


def test_a_hint_in_xml_is_told_with_the_error() -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message><Hint>ask &quot;the owner&quot;</Hint></Error>"
    error = answer_error(403, body)
    assert isinstance(error, AccessDeniedError)
    assert str(error) == 'Access Denied hint=ask "the owner" code=AccessDenied status=403'


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("&lt;YOUR-AKID&gt;", "<YOUR-AKID>"),
        ("&amp; &quot; &apos;", "& \" '"),
        ("&#233;&#xe9;&#X1F600;", "\u00e9\u00e9&#X1F600;"),
        ("&#x1F600;", "\U0001f600"),
        ("&amp;lt; is &amp;#60;", "&lt; is &#60;"),  # once, and not again what comes out of it
        # What XML has no character for stays as it is written, and so does what it has no name for.
        (
            "&#0;&#27;&#xD800;&#x110000;&#xFFFE;&#99999999999999999999;",
            "&#0;&#27;&#xD800;&#x110000;&#xFFFE;&#99999999999999999999;",
        ),
        ("&nbsp; & &; &#; &#x; &lt", "&nbsp; & &; &#; &#x; &lt"),
    ],
)
def test_what_xml_writes_as_an_entity_is_read_as_its_character(written: str, read: str) -> None:
    body = f"<Error><Code>NoSuchKey</Code><Message>{written}</Message></Error>".encode()
    assert answer_error(404, body).message == read


@given(st.integers(400, 599), st.binary(max_size=100), st.sampled_from(["", "application/msgpack", "text/html"]))
def test_any_refusal_is_some_error(status: int, body: bytes, form: str) -> None:
    assert isinstance(answer_error(status, body, content_type=form), KvobjError)


def test_names_become_keys_as_their_namespace_has_them() -> None:
    ours = Namespace(name="llama", ids="kvobj", chunk_tokens=16)
    foreign = Namespace(name="engine", ids="foreign", chunk_tokens=16)
    assert ours.key_of(bytes(range(32))) == bytes(range(32)).hex()
    assert foreign.key_of("a/b") == "engine/a/b"
    assert foreign.key_of(bytes(32)) == "engine/" + "00" * 32
    assert DEFAULT.key_of("a/b") == "a/b"
    with pytest.raises(InvalidChunkIdError):
        ours.key_of(b"short")
