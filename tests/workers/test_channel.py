"""The pair between store process and worker: calls both ways over a real socket pair, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.errors import BucketExistsError, KvobjError, LayoutMismatchError, NoSuchKeyError, UnavailableError
from kvobj.ids import BlobId
from kvobj.workers import channel as channel_module
from kvobj.workers.channel import LATER, Channel, Silence
from kvobj.workers.wire import Failure, FrameReader, Kind, error_from, failure_of, frame

LOG = logging.getLogger("test.workers")


class Calls:
    """What one end serves."""

    async def add(self, one: int, other: int = 2) -> int:
        """The sum."""
        raise NotImplementedError

    async def wait(self, name: str) -> str:
        """The name, once it is let go."""
        raise NotImplementedError

    async def open(self, size: int) -> bytes:
        """So many bytes, which are held."""
        raise NotImplementedError

    async def refuse(self) -> None:
        """Never."""
        raise NotImplementedError

    def note(self, what: str) -> None:
        """Told."""
        raise NotImplementedError


class Server(Calls):
    def __init__(self) -> None:
        self.noted: list[str] = []
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.cancelled: list[str] = []

    async def add(self, one: int, other: int = 2) -> int:
        return one + other

    async def wait(self, name: str) -> str:
        self.waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await self.waiting[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name

    async def open(self, size: int) -> bytes:
        return bytes(size)

    async def refuse(self) -> None:
        raise NoSuchKeyError("no such key", key="k")

    def note(self, what: str) -> None:
        self.noted.append(what)


@asynccontextmanager
async def pair(
    *, at_once: dict[str, Any] | None = None, silent_seconds: float | None = None
) -> AsyncIterator[tuple[Server, Channel, Calls, list[tuple[str, Any]]]]:
    server, unwanted = Server(), list[tuple[str, Any]]()
    ours, theirs = socket.socketpair()
    near = Channel(
        serves=SimpleNamespace(),
        interface=type("Nothing", (), {}),
        calls=Calls,
        log=LOG,
        silent_seconds=silent_seconds,
        on_unwanted=lambda name, result: unwanted.append((name, result)),
    )
    far = Channel(serves=server, interface=Calls, calls=type("Nothing", (), {}), log=LOG, at_once=at_once)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: near, sock=ours)
    await loop.create_connection(lambda: far, sock=theirs)
    try:
        yield server, near, near.proxy(Calls), unwanted
    finally:
        await near.aclose()
        await far.aclose()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 - the other end gives no sign
            await asyncio.sleep(0)


async def test_calls_are_answered_in_any_order_and_tells_are_done_in_theirs() -> None:
    async with pair() as (server, near, calls, _):
        first, second = asyncio.ensure_future(calls.wait("a")), asyncio.ensure_future(calls.wait("b"))
        await until(lambda: len(server.waiting) == 2)
        server.waiting["b"].set_result(None)
        assert await second == "b"
        assert not first.done()
        for number in range(100):
            near.tell("note", str(number))
        assert await calls.add(1) == 3
        assert server.noted == [str(number) for number in range(100)]
        server.waiting["a"].set_result(None)
        assert await first == "a"


async def test_named_and_missing_arguments_travel_as_in_a_call() -> None:
    async with pair() as (_, _, calls, _):
        assert await calls.add(other=5, one=1) == 6
        assert await calls.add(4) == 6


async def test_what_can_be_answered_at_once_is_and_the_rest_is_a_call() -> None:
    async with pair(at_once={"add": lambda one, _other: LATER if one else -1}) as (_, _, calls, _):
        assert await calls.add(0) == -1
        assert await calls.add(1) == 3


async def test_an_error_arrives_as_itself() -> None:
    async with pair() as (_, _, calls, _):
        with pytest.raises(NoSuchKeyError, match="no such key key=k"):
            await calls.refuse()


async def test_a_caller_that_goes_away_ends_its_call() -> None:
    async with pair() as (server, _, calls, _):
        task = asyncio.ensure_future(calls.wait("x"))
        await until(lambda: "x" in server.waiting)
        task.cancel()
        await until(lambda: server.cancelled == ["x"])
        assert await calls.add(1) == 3


async def test_what_a_call_holds_is_given_back_where_its_caller_is_gone() -> None:
    async with pair() as (_, near, calls, unwanted):
        for turns in range(12):  # at each point of its way: before it is sent, on the way, answered and not yet taken
            task = asyncio.ensure_future(calls.open(turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                continue
            before = len(unwanted)
            task.cancel()
            await asyncio.wait([task])
            assert await near.call("add", 1) == 3
            if task.cancelled() and len(unwanted) > before:
                assert unwanted[-1] == ("open", bytes(turns))
        assert unwanted


async def test_a_call_that_nobody_answers_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "CALL_SECONDS", 0.0)
    async with pair() as (server, _, calls, _):
        with pytest.raises(UnavailableError, match="not answered in time"):
            await calls.wait("slow")
        await until(lambda: server.cancelled == ["slow"])


async def test_calls_that_may_take_long_fail_where_the_other_end_says_nothing_at_all() -> None:
    async with pair(silent_seconds=0.5) as (server, _, calls, _):
        with pytest.raises(UnavailableError, match="says nothing"):
            await calls.wait("slow")
        await until(lambda: server.cancelled == ["slow"])


def test_a_silence_counts_from_what_came_last() -> None:
    silence = Silence(0.0)
    assert [silence.seconds(now, heard_at) for now, heard_at in ((1.0, 0.5), (4.0, 0.5), (7.0, 0.5), (8.0, 7.5))] == [
        0.5,
        3.5,
        6.5,
        0.5,
    ]


def test_a_silence_counts_anew_where_this_process_stood_still() -> None:
    silence = Silence(0.0)
    assert silence.seconds(3.0, 2.5) == 0.5
    assert silence.seconds(16.0, 2.5) == 0.0
    assert silence.seconds(19.0, 2.5) == 3.0  # it is silent indeed
    assert silence.seconds(22.0, 21.0) == 1.0


async def test_the_end_of_the_pair_fails_what_waits_and_what_is_asked_afterwards() -> None:
    async with pair() as (server, near, calls, _):
        task = asyncio.ensure_future(calls.wait("x"))
        await until(lambda: "x" in server.waiting)
        await near.aclose()
        with pytest.raises(UnavailableError, match="gone"):
            await task
        with pytest.raises(UnavailableError, match="gone"):
            await calls.add(1)


async def test_garbage_ends_the_pair_and_not_the_process(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(serves=Server(), interface=Calls, calls=Calls, log=LOG)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
    with theirs, caplog.at_level(logging.CRITICAL):
        theirs.sendall(b"\x05\0\0\0nonsense that is no message")
        async with asyncio.timeout(5):
            await channel.lost
    await channel.aclose()


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 97), min_size=1))
def test_messages_are_cut_out_of_any_pieces(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(Kind.TELL, number, 0, body) for number, body in enumerate(bodies))
    reader, found, position, turn = FrameReader(), list[tuple[int, bytes]](), 0, 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        turn += 1
        for message in reader.feed(stream[position : position + step]):
            found.append((message.number, msgspec.msgpack.decode(message.body)))
        position += step
    assert found == list(enumerate(bodies))


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_refused(data: bytes) -> None:
    reader = FrameReader()
    try:
        for message in reader.feed(data):
            assert isinstance(message.number, int)
    except (ValueError, msgspec.MsgspecError):
        pass


def test_errors_keep_their_class_their_message_and_their_data() -> None:
    row = BucketRow("b", BucketKind.KV, "root", 0, Durability.MEMORY)
    told = msgspec.msgpack.Decoder(Failure)
    for error in (
        LayoutMismatchError("another layout", differs=("parent", "tokens"), expected_bytes=4),
        BucketExistsError("the bucket exists", existing=row),
        NoSuchKeyError("no such key", blob_id=BlobId(bytes(16)), where=object),
    ):
        frame(Kind.FAILURE, 1, 0, failure_of(error))
        (message,) = FrameReader().feed(frame(Kind.FAILURE, 1, 0, failure_of(error)))
        back = error_from(told.decode(message.body))
        assert type(back) is type(error)
        assert back.message == error.message
        assert {name: back.data[name] for name in error.data if name != "where"} == {
            name: value for name, value in error.data.items() if name != "where"
        }


def test_an_error_of_another_version_is_one_to_try_again_after() -> None:
    assert type(error_from(Failure("FutureError", "what is it", {}))) is UnavailableError
    assert isinstance(error_from(Failure("KvobjError", "x", {})), KvobjError)
