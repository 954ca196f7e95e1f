"""Chunks that are not soon in dram keep no connection of the same-host path: they come over HTTP, and reads of others wait for none
of them."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from module_paths import ModulePaths
from raw_http import RawConnection
from real_store import MIB, node_settings, running_node
from remote_servers import RemoteStore, drop_bucket, make_bucket
from remote_world import RemoteWorld, content, remote_settings, remote_world
from s3_driver import ROOT, Driver
from s3_proxy import NOTHING, FaultProxy, Operation, Plan, Toxic, proxy_thread
from same_host_world import RawPeer, client_of, payload, wait_for_nothing_held
from server_process import BucketSetting, ServerProcess, ServerSettings, wait_until
from test_connection_ends import ask

from kvobj.admin.cli import main
from kvobj.api.same_host.rights import Rights
from kvobj.app.node import Node
from kvobj.app.same_host import SameHost, start_same_host
from kvobj.arena import Pin
from kvobj.client import KvClient
from kvobj.client.same_host import LANES_MAX
from kvobj.clock import SystemClock
from kvobj.config.settings import SameHostSettings
from kvobj.errors import BusyError
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.same_host.messages import VERSION, Extent, Hello, Open, Opened, Release, Welcome

SIZE = MIB
STORED = 24
STALL_SECONDS = 8.0
SOON_SECONDS = 3.0
"""What waits for nothing has ended by then, on a busy machine, too; what waits for the remote, or for its deadline, has not."""
STALLED = Plan(
    (Toxic.STALL_HEAD,), rate=1.0, operations=frozenset({Operation.GET}), key_part="blobs/", stall_seconds=60.0
)
COUNTED = replace(STALLED, stall_seconds=0.0)
"""Reads of blobs stand among the injections, and nothing is done to them."""


# -- what the server answers -------------------------------------------------------------------------------------
async def served(node: Node) -> SameHost:
    same_host = start_same_host(
        node, node.kv.chunks, clock=SystemClock(), metrics=Metrics(), log=logging.getLogger("test")
    )
    assert same_host is not None
    return same_host


async def greeted(node: Node, same_host: SameHost, bucket: str) -> RawPeer:
    row = await node.catalog.bucket(bucket)
    assert row is not None
    rights = Rights(row, ROOT.id, is_owner=True, lane=None, may_write=True, is_trusted=True)
    granted = await same_host.grants.grant(rights)
    peer = RawPeer(str(same_host.server.path))
    assert isinstance(await ask(peer, Hello(VERSION, granted.token)), Welcome)
    return peer


def hang_up(peer: RawPeer) -> None:
    peer.close()
    for descriptor in peer.descriptors:
        os.close(descriptor)


async def opened(peer: RawPeer, *keys: str) -> Opened:
    found = await ask(peer, Open(list(keys)))
    assert isinstance(found, Opened)
    return found


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
async def world(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore, proxy: FaultProxy
) -> AsyncIterator[RemoteWorld]:
    settings = remote_settings(tmp_path / "data", shm_path, kvobj_remote.behind(proxy.port))
    async with remote_world(replace(settings, same_host=SameHostSettings()), proxy, kvobj_remote) as running:
        await running.node.arena.populate()
        yield running


async def test_what_lies_on_the_remote_alone_is_answered_with_its_size_and_not_fetched(world: RemoteWorld) -> None:
    for name in ("far", "near", "here"):
        await world.put(f"/chunks/{name}", content(1, SIZE))
    await world.evict("chunks", "far")
    await world.node.dram.delete([await world.blob("chunks", "near")])
    assert await world.is_in_nvme("chunks", "near")
    world.proxy.plan = STALLED
    same_host = await served(world.node)
    peer = await greeted(world.node, same_host, "chunks")
    found = await opened(peer, "here", "far", "near", "nowhere")
    assert [extent is not None for extent in found.extents] == [True, False, True, False]
    assert found.sizes == [SIZE, SIZE, SIZE, None]
    assert not world.proxy.injections
    world.proxy.plan = COUNTED
    assert (await world.driver.get("/chunks/far")).body == content(1, SIZE)
    assert len(world.proxy.injections) == 1
    await world.node.read_tier.promotions_done()
    (extent,) = (await opened(peer, "far")).extents
    assert extent is not None
    hang_up(peer)
    await same_host.server.aclose()


async def test_what_finds_no_room_soon_is_answered_with_its_size_and_nothing_of_it_stays(
    tmp_path: Path, module_paths: ModulePaths
) -> None:
    settings = replace(
        node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=32),
        same_host=SameHostSettings(),
    )
    async with running_node(settings) as node:
        await node.arena.populate()
        driver = Driver(store=node.store)
        assert (await driver.put("/cache", b"", x_kvobj_bucket_kind="kv")).status == 200
        names = [f"cold-{index}" for index in range(6)]
        for name in names:
            answer = await driver.put(f"/cache/{name}", content(1, MIB), x_kvobj_durability="local")
            assert answer.status == 200
        rows = await node.catalog.lookup("cache", names)
        await node.dram.delete([BlobId(row.blobs[0].blob_id) for row in rows if row is not None])
        same_host = await served(node)
        peer = await greeted(node, same_host, "cache")
        pins = await all_room(node)
        taken = node.arena.reserved_bytes
        began = time.monotonic()
        found = await opened(peer, *names)
        assert time.monotonic() - began < SOON_SECONDS
        assert found.extents == [None] * len(names)
        assert found.sizes == [MIB] * len(names)
        assert node.arena.reserved_bytes == taken
        for pin in pins:
            pin.release()
        extents = (await opened(peer, *names)).extents
        held = [extent.handle for extent in extents if isinstance(extent, Extent)]
        assert len(held) == len(names)
        peer.say(Release(held))
        hang_up(peer)
        await same_host.server.aclose()


async def all_room(node: Node) -> list[Pin]:
    """All of the arena that can be had."""
    pins: list[Pin] = []
    size_bytes = node.arena.capacity_bytes
    while size_bytes >= 4096:
        try:
            pins.append(await node.arena.reserve(size_bytes, timeout_seconds=0.0))
        except BusyError:
            size_bytes //= 2
    return pins


# -- what a client does ------------------------------------------------------------------------------------------
class Site:
    """A server that has lost its disk and its memory: all its chunks lie on its remote alone, but for one that was read since."""

    def __init__(self, server: ServerProcess, proxy: FaultProxy, far: list[str], warm: str) -> None:
        self.server = server
        self.proxy = proxy
        self.far = far
        self.warm = warm

    def take(self, count: int) -> list[str]:
        """Chunks that nobody has read."""
        taken, self.far = self.far[:count], self.far[count:]
        assert len(taken) == count
        return taken


@pytest.fixture(scope="module")
def site(module_paths: ModulePaths, kvobj_remote_server: ServerProcess) -> Iterator[Site]:
    far = kvobj_remote_server
    store = RemoteStore("kvobj", far.host, far.port, far.credentials(), "test-beside-a-stalled-remote")
    make_bucket(store)
    try:
        with proxy_thread(store.host, store.port) as proxy:
            lines = store.behind(proxy.port).tier(
                request_timeout='"20 s"', operation_timeout='"20 s"', share_timeout='"20 s"', hedge='"off"'
            )
            settings = ServerSettings(
                buckets=(BucketSetting("cache", "kv", "shared"),),
                remote=lines,
                sections={"log": {"requests": "false"}, "security": {"wrapping_key_env": '"KVOBJ_TEST_WRAPPING"'}},
                environment={"KVOBJ_TEST_WRAPPING": "5a" * 32},
            )
            with ServerProcess(module_paths.mktemp("site"), settings) as server:
                yield lost(server, proxy)
    finally:
        drop_bucket(store)


def lost(server: ServerProcess, proxy: FaultProxy) -> Site:
    names = [f"chunk {index}" for index in range(STORED)]
    with client_of(server, same_host=False) as client:
        for name in names:
            client.put_chunk(name, payload(name, SIZE))
    assert main(["flush", "--data", str(server.data)]) == 0
    server.close()
    shutil.rmtree(server.data)
    arguments = ["rebuild", "--remote", "--config", str(server.configuration)]
    assert main(arguments, environment=server.settings.environment) == 0
    server.start()
    return Site(server, proxy, names[:-1], names[-1])


@pytest.fixture
def client(site: Site) -> Iterator[KvClient]:
    with client_of(site.server, timeout_seconds=30.0) as client:
        assert client.get_chunk(site.warm) == payload(site.warm, SIZE)
        assert client.is_same_host
        yield client
    site.proxy.plan = NOTHING
    wait_for_nothing_held(site.server)


def viewed(client: KvClient, name: str) -> memoryview | None:
    view = client.view_chunk(name)
    if view is None:
        return None
    with view:
        return memoryview(bytes(view.data))


READS: Sequence[Callable[[KvClient, str], memoryview | None]] = (
    lambda client, name: client.get_chunk(name),
    viewed,
)


def test_a_read_of_what_is_in_dram_does_not_wait_behind_reads_from_a_stalled_remote(
    site: Site, client: KvClient
) -> None:
    cold = site.take(LANES_MAX + 2)
    site.proxy.injections.clear()
    site.proxy.plan = replace(STALLED, stall_seconds=STALL_SECONDS)
    with ThreadPoolExecutor(len(cold)) as threads:
        reading = [threads.submit(READS[at % 2], client, name) for at, name in enumerate(cold)]
        wait_until(lambda: len(site.proxy.injections) >= LANES_MAX, timeout_seconds=20, what="stalled reads")
        for at in range(20):
            began = time.monotonic()
            assert READS[at % 2](client, site.warm) == payload(site.warm, SIZE)
            assert time.monotonic() - began < SOON_SECONDS
        assert not all(each.done() for each in reading)
        site.proxy.plan = NOTHING
        for name, each in zip(cold, reading, strict=True):
            assert each.result(60) == payload(name, SIZE)


def test_batches_have_what_lies_on_the_remote_alone_beside_what_is_here(site: Site, client: KvClient) -> None:
    def mixed() -> tuple[list[str], list[memoryview]]:
        first, second, third = site.take(3)
        names = [site.warm, first, second, "nowhere", site.warm, third]
        return names, [memoryview(bytearray(SIZE)) for _ in names]

    names, rooms = mixed()
    assert client.get_chunks(names, rooms) == [None if name == "nowhere" else SIZE for name in names]
    assert [bytes(room) for room in rooms if any(room[:64])] == [payload(n, SIZE) for n in names if n != "nowhere"]

    names, rooms = mixed()
    site.proxy.plan = COUNTED
    site.proxy.injections.clear()
    items = list(client.mget(names, into=lambda index, _layer, _size: rooms[index]))
    assert [item.index for item in items] == list(range(len(names)))
    assert [item.data for item in items] == [None if name == "nowhere" else payload(name, SIZE) for name in names]
    assert all(item.data is None or memoryview(item.data).obj is rooms[item.index].obj for item in items)
    assert len(site.proxy.injections) == 3

    names, _ = mixed()
    with ExitStack() as stack:
        views = [None if view is None else stack.enter_context(view) for view in client.view_chunks(names)]
        assert [None if view is None else view.is_shared for view in views] == [True, False, False, None, True, False]
        assert [None if view is None else view.data for view in views] == [
            None if name == "nowhere" else payload(name, SIZE) for name in names
        ]
    with client.view_chunks(names)[1] or pytest.fail("it was read before") as view:
        assert view.is_shared


def requests_of(server: ServerProcess) -> float:
    """S3 requests that were answered, ever."""
    with RawConnection(server.host, server.admin_port) as admin:
        admin.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        page = admin.read_reply().body.decode()
    lines = [line for line in page.splitlines() if line.startswith("kvobj_s3_requests_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_pinned_batch_from_the_remote_comes_by_one_stream_and_by_its_pin_what_was_deleted(
    site: Site, client: KvClient
) -> None:
    names = site.take(4)
    session = client.open_session(holder="reader", ttl_ms=60_000).session
    pins = [tail.pin for tail in client.pin_tails(session, names).pins]
    with site.server.raw() as raw:
        assert raw.request("DELETE", f"/cache/{names[1]}").status == 204
    assert client.get_chunk(names[1]) is None
    before = requests_of(site.server)
    views = client.view_chunks(names, pins=pins)
    assert requests_of(site.server) - before == 2
    for name, view in zip(names, views, strict=True):
        assert view is not None
        with view:
            assert view.data == payload(name, SIZE)
    client.close_session(session)


def test_a_read_that_finds_all_connections_in_use_goes_over_http(site: Site, client: KvClient) -> None:
    path = client._same_host
    with ExitStack() as others:
        for _ in range(LANES_MAX):
            assert others.enter_context(path._lane(time.monotonic() + 10.0)) is not None
        fallbacks = client.same_host_fallbacks
        began = time.monotonic()
        assert client.is_same_host
        assert client.get_chunk(site.warm) == payload(site.warm, SIZE)
        assert viewed(client, site.warm) == payload(site.warm, SIZE)
        assert time.monotonic() - began < SOON_SECONDS
        assert client.same_host_fallbacks == fallbacks + 2
    assert client.get_chunk(site.warm) == payload(site.warm, SIZE)
    assert client.same_host_fallbacks == fallbacks + 2


def test_a_store_that_finds_all_connections_in_use_waits_for_one(client: KvClient) -> None:
    path = client._same_host
    others = ExitStack()
    for _ in range(LANES_MAX):
        assert others.enter_context(path._lane(time.monotonic() + 10.0)) is not None
    storing = threading.Thread(target=lambda: client.put_chunk("stored", b"bytes", durability="memory"))
    storing.start()
    wait_until(lambda: len(path._given) > 0, timeout_seconds=20, what="a store that waits")
    assert storing.is_alive()
    others.close()
    storing.join(20)
    assert bytes(client.get_chunk("stored") or b"") == b"bytes"
    assert client.same_host_fallbacks == 0
