"""Documents of the KV API: what goes in comes out in both formats, and nothing else is ever anything but a typed error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.kv.bodies import Format, decode, encode, ids_of, reply_format, request_format, short_id, tokens_of
from kvobj.api.kv.chunk_stream import BoundedSource, framed, read_header
from kvobj.api.kv.errors import kv_error_reply
from kvobj.api.kv.matching import MatchJson, MatchMsgpack, hint_level
from kvobj.api.kv.mget import GetJson, GetMsgpack
from kvobj.api.kv.sessions import OpenRequest, PinsJson, PinsMsgpack, RenewalJson, RenewalMsgpack
from kvobj.errors import (
    BatchTooLargeError,
    IncompleteBodyError,
    InvalidChunkIdError,
    InvalidRequestError,
    InvalidTokensError,
    KvobjError,
    LayoutMismatchError,
    ParentNotFoundError,
    UnavailableError,
)

REQUESTS: list[tuple[type, type]] = [
    (MatchJson, MatchMsgpack),
    (GetJson, GetMsgpack),
    (OpenRequest, OpenRequest),
    (RenewalJson, RenewalMsgpack),
    (PinsJson, PinsMsgpack),
]
IDS = st.lists(st.binary(min_size=32, max_size=32), max_size=20)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=50)
# Documents of any shape, and near what is asked for.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["ids", "tokens", "session", "pin", "namespace", "release", "tails", "layers", "hint", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


class Bytes:
    """A source over bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def receive_into(self, buffer: memoryview, on_bytes: object) -> None:
        del on_bytes
        if len(buffer) > len(self.data):
            raise IncompleteBodyError("the body ended early")
        buffer[:] = self.data[: len(buffer)]
        self.data = self.data[len(buffer) :]


@given(IDS)
def test_ids_mean_the_same_in_both_formats(ids: list[bytes]) -> None:
    raw = b"".join(ids)
    assert ids_of([each.hex() for each in ids]) == raw
    assert ids_of(raw) == raw


@given(st.lists(st.text(max_size=70), max_size=4) | st.binary(max_size=200))
def test_any_other_list_of_ids_is_refused(ids: list[str] | bytes) -> None:
    try:
        raw = ids_of(ids)
    except InvalidChunkIdError:
        return
    if isinstance(ids, bytes):
        assert raw == ids
        assert len(ids) % 32 == 0
    else:
        assert [raw[at : at + 32].hex() for at in range(0, len(raw), 32)] == ids


@given(TOKENS)
def test_tokens_mean_the_same_in_both_formats(tokens: list[int]) -> None:
    raw = struct.pack(f"<{len(tokens)}I", *tokens)
    assert tokens_of(tokens) == raw
    assert tokens_of(raw) == raw


@pytest.mark.parametrize("tokens", [[2**32], [-1], [0, 2**64], b"\0" * 3])
def test_a_token_out_of_range_is_refused(tokens: list[int] | bytes) -> None:
    with pytest.raises(InvalidTokensError):
        tokens_of(tokens)


def test_one_more_than_a_call_may_name_is_refused() -> None:
    assert len(ids_of(bytes(32 * 65_536))) == 32 * 65_536
    assert len(tokens_of(bytes(4 * 4_194_304))) == 4 * 4_194_304
    too_many: list[bytes | list[str]] = [bytes(32 * 65_537), ["0" * 64] * 65_537]
    for ids in too_many:
        with pytest.raises(BatchTooLargeError) as caught:
            ids_of(ids)
        assert caught.value.data == {"limit": 65_536, "given": 65_537}
    with pytest.raises(BatchTooLargeError):
        tokens_of(bytes(4 * 4_194_305))


@given(VALUES, st.sampled_from(REQUESTS))
def test_any_document_is_a_request_or_an_invalid_one(value: object, kinds: tuple[type, type]) -> None:
    for kind, document_format in zip(kinds, (Format.JSON, Format.MSGPACK), strict=True):
        document = msgspec.json.encode(value) if document_format is Format.JSON else msgspec.msgpack.encode(value)
        try:
            assert isinstance(decode(document, kind, document_format), kind)
        except InvalidRequestError as error:
            assert error.message  # noqa: PT017 - that no other error comes is the point


@given(st.binary(max_size=64), st.sampled_from(REQUESTS), st.sampled_from(list(Format)))
def test_any_bytes_are_a_request_or_an_invalid_one(raw: bytes, kinds: tuple[type, type], form: Format) -> None:
    kind = kinds[form is Format.MSGPACK]
    try:
        assert isinstance(decode(raw, kind, form), kind)
    except InvalidRequestError as error:
        assert error.message  # noqa: PT017 - that no other error comes is the point


@given(
    ids=IDS,
    session=st.none() | st.binary(min_size=16, max_size=16),
    explain=st.booleans(),
    output_tokens=st.integers(0, 10**6),
)
def test_a_request_reads_the_same_in_both_formats(
    ids: list[bytes], session: bytes | None, *, explain: bool, output_tokens: int
) -> None:
    common = {"namespace": "n", "explain": explain, "hint": {"output_tokens": output_tokens}}
    as_json = msgspec.json.encode({**common, "ids": [each.hex() for each in ids], "session": session and session.hex()})
    as_msgpack = msgspec.msgpack.encode({**common, "ids": b"".join(ids), "session": session})
    one = decode(as_json, MatchJson, Format.JSON)
    other = decode(as_msgpack, MatchMsgpack, Format.MSGPACK)
    assert one.ids is not None
    assert other.ids is not None
    assert ids_of(one.ids) == ids_of(other.ids)
    assert (one.session and short_id(one.session)) == (other.session and short_id(other.session)) == session
    assert (one.namespace, one.explain, one.hint) == (other.namespace, other.explain, other.hint)


