"""Messages of a peer on the event loop: whose turn it is, and what is left of a peer that has gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
import uvloop

from kvobj.api.same_host.message_socket import MessageSocket
from kvobj.same_host.framing import framed

MESSAGE_BYTES_MAX = 64 * 1024
FLOOD = 12_000
"""Messages that arrive in one step, and take a few turns to read at the least."""

TURNS = 3
"""Its bytes are read, its reader is woken, and who counts sees it."""


class Peer:
    """The two ends of a connection: what the other says, and what is read of it. `turns`: what was dealt with of a flood when
    somebody else, who wanted a turn at its first message, had one."""

    def __init__(self) -> None:
        here, self.socket = socket.socketpair()
        self.socket.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        self.messages = MessageSocket(
            here, bytes_max=MESSAGE_BYTES_MAX, on_end=lambda: None, answer_now=self.answer_now
        )
        self.answers: Callable[[bytes], bytes | None] = lambda _: None
        self.dealt_with = 0
        self.turns: list[int] = []

    def answer_now(self, message: bytes) -> bytes | None:
        answer = self.answers(message)
        if answer is not None:
            self.deal_with()
        return answer

    def deal_with(self) -> None:
        self.dealt_with += 1
        if self.dealt_with == 1:
            asyncio.get_running_loop().call_soon(lambda: self.turns.append(self.dealt_with))

    async def read_flood(self) -> None:
        while self.dealt_with < FLOOD:
            assert await self.messages.read() == b"m"
            self.deal_with()

    def close(self) -> None:
        self.messages.close()
        self.socket.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    yield made
    made.close()


async def test_others_have_their_turn_before_all_of_many_messages_is_read(peer: Peer) -> None:
    peer.socket.sendall(framed(b"m") * FLOOD)
    async with asyncio.timeout(30):
        await peer.read_flood()
    assert peer.turns
    assert peer.turns[0] < FLOOD


async def test_others_have_their_turn_before_all_of_many_messages_is_answered_where_it_arrives(peer: Peer) -> None:
    peer.answers = lambda _: b"" if peer.dealt_with < FLOOD - 1 else None
    reading = asyncio.create_task(peer.read_flood())
    await asyncio.sleep(0)  # it waits for the first
    peer.socket.sendall(framed(b"m") * FLOOD)
    async with asyncio.timeout(30):
        await reading
    assert peer.turns
    assert peer.turns[0] < FLOOD - 1


async def test_two_that_send_much_are_read_in_turns(peer: Peer) -> None:
    other = Peer()
    seen: list[int] = []

    async def read(one: Peer, another: Peer) -> None:
        await one.read_flood()
        seen.append(another.dealt_with)

    for each in (peer, other):
        each.socket.sendall(framed(b"m") * FLOOD)
    async with asyncio.timeout(30):
        await asyncio.gather(read(peer, other), read(other, peer))
    other.close()
    assert seen[0] > 0, "of the other one was read before all of this one's was"


async def test_a_message_that_is_waited_for_costs_no_turn_more(peer: Peer) -> None:
    for _ in range(3):
        reading = asyncio.create_task(peer.messages.read())
        await asyncio.sleep(0)
        peer.socket.sendall(framed(b"m"))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns <= TURNS


async def test_the_end_of_a_peer_is_waited_for_whatever_it_says_and_nothing_more_is_sent_to_it(peer: Peer) -> None:
    peer.messages.send_now(bytes(4 * 1024 * 1024))  # more than the kernel takes
    ending = asyncio.create_task(peer.messages.wait_end())
    heard = 0
    for _ in range(100):
        await asyncio.sleep(0)
        with suppress(BlockingIOError):
            heard += len(peer.socket.recv(1024 * 1024))
        with suppress(BlockingIOError):
            peer.socket.send(bytes(4))  # no message has this length
    assert heard < 4 * 1024 * 1024
    assert not ending.done()
    peer.socket.close()
    async with asyncio.timeout(30):
        await ending


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("is_heard", [True, False], ids=["read", "thrown away"])
def test_a_peer_that_closes_with_a_reply_unread_behind_a_message_of_its_own_is_known_to_be_gone(
    make_loop: Callable[[], asyncio.AbstractEventLoop], *, is_heard: bool
) -> None:
    async def leave() -> None:
        peer = Peer()
        await peer.messages.send(b"a reply")
        peer.socket.sendall(framed(b"m"))
        peer.socket.close()
        async with asyncio.timeout(5.0):
            if is_heard:
                assert await peer.messages.read() == b"m"
                assert await peer.messages.read() is None
            else:
                await peer.messages.wait_end()
        peer.messages.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(leave())
