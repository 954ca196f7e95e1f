"""The heads of `lm://`: what LMCache packs is read, what it unpacks is written, and any other bytes are a typed error."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lm_peers import FORM, GET, NO_FORM, PUT, request

from kvobj.api.lm.protocol import (
    ABSENT,
    FOUND,
    REPLY_BYTES,
    REQUEST_BYTES,
    Code,
    Command,
    Form,
    Request,
    reply_head,
)
from kvobj.errors import InvalidRequestError

NUMBERS = st.integers(-(2**31), 2**31 - 1)
FORMS = st.builds(Form, NUMBERS, NUMBERS, st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
# What ClientMetaMessage(PUT, "m@1@0@ff@half", 4, KV_2LTD, bfloat16, [2, 32, 256, 1024]).serialize() gives with lmcache 0.5.6.
LMCACHE_PUT = bytes.fromhex(
    "010000000400000001000000030000000000000002000000200000000001000000040000"
) + b"m@1@0@ff@half".ljust(150)


def test_a_put_of_lmcache_is_read() -> None:
    assert len(LMCACHE_PUT) == REQUEST_BYTES == 186
    assert Request.parse(LMCACHE_PUT) == Request(Command.PUT, 4, Form(1, 3, (2, 32, 256, 1024)), "m@1@0@ff@half")
    assert request(PUT, "m@1@0@ff@half", length=4, form=FORM) == LMCACHE_PUT


def test_replies_are_as_lmcache_unpacks_them() -> None:
    assert REPLY_BYTES == 36
    form = Form(2, 3, (2, 32, 256, 1024))
    told = struct.unpack("iiiiiiiii", reply_head(Code.SUCCESS, body_bytes=77, form=form))
    assert told == (200, 77, 2, 3, 2, 32, 256, 1024, 0)
    # What lmcache_server answers where there is no chunk to speak of.
    assert struct.unpack("iiiiiiiii", FOUND) == (200, 0, 1, 2, 0, 0, 0, 0, 0)
    assert struct.unpack("iiiiiiiii", ABSENT) == (400, 0, 1, 2, 0, 0, 0, 0, 0)


@given(st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
@example(struct.pack("<9i150s", 1, 2**31 - 1, 0, 0, 0, 0, 0, 0, 0, b"\xff" * 150))
@example(struct.pack("<9i150s", 1, -1, 0, 0, 0, 0, 0, 0, 0, b"k"))
@example(struct.pack("<9i150s", 6, 0, 0, 0, 0, 0, 0, 0, 0, b"k"))
def test_any_head_is_a_request_or_a_typed_error(head: bytes) -> None:
    number, length = struct.unpack_from("<2i", head)
    try:
        parsed = Request.parse(head)
    except InvalidRequestError:
        assert not 1 <= number <= 5 or length < 0
        return
    assert parsed.command == number
    assert parsed.body_bytes == (length if number == PUT else 0)
    assert parsed.key is None or 0 < len(parsed.key.encode()) <= 150


@given(
    st.sampled_from(Command),
    st.integers(0, 2**31 - 1),
    FORMS,
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=37),
)
def test_whatever_a_client_packs_is_read_as_it_was_meant(command: Command, length: int, form: Form, key: str) -> None:
    head = request(command, key, length=length, form=(form.fmt, form.dtype, *form.dimensions), location=2)
    body_bytes = length if command is Command.PUT else 0
    assert Request.parse(head) == Request(command, body_bytes, form, key)


@pytest.mark.parametrize("key", [b"", b" " * 150, b"\xff\xfe", b"a\0b"])
def test_what_can_be_no_key_is_none_and_the_framing_holds(key: bytes) -> None:
    assert Request.parse(request(PUT, key, length=9)) == Request(Command.PUT, 9, Form(*NO_FORM[:2], (0, 0, 0, 0)), None)


def test_the_length_of_a_request_without_a_body_means_nothing() -> None:
    assert Request.parse(request(GET, "k", length=10**9)).body_bytes == 0


@given(FORMS)
def test_a_form_survives_its_text(form: Form) -> None:
    assert Form.parse(form.to_text()) == form


@given(
    st.none() | st.text() | st.lists(st.integers(), min_size=6, max_size=6).map(lambda each: " ".join(map(str, each)))
)
@example("2 3 2 32 256 99999999999")
@example("2 3 2 32 256 -")
@example("2 3 2 32 256 ²")
def test_any_other_text_is_no_form(text: str | None) -> None:
    form = Form.parse(text)
    assert form is None or min(form.fmt, form.dtype, *form.dimensions) >= -(2**31)
    assert form is None or max(form.fmt, form.dtype, *form.dimensions) < 2**31
