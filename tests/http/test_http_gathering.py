"""Requests that nobody hurries for are laid aside and answered together: who waits, until when; nothing is lost or overtaken."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from certificates import Authority
from http_peers import TIMEOUT_SECONDS, Peer, Served, receive_all, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.http.gathering import MOMENT_SECONDS, WAITING_MAX, Gathering
from kvobj.api.message import RepeatedAnswer, Reply, RequestBody, RequestHead
from kvobj.clock import SystemClock

A_WHILE = 1 / 64
"""Caches are cold again by then, and others expected still."""
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"
SETTINGS = HttpSettings(sweep_seconds=3600.0, parting_seconds=TIMEOUT_SECONDS)


def renewal(name: str, *, padding: int = 0) -> bytes:
    length = f"content-length: {padding}\r\n" if padding else ""
    return f"PUT /renew-{name} HTTP/1.1\r\nHost: h\r\n{length}\r\n{' ' * padding}".encode()


@dataclass
class Renewals:
    """Answers what asks for a renewal, of names that it knows; what it does not know is the handler's."""

    unknown: str = "-"
    order: list[str] = field(default_factory=list)
    waited: dict[str, int] = field(default_factory=dict)

    @property
    def looks_like(self) -> Callable[[bytes], object | None]:
        return re.compile(rb"PUT /renew-").match

    def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
        found = re.fullmatch(
            rb"PUT (/renew-([a-z]+)) HTTP/1\.1\r\nHost: h\r\n(?:content-length: (\d+)\r\n)?\r\n( *)", request
        )
        if found is None or found[2].decode() == self.unknown or int(found[3] or 0) != len(found[4]):
            return None
        name = found[2].decode()
        self.order.append(name)
        self.waited[name] = waited_ms
        ready = f"x-request: {request_id}\r\ncontent-length: {len(found[2])}\r\n"
        return RepeatedAnswer("PUT", found[1].decode(), 0, Reply(200, ready=ready, log={"known": True}), found[2])

    async def handle(self, head: RequestHead, body: RequestBody) -> Reply:
        await receive_all(body)
        self.order.append(f"handled {head.target}")
        self.waited[head.target] = head.waited_ms
        return Reply(200, (), head.target.encode())


def lying(served: Served) -> int:
    """Connections on which something lies."""
    return sum(connection.wire.has_unread for connection in served.server._connections)


async def ends_unanswered(peer: Peer) -> bool:
    """Whether nothing more comes before the connection ends, in whichever way."""
    try:
        return await peer.rest() == b""
    except ConnectionResetError:
        return True


async def two_of_whom_one_waits(served: Served) -> tuple[Peer, Peer]:
    """The first was answered a while ago, so that the second, whose renewal lies there, waits for others."""
    first, second = await served.connect(), await served.connect()
    await first.send(renewal("a"))
    assert (await first.answer()).body == b"a"
    served.clock.seconds += A_WHILE
    await second.send(renewal("b"))
    await until(lambda: lying(served) == 1)
    return first, second


async def test_who_is_alone_is_answered_at_once() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        peer = await served.connect()
        for _ in range(3):
            await peer.send(renewal("a"))
            answer = await peer.answer()
            assert (answer.status, answer.body) == (200, b"a")
            assert not served.server._serving.gathering._waiting
            served.clock.seconds += A_WHILE
        assert 'kvobj_s3_requests_total{method="PUT",status="2xx"} 3.0' in served.metrics.render().decode()
    assert renewals.order == ["a", "a", "a"]
    assert renewals.waited == {"a": 0}
    line = json.loads(served.lines[-1])
    assert (line["method"], line["target"], line["status"], line["known"]) == ("PUT", "/renew-a", 200, True)


async def test_who_comes_right_behind_another_is_answered_at_once() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        for name in ("a", "b", "c"):
            peer = await served.connect()
            await peer.send(renewal(name))
            assert (await peer.answer()).body == name.encode()
        assert renewals.waited == {"a": 0, "b": 0, "c": 0}


async def test_after_a_moment_without_others_the_next_is_answered_at_once() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await served.connect(), await served.connect()
        await first.send(renewal("a"))
        await first.answer()
        served.clock.seconds += 2 * MOMENT_SECONDS
        await second.send(renewal("b"))
        assert (await second.answer()).body == b"b"
        assert renewals.waited == {"a": 0, "b": 0}


