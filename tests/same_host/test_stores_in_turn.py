"""Chunks that need not become visible together: stored part by part, with room ahead that nobody waits for beside his own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from same_host_world import (
    READER,
    TRUSTED,
    client_of,
    gauge,
    grant_of,
    payload,
    raw_peer,
    settings,
    wait_for_nothing_held,
)
from server_process import MIB, ServerProcess, UserSetting

from kvobj.client import KvClient, NewChunk, StoredChunk
from kvobj.errors import ImmutableChunkError
from kvobj.same_host.framing import framed
from kvobj.same_host.messages import (
    VERSION,
    Abandon,
    Failed,
    Hello,
    NewItem,
    Open,
    Opened,
    Release,
    Reserve,
    Reserved,
    Welcome,
    encode,
)

DECLARATION = {
    "model": "m",
    "chunk_tokens": 16,
    "layout": {"kind": "opaque"},
    "ids": "foreign",
    "access": {READER.id: "write", TRUSTED.id: "write"},
}
DRAM_MIB = 512
BATCHES_BYTES = DRAM_MIB * MIB // 4
"""What all batches on their way in may have together."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("same-host"), settings(dram_mib=DRAM_MIB)) as running:
        with client_of(running, same_host=False) as root:
            root.declare_namespace("shared", DECLARATION)
        yield running


@pytest.fixture
def root(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as client:
        assert client.is_same_host
        yield client
    wait_for_nothing_held(server)


def fresh() -> str:
    return f"k-{secrets.token_hex(8)}"


def all_but(left_bytes: int) -> Reserve:
    """What leaves so much room for other batches."""
    return Reserve("shared", [NewItem(fresh(), (BATCHES_BYTES - left_bytes) // 4) for _ in range(4)])


@pytest.mark.parametrize("user", [None, READER, TRUSTED], ids=["root", "all", "trusted"])
def test_each_chunk_of_many_has_its_own_answer_and_its_own_bytes(
    server: ServerProcess, user: UserSetting | None
) -> None:
    with client_of(server, user) as client, client_of(server, same_host=False) as other:
        space = other.namespace("shared")
        names = [fresh() for _ in range(20)]
        bodies = [payload(name, MIB + index) for index, name in enumerate(names)]
        other.put_chunk(names[3], bodies[3], namespace=space)
        other.put_chunk(names[11], bodies[11][:-1], namespace=space)
        told = client.put_chunks([NewChunk(*each) for each in zip(names, bodies, strict=True)], namespace=space)
        assert isinstance(told.pop(11), ImmutableChunkError)
        assert [each.existed for each in told if isinstance(each, StoredChunk)] == [
            index == 3 for index in range(20) if index != 11
        ]
        bodies[11] = bodies[11][:-1]
        for name, body in zip(names, bodies, strict=True):
            assert other.get_chunk(name, namespace=space) == body
        assert client.same_host_fallbacks == 0


def test_a_chain_is_stored_parents_first(root: KvClient) -> None:
    space = root.declare_namespace("chained", {**DECLARATION, "ids": "kvobj"})
    ids = space.chunk_ids([secrets.randbelow(2**31) for _ in range(16 * 12)])
    body = payload("chain", MIB)
    parents: list[bytes | str] = ["root", *ids]
    chunks = [NewChunk(each, body, parent=parents[index]) for index, each in enumerate(ids)]
    assert all(isinstance(each, StoredChunk) for each in root.put_chunks(chunks, namespace=space))
    assert root.match(namespace=space, ids=ids).matched == 12


def test_a_reservation_beside_another_of_its_writer_does_not_wait_for_room(server: ServerProcess) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
        first = peer.ask(all_but(4 * MIB))
        assert isinstance(first, Reserved)
        began = time.monotonic()
        refused = peer.ask(Reserve("shared", [NewItem(fresh(), 8 * MIB)]))
        assert isinstance(refused, Failed)
        assert refused.status == 503
        assert time.monotonic() - began < 5  # who has nothing waits ten seconds
        assert isinstance(peer.ask(Reserve("shared", [NewItem(fresh(), MIB)])), Reserved)
        peer.say(Abandon(first.batch))
        assert isinstance(peer.ask(Reserve("shared", [NewItem(fresh(), 8 * MIB)])), Reserved)
    wait_for_nothing_held(server)


def test_what_finds_no_room_ahead_is_stored_when_its_turn_comes(server: ServerProcess, root: KvClient) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        assert isinstance(peer.ask(all_but(20 * MIB)), Reserved)
        names = [fresh() for _ in range(6)]
        body = payload("late", 12 * MIB)  # each a part of its own, of which one fits
        told = root.put_chunks([NewChunk(name, body) for name in names])
        assert all(isinstance(each, StoredChunk) and not each.existed for each in told)
        assert root.same_host_fallbacks == 0
    assert root.get_chunk(names[-1]) == body


def test_what_is_asked_ahead_is_answered_in_its_order_and_counted_as_reads(
    server: ServerProcess, root: KvClient
) -> None:
    names = [fresh() for _ in range(3)]
    for name in names:
        root.put_chunk(name, payload(name, 5000))
    grant = grant_of(server)
    hits = 'kvobj_tier_gets_total{outcome="hit",tier="dram"}'
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        assert isinstance(peer.ask(Open(names)), Opened)  # the region is shown
        peer.say(Release([1, 2, 3]))
        before = gauge(server, hits)
        asked = [Open([names[0]]), Open([*names[1:], "absent"]), Release([4]), Open([names[2]])]
        peer.socket.sendall(b"".join(framed(encode(each)) for each in asked))
        answers = [peer.hear() for _ in range(3)]
        opened = [[extent and (extent.handle, extent.size_bytes) for extent in each.extents] for each in answers]  # type: ignore[union-attr]
        assert opened == [[(4, 5000)], [(5, 5000), (6, 5000), None], [(7, 5000)]]
        assert gauge(server, hits) == before + 4
        assert gauge(server, "kvobj_same_host_pinned_bytes") == 3 * 5000
