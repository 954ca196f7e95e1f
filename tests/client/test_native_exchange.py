"""A question and its answer in one native call: what comes, what ends it, and that nothing else is lost or kept."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvobj.client.native_exchange import READ_BYTES, NativeExchange

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def exchange() -> NativeExchange:
    made = NativeExchange.made()
    assert made is not None, "the native library was built with what is tested"
    return made


@contextmanager
def heard_by(theirs: socket.socket, size_bytes: int) -> Iterator[list[bytes]]:
    """What a peer reads of so many bytes, which it has read at the block's end."""
    heard: list[bytes] = []

    def read() -> None:
        left = size_bytes
        while left:
            heard.append(theirs.recv(left))
            left -= len(heard[-1])

    peer = threading.Thread(target=read)
    peer.start()
    yield heard
    peer.join()


def test_an_answer_that_comes_meanwhile_is_taken_and_a_later_one_is_left(pair: Pair, exchange: NativeExchange) -> None:
    ours, theirs = pair
    theirs.sendall(b"answer")
    came = exchange(ours, b"question")
    assert came is not None
    assert (bytes(came[0]), came[1], theirs.recv(100)) == (b"answer", [], b"question")
    assert exchange(ours, b"another") is None
    assert theirs.recv(100) == b"another"
    theirs.sendall(b"late")
    assert ours.recv(100) == b"late"


def test_descriptors_are_the_callers_and_closed_in_what_it_executes(pair: Pair, exchange: NativeExchange) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    sent = array.array("i", [reading, writing])
    theirs.sendmsg([b"two"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    came = exchange(ours, b"?")
    assert came is not None
    data, descriptors, _ = came
    assert bytes(data) == b"two"
    assert not {reading, writing} & set(descriptors)
    assert not any(os.get_inheritable(each) for each in descriptors)
    os.write(descriptors[1], b"through")
    assert os.read(reading, 7) == b"through"
    for each in (*sent, *descriptors):
        os.close(each)


def test_what_does_not_fit_is_had_next_time(pair: Pair, exchange: NativeExchange) -> None:
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * READ_BYTES)
    answer = os.urandom(READ_BYTES + 1)
    theirs.sendall(answer)
    came = b""
    while len(came) < len(answer):
        next_piece = exchange(ours, b"?")
        assert next_piece is not None
        came += bytes(next_piece[0])
    assert came == answer


def test_a_question_longer_than_the_sockets_buffers_is_sent_whole(pair: Pair, exchange: NativeExchange) -> None:
    ours, theirs = pair
    question = os.urandom(8 * 1024 * 1024)
    with heard_by(theirs, len(question)) as heard:
        exchange(ours, question)
    assert b"".join(heard) == question


def test_who_does_not_read_is_not_waited_for_past_the_sockets_limit(pair: Pair, exchange: NativeExchange) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 20_000))
    with pytest.raises(TimeoutError):
        exchange(ours, bytes(8 * 1024 * 1024))


def test_an_end_is_no_bytes_and_what_goes_wrong_is_an_error(pair: Pair, exchange: NativeExchange) -> None:
    ours, theirs = pair
    theirs.shutdown(socket.SHUT_WR)
    came = exchange(ours, b"?")
    assert came is not None
    assert len(came[0]) == 0
    theirs.close()
    with pytest.raises(BrokenPipeError):  # and no signal
        exchange(ours, b"?")
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        exchange(ours, b"?")


def test_a_signals_handler_runs_while_a_question_is_being_sent_and_may_end_it(
    pair: Pair, exchange: NativeExchange
) -> None:
    ours, theirs = pair
    question = os.urandom(8 * 1024 * 1024)
    seen, ended = threading.Event(), threading.Event()
    is_to_end = False
    main = threading.main_thread().ident
    assert main is not None

    def note(*_: object) -> None:
        seen.set()
        if is_to_end and not ended.is_set():
            ended.set()
            raise InterruptedError("the handler's own")

    def interrupt() -> None:
        nonlocal is_to_end
        theirs.recv(1)
        while not seen.wait(0.001):  # one that comes just before the sender waits for room does not wake it
            signal.pthread_kill(main, signal.SIGUSR1)
        left = len(question) - 1
        while left:
            left -= len(theirs.recv(left))
        theirs.recv(1)
        is_to_end = True
        while not ended.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, note)
    other = threading.Thread(target=interrupt)
    other.start()
    try:
        exchange(ours, question)
        with pytest.raises(InterruptedError, match="own"):
            exchange(ours, question)
    finally:
        other.join()
        signal.signal(signal.SIGUSR1, before)
