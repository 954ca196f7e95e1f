"""A KV bucket with an upstream: what is not here is had from there, exactly, and an upstream that fails is as none."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from federation_world import (
    ALICE,
    AWAY,
    BOB,
    World,
    call,
    federation,
    ids_of,
    lm_ask,
    match,
    mget,
    mput,
    put,
    put_chain,
    stored,
)
from free_ports import free_port
from kv_driver import CHUNK_BYTES, CHUNK_TOKENS, LAYERS, payload
from s3_proxy import NOTHING, Operation, Plan, Toxic
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.admin.cli import main as kvobj_admin
from kvobj.client import NewChunk, StoredChunk

LM_GET, LM_EXIST = 2, 3
LM_SUCCESS, LM_FAIL = 200, 400


@pytest.fixture
def world(federated: World) -> Iterator[World]:
    federated.proxy.plan = NOTHING
    yield federated
    federated.proxy.plan = NOTHING


def bytes_of(chunk_id: str) -> bytes:
    return payload(bytes.fromhex(chunk_id))


# -- reads -----------------------------------------------------------------------------------------------------------
def test_a_chunk_that_is_only_there_is_stored_here_with_its_ancestors_and_its_place(world: World) -> None:
    namespace = world.declare_both("place")
    ids = ids_of(namespace, 5)
    put_chain(world.far, namespace, ids)
    reply = call(world.near, "GET", f"/cache/{ids[3]}")
    assert (reply.status, reply.body) == (200, bytes_of(ids[3]))
    assert reply.headers["x-kvobj-digest"] == blake3(bytes_of(ids[3])).hexdigest()
    assert reply.headers["x-kvobj-parent"] == ids[2]
    assert reply.headers["x-kvobj-namespace"] == "place"
    assert set(ids[:4]) <= stored(world.near)
    assert ids[4] not in stored(world.near)
    # From here on it is this store's own.
    world.proxy.plan = AWAY
    assert call(world.near, "GET", f"/cache/{ids[0]}").body == bytes_of(ids[0])
    assert match(world.near, namespace, ids)["matched"] == 4


def test_a_head_finds_it_too_and_a_range_and_layers_are_of_the_same_bytes(world: World) -> None:
    namespace = world.declare_both("parts")
    ids = ids_of(namespace, 3)
    put_chain(world.far, namespace, ids)
    head = call(world.near, "HEAD", f"/cache/{ids[0]}")
    assert (head.status, head.headers["content-length"]) == (200, str(CHUNK_BYTES))
    ranged = call(world.near, "GET", f"/cache/{ids[1]}", headers={"range": "bytes=10-19"})
    assert (ranged.status, ranged.body) == (206, bytes_of(ids[1])[10:20])
    layer = CHUNK_BYTES // LAYERS
    layers = call(world.near, "GET", f"/cache/{ids[2]}", query={"layers": "1-2"})
    assert (layers.status, layers.body) == (206, bytes_of(ids[2])[layer : 3 * layer])


def test_what_neither_has_is_a_miss(world: World) -> None:
    namespace = world.declare_both("neither")
    (absent,) = ids_of(namespace, 1)
    assert call(world.near, "GET", f"/cache/{absent}").status == 404
    assert call(world.near, "HEAD", f"/cache/{absent}").status == 404
    assert [item.header["status"] for item in mget(world.near, [absent])] == [404]


def test_askers_at_the_same_time_share_one_flight(world: World) -> None:
    namespace = world.declare_both("flight")
    earlier, chunk_id = ids_of(namespace, 2)
    put_chain(world.far, namespace, [earlier, chunk_id])
    for _ in range(4):  # every process has seen that the namespace is the same there
        assert call(world.near, "GET", f"/cache/{earlier}").status == 200
        assert match(world.near, namespace, [earlier, chunk_id])["matched"] == 2
    world.proxy.plan = Plan((Toxic.STALL_HEAD,), rate=1.0, operations=frozenset({Operation.GET}), stall_seconds=0.5)
    asked_before = len(world.proxy.injections)
    with ThreadPoolExecutor(6) as threads:
        replies = list(threads.map(lambda _: call(world.near, "GET", f"/cache/{chunk_id}"), range(6)))
    assert all(reply.body == bytes_of(chunk_id) for reply in replies)
    assert 1 <= len(world.proxy.injections) - asked_before <= world.near.settings.workers


def test_an_mget_brings_what_is_missing_and_a_short_last_chunk(world: World) -> None:
    namespace = world.declare_both("mget")
    ids = ids_of(namespace, 12)
    put_chain(world.far, namespace, ids)
    put_chain(world.near, namespace, ids[:2])
    short = namespace.ids(list(range(12 * CHUNK_TOKENS + 3)))[-1].hex()
    data = payload(b"short", CHUNK_BYTES * 3 // CHUNK_TOKENS)
    headers = {"x-kvobj-namespace": "mget", "x-kvobj-parent": ids[-1], "x-kvobj-tokens": "3"}
    assert call(world.far, "PUT", f"/cache/{short}", data, headers=headers).status == 200
    absent = hashlib.sha256(b"absent").hexdigest()
    items = mget(world.near, [*ids, absent, short])
    assert [item.header["status"] for item in items] == [200] * 12 + [404, 200]
    assert [item.payload for item in items] == [*map(bytes_of, ids), b"", data]
    assert {*ids, short} <= stored(world.near)
    assert call(world.near, "HEAD", f"/cache/{short}").headers["x-kvobj-tokens"] == "3"


def test_chunks_without_a_namespace_come_too(world: World) -> None:
    body = b"loose bytes"
    assert call(world.far, "PUT", "/cache/some/key", body).status == 200
    assert call(world.near, "GET", "/cache/some/key").body == body
    assert "some/key" in stored(world.near)


def test_buckets_without_an_upstream_ask_nobody(world: World) -> None:
    before = world.upstream("requests_total")
    assert call(world.near, "GET", "/own/some-key").status == 404
    assert world.upstream("requests_total") == before


def test_who_may_not_read_the_namespace_here_gets_nothing(world: World) -> None:
    namespace = world.declare(world.far, "rights")
    world.declare(world.near, "rights", key=namespace.key.hex(), access={"alice": "read"})
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids)
    assert call(world.near, "GET", f"/cache/{ids[0]}", user=BOB).status == 403
    assert not {*ids} & stored(world.near)
    assert call(world.near, "GET", f"/cache/{ids[1]}", user=ALICE).body == bytes_of(ids[1])


def test_a_chunk_that_cannot_be_stored_here_is_handed_on(world: World) -> None:
    namespace = world.declare(world.far, "full")
    world.declare(world.near, "full", key=namespace.key.hex(), quota={"chunks": 0})
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids)
    for _ in range(2):
        reply = call(world.near, "GET", f"/cache/{ids[1]}")
        assert (reply.status, reply.body) == (200, bytes_of(ids[1]))
        assert reply.headers["x-kvobj-digest"] == blake3(bytes_of(ids[1])).hexdigest()
    assert call(world.near, "HEAD", f"/cache/{ids[1]}").headers["content-length"] == str(CHUNK_BYTES)
    ranged = call(world.near, "GET", f"/cache/{ids[1]}", headers={"range": "bytes=5-9"})
    assert ranged.body == bytes_of(ids[1])[5:10]
    assert not {*ids} & stored(world.near)


def test_clients_on_this_host_read_and_write_through_shared_memory_what_is_there(world: World) -> None:
    declared = world.declare_both("memory")
    ids = ids_of(declared, 4)
    put_chain(world.far, declared, ids[:3])
    with world.same_host_client() as client:
        namespace = client.namespace("memory")
        assert bytes(client.get_chunk(ids[2], namespace=namespace) or b"") == bytes_of(ids[2])
        assert {*ids[:3]} <= stored(world.near)
        assert client.get_chunk(ids[3], namespace=namespace) is None
        (written,) = client.mput(
            [NewChunk(ids[3], bytes_of(ids[3]), parent=ids[2])], namespace=namespace, durability="shared"
        )
        assert isinstance(written, StoredChunk)
        assert (written.existed, written.durability) == (False, "local")
        assert client.is_same_host
        assert client.same_host_fallbacks == 0
    assert ids[3] in stored(world.near) & stored(world.far)


def test_lmcaches_own_protocol_finds_what_is_there_with_its_form(world: World) -> None:
    body = b"as LMCache put it there"
    form = (1, 3, 2, 32, 256, 1024)
    headers = {"x-amz-meta-lmcache-form": " ".join(map(str, form))}
    assert call(world.far, "PUT", "/cache/model@1@0@a", body, headers=headers).status == 200
    assert lm_ask(world.lm_port, LM_EXIST, "model@1@0@b")[0] == LM_FAIL
    assert lm_ask(world.lm_port, LM_GET, "model@1@0@a") == (LM_SUCCESS, form, body)
    assert "model@1@0@a" in stored(world.near)
    assert call(world.far, "PUT", "/cache/model@1@0@c", body, headers=headers).status == 200
    assert lm_ask(world.lm_port, LM_EXIST, "model@1@0@c")[0] == LM_SUCCESS


# -- match -----------------------------------------------------------------------------------------------------------
def test_a_match_counts_what_either_has_and_fetches_nothing(world: World) -> None:
    namespace = world.declare_both("match")
    ids = ids_of(namespace, 8)
    put_chain(world.far, namespace, ids[:6])
    put_chain(world.near, namespace, ids[:2])
    found = match(world.near, namespace, ids, detail="chunks", explain=True)
    assert (found["matched"], found["tokens"]) == (6, 6 * CHUNK_TOKENS)
    assert found["size_bytes"] == 6 * CHUNK_BYTES
    assert [each["id"] for each in found["chunks"]] == ids[:6]
    assert [each["tier"] for each in found["chunks"]] == ["dram"] * 2 + ["upstream"] * 4
    assert all(each["digest"] == blake3(bytes_of(each["id"])).hexdigest() for each in found["chunks"])
    assert (found["explain"]["at"], found["pin"]) == (6, None)
    assert not {*ids[2:]} & stored(world.near)
    # What this store alone has is counted as ever.
    other = ids_of(namespace, 3, first=1000)
    put_chain(world.near, namespace, other)
    assert match(world.near, namespace, other)["matched"] == 3


def test_a_match_stays_exact_for_lists_that_are_no_chain(world: World) -> None:
    namespace = world.declare_both("exact")
    one, two = ids_of(namespace, 4), ids_of(namespace, 4, first=1000)
    put_chain(world.far, namespace, one)
    put_chain(world.far, namespace, two)
    put_chain(world.near, namespace, one[:2])
    assert match(world.near, namespace, [*one[:2], *two[2:]])["matched"] == 2
    assert match(world.near, namespace, one[1:])["matched"] == 0
    assert match(world.near, namespace, [*one[:3], one[2]])["matched"] == 3
    assert match(world.near, namespace, [*two[:1], one[1]])["matched"] == 1


def test_a_match_with_a_pin_has_the_run_here_and_pinned(world: World) -> None:
    namespace = world.declare_both("pin")
    ids = ids_of(namespace, 6)
    put_chain(world.far, namespace, ids[:5])
    put_chain(world.near, namespace, ids[:1])
    opened = call(world.near, "POST", "/cache", b'{"holder": "t"}', query={"sessions": ""})
    session = opened.body.split(b'"session":"')[1][:32].decode()
    found = match(world.near, namespace, ids, pin=True, session=session, detail="chunks")
    assert (found["matched"], len(found["chunks"])) == (5, 5)
    assert "upstream" not in {each["tier"] for each in found["chunks"]}
    assert {*ids[:5]} <= stored(world.near)
    # It is the pin that holds: a deleted chunk is read by it still.
    assert call(world.near, "DELETE", f"/cache/{ids[0]}").status == 204
    world.proxy.plan = AWAY
    read = call(world.near, "GET", f"/cache/{ids[4]}", headers={"x-kvobj-pin": found["pin"]})
    assert read.body == bytes_of(ids[4])
    assert call(world.near, "GET", f"/cache/{ids[4]}").status == 404


# -- writes ----------------------------------------------------------------------------------------------------------
def test_a_shared_write_stands_in_both_and_the_upstreams_answer_is_the_writers(world: World) -> None:
    namespace = world.declare_both("shared")
    ids = ids_of(namespace, 3)
    first = put(world.near, namespace, ids[0], "root", durability="shared")
    assert first.status == 200, first.body
    assert first.headers["x-kvobj-existed"] == "false"
    assert first.headers["x-kvobj-durability"] == "local"  # what upstreams are asked for, unless configured otherwise
    assert first.headers["x-kvobj-digest"] == blake3(bytes_of(ids[0])).hexdigest()
    assert ids[0] in stored(world.near) & stored(world.far)
    head = call(world.far, "HEAD", f"/cache/{ids[0]}")
    assert (head.headers["x-kvobj-namespace"], head.headers["x-kvobj-parent"]) == ("shared", "root")
    # There before: by an earlier writer of its own, whose bytes stand and whose digest is told.
    put_chain(world.far, namespace, [ids[1]], parent=ids[0])
    second = put(world.near, namespace, ids[1], ids[0], durability="shared")
    assert (second.status, second.headers["x-kvobj-existed"]) == (200, "true")
    again = put(world.near, namespace, ids[0], "root", durability="shared")
    assert (again.status, again.headers["x-kvobj-existed"]) == (200, "true")
    # What stands here alone is put there when it is written as shared.
    assert put(world.near, namespace, ids[2], ids[1]).headers["x-kvobj-durability"] == "memory"
    assert ids[2] not in stored(world.far)
    raised = put(world.near, namespace, ids[2], ids[1], durability="shared")
    assert (raised.status, raised.headers["x-kvobj-durability"]) == (200, "local")
    assert ids[2] in stored(world.far)


def test_other_classes_stay_here(world: World) -> None:
    namespace = world.declare_both("classes")
    ids = ids_of(namespace, 2)
    assert put(world.near, namespace, ids[0], "root", durability="memory").status == 200
    assert put(world.near, namespace, ids[1], ids[0], durability="local").status == 200
    assert not {*ids} & stored(world.far)


def test_the_upstreams_refusal_passes_through(world: World) -> None:
    namespace = world.declare_both("refusal")
    ids = ids_of(namespace, 2)
    put_chain(world.near, namespace, ids[:1])
    refused = put(world.near, namespace, ids[1], ids[0], durability="shared")
    assert (refused.status, refused.code) == (409, "ParentNotFound")
    assert ids[1] in stored(world.near) - stored(world.far)


def test_a_shared_write_while_the_upstream_is_away_is_refused_and_stands_here(world: World) -> None:
    namespace = world.declare_both("writes-away")
    (chunk_id,) = ids_of(namespace, 1)
    world.proxy.plan = AWAY
    refused = put(world.near, namespace, chunk_id, "root", durability="shared")
    assert refused.status == 503
    world.proxy.plan = NOTHING

    def is_taken() -> bool:
        return put(world.near, namespace, chunk_id, "root", durability="shared").status == 200

    wait_until(is_taken, timeout_seconds=15, what="the upstream to be asked again")
    assert chunk_id in stored(world.far)


# -- what goes wrong -------------------------------------------------------------------------------------------------
def test_a_namespace_with_another_key_there_is_not_used(world: World) -> None:
    there, here = world.declare(world.far, "other"), world.declare(world.near, "other")
    assert there.key != here.key
    ids = ids_of(there, 1)
    put_chain(world.far, there, ids)
    assert call(world.near, "GET", f"/cache/{ids[0]}").status == 404
    assert match(world.near, here, ids_of(here, 2))["matched"] == 0
    refused = put(world.near, here, ids_of(here, 1)[0], "root", durability="shared")
    assert (refused.status, refused.code) == (409, "NamespaceConflict")
    assert "kvobj-admin namespace import" in world.near.log_path.read_text()
    alone = world.declare(world.far, "alone")
    (absent,) = ids_of(alone, 1)
    put_chain(world.far, alone, [absent])
    assert call(world.near, "GET", f"/cache/{absent}").status == 404
    assert not {absent, *ids} & stored(world.near)


def test_wrong_bytes_are_a_miss_and_are_not_stored(world: World) -> None:
    namespace = world.declare_both("wrong")
    ids = ids_of(namespace, 1)
    put_chain(world.far, namespace, ids)
    world.proxy.plan = Plan((Toxic.WRONG_BYTE_DOWN,), rate=1.0, operations=frozenset({Operation.GET}), key_part=ids[0])
    reply = call(world.near, "GET", f"/cache/{ids[0]}")
    assert reply.status == 404
    assert ids[0] not in stored(world.near)
    (line,) = [each for each in world.near.log_path.read_text().splitlines() if "came with wrong bytes" in each]
    assert reply.headers["x-amz-request-id"] in line
    world.proxy.plan = NOTHING
    assert call(world.near, "GET", f"/cache/{ids[0]}").body == bytes_of(ids[0])


@pytest.mark.parametrize("toxic", [Toxic.RESET_BODY, Toxic.TRUNCATED, Toxic.HALF_HEAD])
def test_a_broken_answer_is_asked_for_again(world: World, toxic: Toxic) -> None:
    namespace = world.declare_both(f"broken-{toxic.name.lower().replace('_', '-')}")
    ids = ids_of(namespace, 12)
    put_chain(world.far, namespace, ids)
    world.proxy.plan = Plan((toxic,), rate=0.3, seed=5, operations=frozenset({Operation.GET}))
    for chunk_id in ids:
        reply = call(world.near, "GET", f"/cache/{chunk_id}")
        assert reply.status in (200, 404)
        assert reply.status == 404 or reply.body == bytes_of(chunk_id)
    world.proxy.plan = NOTHING
    wait_until(
        lambda: all(call(world.near, "GET", f"/cache/{each}").status == 200 for each in ids),
        timeout_seconds=15,
        what="all of them",
    )


def test_an_upstream_that_is_away_is_as_none_and_comes_back(world: World) -> None:
    namespace = world.declare_both("away")
    ids = ids_of(namespace, 4)
    put_chain(world.far, namespace, ids)
    put_chain(world.near, namespace, ids[:2])
    world.proxy.plan = AWAY
    began = time.monotonic()
    for _ in range(5):
        assert call(world.near, "GET", f"/cache/{ids[3]}").status == 404
        assert match(world.near, namespace, ids)["matched"] == 2
        assert [item.header["status"] for item in mget(world.near, ids)] == [200, 200, 404, 404]
    assert time.monotonic() - began < 40
    assert call(world.near, "GET", f"/cache/{ids[1]}").body == bytes_of(ids[1])
    world.proxy.plan = NOTHING
    wait_until(
        lambda: call(world.near, "GET", f"/cache/{ids[3]}").status == 200,
        timeout_seconds=15,
        what="it to be asked again",
    )
    log = world.near.log_path.read_text()
    assert "fails, as if there were none" in log
    assert "answers again" in log


def test_status_tells_how_each_upstream_answers_and_what_it_gave(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = world.status()
    namespace = world.declare_both("status")
    apart = world.declare(world.far, "status-apart"), world.declare(world.near, "status-apart")
    ids = ids_of(namespace, 2)
    put_chain(world.far, namespace, ids)
    put_chain(world.far, apart[0], ids_of(apart[0], 1))
    assert call(world.near, "GET", f"/cache/{ids[1]}").status == 200
    assert match(world.near, apart[1], ids_of(apart[1], 1))["matched"] == 0
    told = world.status()
    assert (told["bucket"], told["endpoint"]) == ("cache", f"http://127.0.0.1:{world.proxy.port}")
    assert (told["state"], told["reason"]) == ("ok", "")
    assert told["chunks"]["hit"] == before["chunks"].get("hit", 0) + 2
    assert told["received_bytes"] >= before["received_bytes"] + 2 * CHUNK_BYTES
    assert told["requests"]["GetChunk"] > before["requests"].get("GetChunk", 0)
    assert "another key" in told["namespaces"]["status-apart"]
    # One that no longer takes this store's user is not one that is away.
    world.proxy.plan = Plan((Toxic.SKEWED,), rate=1.0)
    assert call(world.near, "GET", "/cache/refused").status == 404
    refused = world.status()
    assert refused["state"] == "refused"
    assert "RequestTimeTooSkewed" in refused["reason"]
    world.proxy.plan = NOTHING
    assert call(world.near, "GET", "/cache/refused").status == 404
    assert "RequestTimeTooSkewed" in world.status()["last_error"]
    where = ["--endpoint", f"http://127.0.0.1:{world.near.admin_port}", "--data", str(world.near.data)]
    assert kvobj_admin([*where, "status"]) == 0
    printed = capsys.readouterr().out
    assert "upstream of cache" in printed
    assert f"http://127.0.0.1:{world.proxy.port}/cache" in printed
    assert "GetChunk" in printed


def test_worker_processes_ask_upstreams_too(tmp_path: Path) -> None:
    with federation(tmp_path, workers=2) as world:
        namespace = world.declare_both("workers")
        ids = ids_of(namespace, 6)
        put_chain(world.far, namespace, ids)
        assert match(world.near, namespace, ids)["matched"] == 6
        assert call(world.near, "GET", f"/cache/{ids[2]}").body == bytes_of(ids[2])
        assert [item.payload for item in mget(world.near, ids)] == [bytes_of(each) for each in ids]
        assert {*ids} <= stored(world.near)
        (mine,) = ids_of(namespace, 1, first=1000)
        written = put(world.near, namespace, mine, "root", durability="shared")
        assert (written.status, written.headers["x-kvobj-durability"]) == (200, "local")
        assert mine in stored(world.far)
        # Batches too, and what only the store process serves: figures are those of all processes.
        batch = ids_of(namespace, 3, first=2000)
        items = mput(world.near, namespace, batch, durability="shared")
        assert [(item["status"], item["existed"]) for item in items] == [(200, False)] * 3
        assert {*batch} <= stored(world.far)
        others = ids_of(namespace, 1, first=3000)
        put_chain(world.far, namespace, others)
        with world.same_host_client() as client:
            read = client.get_chunk(others[0], namespace=client.namespace("workers"))
            assert bytes(read or b"") == bytes_of(others[0])
            assert client.is_same_host
        form = {"x-amz-meta-lmcache-form": "1 3 2 32 256 1024"}
        assert call(world.far, "PUT", "/cache/model@1@0@a", b"bytes", headers=form).status == 200
        assert lm_ask(world.lm_port, LM_GET, "model@1@0@a")[::2] == (LM_SUCCESS, b"bytes")
        told = world.status()
        assert (told["state"], told["chunks"]["hit"], told["chunks"]["put"]) == ("ok", 8, 4)
        assert world.upstream("chunks_total", outcome="hit") == 8


def test_two_stores_that_are_each_others_upstream_do_not_ask_in_a_ring(tmp_path: Path) -> None:
    def server(name: str, port: int, upstream_port: int) -> ServerProcess:
        table = {
            "bucket": '"cache"',
            "endpoint": f'"http://127.0.0.1:{upstream_port}"',
            "access_key": f'"{ALICE.access_key}"',
            "secret_key": f'"{ALICE.secret_key}"',
            "timeout": '"20 s"',
        }
        settings = ServerSettings(
            dram_bytes=32 * MIB,
            nvme_bytes=64 * MIB,
            buckets=[BucketSetting("cache", "kv", "memory", owner="alice")],
            users=[ALICE],
            upstreams=[table],
            workers=1,
        )
        made = ServerProcess(tmp_path / name, settings)
        made.port = port
        return made

    ports = free_port(), free_port()
    with server("one", *ports) as one, server("two", *reversed(ports)) as two:
        began = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda turn: call((one, two)[turn % 2], "GET", "/cache/absent").status, range(8))
        assert list(answers) == [404] * 8
        assert time.monotonic() - began < 10, "nobody waited for a timeout"
        assert call(one, "PUT", "/cache/here", b"one's").status == 200
        assert call(two, "GET", "/cache/here").body == b"one's"
