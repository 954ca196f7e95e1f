"""Chunks on their way from an upstream: who waits for whom, what they hold meanwhile, and what becomes of what cannot be stored."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from federation_world import World, call, federation, ids_of, match, metrics_of, mget, put_chain, stored
from kv_driver import CHUNK_BYTES, CHUNK_TOKENS, LAYERS, Namespace, payload
from raw_http import RawReply
from s3_proxy import NOTHING, Operation, Plan, Toxic
from server_process import MIB, wait_until

from kvobj.client import ROOT, Credentials, KvClient, NewChunk

HEADS_FOR_1_MIB = 64
GETS = frozenset({Operation.GET})


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The near store has room for 4 chunks of 1 MiB in batches, and 4 connections to the far one."""
    root = tmp_path_factory.mktemp("flights")
    with federation(root, near_bytes=16 * MIB, far_bytes=64 * MIB, connections="4", timeout='"4 s"') as running:
        yield running


@pytest.fixture
def world(narrow: World) -> Iterator[World]:
    narrow.proxy.plan = NOTHING
    yield narrow
    narrow.proxy.plan = NOTHING


def layout(heads: int) -> dict[str, object]:
    """Chunks of 16 KiB for each head."""
    return {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": heads, "head_dim": 64}


def bytes_of(chunk_id: str, heads: int) -> bytes:
    return bytes.fromhex(chunk_id) * (heads * 16 * 1024 // 32)


def put_far(world: World, namespace: Namespace, ids: Sequence[str], heads: int) -> None:
    """A chain of large chunks."""
    parent = "root"
    for chunk_id in ids:
        headers = {"x-kvobj-namespace": namespace.name, "x-kvobj-parent": parent}
        reply = call(world.far, "PUT", f"/cache/{chunk_id}", bytes_of(chunk_id, heads), headers=headers)
        assert reply.status == 200, reply.body
        parent = chunk_id


def large_chain(world: World, name: str, count: int) -> list[str]:
    namespace = world.declare_both(name, layout=layout(HEADS_FOR_1_MIB))
    ids = ids_of(namespace, count)
    put_far(world, namespace, ids, HEADS_FOR_1_MIB)
    return ids


def in_parallel(calls: Sequence[Callable[[], RawReply]]) -> list[RawReply]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda each: each(), calls))


# -- who waits for whom ----------------------------------------------------------------------------------------------
def test_one_chain_asked_for_chunk_by_chunk_at_the_same_time_comes_whole(world: World) -> None:
    ids = large_chain(world, "apart", 12)
    shuffled = random.Random(1).sample(ids, len(ids))
    replies = in_parallel([partial(call, world.near, "GET", f"/cache/{each}") for each in shuffled])
    assert [reply.status for reply in replies] == [200] * len(ids)
    assert all(reply.body == bytes_of(each, HEADS_FOR_1_MIB) for each, reply in zip(shuffled, replies, strict=True))
    assert {*ids} <= stored(world.near)


def test_an_mget_of_a_chain_that_names_children_first_brings_each_chunk_once(world: World) -> None:
    ids = large_chain(world, "children-first", 12)
    gets = world.proxy.requests[Operation.GET]
    items = mget(world.near, ids[::-1])
    assert [item.payload for item in items] == [bytes_of(each, HEADS_FOR_1_MIB) for each in ids[::-1]]
    assert world.proxy.requests[Operation.GET] - gets <= len(ids) + 1, "each, and where its namespace is asked for"


def test_ends_of_chains_come_although_all_connections_are_asked_for_at_once(world: World) -> None:
    namespace = world.declare_both("ends")
    chains = [ids_of(namespace, 16, first=10_000 * number) for number in range(3)]
    for chain in chains:
        put_chain(world.far, namespace, chain)
    with ThreadPoolExecutor(len(chains)) as threads:
        answers = list(threads.map(lambda chain: mget(world.near, chain[8:]), chains))
    assert all(item.payload for items in answers for item in items)


def test_a_chunk_whose_parent_is_here_takes_one_request(world: World) -> None:
    namespace = world.declare_both("one-request")
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids)
    assert call(world.near, "GET", f"/cache/{ids[0]}").status == 200
    before = world.proxy.requests.total()
    assert call(world.near, "GET", f"/cache/{ids[1]}").status == 200
    assert world.proxy.requests.total() - before == 1


