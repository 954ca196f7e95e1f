"""Long bodies that threads receive: the right bytes whoever ends up receiving them, and no thread that waits for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from http_peers import TIMEOUT_SECONDS, echo, pattern, serving, until
from threads_world import Served
from threads_world import serving as serving_wires

from kvobj.api.http import HttpSettings
from kvobj.errors import IncompleteBodyError
from kvobj.wire.body_handover import Wire
from kvobj.wire.body_receivers import RECEIVED_BYTES_MIN, BodyReceivers, make_receivers
from kvobj.wire.body_threads import MoveOutcome

# Python's own event loop keeps copies of what it could not send at once: the threads are not for it.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MIB = 1024 * 1024
BODY_BYTES = 12 * MIB  # more than both sockets hold


@asynccontextmanager
async def serving_one_thread(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served[BodyReceivers]]:
    receivers = make_receivers(asyncio.get_running_loop(), threads=1)
    assert receivers is not None, "no native library"
    for other in (object(), object()):
        receivers.is_alone(other)  # whoever comes now is not the only one
    async with serving_wires(monkeypatch, receivers) as served:
        yield served


@dataclass
class Body:
    """A buffer that is being filled, and what was told of it."""

    buffer: bytearray
    told: list[int]
    filling: asyncio.Task[None]

    @classmethod
    def begun(cls, wire: Wire, size: int, *, has_more: bool = False) -> Body:
        buffer, told = bytearray(size), list[int]()
        filling = asyncio.ensure_future(wire.fill(memoryview(buffer), told.append, has_more=has_more))
        return cls(buffer, told, filling)

    async def end(self) -> bytes:
        await asyncio.wait_for(asyncio.shield(self.filling), TIMEOUT_SECONDS)
        return bytes(self.buffer)


async def send(client: socket.socket, data: bytes) -> None:
    await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(client, data), TIMEOUT_SECONDS)


async def test_a_thread_receives_what_is_long_and_the_event_loop_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            total = 0
            for size, movings in ((RECEIVED_BYTES_MIN // 2, 0), (BODY_BYTES, 1), (BODY_BYTES + 1, 2)):
                body, data = Body.begun(wire, size), pattern(size)
                await send(client, data)
                assert await body.end() == data
                assert body.told[-1] == size
                assert body.told == sorted(set(body.told))
                assert len(served.movings) == movings
                total += size
                assert (wire.filled, wire.bytes_in) == (size, total)


async def test_who_is_alone_is_received_by_the_event_loop_until_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        other, second = await served.connect()
        with client, second:
            data = pattern(RECEIVED_BYTES_MIN)

            async def put(wire: Wire, client: socket.socket) -> None:
                body = Body.begun(wire, len(data))
                await send(client, data)
                assert await body.end() == data

            for _ in range(20):
                await put(wire, client)
            assert len(served.movings) == 16
            await put(other, second)
            await put(wire, client)
            assert len(served.movings) == 18


async def test_the_first_of_all_is_alone() -> None:
    receivers = make_receivers(asyncio.get_running_loop(), threads=1)
    assert receivers is not None, "no native library"
    one, other = object(), object()
    assert [receivers.is_alone(who) for who in (one, one, other, one)] == [True, True, False, False]
    receivers.close()


async def test_what_comes_behind_a_body_is_not_received_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            data = pattern(BODY_BYTES)
            for has_more in (False, True):
                body = Body.begun(wire, BODY_BYTES, has_more=has_more)
                await send(client, data + b"GET / HTTP/1.1")
                assert await body.end() == data
                behind = b""
                while len(behind) < 14:
                    behind += await asyncio.wait_for(wire.read_segment(), TIMEOUT_SECONDS)
                assert behind == b"GET / HTTP/1.1"
            assert len(served.movings) == 2


async def test_a_client_that_is_slow_leaves_the_thread_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        other, second = await served.connect()
        with client, second:
            data = pattern(BODY_BYTES)
            slow = Body.begun(wire, BODY_BYTES)
            await send(client, data[:1000])
            await until(lambda: bool(served.movings) and served.movings[0].ended.done())
            assert served.movings[0].ended.result() is MoveOutcome.SLOW
            quick = Body.begun(other, BODY_BYTES)
            await send(second, data)
            assert await quick.end() == data
            await send(client, data[1000:])
            assert await slow.end() == data
            assert len(served.movings) == 2


async def test_without_a_free_thread_the_event_loop_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        (wire, client), (other, second) = await served.connect(), await served.connect()
        with client, second:
            data = pattern(BODY_BYTES)
            bodies = [Body.begun(wire, BODY_BYTES), Body.begun(other, BODY_BYTES)]
            await asyncio.gather(send(client, data), send(second, data))
            assert [await body.end() for body in bodies] == [data, data]
            assert len(served.movings) == 1


async def test_with_a_low_water_mark_a_tail_of_any_length_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        wire.tune(send_bytes=None, low_water_bytes=512 * 1024)
        with client:
            await send(client, pattern(256 * 1024))  # full segments, so that the mark is set
            lead = Body.begun(wire, 256 * 1024)
            await lead.end()
            for size in (BODY_BYTES + 1, BODY_BYTES + 512 * 1024 - 1, RECEIVED_BYTES_MIN):
                body, data = Body.begun(wire, size), pattern(size)
                await send(client, data)
                assert await body.end() == data
            assert len(served.movings) == 3
            assert wire.filling is None


async def test_a_client_that_goes_is_told_apart_from_one_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            body = Body.begun(wire, BODY_BYTES)
            await send(client, pattern(5 * MIB))
        with pytest.raises(IncompleteBodyError):
            await body.end()
        assert len(served.movings) == 1
        assert wire.filled == wire.bytes_in == 5 * MIB
        assert bytes(body.buffer[: 5 * MIB]) == pattern(5 * MIB)


@pytest.mark.parametrize("way", ["cancelled", "failed", "reset"])
async def test_when_a_fill_has_ended_no_thread_writes_to_its_buffer(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            body = Body.begun(wire, BODY_BYTES)
            await send(client, pattern(3 * MIB))
            await until(lambda: wire.filled >= 2 * MIB)
            if way == "cancelled":
                body.filling.cancel()
            elif way == "failed":
                wire.fail_reader(TimeoutError("too slow"))
            else:
                wire.reset()
            with pytest.raises((asyncio.CancelledError, TimeoutError, IncompleteBodyError)):
                await body.filling
            kept = bytes(body.buffer)
            if way != "reset":
                filled = wire.filled
                assert kept == pattern(BODY_BYTES)[:filled] + bytes(BODY_BYTES - filled)
                await send(client, b"x" * 1000)
                rest = b""
                while not rest.endswith(b"x" * 1000):  # what was not taken is the next reader's
                    rest += await asyncio.wait_for(wire.read_segment(), TIMEOUT_SECONDS)
                assert rest == pattern(3 * MIB)[filled:] + b"x" * 1000
            assert bytes(body.buffer) == kept
        other, second = await served.connect()
        with second:
            again, data = Body.begun(other, BODY_BYTES), pattern(BODY_BYTES)
            await send(second, data)
            assert await again.end() == data


@pytest.mark.parametrize("way", ["slow", "cancelled"])
async def test_a_sweep_in_the_middle_of_a_body_leaves_no_low_water_mark_behind(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        wire.tune(send_bytes=None, low_water_bytes=512 * 1024)
        with client:
            data = pattern(BODY_BYTES)
            body = Body.begun(wire, BODY_BYTES)
            await send(client, data)
            assert await body.end() == data
            body = Body.begun(wire, BODY_BYTES)
            await send(client, data[: 6 * MIB])
            await until(lambda: wire.filled >= 2 * MIB)
            wire.await_any()
            await send(client, data[6 * MIB : -300_000])
            if way == "slow":
                await until(served.movings[-1].ended.done)
                await send(client, data[-300_000:])
                assert await body.end() == data
            else:
                await until(lambda: served.movings[-1].left in (300_000, 0))  # 0: it was slow on a busy machine
                body.filling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await body.filling
            reading = asyncio.ensure_future(wire.read_segment())
            await send(client, b"GET / HTTP/1.1")
            assert await asyncio.wait_for(reading, TIMEOUT_SECONDS) == b"GET / HTTP/1.1"


async def test_a_connection_that_is_lost_ends_a_fill_whose_last_bytes_nobody_was_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            body = Body.begun(wire, RECEIVED_BYTES_MIN)
            await until(lambda: bool(served.movings))
            client.settimeout(TIMEOUT_SECONDS)

            def lose() -> None:
                client.sendall(pattern(RECEIVED_BYTES_MIN))
                while served.movings[0].left:  # the event loop stands still meanwhile
                    pass
                wire.reset()

            asyncio.get_running_loop().call_later(0, lose)
            (failure,) = await asyncio.gather(body.filling, return_exceptions=True)
            assert isinstance(failure, IncompleteBodyError) is (body.told != [RECEIVED_BYTES_MIN])


async def test_without_a_descriptor_for_the_threads_the_event_loop_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(24, "too many open files")

    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            data = pattern(BODY_BYTES)
            for movings in (0, 1):
                with monkeypatch.context() as patched:
                    if not movings:
                        patched.setattr("kvobj.wire.body_threads.os.eventfd", refuse)
                    body = Body.begun(wire, BODY_BYTES)
                    await send(client, data)
                    assert await body.end() == data
                assert len(served.movings) == movings


async def test_what_the_filler_raises_ends_its_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:

            def refuse(_: int) -> None:
                raise ValueError("not so much")

            filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(BODY_BYTES)), refuse))
            await send(client, pattern(3 * MIB))
            with pytest.raises(ValueError, match="not so much"):
                await asyncio.wait_for(filling, TIMEOUT_SECONDS)
            assert len(served.movings) == 1


async def test_a_server_tells_bodies_apart_that_come_at_once_and_requests_that_follow_them() -> None:
    async with serving(echo, HttpSettings(sweep_seconds=3600.0, receiver_threads=2)) as served:

        async def put_three(seed: int) -> None:
            peer = await served.connect()
            for number in range(3):
                body = pattern(6 * MIB + seed, seed + number)
                await peer.send(b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                reply = await peer.answer()
                assert (reply.status, reply.body) == (200, body)
                await peer.send(b"GET /y HTTP/1.1\r\nHost: h\r\n\r\n")
                assert (await peer.answer()).status == 200

        await asyncio.gather(*(put_three(seed) for seed in range(1, 6)))