@pytest.mark.parametrize(
    ("document", "error", "word"),
    [
        (b'{"ids": [], "colour": 1}', InvalidRequestError, "colour"),
        (b'{"ids": [3]}', InvalidChunkIdError, "ids"),
        (b'{"tokens": [0, 1.5]}', InvalidTokensError, "tokens"),
        (b'{"hint": {"output_tokens": "x"}}', InvalidRequestError, "hint"),
    ],
)
def test_a_wrong_field_is_named(document: bytes, error: type[KvobjError], word: str) -> None:
    with pytest.raises(error) as caught:
        decode(document, MatchJson, Format.JSON)
    assert word in caught.value.message


def test_bytes_in_a_reply_are_hex_in_json_and_raw_in_msgpack() -> None:
    value = {"pin": b"\x0f" * 2, "chunks": [{"digest": b"\xff", "id": "a"}, {"digest": None}], "n": 1}
    assert msgspec.json.decode(encode(value, Format.JSON)) == {
        "pin": "0f0f",
        "chunks": [{"digest": "ff", "id": "a"}, {"digest": None}],
        "n": 1,
    }
    assert msgspec.msgpack.decode(encode(value, Format.MSGPACK)) == value


@pytest.mark.parametrize(
    ("content_type", "accept", "request_in", "reply_in"),
    [
        (None, None, Format.JSON, Format.JSON),
        ("application/json; charset=utf-8", None, Format.JSON, Format.JSON),
        ("application/msgpack", None, Format.MSGPACK, Format.MSGPACK),
        ("application/x-msgpack", "*/*", Format.MSGPACK, Format.MSGPACK),
        ("application/msgpack", "application/json", Format.MSGPACK, Format.JSON),
        (None, "text/html, application/msgpack;q=0.9, application/json", Format.JSON, Format.MSGPACK),
        ("text/plain", None, None, Format.JSON),
    ],
)
def test_formats_are_those_of_content_type_and_accept(
    content_type: str | None, accept: str | None, request_in: Format | None, reply_in: Format
) -> None:
    fields = {name: value for name, value in (("content-type", content_type), ("accept", accept)) if value is not None}
    assert reply_format(fields) is reply_in
    if request_in is None:
        with pytest.raises(InvalidRequestError):
            request_format(fields)
    else:
        assert request_format(fields) is request_in


@given(st.text(max_size=40) | st.binary(max_size=20))
def test_a_short_id_is_16_bytes_or_none(value: str | bytes) -> None:
    found = short_id(value)
    if isinstance(value, bytes):
        assert found == (value if len(value) == 16 else None)
    else:
        assert (found is not None) == (len(value) == 32 and all(digit in "0123456789abcdef" for digit in value))


@pytest.mark.parametrize(
    ("tokens", "level"), [(-1, 0), (0, 0), (1, 0), (3, 0), (4, 1), (15, 1), (16, 2), (512, 4), (1024, 5), (10**9, 5)]
)
def test_a_hint_is_half_the_logarithm_of_the_output(tokens: int, level: int) -> None:
    assert hint_level(tokens) == level


@pytest.mark.parametrize("form", list(Format))
def test_an_error_is_a_document_with_what_a_client_may_know(form: Format) -> None:
    error = ParentNotFoundError("the parent is not live", parent="p", blob_id=b"\1", secret="s")
    reply = kv_error_reply(error, fields={"accept": form.value}, request_id="R", host_id="H", resource="/b", close=True)
    assert reply.status == 409
    assert dict(reply.headers)["content-type"] == form.value
    assert reply.close
    assert isinstance(reply.body, bytes)
    decoded = msgspec.json.decode(reply.body) if form is Format.JSON else msgspec.msgpack.decode(reply.body)
    assert decoded["error"] == {
        "code": "ParentNotFound",
        "message": "The chunk's parent is not stored.",
        "detail": {"parent": "p"},
        "resource": "/b",
        "request_id": "R",
    }


def test_a_busy_store_says_when_to_come_again_and_lists_are_told_as_lists() -> None:
    busy = kv_error_reply(UnavailableError("x"), fields={}, request_id="", host_id="", resource="", close=False)
    assert dict(busy.headers)["retry-after"] == "1"
    differs = kv_error_reply(
        LayoutMismatchError("x", differs=("size_bytes", "part")),
        fields={},
        request_id="",
        host_id="",
        resource="",
        close=False,
    )
    assert isinstance(differs.body, bytes)
    assert msgspec.json.decode(differs.body)["error"]["detail"] == {"differs": ["size_bytes", "part"]}


@given(st.binary(max_size=100))
async def test_any_bytes_of_a_stream_are_a_header_or_a_typed_error(raw: bytes) -> None:
    try:
        header, taken = await read_header(BoundedSource(Bytes(raw), len(raw)))
    except (InvalidRequestError, IncompleteBodyError):
        return
    assert 4 < taken <= len(raw)
    assert header.size_bytes >= 0


async def test_a_header_reads_back_as_it_was_framed() -> None:
    raw = framed({"i": 3, "size_bytes": 7, "id": b"\1" * 32, "parent": "root", "namespace": "n", "tokens": 5})
    source = BoundedSource(Bytes(raw + b"payload"), len(raw) + 7)
    header, taken = await read_header(source)
    assert (header.i, header.size_bytes, header.id, header.parent, header.tokens) == (3, 7, b"\1" * 32, "root", 5)
    assert taken == len(raw)
    assert source.left_bytes == 7
