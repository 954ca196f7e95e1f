"""Connections of a server in this process, by their ends: who gives way, what is left of one, and until when its room is."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from module_paths import ModulePaths
from real_store import MIB, node_settings, running_node
from same_host_world import RawPeer, no_descriptors_left

from kvobj.api.same_host import connection
from kvobj.api.same_host.connection import Connection
from kvobj.api.same_host.message_socket import MessageSocket
from kvobj.api.same_host.rights import Rights
from kvobj.api.same_host.server import STRANGERS_MAX
from kvobj.app.node import Node
from kvobj.app.same_host import SameHost, start_same_host
from kvobj.clock import SystemClock
from kvobj.config.settings import BucketSettings, SameHostSettings
from kvobj.metrics import Metrics
from kvobj.same_host.framing import framed
from kvobj.same_host.messages import (
    REQUEST_BYTES_MAX,
    VERSION,
    Hello,
    NewItem,
    Open,
    Opened,
    Reply,
    Request,
    Reserve,
    Reserved,
    Stage,
    Welcome,
    encode,
)

CONNECTIONS_MAX = STRANGERS_MAX + 8


@dataclass(frozen=True, slots=True)
class World:
    """A node with its socket, and connections to it, whose calls are made on a thread."""

    node: Node
    same_host: SameHost
    peers: list[RawPeer]

    @property
    def connections(self) -> int:
        return self.same_host.server.connections

    def knock(self) -> RawPeer:
        """A connection that says nothing."""
        peer = RawPeer(str(self.same_host.server.path))
        self.peers.append(peer)
        return peer

    async def greeted(self) -> RawPeer:
        """A trusted writer's connection."""
        bucket = await self.node.catalog.bucket("cache")
        assert bucket is not None
        rights = Rights(bucket, "root", is_owner=True, lane=None, may_write=True, is_trusted=True)
        granted = await self.same_host.grants.grant(rights)
        peer = self.knock()
        assert isinstance(await ask(peer, Hello(VERSION, granted.token)), Welcome)
        return peer

    def close_peers(self) -> None:
        for peer in self.peers:
            peer.close()
            for descriptor in peer.descriptors:
                os.close(descriptor)
        self.peers.clear()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0)


def has_ended(peer: RawPeer) -> bool:
    """Whether the server has ended it; what it has said is left unread."""
    readable, _, _ = select.select([peer.socket], [], [], 0)
    try:
        return bool(readable) and not peer.socket.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:
        return True


async def ask(peer: RawPeer, request: Request) -> Reply | None:
    return await asyncio.to_thread(peer.ask, request)


@pytest.fixture
async def world(tmp_path: Path, module_paths: ModulePaths) -> AsyncIterator[World]:
    settings = replace(
        node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=32),
        buckets=(BucketSettings("cache", "kv", "memory"),),
        same_host=SameHostSettings(connections=CONNECTIONS_MAX),
    )
    async with running_node(settings) as node:
        await node.arena.populate()
        log = logging.getLogger("test")
        same_host = start_same_host(node, node.kv.chunks, clock=SystemClock(), metrics=Metrics(), log=log)
        assert same_host is not None
        made = World(node, same_host, [])
        yield made
        made.close_peers()
        await same_host.server.aclose()


# -- who gives way -------------------------------------------------------------------------------------------------
async def test_who_says_nothing_gives_way_to_who_comes_later(world: World) -> None:
    greeted = await world.greeted()
    strangers = [world.knock() for _ in range(STRANGERS_MAX + 20)]
    await world.until(lambda: all(has_ended(peer) for peer in strangers[:20]))
    await world.until(lambda: world.connections == STRANGERS_MAX + 1)
    assert not any(has_ended(peer) for peer in strangers[20:])
    later = await world.greeted()
    for peer in (greeted, later):
        assert isinstance(await ask(peer, Open([])), Opened)


async def test_a_stranger_gives_way_where_all_places_are_taken_and_nobody_else_does(world: World) -> None:
    greeted = [await world.greeted() for _ in range(CONNECTIONS_MAX - 1)]
    stranger = world.knock()
    greeted.append(await world.greeted())
    await world.until(lambda: has_ended(stranger) and world.connections == CONNECTIONS_MAX)
    late = world.knock()
    await world.until(lambda: has_ended(late))
    assert world.connections == CONNECTIONS_MAX
    for peer in greeted:
        assert isinstance(await ask(peer, Open([])), Opened)


