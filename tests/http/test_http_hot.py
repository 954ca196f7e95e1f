"""Requests that are answered from their bytes where they arrive: which, and what becomes of those that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
from http_peers import TIMEOUT_SECONDS, Served, receive_all, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.message import RepeatedAnswer, Reply, RequestBody, RequestHead

SETTINGS = HttpSettings(sweep_seconds=3600.0, parting_seconds=TIMEOUT_SECONDS)


def request(name: str, body: bytes = b"") -> bytes:
    return f"PUT /hot-{name} HTTP/1.1\r\nHost: h\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Hot:
    """Answers what asks for something hot; what it does not know, or what is not whole, is the handler's."""

    order: list[str] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    fails: bool = False

    @property
    def looks_like(self) -> Callable[[bytes], object | None]:
        return re.compile(rb"PUT /hot-").match

    def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
        assert waited_ms == 0
        found = re.fullmatch(rb"PUT (/hot-([a-z]+)) HTTP/1\.1\r\nHost: h\r\ncontent-length: (\d+)\r\n\r\n(x*)", request)
        if found is None or int(found[3]) != len(found[4]) or found[2] == b"unknown":
            return None
        if self.fails:
            raise RuntimeError("a defect")
        name = found[2].decode()
        self.order.append(name)
        ready = f"x-request: {request_id}\r\ncontent-length: {len(found[2])}\r\n"
        return RepeatedAnswer(
            "PUT", found[1].decode(), len(found[4]), Reply(200, ready=ready, log={"known": True}), found[2]
        )

    async def handle(self, head: RequestHead, body: RequestBody) -> Reply:
        await receive_all(body)
        self.order.append(f"handled {head.target}")
        self.raws.append(head.raw)
        return Reply(200, (), head.target.encode())


def have_arrived(served: Served, size_bytes: int) -> bool:
    (connection,) = served.server._connections
    return connection.wire.bytes_in == size_bytes


async def test_it_is_answered_where_it_arrives_and_counted_and_logged_as_all_are() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peers = [await served.connect() for _ in range(3)]
        for number, peer in enumerate(peers * 2):
            await peer.send(request("a", b"x" * number))
            answer = await peer.answer()
            assert (answer.status, answer.body) == (200, b"a")
        rendered = served.metrics.render().decode()
        assert 'kvobj_s3_requests_total{method="PUT",status="2xx"} 6.0' in rendered
        assert "kvobj_s3_received_bytes_total 15.0" in rendered
        line = json.loads(served.lines[-1])
    assert hot.order == ["a"] * 6
    assert (line["method"], line["target"], line["status"], line["known"]) == ("PUT", "/hot-a", 200, True)
    assert (line["bytes_in"], line["request_id"]) == (5, "REQUEST6")


async def test_what_it_does_not_know_is_handled_and_the_handler_sees_the_head_as_it_arrived() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peer = await served.connect()
        for name in ("unknown", "a", "unknown"):
            await peer.send(request(name, b"xyz" if name == "unknown" else b""))
            assert (await peer.answer()).status == 200
    assert hot.order == ["handled /hot-unknown", "a", "handled /hot-unknown"]
    assert hot.raws == [request("unknown", b"xyz")[:-3]] * 2


async def test_what_comes_in_pieces_is_handled_and_what_follows_is_hot_again() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peer = await served.connect()
        whole = request("a", b"x" * 100)
        sent = 0
        for cut in (4, 12, len(whole) - 101, len(whole) - 100, len(whole) - 1):
            await peer.send(whole[:cut])
            sent += cut
            await until(partial(have_arrived, served, sent))
            await peer.send(whole[cut:])
            assert (await peer.answer()).body == b"/hot-a"
            await peer.send(whole)
            assert (await peer.answer()).body == b"a"
            sent += 2 * len(whole) - cut


async def test_requests_behind_each_other_are_answered_in_order_and_none_is_lost() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peer = await served.connect()
        names = ["a", "b", "unknown", "c", "d"]
        await peer.send(b"".join([request(name) for name in names]))
        for name in names:
            assert (await peer.answer()).body in {f"/hot-{name}".encode(), name.encode()}
    assert [name.removeprefix("handled /hot-") for name in hot.order] == names


async def test_long_ones_are_handled() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peer = await served.connect()
        await peer.send(request("a", b"x" * 33_000))
        assert (await peer.answer()).body == b"/hot-a"


async def test_while_the_server_drains_the_reply_says_that_the_connection_ends() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        peer = await served.connect()
        await peer.send(request("a"))
        assert (await peer.answer()).body == b"a"
        next(iter(served.server._connections)).drain(served.clock.monotonic(), idle_seconds=1e9)
        await peer.send(request("a"))
        answer = await peer.answer()
        assert (answer.body, answer.headers["connection"]) == (b"/hot-a", "close")


@pytest.mark.parametrize("with_repeated", [False, True])
async def test_they_are_never_laid_aside(*, with_repeated: bool) -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot, repeated=hot if with_repeated else None) as served:
        for name in ("a", "b", "c"):
            peer = await served.connect()
            await peer.send(request(name))
            assert (await peer.answer()).body == name.encode()
            assert not served.server._serving.gathering._waiting
            served.clock.seconds += 1 / 64


async def test_a_defect_in_it_ends_its_connection_and_no_other() -> None:
    hot = Hot()
    async with serving(hot.handle, SETTINGS, hot=hot) as served:
        first, second = await served.connect(), await served.connect()
        hot.fails = True
        await first.send(request("a"))
        with suppress(ConnectionResetError):
            assert await first.rest() == b""
        assert [line for line in served.lines if "REQUEST1" in line] != []
        hot.fails = False
        await second.send(request("a"))
        assert (await second.answer()).body == b"a"
