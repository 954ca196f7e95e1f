"""Stores that follow one another: the client has room before it asks, and whatever comes in between leaves none of it held, and no
wrong byte."""

from __future__ import annotations

import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from module_paths import ModulePaths
from same_host_world import Holder, client_of, gauge, noise, payload, settings, wait_for_nothing_held
from server_process import MIB, ServerProcess, wait_until

from kvobj.client import KvClient, NewChunk, StoredChunk, same_host
from kvobj.client.call_scope import CallScope
from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.errors import KvobjError, UnavailableError

SIZE = 300_000
PREPARED = "kvobj_same_host_prepared_bytes"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("on"), settings()) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as connected:
        assert connected.is_same_host
        yield connected
    wait_for_nothing_held(server)
    assert gauge(server, PREPARED) == 0


def store(client: KvClient, names: Sequence[str], *, size_bytes: int = SIZE, batches: int = 3) -> list[StoredChunk]:
    """Store chunks in so many batches; all of them are stored afterwards."""
    chunks = [NewChunk(name, payload(name, size_bytes)) for name in names]
    step = -(-len(chunks) // batches)
    told = client.mput_batches([chunks[start : start + step] for start in range(0, len(chunks), step)])
    stored: list[StoredChunk] = []
    for answer in told:
        assert not isinstance(answer, KvobjError)
        for each in answer:
            assert isinstance(each, StoredChunk)
            stored.append(each)
    return stored


def fresh(count: int = 6) -> list[str]:
    front = secrets.token_hex(6)
    return [f"{front}-{index}" for index in range(count)]


def check(client: KvClient, names: Sequence[str], size_bytes: int = SIZE) -> None:
    assert [item.data for item in client.mget(list(names))] == [payload(name, size_bytes) for name in names]


def prepared(server: ServerProcess) -> int:
    return gauge(server, PREPARED)


def wait_for_rooms(server: ServerProcess) -> int:
    wait_until(lambda: prepared(server) > 0, timeout_seconds=15, what="room for what comes next")
    return prepared(server)


def test_stores_that_follow_find_room_and_are_right(server: ServerProcess, client: KvClient) -> None:
    names = [fresh() for _ in range(5)]
    for some in names:
        assert not any(each.existed for each in store(client, some))
        assert wait_for_rooms(server) < 2 * len(some) * SIZE
    for some in names:
        check(client, some)
    assert client.same_host_fallbacks == 0


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_the_next_store_may_be_cut_otherwise(server: ServerProcess, client: KvClient, batches: int) -> None:
    names = [fresh(), fresh(), fresh(4)]
    store(client, names[0])
    for some in names[1:]:
        wait_for_rooms(server)
        store(client, some, batches=batches)
    for some in names:
        check(client, some)
    assert client.same_host_fallbacks == 0


def test_one_batch_has_room_for_as_much_again(server: ServerProcess, client: KvClient) -> None:
    for some in (fresh(2), fresh(2), fresh(1)):
        store(client, some, batches=1)
        check(client, some)
        wait_for_rooms(server)
    assert client.same_host_fallbacks == 0


def test_chunks_of_another_size_or_more_of_them_ask_for_room_of_their_own(
    server: ServerProcess, client: KvClient
) -> None:
    for count, size_bytes in ((4, SIZE), (4, 2 * SIZE), (9, SIZE), (3, 100), (4, SIZE)):
        names = fresh(count)
        store(client, names, size_bytes=size_bytes)
        check(client, names, size_bytes)
        assert wait_for_rooms(server) < 2 * count * max(size_bytes, 8192)
    assert client.same_host_fallbacks == 0


def test_chunks_of_several_sizes_leave_no_room_behind(server: ServerProcess, client: KvClient) -> None:
    store(client, fresh())
    wait_for_rooms(server)
    odd = [(name, SIZE + 4096 * index) for index, name in enumerate(fresh(4))]
    batches = [[NewChunk(name, payload(name, size_bytes))] for name, size_bytes in odd]
    assert not any(isinstance(answer, KvobjError) for answer in client.mput_batches(batches))
    wait_until(lambda: prepared(server) == 0, timeout_seconds=15, what="the room to be given back")
    assert [item.data for item in client.mget([name for name, _ in odd])] == [payload(*each) for each in odd]


def test_what_was_there_before_keeps_its_bytes_and_ends_the_room(server: ServerProcess, client: KvClient) -> None:
    names = fresh()
    store(client, names)
    wait_for_rooms(server)
    others = [[NewChunk(name, noise(SIZE)) for name in some] for some in (names[:3], names[3:])]
    told = client.mput_batches(others)
    existed = [
        each.existed for answer in told if isinstance(answer, list) for each in answer if isinstance(each, StoredChunk)
    ]
    assert existed == [True] * 6
    wait_until(lambda: prepared(server) == 0, timeout_seconds=15, what="the room to be given back")
    check(client, names)
    assert all(each.existed for each in store(client, names))
    store(client, more := fresh())
    check(client, more)
    assert client.same_host_fallbacks == 0


def test_a_chunk_that_names_its_digest_has_it_compared(server: ServerProcess, client: KvClient) -> None:
    store(client, fresh())
    wait_for_rooms(server)
    wrong, right = fresh(2)
    told = client.mput_batches([[NewChunk(wrong, payload(wrong, SIZE), digest=bytes(32))]])
    assert isinstance(told[0], KvobjError)
    assert client.get_chunk(wrong) is None
    store(client, [right])
    check(client, [right])


def test_a_class_that_is_asked_for_is_had_though_there_is_room_of_another(
    server: ServerProcess, client: KvClient
) -> None:
    store(client, fresh())
    wait_for_rooms(server)
    names = fresh()
    told = client.mput_batches([[NewChunk(name, payload(name, SIZE))] for name in names], durability="local")
    answers = [each for answer in told if isinstance(answer, list) for each in answer]
    assert [each.durability for each in answers if isinstance(each, StoredChunk)] == ["local"] * len(names)
    check(client, names)
    assert client.same_host_fallbacks == 0


def test_a_call_that_was_ended_leaves_no_lane_that_seems_to_have_room() -> None:
    for count in (0, 2):
        ours, theirs = socket.socketpair()
        theirs.settimeout(0)
        lane = Lane(ours, GrantAnswer("", b"", b"", 1000, may_write=True, is_trusted=True))
        scope = CallScope()
        scope.cancel()
        with scope.entered(), pytest.raises(UnavailableError):
            lane.prepare(SIZE, count, None, deadline=time.monotonic() + 30)
        assert not lane.has_rooms
        assert theirs.recv(1) == b""  # closed: what the server still holds for it goes with it
        theirs.close()


def test_the_keeper_does_not_forget_room_that_comes_as_it_looks() -> None:
    """A store behind whose rooms nobody looks would have them for as long as the client is connected."""
    looked, went_on = threading.Event(), threading.Event()

    class Lanes(set[Lane]):
        def __iter__(self) -> Iterator[Lane]:
            yield from super().__iter__()
            looked.set()
            assert went_on.wait(30)

    class Noted:
        """A lock that says that the store has come to it."""

        def __init__(self) -> None:
            self.inner = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread().name == "store":
                went_on.set()
            self.inner.acquire()

        def __exit__(self, *_: object) -> None:
            self.inner.release()

    def refuse(*_: object) -> GrantAnswer:
        raise UnavailableError("no server")

    path = same_host.SameHost(refuse, lambda _: None, timeout_seconds=5)
    path._lock = cast("threading.Lock", Noted())
    ours, theirs = socket.socketpair()
    lane = Lane(ours, GrantAnswer("", b"", b"", 1000, may_write=True, is_trusted=True))
    path._lanes = Lanes([lane])
    lent = path._lane(None)
    path._loans.add(lent)  # somebody stores by it
    lent.lane = lane
    path._rooms_until = 0.0

    def keep() -> None:
        assert looked.wait(30)
        lane.has_rooms = True
        path._keep_rooms(lane, [])
        went_on.set()

    storing = threading.Thread(target=keep, name="store")
    storing.start()
    path.flush()
    storing.join(30)
    assert path._rooms_until is not None
    lane.close()
    theirs.close()


def test_room_that_nobody_uses_is_given_back_in_time(
    server: ServerProcess, client: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "ROOMS_SECONDS", 0.2)
    for _ in range(2):
        store(client, names := fresh())
        wait_until(lambda: prepared(server) == 0, timeout_seconds=15, what="the room to be given back")
        check(client, names)
    store(client, names := fresh())
    check(client, names)
    assert client.same_host_fallbacks == 0


def test_threads_that_store_and_read_at_once_get_right_bytes(server: ServerProcess, client: KvClient) -> None:
    wrong: list[object] = []

    def work() -> None:
        for _ in range(12):
            names = fresh(4)
            store(client, names, batches=2)
            wrong.extend(
                item for item, name in zip(client.mget(names), names, strict=True) if item.data != payload(name, SIZE)
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert client.same_host_fallbacks == 0
    assert prepared(server) <= 4 * 2 * SIZE * 2


def test_a_client_that_dies_with_room_ahead_leaves_nothing(server: ServerProcess) -> None:
    before = server.settled_occupancy()
    with Holder(server) as holder:
        assert holder.ask(f"storing-on {secrets.token_hex(6)} {SIZE}") == "stored"
        wait_for_rooms(server)
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        wait_for_nothing_held(server)
    wait_until(lambda: prepared(server) == 0, timeout_seconds=15, what="the room to be given back")
    with client_of(server, same_host=False) as far:
        stored = server.settled_occupancy()["arena reserved_bytes"] - before["arena reserved_bytes"]
        assert stored <= 4 * 2 * SIZE
        assert far.get_chunk("never-stored") is None


def test_a_client_killed_while_it_stores_on_leaves_whole_chunks_or_none(server: ServerProcess) -> None:
    name = secrets.token_hex(6)
    with Holder(server) as holder:
        holder.say(f"storing-for-ever {name} {SIZE}")
        with client_of(server, same_host=False) as far:
            wait_until(lambda: far.get_chunk(f"{name}-30-0") is not None, timeout_seconds=30, what="stores to go on")
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
    wait_for_nothing_held(server)
    wait_until(lambda: prepared(server) == 0, timeout_seconds=15, what="the room to be given back")
    found = 0
    with client_of(server, same_host=False) as far:
        for turn in range(10_000):
            names = [f"{name}-{turn}-{index}" for index in range(4)]
            data = [item.data for item in far.mget(names)]
            assert all(each in (None, payload(key, SIZE)) for each, key in zip(data, names, strict=True))
            if not any(data):
                break
            found += 1
    assert found > 30


def test_stores_go_on_over_a_restart(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings()) as own, client_of(own) as client:
        assert client.is_same_host
        store(client, before := fresh())
        wait_for_rooms(own)
        own.kill()
        own.start()
        store(client, during := fresh())
        wait_until(lambda: client.is_same_host, timeout_seconds=20, what="the same-host path to be back")
        store(client, after := fresh())
        store(client, last := fresh())
        for names in (before, during, after, last):
            check(client, names)
        client.close()
        wait_for_nothing_held(own)


def test_writers_with_room_ahead_leave_others_theirs_in_a_small_arena(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings(dram_mib=64)) as own, client_of(own) as client, client_of(own) as other:
        for _ in range(6):
            for each in (client, other):
                store(each, names := fresh(12), size_bytes=MIB // 2)
                check(each, names, MIB // 2)
                assert prepared(own) <= 64 * MIB // 16
        with client_of(own, same_host=False) as far:
            for _ in range(4):
                far.mput([NewChunk(name, payload(name, MIB)) for name in fresh(12)])