def test_a_chunk_whose_parent_does_not_come_is_handed_on(world: World) -> None:
    namespace = world.declare_both("orphan")
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids)
    match(world.near, namespace, ids)  # that the namespace is the same there is known
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, operations=GETS, key_part=ids[0], stall_seconds=20.0)
    stalled = len(world.proxy.injections)
    with ThreadPoolExecutor(1) as threads:
        parent = threads.submit(call, world.near, "GET", f"/cache/{ids[0]}")
        wait_until(lambda: len(world.proxy.injections) > stalled, timeout_seconds=10, what="the parent's flight")
        reply = call(world.near, "GET", f"/cache/{ids[1]}")
        assert (reply.status, reply.body) == (200, payload(bytes.fromhex(ids[1])))
        assert parent.result(20).status == 404
    assert not {*ids} & stored(world.near)
    assert "does not fit here" not in world.near.log_path.read_text()


def test_a_slow_upstream_keeps_nothing_of_the_room_for_others_batches(world: World) -> None:
    namespace = world.declare_both("slow", layout=layout(HEADS_FOR_1_MIB))
    ids = [ids_of(namespace, 1, first=1000 * number)[0] for number in range(8)]
    for each in ids:
        put_far(world, namespace, [each], HEADS_FOR_1_MIB)
    match(world.near, namespace, ids[:1])
    world.proxy.plan = Plan((Toxic.TRICKLE,), rate=1.0, operations=GETS, trickle_bytes_per_second=100_000)
    before = len(world.proxy.injections)
    pair = world.near.credentials()
    own = KvClient(world.near.endpoint, Credentials(pair.access_key, pair.secret_key), "own", timeout_seconds=20.0)
    with ThreadPoolExecutor(1) as threads, own:
        asked = threads.submit(mget, world.near, ids)
        wait_until(lambda: len(world.proxy.injections) > before + 3, timeout_seconds=10, what="bodies that trickle")
        own.mput([NewChunk("beside", b"bytes" * 20_000, ROOT), NewChunk("beside-too", b"bytes" * 20_000, ROOT)])
        assert not asked.done(), "they are on their way still, and the batch did not wait for them"
        asked.result(30)


def test_while_the_rest_of_a_pinned_match_is_fetched_nothing_is_pinned(world: World) -> None:
    def pins() -> float:
        (line,) = [each for each in metrics_of(world.near).splitlines() if each.startswith("kvobj_lease_pins ")]
        return float(line.rpartition(" ")[2])

    namespace = world.declare_both("given-up")
    ids = ids_of(namespace, 4)
    put_chain(world.far, namespace, ids)
    put_chain(world.near, namespace, ids[:2])
    opened = call(world.near, "POST", "/cache", b'{"holder": "t"}', query={"sessions": ""})
    session = opened.body.split(b'"session":"')[1][:32].decode()
    before = pins()
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, operations=GETS, key_part=ids[2], stall_seconds=20.0)
    stalled = len(world.proxy.injections)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(match, world.near, namespace, ids, pin=True, session=session)
        wait_until(lambda: len(world.proxy.injections) > stalled, timeout_seconds=10, what="the rest to be asked for")
        assert pins() == before
        assert asked.result(20)["matched"] == 2
    assert pins() == before + 1


# -- what cannot be stored -------------------------------------------------------------------------------------------
def test_a_chunk_that_no_batch_has_room_for_is_stored_as_one_that_is_put_alone(world: World) -> None:
    heads = 5 * HEADS_FOR_1_MIB
    namespace = world.declare_both("wide", layout=layout(heads))
    ids = ids_of(namespace, 2)
    put_far(world, namespace, ids, heads)
    reply = call(world.near, "GET", f"/cache/{ids[1]}")
    assert reply.status == 200
    assert reply.body == bytes_of(ids[1], heads)
    assert {*ids} <= stored(world.near)