async def test_all_that_come_within_a_moment_are_answered_in_turn_when_it_is_over() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        served.clock.seconds += 1 / 32
        await first.send(renewal("c"))
        await until(lambda: lying(served) == 2)
        assert renewals.order == ["a"]
        assert ((await second.answer()).body, (await first.answer()).body) == (b"b", b"c")
        assert renewals.order == ["a", "b", "c"]
        assert renewals.waited == {"a": 0, "b": 31, "c": 0}
        assert json.loads(served.lines[1])["duration_ms"] == pytest.approx(31.25)


async def test_one_that_nobody_joins_is_answered_when_the_moment_is_over() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        _, second = await two_of_whom_one_waits(served)
        assert (await second.answer()).body == b"b"
        assert served.server._serving.gathering._timer is None


async def test_what_is_not_known_goes_to_the_handler_which_is_told_how_long_it_waited() -> None:
    renewals = Renewals(unknown="b")
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        served.clock.seconds += 1 / 32
        await first.send(renewal("c"))
        assert ((await second.answer()).body, (await first.answer()).body) == (b"/renew-b", b"c")
        assert renewals.waited == {"a": 0, "/renew-b": 31, "c": 0}


async def test_what_comes_behind_it_on_its_connection_ends_the_wait_and_does_not_overtake_it() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        _, second = await two_of_whom_one_waits(served)
        await second.send(NEXT)
        assert [(await second.answer()).body for _ in range(2)] == [b"/renew-b", b"/next"]
        assert renewals.order == ["a", "handled /renew-b", "handled /next"]
        assert not served.server._serving.gathering._waiting


async def one_that_has_only_begun(served: Served) -> Peer:
    """A beginning that was laid aside."""
    first, second = await served.connect(), await served.connect()
    await first.send(renewal("a"))
    await first.answer()
    served.clock.seconds += A_WHILE
    await second.send(renewal("b")[:20])
    await until(lambda: lying(served) == 1)
    return second


async def test_the_rest_of_one_whose_beginning_was_laid_aside_makes_it_whole() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        peer = await one_that_has_only_begun(served)
        await peer.send(renewal("b")[20:])
        assert (await peer.answer()).body == b"b"
        assert served.server._serving.gathering._timer is None


async def test_a_beginning_that_nothing_follows_is_refused_at_the_deadline_of_heads() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        peer = await one_that_has_only_begun(served)
        await until(lambda: lying(served) == 0)
        served.turn(SETTINGS.header_seconds + 1)
        assert (await peer.answer()).status == 400


async def test_what_looks_like_a_renewal_within_a_head_does_not_put_off_the_deadline_of_it() -> None:
    renewals = Renewals()
    beginning, more = b"GET / HTTP/1.1\r\nHost: h\r\nX: ", renewal("b")[:20]
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        slow = await served.connect()
        await slow.send(beginning)
        await until(lambda: any(connection._reader.is_within_head for connection in served.server._connections))
        (wire,) = (connection.wire for connection in served.server._connections)
        served.turn(SETTINGS.header_seconds - 2 * A_WHILE)
        other = await served.connect()
        await other.send(renewal("a"))
        assert (await other.answer()).body == b"a"
        served.clock.seconds += A_WHILE
        await slow.send(more)
        await until(lambda: wire.bytes_in == len(beginning) + len(more))
        assert not wire.has_unread
        served.turn(A_WHILE)
        assert (await slow.answer()).status == 400


@pytest.mark.parametrize("size", [65_536, 66_000, 90_000])
async def test_after_one_as_long_as_the_buffer_that_comes_in_two_pieces_the_next_is_read(size: int) -> None:
    renewals = Renewals()
    padded = renewal("b", padding=2 * size - len(renewal("b", padding=size)))
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first = await served.connect()
        await first.send(renewal("a"))
        assert (await first.answer()).body == b"a"
        (known,) = served.server._connections
        served.clock.seconds += A_WHILE
        second = await served.connect()
        await second.send(padded[:30_000])
        await until(lambda: len(served.server._connections) == 2)
        (wire,) = (connection.wire for connection in served.server._connections if connection is not known)
        await until(lambda: wire.bytes_in == 30_000)
        await second.send(padded[30_000:])
        assert (await second.answer()).body == b"/renew-b"
        await second.send(renewal("b"))
        assert (await second.answer()).body == b"b"


