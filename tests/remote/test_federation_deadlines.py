"""Times of questions to an upstream: whose deadline counts, and what is told of an upstream that lets them pass. In one process, so
that a test says the deadlines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from federation_world import World, call
from kv_driver import KvDriver, kv_node
from s3_proxy import NOTHING, Operation, Plan, Toxic
from server_process import wait_until

from kvobj.api.upstreams import Upstream
from kvobj.app.upstreams import make_upstreams
from kvobj.catalog.rows import BucketRow
from kvobj.clock import SystemClock
from kvobj.config.settings import RemoteSettings, UpstreamSettings
from kvobj.metrics import Metrics
from kvobj.store.upstream.fetching import Outcome


@asynccontextmanager
async def upstream_of(kv: KvDriver, port: int, access_key: str, secret_key: str) -> AsyncIterator[Upstream]:
    assert kv.chunks is not None
    server = RemoteSettings(f"http://127.0.0.1:{port}", "cache", access_key, secret_key)
    fronted = make_upstreams(
        [UpstreamSettings("cache", server)],
        kv.node.store,
        kv.chunks,
        store_id="ab",
        has_remote=False,
        clock=SystemClock(),
        metrics=Metrics(),
        log=logging.getLogger("test"),
    )
    try:
        yield fronted.upstreams["cache"]
    finally:
        await fronted.aclose()


async def bucket_of(kv: KvDriver) -> BucketRow:
    row = await kv.node.catalog.bucket("cache")
    assert row is not None
    return row


@asynccontextmanager
async def odd_upstream(answer: Callable[[str], bytes]) -> AsyncIterator[int]:
    """A server that says, to each request for a key, what it is told; nothing where that is empty. Its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                said = answer(path.rpartition("/")[2])
                if said:
                    writer.write(said if method == "GET" else said.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_who_joins_a_flight_that_fails_by_its_time_has_it_fly_once_more(
    federated: World, tmp_path: Path, shm_path: Path
) -> None:
    assert call(federated.far, "PUT", "/cache/joined/key", b"joined bytes").status == 200
    pair = federated.far.credentials()
    federated.proxy.plan = Plan(
        (Toxic.STALL_HEAD,), rate=1.0, operations=frozenset({Operation.GET}), key_part="joined/key", stall_seconds=20.0
    )
    stalled = len(federated.proxy.injections)
    async with (
        kv_node(tmp_path, shm_path) as kv,
        upstream_of(kv, federated.proxy.port, pair.access_key, pair.secret_key) as upstream,
    ):
        bucket, now = await bucket_of(kv), asyncio.get_running_loop().time()
        first = asyncio.create_task(upstream.fetcher.fetch(bucket, "joined/key", until=now + 1.0))
        later = asyncio.create_task(upstream.fetcher.fetch(bucket, "joined/key", until=now + 20.0))
        await asyncio.to_thread(
            wait_until,
            lambda: len(federated.proxy.injections) > stalled,
            timeout_seconds=0.9,
            what="the flight",
        )
        federated.proxy.plan = NOTHING
        assert (await first).outcome is Outcome.FAILED
        assert (await later).outcome is Outcome.STORED


async def test_a_question_whose_asker_gives_up_at_the_deadline_counts_as_unanswered(
    tmp_path: Path, shm_path: Path
) -> None:
    async with (
        odd_upstream(lambda _: b"") as port,
        kv_node(tmp_path, shm_path) as kv,
        upstream_of(kv, port, "access", "secret") as upstream,
    ):
        loop, bucket = asyncio.get_running_loop(), await bucket_of(kv)
        until = loop.time() + 0.5

        def keep_busy() -> None:
            while loop.time() < until + 0.01:
                pass

        loop.call_at(until - 0.05, keep_busy)  # both deadlines, the question's and the asker's, are over in one turn
        found = await upstream.fetcher.fetch(bucket, "silent", until=until)
        assert found.outcome is Outcome.FAILED
        assert upstream.client.health.present({}).state == "down"


@pytest.mark.parametrize("parents", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}])
async def test_chunks_that_are_their_own_ancestors_are_refused_at_once(
    parents: dict[str, str], tmp_path: Path, shm_path: Path
) -> None:
    def answer(key: str) -> bytes:
        fields = f"content-length: 1\r\nx-kvobj-digest: {'00' * 32}\r\nx-kvobj-parent: {parents[key]}\r\n"
        return f"HTTP/1.1 200 OK\r\n{fields}\r\nx".encode()

    async with (
        odd_upstream(answer) as port,
        kv_node(tmp_path, shm_path) as kv,
        upstream_of(kv, port, "access", "secret") as upstream,
    ):
        bucket, now = await bucket_of(kv), asyncio.get_running_loop().time()
        found = await upstream.fetcher.fetch(bucket, "a", until=now + 20.0)
        assert found.outcome in (Outcome.DISAGREES, Outcome.LOOSE)
        assert asyncio.get_running_loop().time() - now < 5


async def test_a_chunk_right_behind_its_parent_is_asked_for_and_not_about(tmp_path: Path, shm_path: Path) -> None:
    asked: dict[str, list[str]] = {"parent": [], "child": []}
    child_asked, parent_goes_on = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                key = path.rpartition("/")[2]
                asked[key].append(method)
                fields = [f"content-length: {len(key)}", f"x-kvobj-digest: {blake3(key.encode()).hexdigest()}"]
                fields += ["x-kvobj-parent: parent"] if key == "child" else []
                writer.write(("\r\n".join(["HTTP/1.1 200 OK", *fields]) + "\r\n\r\n").encode())
                if key == "child":
                    child_asked.set()
                else:
                    await parent_goes_on.wait()
                if method == "GET":
                    writer.write(key.encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        kv_node(tmp_path, shm_path) as kv,
        upstream_of(kv, server.sockets[0].getsockname()[1], "access", "secret") as upstream,
        asyncio.timeout(20),
    ):
        bucket, until = await bucket_of(kv), asyncio.get_running_loop().time() + 20.0
        parent = upstream.fetcher._flight(bucket, "parent", until=until, is_alone=True)
        await parent.has_room.wait()
        both = asyncio.create_task(upstream.fetcher.fetch_all(bucket, ["parent", "child"], until=until, is_run=True))
        await child_asked.wait()
        parent_goes_on.set()
        assert await both == 2
        assert asked == {"parent": ["GET"], "child": ["GET"]}
