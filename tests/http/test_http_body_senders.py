"""Long replies that threads send: the right bytes whoever ends up sending them, and no thread that waits for a client for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from http_peers import TIMEOUT_SECONDS, pattern, until
from threads_world import Served, serving

from kvobj.wire.body_handover import Wire
from kvobj.wire.body_senders import ALONE_BYTES_MAX, SENT_BYTES_MIN, BodySenders, make_senders
from kvobj.wire.body_threads import MoveOutcome

# Python's own event loop keeps copies of what it could not send at once: the threads are not for it.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

BODY_BYTES = 12 * 1024 * 1024  # more than both sockets hold
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@asynccontextmanager
async def serving_one_thread(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served[BodySenders]]:
    senders = make_senders(asyncio.get_running_loop(), threads=1)
    assert senders is not None, "no native library"
    async with serving(monkeypatch, senders) as served:
        yield served


async def received(client: socket.socket, size: int) -> bytes:
    loop, body = asyncio.get_running_loop(), bytearray(size)
    with memoryview(body) as view:
        filled = 0
        while filled < size:
            count = await asyncio.wait_for(loop.sock_recv_into(client, view[filled:]), TIMEOUT_SECONDS)
            assert count
            filled += count
    return bytes(body)


async def test_a_thread_sends_what_is_long_and_the_event_loop_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            for size, sendings in ((SENT_BYTES_MIN // 2, 0), (BODY_BYTES, 1), (BODY_BYTES, 2)):
                body = pattern(size)
                sending = asyncio.ensure_future(wire.send(HEAD, memoryview(body)))
                assert await received(client, len(HEAD) + size) == HEAD + body
                await asyncio.wait_for(sending, TIMEOUT_SECONDS)
                assert len(served.movings) == sendings
                assert wire.bytes_taken == wire.bytes_out
        assert [sending.ended.result() for sending in served.movings] == [MoveOutcome.WHOLE] * 2


async def test_the_event_loop_goes_on_for_a_client_that_takes_nothing_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = pattern(BODY_BYTES)
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            sending = asyncio.ensure_future(wire.send(HEAD, memoryview(body)))
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await until(lambda: bool(served.movings))
                assert await served.movings[0].ended is MoveOutcome.SLOW
            assert wire.is_flushing
            assert wire.bytes_taken < wire.bytes_out
            assert await received(client, len(HEAD) + BODY_BYTES) == HEAD + body
            await asyncio.wait_for(sending, TIMEOUT_SECONDS)


def pieces_of(*sizes: int) -> tuple[list[tuple[bytes, memoryview]], bytes]:
    """Pieces whose views are so long, each but every third led by some bytes; and all of them joined."""
    leads = [b"" if index % 3 == 2 else b"%d:" % index * index for index in range(len(sizes))]
    contents = [pattern(size, index + 1) for index, size in enumerate(sizes)]
    return (
        [(lead, memoryview(content)) for lead, content in zip(leads, contents, strict=True)],
        b"".join(lead + content for lead, content in zip(leads, contents, strict=True)),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (1024 * 1024,) * 12,
        (0, SENT_BYTES_MIN, 0, 0, 1),
        (3, 3_000_000, 1, 2_000_001, 5, 7_000_000),
        (65_537,) * 200,  # more parts than one call takes
        (1,) * 999 + (SENT_BYTES_MIN,),
    ],
)
async def test_a_thread_sends_a_burst_as_one(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    pieces, whole = pieces_of(*sizes)
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            wire.write(HEAD)
            sending = asyncio.ensure_future(wire.send_burst(pieces))
            assert await received(client, len(HEAD) + len(whole)) == HEAD + whole
            await asyncio.wait_for(sending, TIMEOUT_SECONDS)
            assert wire.bytes_taken == wire.bytes_out == len(HEAD) + len(whole)
        assert [moving.ended.result() for moving in served.movings] == [MoveOutcome.WHOLE]


async def test_a_short_burst_is_the_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, whole = pieces_of(1, 20_000, 0, 300_000)
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            sending = asyncio.ensure_future(wire.send_burst(pieces))
            assert await received(client, len(whole)) == whole
            await asyncio.wait_for(sending, TIMEOUT_SECONDS)
            assert wire.bytes_taken == wire.bytes_out == len(whole)
        assert served.movings == []


async def test_bursts_that_find_no_free_thread_are_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = [pieces_of(*(1_000_000 + index,) * 9) for index in range(3)]
    async with serving_one_thread(monkeypatch) as served:
        pairs = [await served.connect() for _ in bursts]
        sends = [
            asyncio.ensure_future(wire.send_burst(pieces)) for (wire, _), (pieces, _) in zip(pairs, bursts, strict=True)
        ]
        got = await asyncio.gather(
            *(received(client, len(whole)) for (_, client), (_, whole) in zip(pairs, bursts, strict=True))
        )
        await asyncio.wait_for(asyncio.gather(*sends), TIMEOUT_SECONDS)
        for _, client in pairs:
            client.close()
    assert got == [whole for _, whole in bursts]


async def test_the_event_loop_goes_on_in_the_middle_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, whole = pieces_of(*(1_000_003,) * 14)
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        with client:
            sending = asyncio.ensure_future(wire.send_burst(pieces))
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await until(lambda: bool(served.movings))
                assert await served.movings[0].ended is MoveOutcome.SLOW
            assert 0 < wire.bytes_taken < wire.bytes_out
            assert await received(client, len(whole)) == whole
            await asyncio.wait_for(sending, TIMEOUT_SECONDS)
            assert wire.bytes_taken == len(whole)


async def test_who_finds_no_free_thread_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [pattern(BODY_BYTES + index) for index in range(3)]
    async with serving_one_thread(monkeypatch) as served:
        pairs = [await served.connect() for _ in bodies]
        sends = [
            asyncio.ensure_future(wire.send(HEAD, memoryview(body)))
            for (wire, _), body in zip(pairs, bodies, strict=True)
        ]
        got = await asyncio.gather(
            *(received(client, len(HEAD) + len(body)) for (_, client), body in zip(pairs, bodies, strict=True))
        )
        await asyncio.wait_for(asyncio.gather(*sends), TIMEOUT_SECONDS)
        for _, client in pairs:
            client.close()
    assert got == [HEAD + body for body in bodies]
    assert 1 <= len(served.movings) < len(bodies) + 1


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("how", ["the client resets", "the server resets", "the sender is cancelled"])
async def test_a_sending_that_is_cut_short_leaves_its_memory_and_its_thread(
    monkeypatch: pytest.MonkeyPatch, how: str, count: int
) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        pieces = [(HEAD, memoryview(bytearray(BODY_BYTES // count))) for _ in range(count)]
        sending = asyncio.ensure_future(wire.send_burst(pieces))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await until(lambda: bool(served.movings))
            if how == "the client resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
            elif how == "the server resets":
                wire.reset()
            else:
                sending.cancel()
            with pytest.raises((ConnectionError, asyncio.CancelledError)):
                await sending
            assert served.movings[0].left == 0
            # The one thread is free again, at once or when it has looked at the socket for the last time.
            body = pattern(BODY_BYTES)
            while len(served.movings) == 1:
                other, taker = await served.connect()
                with taker:
                    again = asyncio.ensure_future(other.send(HEAD, memoryview(body)))
                    assert await received(taker, len(HEAD) + BODY_BYTES) == HEAD + body
                    await again
            assert await served.movings[1].ended is MoveOutcome.WHOLE
        client.close()


async def test_who_is_alone_is_sent_to_by_the_event_loop_until_somebody_else_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving_one_thread(monkeypatch) as served:
        one, two = await served.connect(), await served.connect()

        async def fetch(pair: tuple[Wire, socket.socket], size: int) -> int:
            """Send and receive a body; how many threads took part."""
            (wire, client), body, before = pair, pattern(size), len(served.movings)
            sending = asyncio.ensure_future(wire.send(HEAD, memoryview(body)))
            assert await received(client, len(HEAD) + size) == HEAD + body
            await asyncio.wait_for(sending, TIMEOUT_SECONDS)
            assert wire.bytes_taken == wire.bytes_out
            return len(served.movings) - before

        alone = [await fetch(one, SENT_BYTES_MIN + 4096) for _ in range(32)]
        beside = [await fetch(pair, SENT_BYTES_MIN + 4096) for pair in (two, one) * 3]
        with one[1], two[1]:
            # Of a socket that is not used to long bodies the kernel takes a part, and a thread may have to send the rest.
            assert alone[0] == 1
            assert alone[-1] == 0
            assert beside == [1] * 6
            assert await fetch(one, ALONE_BYTES_MAX + 8192) == 1


async def test_a_small_reply_to_another_ends_being_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_one_thread(monkeypatch) as served:
        (one, client), (two, other) = await served.connect(), await served.connect()
        with client, other:
            while not served.threads.is_alone(one, SENT_BYTES_MIN):
                pass
            one.write(b"more")
            assert served.threads.is_alone(one, SENT_BYTES_MIN)
            two.write(b"small")
            assert not served.threads.is_alone(one, SENT_BYTES_MIN)


async def test_a_client_that_is_gone_is_a_lost_connection_also_to_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving_one_thread(monkeypatch) as served:
        wire, client = await served.connect()
        while not served.threads.is_alone(wire, ALONE_BYTES_MAX):
            pass
        client.shutdown(socket.SHUT_RDWR)
        client.close()

        async def send_on() -> None:
            for _ in range(64):  # the first may still find room in the kernel
                await wire.send(HEAD, memoryview(pattern(ALONE_BYTES_MAX)))

        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(send_on(), TIMEOUT_SECONDS)