async def test_a_client_that_ends_its_side_is_answered() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        _, second = await two_of_whom_one_waits(served)
        second.writer.write_eof()
        assert (await second.answer()).body == b"/renew-b"
        assert await second.rest() == b""


async def test_a_client_that_goes_takes_nothing_from_the_others() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        second.vanish()
        await until(lambda: len(served.server._connections) == 1)
        await first.send(renewal("c"))
        assert (await first.answer()).body == b"c"
        assert not served.server._serving.gathering._waiting


async def test_a_connection_on_which_something_lies_is_not_idle() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        served.turn(SETTINGS.keep_alive_seconds + 1)
        assert (await second.answer()).body == b"b"
        assert await first.rest() == b""


async def test_a_server_that_drains_answers_what_lies_there_and_says_that_it_ends() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        answer = await second.answer()
        assert (answer.body, answer.headers["connection"]) == (b"/renew-b", "close")
        await first.send(renewal("c"))
        assert (await first.answer()).headers["connection"] == "close"
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS)


async def test_a_server_that_is_closed_answers_nothing_more() -> None:
    renewals = Renewals()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        _, second = await two_of_whom_one_waits(served)
        await served.server.aclose()
        assert served.server._serving.gathering._timer is None
        assert await ends_unanswered(second)
    assert renewals.order == ["a"]


async def test_what_is_read_over_tls_waits_as_well(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    authority.sign().write(tmp_path / "certificate", tmp_path / "key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    renewals = Renewals()
    async with serving(
        renewals.handle,
        SETTINGS,
        server_context=context,
        client_context=authority.client_context(),
        repeated=renewals,
    ) as served:
        first, second = await two_of_whom_one_waits(served)
        await first.send(renewal("c"))
        assert ((await second.answer()).body, (await first.answer()).body) == (b"b", b"c")


async def test_replies_that_are_not_taken_cost_the_client_its_connection_and_nobody_else() -> None:
    class Long(Renewals):
        def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
            short = super().answer(request, request_id, waited_ms=waited_ms)
            if short is None or not request.startswith(b"PUT /renew-long "):
                return short
            body = bytes(32 * 1024 * 1024)
            return RepeatedAnswer("PUT", short.target, 0, Reply(200, ready=f"content-length: {len(body)}\r\n"), body)

    renewals = Long()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        slow = await served.connect()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await slow.send(renewal("long"))
        await until(lambda: any(connection.wire.is_flushing for connection in served.server._connections))
        served.turn(SETTINGS.send_stall_seconds - 1)
        other = await served.connect()
        served.clock.seconds += 2
        await other.send(renewal("b"))
        assert (await other.answer()).body == b"b"
        served.server.sweep()
        await until(lambda: len(served.server._connections) == 1)


async def test_a_defect_costs_one_connection_and_not_those_that_wait_beside_it() -> None:
    class Broken(Renewals):
        def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
            if request.startswith(b"PUT /renew-b "):
                raise RuntimeError("a bug")
            return super().answer(request, request_id, waited_ms=waited_ms)

    renewals = Broken()
    async with serving(renewals.handle, SETTINGS, repeated=renewals) as served:
        first, second = await two_of_whom_one_waits(served)
        await first.send(renewal("c"))
        assert (await first.answer()).body == b"c"
        await until(lambda: len(served.server._connections) == 1)
        assert await ends_unanswered(second)
        assert renewals.order == ["a", "c"]


class Noted:
    """A connection that notes when it is served."""

    def __init__(self, name: int, order: list[int]) -> None:
        self._name = name
        self._order = order

    def take_up(self) -> None:
        self._order.append(self._name)


async def test_no_more_wait_than_may() -> None:
    order: list[int] = []
    gathering = Gathering(SystemClock())
    connections = [Noted(number, order) for number in range(WAITING_MAX + 2)]
    assert not gathering.lays_aside(connections[0], 0.0)
    for connection in connections[1:-1]:
        assert gathering.lays_aside(connection, A_WHILE)
    assert not order
    assert not gathering.lays_aside(connections[-1], A_WHILE)
    assert order == list(range(1, WAITING_MAX + 1))
    gathering.close()