async def test_a_server_without_descriptors_does_not_ask_for_one_at_every_turn(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = world.knock()
    with no_descriptors_left():
        for _ in range(100):
            await asyncio.sleep(0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert world.connections == 0
    await world.until(lambda: world.connections == 1)
    assert not has_ended(waiting)


# -- what is left of one -------------------------------------------------------------------------------------------
@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def control_pages() -> int:
    """How many descriptors of control pages this process has."""
    links: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            links.append(str(descriptor.readlink()))
    return sum("kvobj-control" in link for link in links)


async def test_nothing_is_left_of_connections_that_have_ended(world: World) -> None:
    begun = REQUEST_BYTES_MAX.to_bytes(4, "little") + bytes(10_000)
    gc.collect()  # what tests before this one have left to it
    before = control_pages()
    with no_search_for_cycles():
        for said in (b"", begun, bytes(4), framed(b"junk"), framed(encode(Stage(MIB))) + begun):
            for peer in (world.knock(), await world.greeted()):
                peer.socket.sendall(said)
        await world.until(lambda: world.connections == 4)  # who has said nothing, or begun to say something
        world.close_peers()
        await world.until(lambda: world.connections == 0)
        left = [each for each in gc.get_objects() if isinstance(each, Connection | MessageSocket)]
        assert left == []
        assert control_pages() == before


# -- room of a writer that may still be writing --------------------------------------------------------------------
def say_what_is_no_message(peer: RawPeer) -> None:
    peer.socket.sendall(bytes(4))


def say_junk(peer: RawPeer) -> None:
    peer.socket.sendall(framed(b"junk"))


def read_no_more(peer: RawPeer) -> None:
    peer.socket.shutdown(socket.SHUT_RD)
    peer.say(Open([]))


@pytest.mark.parametrize("end", [say_what_is_no_message, say_junk, read_no_more])
async def test_room_of_a_trusted_writer_is_its_own_until_its_socket_has_ended(
    world: World, end: Callable[[RawPeer], None]
) -> None:
    before = world.node.arena.reserved_bytes
    writer, other = await world.greeted(), await world.greeted()
    control = writer.descriptors[-1]
    assert isinstance(await ask(writer, Reserve("default", [NewItem("k", MIB)])), Reserved)
    held = world.node.arena.reserved_bytes
    assert held > before
    end(writer)
    await world.until(lambda: os.pread(control, 1, 0) == b"\1")
    for _ in range(3):
        writer.socket.sendall(bytes(70_000))  # nothing that it says ends the wait
        assert isinstance(await ask(other, Open([])), Opened)
    assert world.node.arena.reserved_bytes == held
    writer.socket.close()
    await world.until(lambda: world.node.arena.reserved_bytes == before)


# -- a stop --------------------------------------------------------------------------------------------------------
async def test_a_stop_waits_once_for_all_writers_that_stall(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [await world.greeted() for _ in range(4)]
    controls = [writer.descriptors[-1] for writer in writers]
    for number, writer in enumerate(writers):
        assert isinstance(await ask(writer, Reserve("default", [NewItem(f"k{number}", MIB)])), Reserved)
    closing = asyncio.create_task(world.same_host.server.aclose())
    await world.until(lambda: all(os.pread(control, 1, 0) == b"\1" for control in controls))
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.connections == len(writers)
    loop = asyncio.get_running_loop()
    now, later = loop.time, connection._STALL_SECONDS
    monkeypatch.setattr(loop, "time", lambda: now() + later)  # once that long, as the loop sees it
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.connections == 0
    await closing


# -- the socket's name ---------------------------------------------------------------------------------------------
def server_beside(world: World) -> SameHost | None:
    """Another server's, of the same configuration."""
    log = logging.getLogger("beside")
    return start_same_host(world.node, world.node.kv.chunks, clock=SystemClock(), metrics=Metrics(), log=log)


async def test_a_socket_that_is_listened_at_is_not_taken_from_who_does(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert server_beside(world) is None
    assert [record.levelname for record in caplog.records if record.name == "beside"] == ["WARNING"]
    assert isinstance(await ask(await world.greeted(), Open([])), Opened)


async def test_a_socket_where_more_wait_than_are_taken_is_not_taken_either(world: World) -> None:
    path = world.same_host.server.path
    await world.same_host.server.aclose()
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        assert server_beside(world) is None
    assert path.exists()


async def test_a_socket_that_nobody_listens_at_any_more_is_replaced(world: World) -> None:
    path = world.same_host.server.path
    await world.same_host.server.aclose()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    beside = server_beside(world)
    assert beside is not None
    world.knock()
    await world.until(lambda: beside.server.connections == 1)
    await beside.server.aclose()
    assert not path.exists()


async def test_a_stop_leaves_a_socket_that_is_anothers_by_now(world: World) -> None:
    path = world.same_host.server.path
    path.unlink()
    beside = server_beside(world)
    assert beside is not None
    await world.same_host.server.aclose()
    world.knock()
    await world.until(lambda: beside.server.connections == 1)
    await beside.server.aclose()
    assert not path.exists()
