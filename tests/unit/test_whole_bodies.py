"""A body that came with its head is taken at once, and nothing of one that did not, or of which nobody knows how much it is."""

from __future__ import annotations

import asyncio

import pytest

from kvobj.api.http.request_body import ChunkedBody, LengthBody
from kvobj.wire.body_handover import ReceiveMode, Wire


@pytest.fixture
def wire() -> Wire:
    loop = asyncio.new_event_loop()
    loop.close()
    return Wire(loop, lambda _: None, shared=memoryview(bytearray(64)), mode=ReceiveMode.DIRECT)


def test_what_follows_a_body_is_left_to_the_next_request(wire: Wire) -> None:
    wire.push_back(b"bodynext")
    body = LengthBody(wire, 4, expects_continue=False)
    assert (body.take_whole(), body.is_finished, body.received) == (b"body", True, 4)
    assert body.take_whole() is None
    assert wire.take_unread() == b"next"


def test_a_body_that_is_not_all_here_is_not_touched(wire: Wire) -> None:
    wire.push_back(b"bod")
    body = LengthBody(wire, 4, expects_continue=False)
    assert (body.take_whole(), body.is_finished) == (None, False)
    assert wire.take_unread() == b"bod"


def test_a_client_that_waits_for_a_word_is_not_passed_over(wire: Wire) -> None:
    wire.push_back(b"body")
    assert LengthBody(wire, 4, expects_continue=True).take_whole() is None
    expired = LengthBody(wire, 4, expects_continue=False)
    expired.expire()
    assert expired.take_whole() is None
    assert ChunkedBody(wire, expects_continue=False).take_whole() is None
    assert wire.take_unread() == b"body"
