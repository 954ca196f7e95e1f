"""Frames and messages of the same-host path, whatever a peer sends; memory that both sides map."""

from __future__ import annotations

import os
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.buffers import address_of
from kvobj.catalog.rows import MAX_KEY_BYTES
from kvobj.errors import InvalidRequestError, UnavailableError
from kvobj.same_host.descriptors import control_page, staging_memory
from kvobj.same_host.framing import Unframer, framed
from kvobj.same_host.mapping import Mapping, copy, mapped
from kvobj.same_host.messages import (
    HELLO_BYTES_MAX,
    KEYS_MAX,
    REQUEST_BYTES_MAX,
    TOKEN_BYTES,
    Commit,
    Extent,
    Failed,
    Hello,
    NewItem,
    Open,
    Opened,
    Regions,
    Release,
    Request,
    Reserve,
    decode_reply,
    decode_request,
    encode,
)
from kvobj.same_host.revocation import is_revoked, revoke

LIMIT = 1024


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=8), st.lists(st.integers(1, 64), min_size=1))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(message) for message in messages)
    unframer, found, position, turn = Unframer(LIMIT), [], 0, 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        unframer.feed(stream[position : position + step])
        position, turn = position + step, turn + 1
        while (message := unframer.take()) is not None:
            found.append(message)
    assert found == messages
    assert unframer.buffered_bytes == 0


@given(st.binary(max_size=4 * LIMIT))
def test_no_bytes_make_the_unframer_keep_more_than_a_message(data: bytes) -> None:
    unframer = Unframer(LIMIT)
    unframer.feed(data)
    try:
        while (message := unframer.take()) is not None:
            assert 0 < len(message) <= LIMIT
    except InvalidRequestError:
        return
    assert unframer.buffered_bytes <= LIMIT + 4


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_typed_error(raw: bytes) -> None:
    for decode, error in ((decode_request, InvalidRequestError), (decode_reply, UnavailableError)):
        try:
            decode(raw)
        except error:
            continue


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, bytes(TOKEN_BYTES)),
        Open(["a", "b"], "ns", (0, 3), [b"p" * 16, None]),
        Release([1, 2**40]),
        Commit(0, "ns", [NewItem(b"i" * 32, 10, "root", 16, bytes(32), 64)], "local"),
        Commit(0, "", [NewItem("key", 10), NewItem(b"i" * 32, 10, b"p" * 32)], rooms=[7, 8]),
        Reserve("ns", [NewItem("key", 10, "parent"), NewItem(b"i" * 300, 0, b"p" * 70_000)]),
        Reserve("", []),
    ],
)
def test_requests_are_read_as_they_were_written(message: Request) -> None:
    assert decode_request(encode(message)) == message


def test_replies_are_read_as_they_were_written() -> None:
    opened = Opened([Extent(1, 2, 4096, 10, 7, None, "dram"), None], [None, 5])
    for reply in (opened, Regions([]), Failed(403, "AccessDenied", "no", {"bucket": "b"})):
        assert decode_reply(encode(reply)) == reply


NO_NAMES: list[object] = [None, 7, 1.5, True, [], [[]], {}, {"a": "b"}, msgspec.msgpack.Ext(5, b"xx")]
"""What no chunk is called."""


@pytest.mark.parametrize(
    "raw",
    [
        encode([1, 1, b"short"]),
        encode([2, ["k"] * (KEYS_MAX + 1)]),
        encode([2, ["k"], None, (-1, 2)]),
        encode([3, [-1]]),
        encode([99, 1]),
        encode({"tag": 1}),
        *(encode([5, "ns", [[name, 1]]]) for name in NO_NAMES),
        *(encode([6, 0, "ns", [["k", 1, name]]]) for name in NO_NAMES[1:]),
        encode([5, "ns", [["k", 1]] * (KEYS_MAX + 1)]),
        b"\x93\x05\xa0\x91\x92" + b"\x91" * 10_000 + b"\x90\x01",
        b"\x93\x05\xa0\x91\x92\xa1\xff\x01",
    ],
)
def test_what_is_out_of_bounds_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_request(raw)


def test_the_longest_requests_that_are_meant_fit_into_a_message() -> None:
    name, number = "k" * MAX_KEY_BYTES, 2**63 - 1
    item = NewItem(name, number, name, number, bytes(32), number)
    longest = Commit(0, name, [item] * KEYS_MAX, "memory", [number] * KEYS_MAX)
    assert len(encode(longest)) <= REQUEST_BYTES_MAX
    assert len(encode(Open([name] * KEYS_MAX, name, (0, 1), [bytes(32)] * KEYS_MAX))) <= REQUEST_BYTES_MAX
    assert len(encode(Hello(number, bytes(TOKEN_BYTES)))) <= HELLO_BYTES_MAX // 8


def test_what_a_message_nests_is_passed_over_and_not_made() -> None:
    count = 200_000
    nested = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    tracemalloc.start()
    try:
        for raw in (b"\x94\x06\x00\xa0\x91\x92" + nested + b"\x01", b"\x94\x06\x00\xa0\x91\x93\xa1k\x01" + nested):
            with pytest.raises(InvalidRequestError):
                decode_request(raw)
        assert decode_request(b"\x93\x03\x90" + nested) == Release([])  # a later version's field
        assert tracemalloc.get_traced_memory()[1] < 8 * count  # an empty list takes 64
    finally:
        tracemalloc.stop()


@given(st.integers(0, 400_000), st.integers(0, 5000))
def test_a_copy_is_exact_and_touches_nothing_behind_it(size_bytes: int, room_bytes: int) -> None:
    data = os.urandom(size_bytes)
    target = bytearray(size_bytes + room_bytes)
    copy(memoryview(target), memoryview(data))
    assert target[:size_bytes] == data
    assert not any(target[size_bytes:])


def test_a_copy_refuses_a_room_that_is_too_small_or_read_only() -> None:
    data = memoryview(bytes(200_000))
    with pytest.raises(ValueError, match="do not fit"):
        copy(memoryview(bytearray(10)), data)
    for size_bytes in (10, 200_000):
        with pytest.raises(TypeError):
            copy(memoryview(bytes(size_bytes)), data[:size_bytes])


def test_memory_is_mapped_once_and_goes_with_its_last_user() -> None:
    descriptor = staging_memory(8192)
    try:
        first, second = (mapped(descriptor, 8192, is_writable=True) for _ in range(2))
        assert first is second
        readable = mapped(descriptor, 8192, is_writable=False)
        assert readable is not first
        first.room[:3] = b"abc"
        assert bytes(readable.piece(0, 3)) == b"abc"
        assert address_of(readable.room) != address_of(first.room)
        with pytest.raises(InvalidRequestError):
            first.piece(8190, 3)
        with pytest.raises(TypeError):
            readable.room[0] = 1
        readable.touch(0, 8192)
        readable.touch(8191, 1)
    finally:
        os.close(descriptor)


def test_memory_that_is_shorter_than_was_said_is_not_mapped() -> None:
    descriptor = staging_memory(4096)
    try:
        for size_bytes in (0, 4097, 2**40):
            with pytest.raises(UnavailableError):
                Mapping(descriptor, size_bytes, is_writable=False)
    finally:
        os.close(descriptor)


def test_a_control_page_is_its_makers_to_write_and_others_to_read() -> None:
    descriptor, page = control_page()
    try:
        seen = Mapping(descriptor, 4096, is_writable=False).room
        assert not is_revoked(seen)
        revoke(page)
        assert is_revoked(seen)
        with pytest.raises(UnavailableError):
            Mapping(descriptor, 4096, is_writable=True)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
