"""Chunks by shared memory between a real server and clients of every kind: the same answers as over HTTP, and nobody gets more."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from module_paths import ModulePaths
from same_host_world import (
    READER,
    STRANGER,
    TRUSTED,
    RawPeer,
    client_of,
    gauge,
    grant_of,
    noise,
    payload,
    raw_peer,
    settings,
    viewed,
    wait_for_nothing_held,
)
from server_process import MIB, ServerProcess, UserSetting

from kvobj.client import Credentials, KvClient, NewChunk, S3Client, Session, SignedConnection, StoredChunk
from kvobj.client.connection import Endpoint
from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.errors import (
    AccessDeniedError,
    ImmutableChunkError,
    InvalidRequestError,
    KvobjError,
    ParentNotFoundError,
    UnavailableError,
)
from kvobj.same_host.descriptors import at_path, control_page, staging_memory
from kvobj.same_host.framing import framed
from kvobj.same_host.mapping import Mapping
from kvobj.same_host.messages import (
    HELLO_BYTES_MAX,
    TOKEN_BYTES,
    VERSION,
    Commit,
    Committed,
    Failed,
    Hello,
    NewItem,
    Open,
    Opened,
    Release,
    Reserve,
    Stage,
    Staged,
    Welcome,
    encode,
)
from kvobj.store.extents import extent_bytes

DECLARATION = {
    "model": "m",
    "chunk_tokens": 16,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": 4, "kv_heads": 8, "head_dim": 64},
    "ids": "kvobj",
    "access": {READER.id: "write", TRUSTED.id: "write"},
}
CHUNK_BYTES = 2 * 4 * 8 * 64 * 16 * 2
KINDS = [None, READER, TRUSTED]
KIND_NAMES = ["root", "all", "trusted"]


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("same-host"), settings(dram_mib=768)) as running:
        with client_of(running, same_host=False) as root:
            root.declare_namespace("shared", DECLARATION)
        yield running


@pytest.fixture
def root(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as client:
        assert client.is_same_host
        yield client
    wait_for_nothing_held(server)


def fresh(prefix: str = "k") -> str:
    return f"{prefix}-{secrets.token_hex(8)}"


def delete(server: ServerProcess, key: str) -> None:
    keys = server.credentials()
    with SignedConnection(Endpoint.parse(server.endpoint), Credentials(keys.access_key, keys.secret_key)) as connection:
        S3Client(connection).delete("cache", key)


@pytest.mark.parametrize("size_bytes", [1, 4096, 300_001, MIB, 80 * MIB])
def test_a_chunk_of_any_size_is_put_viewed_and_copied(root: KvClient, size_bytes: int) -> None:
    name, data = fresh(), noise(size_bytes)
    assert root.put_chunk(name, data).existed is False
    view = viewed(root, name)
    with view:
        assert view.is_shared
        assert view.data == data
        assert view.data.readonly
        assert view.is_valid
        assert view.check()
    room = bytearray(size_bytes + 1)
    filled = root.get_chunk(name, into=room)
    assert filled == data
    assert room[-1] == 0
    assert root.same_host_fallbacks == 0


def test_a_chunk_put_by_shared_memory_is_read_over_http_and_the_other_way_round(
    server: ServerProcess, root: KvClient
) -> None:
    with client_of(server, same_host=False) as http:
        assert http.is_same_host is False
        one, other = fresh(), fresh()
        root.put_chunk(one, payload(one, 70_000))
        http.put_chunk(other, payload(other, 70_000))
        assert http.get_chunk(one) == payload(one, 70_000)
        assert root.get_chunk(other) == payload(other, 70_000)
        assert root.put_chunk(other, payload(other, 70_000)).existed
        with pytest.raises(ImmutableChunkError):
            root.put_chunk(other, b"another size")
        with pytest.raises(ParentNotFoundError):
            root.put_chunk(fresh(), b"x", parent=fresh())


def test_an_empty_chunk_is_put_and_read(root: KvClient) -> None:
    name = fresh()
    assert root.put_chunk(name, b"").existed is False
    assert root.get_chunk(name) == memoryview(b"")
    assert root.get_chunks([name], [memoryview(bytearray(3))]) == [0]
    view = viewed(root, name)
    assert view.size_bytes == 0
    view.release()


def test_a_miss_is_none_in_every_call(root: KvClient) -> None:
    name = fresh()
    assert root.view_chunk(name) is None
    assert root.get_chunk(name) is None
    assert root.get_chunks([name], [memoryview(bytearray(8))]) == [None]
    assert [item.data for item in root.mget([name])] == [None]


@pytest.mark.parametrize("user", KINDS, ids=KIND_NAMES)
def test_a_chain_is_stored_in_one_step_and_read_by_layers(server: ServerProcess, user: UserSetting | None) -> None:
    with client_of(server, user) as client:
        namespace = client.namespace("shared")
        tokens = [secrets.randbelow(2**31) for _ in range(16 * 5)]
        ids = namespace.chunk_ids(tokens)
        data = [noise(CHUNK_BYTES) for _ in ids]
        chain = [NewChunk(ids[at], data[at], parent="root" if at == 0 else ids[at - 1]) for at in range(len(ids))]
        stored = client.mput(chain, namespace=namespace)
        assert all(isinstance(each, StoredChunk) and not each.existed for each in stored)
        assert [item.data for item in client.mget(ids, namespace=namespace)] == data
        layer = CHUNK_BYTES // 4
        assert client.get_chunk(ids[2], namespace=namespace, layers=(1, 2)) == data[2][layer : 3 * layer]
        parts = [item.data for item in client.mget(ids, namespace=namespace, layers=(3, 3))]
        assert parts == [each[3 * layer :] for each in data]
        again = client.mput(chain, namespace=namespace)
        assert all(isinstance(each, StoredChunk) and each.existed for each in again)
        assert client.is_same_host
        assert client.same_host_fallbacks == 0


@pytest.mark.parametrize("user", KINDS, ids=KIND_NAMES)
def test_batches_are_stored_one_after_the_other_and_a_spoiled_one_alone_is_not(
    server: ServerProcess, user: UserSetting | None
) -> None:
    with client_of(server, user) as client:
        namespace = client.namespace("shared")
        ids = [namespace.chunk_ids([secrets.randbelow(2**31) for _ in range(16)])[0] for _ in range(9)]
        data = {name: noise(CHUNK_BYTES) for name in ids}
        spoiled = NewChunk(ids[5], data[ids[5]], parent="root", digest=bytes(32))
        fine = [NewChunk(name, data[name], parent="root") for name in ids]
        told = client.mput_batches(
            [fine[0:2], [fine[2]], [fine[3], fine[4]], [spoiled, fine[6]], fine[7:9]], namespace=namespace
        )
        stored = [each for answer in told if not isinstance(answer, KvobjError) for each in answer]
        assert [isinstance(answer, KvobjError) for answer in told] == [False, False, False, True, False]
        assert isinstance(told[3], InvalidRequestError)
        assert len(stored) == 7
        assert all(isinstance(each, StoredChunk) and not each.existed for each in stored)
        expected = [None if name in {ids[5], ids[6]} else data[name] for name in ids]
        assert [item.data for item in client.mget(ids, namespace=namespace)] == expected
        again = client.mput_batches([fine[0:4], fine[4:9]], namespace=namespace)
        existed = [
            each.existed
            for answer in again
            if isinstance(answer, list)
            for each in answer
            if isinstance(each, StoredChunk)
        ]
        assert existed == [True] * 5 + [False] * 2 + [True] * 2
        assert client.is_same_host
        assert client.same_host_fallbacks == 1  # the spoiled batch, for its reason
    wait_for_nothing_held(server)


def test_threads_that_store_batches_at_once_never_wait_for_each_other(root: KvClient) -> None:
    names = [[fresh() for _ in range(6)] for _ in range(5)]
    failed: list[object] = []

    def store(mine: list[str]) -> None:
        batches = [[NewChunk(name, payload(name, 2 * MIB))] for name in mine]
        failed.extend(answer for answer in root.mput_batches(batches) if isinstance(answer, KvobjError))

    threads = [threading.Thread(target=store, args=(mine,)) for mine in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert root.same_host_fallbacks == 0
    for mine in names:
        assert [item.data for item in root.mget(mine)] == [payload(name, 2 * MIB) for name in mine]


def test_many_chunks_fill_their_rooms_in_one_call(root: KvClient) -> None:
    names = [fresh() for _ in range(40)]
    root.mput([NewChunk(name, payload(name, 5000)) for name in names[:-1]])
    rooms = [memoryview(bytearray(6000)) for _ in names]
    assert root.get_chunks(names, rooms) == [5000] * 39 + [None]
    assert all(room[:5000] == payload(name, 5000) for name, room in zip(names[:-1], rooms, strict=False))


def test_a_room_that_is_too_small_is_an_error_before_any_byte_is_written(root: KvClient) -> None:
    names = [fresh(), fresh()]
    root.mput([NewChunk(name, payload(name, 5000)) for name in names])
    rooms = [memoryview(bytearray(5000)), memoryview(bytearray(4999))]
    with pytest.raises(InvalidRequestError):
        root.get_chunks(names, rooms)
    assert bytes(rooms[0]) == bytes(5000)
    with pytest.raises(InvalidRequestError):
        root.get_chunk(names[0], into=bytearray(10))


def test_a_deleted_chunk_stays_right_under_its_view_until_the_release(server: ServerProcess, root: KvClient) -> None:
    name = fresh()
    data = payload(name, 3 * MIB)
    root.put_chunk(name, data)
    view = viewed(root, name)
    delete(server, name)
    assert root.get_chunk(name) is None
    for _ in range(60):  # what is put now goes anywhere but there
        root.put_chunk(fresh(), noise(4 * MIB))
    assert view.data == data
    assert view.is_valid
    view.release()
    assert not view.is_valid
    with pytest.raises(ValueError, match="released"):
        view.data  # noqa: B018 - the access is what fails


def test_a_pinned_chunk_that_a_delete_has_hidden_is_viewed_by_its_session(
    server: ServerProcess, root: KvClient
) -> None:
    name = fresh()
    root.put_chunk(name, payload(name, 9000))
    with Session(root) as session:
        (pin,) = session.pin([name])
        assert pin is not None
        delete(server, name)
        assert root.view_chunk(name) is None
        view = session.view(pin, name)
        assert view is not None
        with view:
            assert view.is_shared
            assert view.data == payload(name, 9000)
        assert session.read(pin, name) == payload(name, 9000)


def test_opens_go_on_while_as_many_threads_as_can_are_storing(root: KvClient) -> None:
    name = fresh()
    root.put_chunk(name, payload(name, 1000))
    stop = threading.Event()

    def store() -> None:
        while not stop.is_set():
            root.put_chunk(fresh(), noise(8 * MIB))

    threads = [threading.Thread(target=store) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            view = viewed(root, name)
            assert view.is_shared
            view.release()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert root.same_host_fallbacks == 0


def test_threads_share_a_client(root: KvClient) -> None:
    names = [fresh() for _ in range(8)]
    wrong: list[str] = []

    def work(name: str) -> None:
        data = payload(name, 200_000)
        root.put_chunk(name, data)
        wrong.extend(name for _ in range(30) if root.get_chunk(name) != data)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert root.same_host_fallbacks == 0


def test_more_than_one_holder_may_pin_goes_over_http_and_is_right(root: KvClient) -> None:
    names = [fresh() for _ in range(3)]
    for name in names:
        root.put_chunk(name, payload(name, 80 * MIB))
    views = [root.view_chunk(name) for name in names]  # of 768 MiB one may pin a quarter
    assert [view.is_shared for view in views if view is not None] == [True, True, False]
    assert views[2] is not None
    assert views[2].data == payload(names[2], 80 * MIB)
    for view in views:
        assert view is not None
        view.release()


def test_a_forked_child_connects_anew_and_leaves_its_parents_views_alone(root: KvClient) -> None:
    name = fresh()
    root.put_chunk(name, payload(name, 50_000))
    view = viewed(root, name)
    child = os.fork()
    if child == 0:
        is_right = not view.is_valid and root.get_chunk(name) == payload(name, 50_000)
        view.release()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert view.is_valid
    assert view.data == payload(name, 50_000)
    view.release()
    assert root.get_chunk(name) == payload(name, 50_000)


def test_a_child_that_is_forked_while_a_thread_connects_does_not_keep_the_connection(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    descriptor, page = control_page()
    may_end, ends = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        at_path(path, listening.bind)
        listening.listen()
        lanes: list[Lane] = []

        def connect() -> None:
            grant = GrantAnswer(str(path), b"id", bytes(TOKEN_BYTES), 30_000)
            lanes.append(Lane.connect(grant, deadline=time.monotonic() + 30))

        connecting = threading.Thread(target=connect)
        connecting.start()
        peer, _ = listening.accept()
        with peer:
            peer.settimeout(30)
            assert peer.recv(4096)  # its Hello
            child = os.fork()
            if child == 0:
                os.close(ends)
                peer.close()
                os.read(may_end, 1)
                os._exit(0)
            socket.send_fds(peer, [framed(encode(Welcome(VERSION)))], [descriptor])
            connecting.join()
            lanes[0].close()
            try:
                assert peer.recv(1) == b"", "nobody has it any more, though the child lives"
            finally:
                os.close(ends)
                assert os.waitpid(child, 0)[1] == 0
    page.close()
    os.close(descriptor)
    os.close(may_end)


# -- who may ------------------------------------------------------------------------------------------------------
def test_who_may_not_map_the_memory_is_served_over_http(server: ServerProcess) -> None:
    with client_of(server) as root:
        root.declare_namespace("strangers", DECLARATION | {"access": {STRANGER.id: "write"}})
    with client_of(server, STRANGER) as stranger:
        namespace = stranger.namespace("strangers")
        (chunk_id,) = namespace.chunk_ids(list(range(16)))
        assert stranger.is_same_host is False
        stranger.put_chunk(chunk_id, payload("s", CHUNK_BYTES), namespace=namespace, parent="root")
        assert stranger.get_chunk(chunk_id, namespace=namespace) == payload("s", CHUNK_BYTES)
        view = viewed(stranger, chunk_id, namespace=namespace)
        assert not view.is_shared
    with pytest.raises(AccessDeniedError):
        grant_of(server, STRANGER)


def test_a_reader_opens_what_it_is_granted_and_nothing_else(server: ServerProcess, root: KvClient) -> None:
    secret = fresh()
    root.put_chunk(secret, payload(secret, 5000))
    grant = grant_of(server, READER)
    assert not grant.is_trusted
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
        assert peer.ask(Open([secret])) == Opened([None], [None])
        refused = peer.ask(Reserve("shared", [NewItem("x", 10)]))
        assert isinstance(refused, Failed)
        assert refused.status == 403
        denied = peer.ask(Commit(0, "default", [NewItem(fresh(), 10)]))
        assert isinstance(denied, Failed)


def test_a_region_of_a_reader_can_be_mapped_for_reading_alone(server: ServerProcess, root: KvClient) -> None:
    namespace = root.namespace("shared")
    (chunk_id,) = namespace.chunk_ids(list(range(1000, 1016)))
    root.put_chunk(chunk_id, payload("r", CHUNK_BYTES), namespace=namespace, parent="root")
    grant = grant_of(server, READER)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        peer.ask(Open([chunk_id.hex()]))
        control, region = peer.descriptors
        for descriptor in (control, region):
            with pytest.raises(UnavailableError, match="cannot be mapped"):
                Mapping(descriptor, 4096, is_writable=True)
            os.close(descriptor)


def test_the_owner_of_a_bucket_with_its_own_regions_maps_those_alone(server: ServerProcess) -> None:
    with client_of(server) as root, client_of(server, STRANGER, bucket="apart") as owner:
        root.put_chunk(fresh(), b"x" * 100_000)
        assert owner.is_same_host
        name = fresh()
        owner.put_chunk(name, payload(name, 100_000))
        with viewed(owner, name) as view:
            assert view.is_shared
            assert view.data == payload(name, 100_000)
        assert owner.same_host_fallbacks == 0
        (lane,) = owner._same_host._lanes
        assert not lane.grant.is_trusted
        other = fresh()
        assert root.put_chunk(other, b"y" * 100_000).existed is False
        held = root._same_host.open([other])
        assert held is not None
        (extent,) = held.extents
        held.release()
        assert extent is not None
        assert extent.region not in lane._regions


# -- tokens and frames ---------------------------------------------------------------------------------------------
def test_a_token_is_good_once(server: ServerProcess) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as first, raw_peer(grant.socket) as second:
        assert isinstance(first.ask(Hello(VERSION, grant.token)), Welcome)
        assert isinstance(second.ask(Hello(VERSION, grant.token)), Failed)
        assert second.is_ended()
        assert isinstance(first.ask(Open([fresh()])), Opened)


@pytest.mark.parametrize("token", [bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)], ids=["zeros", "random"])
def test_a_wrong_token_opens_nothing(server: ServerProcess, token: bytes) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, token)), Failed)
        assert peer.is_ended()


def test_who_says_anything_before_hello_is_ended(server: ServerProcess) -> None:
    grant = grant_of(server)
    for said in (Open(["k"]), Stage(4096)):
        with raw_peer(grant.socket) as peer:
            peer.say(said)
            assert peer.is_ended()


def test_nobody_has_more_to_say_than_a_hello_before_it(server: ServerProcess) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        peer.socket.sendall((HELLO_BYTES_MAX + 1).to_bytes(4, "little"))
        assert peer.is_ended()
    with raw_peer(grant.socket) as peer:
        items = [NewItem("k" * 1024, 10)]
        peer.socket.sendall(framed(encode(Hello(VERSION, grant.token))) + framed(encode(Commit(0, "default", items))))
        assert isinstance(peer.ask(Open([])), Welcome)
        assert isinstance(peer.hear(), Failed)  # what follows it may be longer
        assert isinstance(peer.hear(), Opened)


def test_a_batch_larger_than_any_object_is_refused_and_the_connection_goes_on(server: ServerProcess) -> None:
    grant = grant_of(server)
    items = [NewItem(fresh(), 2**63 - 1) for _ in range(3)]
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        for asked in (Reserve("default", items), Commit(0, "default", items)):
            refused = peer.ask(asked)
            assert isinstance(refused, Failed)
            assert refused.code == "EntityTooLarge"
        assert isinstance(peer.ask(Open([])), Opened)


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 64, b"\x00\x00\x00\x00", b"\x05\x00\x00\x00junk!", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["length", "empty", "junk", "http"],
)
def test_garbage_ends_the_connection_and_nothing_else(server: ServerProcess, root: KvClient, raw: bytes) -> None:
    name = fresh()
    root.put_chunk(name, b"right")
    for is_greeted in (False, True):
        grant = grant_of(server)
        with raw_peer(grant.socket) as peer:
            if is_greeted:
                assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
            peer.socket.sendall(raw)
            assert peer.is_ended()
    assert root.get_chunk(name) == memoryview(b"right")


def sent_until_nobody_reads(peer: RawPeer) -> int:
    peer.socket.settimeout(0.5)
    frames, sent_bytes = framed(encode(Open([]))) * 10_000, 0
    try:
        while sent_bytes < 64 * MIB:
            sent_bytes += peer.socket.send(frames)
    except TimeoutError:
        return sent_bytes
    return sent_bytes


def test_a_peer_that_reads_nothing_is_not_read_without_end(server: ServerProcess, root: KvClient) -> None:
    name = fresh()
    root.put_chunk(name, b"right")
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
        assert sent_until_nobody_reads(peer) < 16 * MIB
        assert root.get_chunk(name) == memoryview(b"right")


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
        assert gauge(server, "kvobj_same_host_pinned_bytes") == 3 * extent_bytes(5000)


def test_a_reader_of_many_short_chunks_pins_no_more_of_memory_than_its_share(tmp_path: Path) -> None:
    names = [f"short-{number}" for number in range(5000)]
    with ServerProcess(tmp_path, settings(dram_mib=64)) as server, client_of(server, same_host=False) as far:
        for start in range(0, len(names), 1000):
            far.mput([NewChunk(name, b"x") for name in names[start : start + 1000]])
        grant = grant_of(server)
        with raw_peer(grant.socket) as peer:
            peer.ask(Hello(VERSION, grant.token))
            asked = [names[start : start + 64] for start in range(0, 1024, 64)]  # answered where they arrive
            asked += [names[start : start + 1000] for start in range(1024, len(names), 1000)]
            answers = [peer.ask(Open(keys)) for keys in asked]
            opened = [extent for each in answers for extent in each.extents if extent is not None]  # type: ignore[union-attr]
            assert len(opened) == 16 * MIB // extent_bytes(1)
            assert gauge(server, "kvobj_same_host_pinned_bytes") == 16 * MIB
            assert gauge(server, "kvobj_same_host_handles") == len(opened)
        wait_for_nothing_held(server)


# -- what a writer may do to its staging room ------------------------------------------------------------------------
def test_a_staging_room_changed_after_its_commit_changes_nothing_that_is_stored(server: ServerProcess) -> None:
    with client_of(server) as root:
        namespace = root.namespace("shared")
        (chunk_id,) = namespace.chunk_ids([secrets.randbelow(2**31) for _ in range(16)])
        grant = grant_of(server, READER)
        with raw_peer(grant.socket) as peer:
            peer.ask(Hello(VERSION, grant.token))
            staged = peer.ask(Stage(CHUNK_BYTES))
            assert isinstance(staged, Staged)
            room = Mapping(peer.descriptors[-1], staged.size_bytes, is_writable=True)
            room.room[:CHUNK_BYTES] = payload("first", CHUNK_BYTES)
            item = NewItem(chunk_id, CHUNK_BYTES, parent="root")
            committed = peer.ask(Commit(0, "shared", [item]))
            assert isinstance(committed, Committed)
            assert committed.items[0].status == 200
            room.room[:CHUNK_BYTES] = bytes(CHUNK_BYTES)
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(peer.descriptors[-1], 0)
        assert root.get_chunk(chunk_id, namespace=namespace) == payload("first", CHUNK_BYTES)


@pytest.mark.parametrize(
    ("size_bytes", "at"), [(CHUNK_BYTES, 2**40), (CHUNK_BYTES, MIB - 1), (2**62, 0)], ids=["far", "over", "huge"]
)
def test_a_commit_of_what_is_not_in_the_staging_room_is_refused(
    server: ServerProcess, size_bytes: int, at: int
) -> None:
    grant = grant_of(server, READER)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        peer.ask(Stage(MIB))
        refused = peer.ask(Commit(0, "shared", [NewItem("00" * 32, size_bytes, parent="root", at=at)]))
        assert isinstance(refused, Failed)
        assert isinstance(peer.ask(Open([])), Opened)


def test_staging_rooms_are_bounded_for_one_and_for_all(server: ServerProcess) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        assert isinstance(peer.ask(Stage(2**40)), Failed)
        for _ in range(3):  # a new one takes the place of the one before
            assert peer.ask(Stage(200 * MIB)) == Staged(256 * MIB)
        assert gauge(server, "kvobj_same_host_staging_bytes") == 256 * MIB
    wait_for_nothing_held(server)


def test_a_socket_path_of_any_length_is_used(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 90) / ("e" * 90)
    long.mkdir(parents=True)
    path = long / "same-host.sock"
    chosen = settings(dram_mib=128, same_host={"socket": f'"{path}"'})
    with ServerProcess(tmp_path / "server", chosen) as server, client_of(server) as client:
        assert client.is_same_host
        client.put_chunk("k", b"abc")
        assert client.get_chunk("k") == memoryview(b"abc")


def test_memory_whose_size_could_change_is_never_taken_for_a_staging_room() -> None:
    from kvobj.same_host.descriptors import is_sealed_in_size  # noqa: PLC0415 - a helper of this test alone

    sealed, bare = staging_memory(4096), os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    try:
        assert is_sealed_in_size(sealed)
        assert not is_sealed_in_size(bare)
    finally:
        os.close(sealed)
        os.close(bare)