def loose_chunk(world: World, name: str) -> str:
    """A chunk of the far store for which the near one has no quota."""
    namespace = world.declare(world.far, name)
    world.declare(world.near, name, key=namespace.key.hex(), quota={"chunks": 0})
    (chunk_id,) = ids_of(namespace, 1)
    put_chain(world.far, namespace, [chunk_id])
    return chunk_id


def test_bytes_that_are_handed_on_are_read_for_who_takes_them_alone(world: World) -> None:
    chunk_id = loose_chunk(world, "loose")
    assert call(world.near, "GET", f"/cache/{chunk_id}").body == payload(bytes.fromhex(chunk_id))
    passed, gets = world.upstream("chunks_total", outcome="passed"), world.proxy.requests[Operation.GET]
    head = call(world.near, "HEAD", f"/cache/{chunk_id}")
    assert (head.status, head.headers["content-length"]) == (200, str(CHUNK_BYTES))
    unchanged = call(world.near, "GET", f"/cache/{chunk_id}", headers={"if-none-match": "*"})
    assert unchanged.status == 304
    assert world.upstream("chunks_total", outcome="passed") == passed
    assert world.proxy.requests[Operation.GET] - gets == 2, "each had it fetched, to be stored, and no more"
    ranged = call(world.near, "GET", f"/cache/{chunk_id}", headers={"range": "bytes=10-19"})
    assert (ranged.status, ranged.body) == (206, payload(bytes.fromhex(chunk_id))[10:20])
    assert chunk_id not in stored(world.near)


def test_readers_at_the_same_time_share_what_is_handed_on(world: World) -> None:
    chunk_id = loose_chunk(world, "loose-together")
    assert call(world.near, "GET", f"/cache/{chunk_id}").status == 200
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, operations=GETS, stall_seconds=0.7)
    before = len(world.proxy.injections)
    replies = in_parallel([lambda: call(world.near, "GET", f"/cache/{chunk_id}")] * 6)
    assert [reply.body for reply in replies] == [payload(bytes.fromhex(chunk_id))] * 6
    assert len(world.proxy.injections) - before <= 4, "one flight and one read, or two of them"


# -- what is on its way here -----------------------------------------------------------------------------------------
def test_who_follows_a_chunk_that_is_put_here_waits_for_no_upstream(world: World) -> None:
    namespace = world.declare_both("followed", part_axis="layer")
    (chunk_id,) = ids_of(namespace, 1)
    data, half = payload(bytes.fromhex(chunk_id)), CHUNK_BYTES // 2
    gets = world.proxy.requests[Operation.GET]
    pair = world.near.credentials()
    credentials = Credentials(pair.access_key, pair.secret_key)
    with KvClient(world.near.endpoint, credentials, "cache", timeout_seconds=20.0) as client:
        opened = client.namespace("followed")
        client.put_part(bytes.fromhex(chunk_id), data[:half], part=(0, 2), parent=ROOT, namespace=opened)
        seen = threading.Event()

        def follow() -> bytes:
            got = b""
            for span in client.follow_chunk(bytes.fromhex(chunk_id), namespace=opened):
                got += bytes(span)
                seen.set()
            return got

        with ThreadPoolExecutor(1) as threads:
            following = threads.submit(follow)
            assert seen.wait(10)
            client.put_part(bytes.fromhex(chunk_id), data[half:], part=(1, 2), parent=ROOT, namespace=opened)
            assert following.result(20) == data
    assert world.proxy.requests[Operation.GET] == gets


def test_an_upstream_is_asked_once_for_what_is_followed_and_nowhere(world: World) -> None:
    namespace = world.declare_both("nowhere")
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids[:1])
    gets = world.proxy.requests[Operation.GET]
    assert call(world.near, "GET", f"/cache/{ids[1]}", query={"follow": ""}).status == 404
    assert world.proxy.requests[Operation.GET] - gets == 1
    assert call(world.near, "GET", f"/cache/{ids[0]}", query={"follow": ""}).status == 200


def test_the_layout_of_these_tests_gives_the_sizes_that_they_count_on() -> None:
    assert LAYERS * 2 * 64 * 2 * CHUNK_TOKENS == 16 * 1024
    assert HEADS_FOR_1_MIB * 16 * 1024 == MIB
