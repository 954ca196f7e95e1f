"""?follow over real sockets: the end of a stream is what says that it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from following_world import DATA, KEY, SECONDS, World, layer
from http_peers import Peer, Served, serving, until
from kv_driver import CHUNK_BYTES, LAYERS, kv_node
from s3_driver import sign

from kvobj.api.following import CHUNK_FOLLOWERS_MAX


async def followed_over(peer: Peer, key: str) -> None:
    target = f"/cache/{key}?follow"
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sign("GET", target))]
    await peer.send("\r\n".join([*lines, "", ""]).encode())
    head = await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), SECONDS)
    assert b" 200 " in head
    assert b"transfer-encoding: chunked" in head


async def test_a_stream_that_is_whole_has_its_end_and_one_that_is_not_is_reset(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path) as kv:
        await ended_and_reset(World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer")))


async def ended_and_reset(world: World) -> None:
    async with serving(world.kv.driver.service.handle) as served:
        peer = await served.connect()
        async with world.putting() as (body, put):
            await followed_over(peer, KEY)
            body.send(DATA)
            assert await asyncio.wait_for(peer.reader.readexactly(5 + CHUNK_BYTES), SECONDS) == b"800\r\n" + DATA
            await put
        assert await asyncio.wait_for(peer.reader.readexactly(7), SECONDS) == b"\r\n0\r\n\r\n"
        await world.kv.driver.request("DELETE", f"/cache/{KEY}")
        async with world.putting() as (body, put):
            await followed_over(peer, KEY)
            body.send(DATA[:16])
            assert await asyncio.wait_for(peer.reader.readexactly(4 + 16), SECONDS) == b"10\r\n" + DATA[:16]
            body.vanish()
            await put
            assert await peer.is_cut()
        assert not [line for line in served.lines if "could not be completed" in line]


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("kind", ["part", "put"])
async def test_followers_that_go_leave_their_places_though_nothing_comes(
    kind: str, way: str, tmp_path: Path, shm_path: Path
) -> None:
    async with kv_node(tmp_path, shm_path) as kv:
        world = World(kv, await kv.declare("plain"), await kv.declare("parted", part_axis="layer"))
        async with serving(kv.driver.service.handle) as served:
            if kind == "part":
                await world.part(0, LAYERS, layer(0))
                await gone_and_replaced(served, world, way)
            else:
                async with world.putting() as (body, _):
                    body.send(layer(0))
                    await gone_and_replaced(served, world, way)


async def gone_and_replaced(served: Served, world: World, way: str) -> None:
    """As many as may follow do, and go; then one more does."""
    following = world.kv.node.store.following
    peers = [await served.connect() for _ in range(CHUNK_FOLLOWERS_MAX)]
    for peer in peers:
        await followed_over(peer, KEY)
        await asyncio.wait_for(peer.reader.readuntil(layer(0)), SECONDS)
    assert following.followers == CHUNK_FOLLOWERS_MAX
    for peer in peers:
        if way == "close":
            await peer.aclose()
        else:
            peer.reset()
    await until(lambda: not served.server._connections)
    assert following.followers == 0
    another = await served.connect()
    await followed_over(another, KEY)
    await asyncio.wait_for(another.reader.readuntil(layer(0)), SECONDS)
    await another.aclose()
    await until(lambda: following.followers == 0 and not world.kv.node.store.arriving.is_watched)
