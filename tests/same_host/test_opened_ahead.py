"""Chunks that were opened before they are read: the read asks nobody, gets the bytes of then, and whatever comes in between leaves
nothing pinned and no wrong byte."""

from __future__ import annotations

import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from module_paths import ModulePaths
from same_host_world import (
    READER,
    Holder,
    client_of,
    gauge,
    grant_of,
    payload,
    pinned_bytes,
    raw_peer,
    settings,
    wait_for_nothing_held,
    wait_for_pinned,
)
from server_process import MIB, ServerProcess, wait_until

from kvobj.client import Credentials, KvClient, NewChunk
from kvobj.client.opened_ahead import AHEAD_CHUNKS_MAX, OpenedAhead, Turn
from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.same_host.descriptors import control_page
from kvobj.same_host.framing import framed
from kvobj.same_host.messages import (
    KEYS_AHEAD,
    TOKEN_BYTES,
    VERSION,
    Extent,
    Hello,
    Open,
    Opened,
    Welcome,
    encode,
)
from kvobj.store.extents import extent_bytes

DECLARATION = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign"}
SIZE = 300_000
EXTENT = extent_bytes(SIZE)
DRAM_MIB = 256
HITS = 'kvobj_tier_gets_total{outcome="hit",tier="dram"}'


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("ahead"), settings(dram_mib=DRAM_MIB)) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as made:
        assert made.is_same_host
        yield made
    wait_for_nothing_held(server)


def stored(client: KvClient, count: int = 3, size_bytes: int = SIZE) -> list[str]:
    names = [f"ahead-{secrets.token_hex(8)}" for _ in range(count)]
    client.mput([NewChunk(name, payload(name, size_bytes)) for name in names])
    return names


def read(client: KvClient, names: Sequence[str], size_bytes: int = SIZE) -> list[bytes | None]:
    """What comes for the names, into rooms that were filled with something else before."""
    rooms = [bytearray(b"\xa5" * size_bytes) for _ in names]
    sizes = client.get_chunks(names, [memoryview(room) for room in rooms])
    return [None if size is None else bytes(room[:size]) for room, size in zip(rooms, sizes, strict=True)]


def bodies(names: Sequence[str], size_bytes: int = SIZE) -> list[bytes]:
    return [bytes(payload(name, size_bytes)) for name in names]


def replace(server: ServerProcess, name: str, data: bytes | memoryview) -> None:
    """Other bytes under the same name, by somebody else."""
    with server.raw() as raw:
        assert raw.request("DELETE", f"/cache/{name}").status == 204
    with client_of(server, same_host=False) as other:
        other.put_chunk(name, data)


def test_what_was_opened_ahead_is_pinned_and_its_read_is_counted_once(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    before = gauge(server, HITS)
    client.open_ahead(names)
    assert pinned_bytes(server) == 3 * EXTENT
    assert gauge(server, HITS) == before + 3
    assert read(client, names) == bodies(names)
    wait_for_pinned(server, 0)
    assert gauge(server, HITS) == before + 3, "the read asked nobody"
    assert read(client, names) == bodies(names), "each is used once, and asked for anew afterwards"
    assert gauge(server, HITS) == before + 6
    assert client.same_host_fallbacks == 0


def test_what_was_opened_ahead_is_looked_at_without_asking(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    client.open_ahead(names)
    before = gauge(server, HITS)
    views = [client.view_chunk(names[1]), *client.view_chunks([names[2], names[0]])]
    assert gauge(server, HITS) == before
    for view, name in zip(views, [names[1], names[2], names[0]], strict=True):
        assert view is not None
        assert view.is_shared
        assert view.check()
        assert view.data == payload(name, SIZE)
        view.release()
    wait_for_pinned(server, 0)


def test_more_than_one_call_shows_is_opened_in_several_and_read_in_one(server: ServerProcess, client: KvClient) -> None:
    names = stored(client, 2 * KEYS_AHEAD + 3, 5000)
    client.open_ahead(names)
    before = gauge(server, HITS)
    assert read(client, names, 5000) == bodies(names, 5000)
    assert gauge(server, HITS) == before


def test_a_chunk_that_is_replaced_behind_its_back_is_read_as_it_was_and_then_as_it_is(
    server: ServerProcess, client: KvClient
) -> None:
    names = stored(client)
    client.open_ahead(names)
    replace(server, names[1], b"other")
    assert read(client, names) == bodies(names)
    assert read(client, names) == [*bodies(names[:1]), b"other", *bodies(names[2:])]


def test_what_is_dropped_is_let_go_of_and_asked_for_anew(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    client.open_ahead(names)
    replace(server, names[0], b"new")
    client.drop_ahead(names[:1])
    wait_for_pinned(server, 2 * EXTENT)
    assert read(client, names)[0] == b"new"
    wait_for_pinned(server, 0)


def test_what_nobody_reads_is_let_go_of_after_its_time(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    client.open_ahead(names)
    assert pinned_bytes(server) == 3 * EXTENT
    wait_for_pinned(server, 0)  # nobody says a word
    assert read(client, names) == bodies(names)


def test_what_is_read_after_its_time_is_asked_for_anew(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    client.open_ahead(names, seconds=0.0)
    replace(server, names[0], b"new")
    assert read(client, names)[0] == b"new"


@pytest.mark.parametrize("absent_at", [0, 1, 3])
def test_nothing_is_opened_ahead_where_one_is_not_stored(
    server: ServerProcess, client: KvClient, absent_at: int
) -> None:
    names = stored(client)
    asked = [*names[:absent_at], "absent", *names[absent_at:]]
    client.open_ahead(asked)
    assert pinned_bytes(server) == 0
    expected: list[bytes | None] = [*bodies(names)]
    expected.insert(absent_at, None)
    assert read(client, asked) == expected


def test_a_read_of_others_beside_is_right_and_leaves_nothing_held(server: ServerProcess, client: KvClient) -> None:
    names = stored(client, 5)
    client.open_ahead(names[1:3])
    assert read(client, names) == bodies(names)
    wait_for_pinned(server, 0)
    client.open_ahead(names)
    assert read(client, names[2:4]) == bodies(names[2:4])
    wait_for_pinned(server, 3 * EXTENT)
    assert read(client, [names[0], names[0]]) == bodies([names[0], names[0]]), "the second is asked for"
    client.drop_ahead(names)


def test_what_is_not_in_memory_is_not_brought_there_ahead(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings(dram_mib=64)) as server, client_of(server) as client:
        names = stored(client, size_bytes=MIB)
        for _ in range(24):  # until the first have made room
            stored(client, 8, MIB)
        cold = 'kvobj_tier_gets_total{outcome="hit",tier="nvme"}'
        before = gauge(server, cold)
        client.open_ahead(names)
        assert (pinned_bytes(server), gauge(server, cold)) == (0, before)
        assert read(client, names, MIB) == bodies(names, MIB)
        assert gauge(server, cold) > before


def test_who_was_granted_a_namespace_reads_as_before(server: ServerProcess, client: KvClient) -> None:
    space = client.declare_namespace("granted", {**DECLARATION, "access": {READER.id: "read"}})
    client.put_chunk("k", payload("k", SIZE), namespace=space)
    room = memoryview(bytearray(SIZE))
    with client_of(server, READER) as reader:
        assert reader.is_same_host
        reader.open_ahead(["k"], namespace=space)
        assert reader.get_chunks(["k"], [room], namespace=space) == [SIZE]
        reader.drop_ahead(["k"], namespace=space)
    assert room == payload("k", SIZE)


def test_where_there_is_no_shared_memory_it_does_nothing(server: ServerProcess) -> None:
    with client_of(server, same_host=False) as far:
        names = stored(far)
        far.open_ahead(names)
        assert read(far, names) == bodies(names)
        far.drop_ahead(names)


def test_what_is_ahead_takes_half_of_what_a_holder_may_pin_and_readers_find_room(
    server: ServerProcess, client: KvClient
) -> None:
    names = [
        name for _ in range(7) for name in stored(client, 1, 8 * MIB)
    ]  # of 256 MiB one may pin 64, in whole extents
    for name in names:
        client.open_ahead([name])
    assert pinned_bytes(server) == 3 * extent_bytes(8 * MIB)
    with client_of(server) as other:
        assert read(other, names[:3], 8 * MIB) == bodies(names[:3], 8 * MIB)
        assert other.same_host_fallbacks == 0
    assert read(client, names[3:], 8 * MIB) == bodies(names[3:], 8 * MIB)
    assert client.same_host_fallbacks == 0
    client.drop_ahead(names)


def test_what_is_ahead_stays_right_while_memory_is_filled_over_and_over(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings(dram_mib=64)) as server, client_of(server) as client:
        assert client.is_same_host
        for _ in range(4):
            names = stored(client, 2, MIB)
            client.open_ahead(names)
            with client_of(server, same_host=False) as other:
                for _ in range(8):
                    stored(other, 7, 2 * MIB)
            assert read(client, names, MIB) == bodies(names, MIB)


def test_a_restart_in_between_costs_the_read_its_way_and_no_byte(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings()) as server, client_of(server) as client:
        names = stored(client)
        client.open_ahead(names)
        server.kill()
        server.start()
        assert read(client, names) == bodies(names)
        wait_until(lambda: client.is_same_host, timeout_seconds=20, what="the same-host path to be back")
        client.open_ahead(names)
        assert read(client, names) == bodies(names)
        client.close()
        wait_for_nothing_held(server)


def test_a_client_that_stalls_past_its_lease_reads_right_and_one_that_dies_leaves_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, settings(lease="1 s")) as server:
        with client_of(server, same_host=False) as far:
            far.put_chunk("k", payload("k", SIZE))
        with Holder(server) as holder:
            assert holder.ask("ahead k") == "True"
            assert pinned_bytes(server) == EXTENT
            holder.process.send_signal(signal.SIGSTOP)
            wait_for_pinned(server, 0)
            replace(server, "k", payload("other", SIZE))
            holder.process.send_signal(signal.SIGCONT)
            assert holder.ask(f"read k {SIZE}") == payload("other", 8).hex()
            assert holder.ask("ahead k") in {"True", "False"}  # whether the path is back already
            holder.process.send_signal(signal.SIGKILL)
            holder.process.wait()
        wait_for_nothing_held(server)


def test_a_forked_child_has_nothing_of_what_its_parent_had_opened(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    client.open_ahead(names)
    with Holder(server) as holder:  # a process of its own, so that no test's thread is forked
        assert holder.ask(f"fork-ahead {names[0]} {SIZE}") == payload(names[0], 8).hex()
    assert read(client, names) == bodies(names)


def test_threads_that_open_read_and_drop_at_once_get_right_bytes_and_leave_nothing(
    server: ServerProcess, client: KvClient
) -> None:
    names = stored(client, 12)
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(40):
            some = [names[(number + turn + at) % 12] for at in range(4)]
            client.open_ahead(some)
            if (turn + number) % 3 == 0:
                client.drop_ahead(some[:2])
            if read(client, some) != bodies(some):
                wrong.append(some)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    client.drop_ahead(names)
    wait_for_pinned(server, 0)


def test_a_peer_is_shown_all_ahead_or_nothing(server: ServerProcess, client: KvClient) -> None:
    names = stored(client)
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
        assert isinstance(peer.ask(Open(names[:1])), Opened)  # the region is shown
        for keys in ([*names, "absent"], ["k"] * (KEYS_AHEAD + 1), []):
            assert peer.ask(Open(keys, is_ahead=True)) == Opened([None] * len(keys))
        shown = peer.ask(Open(names, is_ahead=True))
        assert isinstance(shown, Opened)
        assert [each and each.size_bytes for each in shown.extents] == [SIZE] * 3
        assert pinned_bytes(server) == 4 * EXTENT


# -- what a client keeps of them -----------------------------------------------------------------------------------
class Kept:
    """An `OpenedAhead`, a lane that holds until it is closed, and what was let go of."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.let_go: list[int] = []
        self.ahead = OpenedAhead(lambda _lane, handles: self.let_go.extend(handles))

    def opened(self, begun: tuple[Turn, Sequence[str]], *handles: int, lane: Lane | None = None) -> None:
        """What was begun is there."""
        turn, keys = begun
        extents = [Extent(handle, 0, 0, 10, 1, None, "dram") for handle in handles]
        self.ahead.keep(turn, lane or self.lane, keys, extents)
        self.ahead.end(turn)

    def take(self, *keys: str) -> list[int] | None:
        taken = self.ahead.take(keys)
        return None if taken is None else [extent.handle for extent in taken[1]]


@contextmanager
def lane_in(directory: Path, greeting: bytes | None = None) -> Iterator[Lane]:
    """A lane to a server that greets and does nothing else."""
    path = directory / secrets.token_hex(4)
    descriptor, page = control_page()
    welcome = framed(greeting or encode(Welcome(VERSION, opens_ahead=True)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        peers: list[socket.socket] = []

        def greet() -> None:
            peer, _ = listening.accept()
            peers.append(peer)
            socket.send_fds(peer, [welcome], [descriptor])

        thread = threading.Thread(target=greet)
        thread.start()
        lane = Lane.connect(GrantAnswer(str(path), b"id", bytes(TOKEN_BYTES), 30_000), deadline=time.monotonic() + 10)
        thread.join(10)
        try:
            yield lane
        finally:
            lane.close()
            peers[0].close()
            page.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with lane_in(tmp_path) as lane:
        yield Kept(lane)


def test_what_is_kept_or_coming_is_not_asked_for_again(kept: Kept) -> None:
    first, second = kept.ahead.begin(["a", "b", "a"]), kept.ahead.begin(["b", "c"])
    assert (first[1], second[1]) == (["a", "b"], ["c"])
    kept.opened(first, 1, 2)
    assert kept.ahead.begin(["a", "b", "c"])[1] == []
    kept.opened(second, 3)
    assert kept.take("c", "a", "b") == [3, 1, 2]
    assert len(kept.ahead) == 0
    assert kept.ahead.due is None
    assert kept.ahead.begin(["a"])[1] == ["a"]
    assert kept.let_go == []


def test_what_is_dropped_while_it_comes_is_let_go_of_when_it_is_there(kept: Kept) -> None:
    begun = kept.ahead.begin(["a", "b"])
    kept.ahead.drop(["a"])
    kept.opened(begun, 1, 2)
    assert kept.let_go == [1]
    assert kept.take("a", "b") is None
    assert kept.let_go == [1, 2], "the rest is not kept either: its read is over"


def test_what_was_not_shown_is_not_kept(kept: Kept) -> None:
    turn, _ = kept.ahead.begin(["a", "b"])
    kept.ahead.end(turn)
    assert (len(kept.ahead), kept.take("a")) == (0, None)
    turn, keys = kept.ahead.begin(["a", "b"])
    kept.ahead.keep(turn, kept.lane, keys, [None, Extent(2, 0, 0, 10, 1, None, "dram")])
    assert kept.take("b") == [2]
    assert kept.ahead.begin(["a"])[1] == ["a"]


def test_a_late_answer_is_not_taken_for_that_to_a_later_question(kept: Kept) -> None:
    before = kept.ahead.begin(["a"])
    kept.ahead.drop(["a"])
    after = kept.ahead.begin(["a"])
    kept.opened(before, 1)
    assert kept.let_go == [1]
    kept.opened(after, 2)
    assert kept.take("a") == [2]


def test_what_comes_in_several_answers_is_read_together(kept: Kept) -> None:
    turn, keys = kept.ahead.begin(["a", "b"])
    kept.ahead.keep(turn, kept.lane, keys[:1], [Extent(1, 0, 0, 10, 1, None, "dram")])
    taken: list[list[int] | None] = []
    reading = threading.Thread(target=lambda: taken.append(kept.take("a", "b")))
    reading.start()
    kept.ahead.keep(turn, kept.lane, keys[1:], [Extent(2, 0, 0, 10, 1, None, "dram")])
    reading.join(10)
    assert taken in ([[1, 2]], [None]), "its wait is bounded"


def test_a_read_waits_for_an_answer_that_is_under_way_and_not_for_ever(kept: Kept) -> None:
    begun = kept.ahead.begin(["a"])
    taken: list[list[int] | None] = []
    reading = threading.Thread(target=lambda: taken.append(kept.take("a")))
    reading.start()
    kept.opened(begun, 1)
    reading.join(10)
    assert taken in ([[1]], [None]), "its wait is bounded"
    late = kept.ahead.begin(["late"])
    assert kept.take("late") is None
    kept.ahead.end(late[0])


def test_what_a_lane_held_that_has_ended_is_not_given_out(kept: Kept) -> None:
    kept.opened(kept.ahead.begin(["a"]), 1)
    kept.lane.close()
    assert kept.take("a") is None
    assert kept.let_go == [1]


def test_what_lies_on_two_lanes_is_asked_for_anew(kept: Kept, tmp_path: Path) -> None:
    with lane_in(tmp_path) as other:
        kept.opened(kept.ahead.begin(["a"]), 1)
        kept.opened(kept.ahead.begin(["b"]), 2, lane=other)
        assert kept.take("a", "b") is None
        assert sorted(kept.let_go) == [1, 2]


def test_what_is_kept_is_bounded(kept: Kept) -> None:
    keys = [str(number) for number in range(AHEAD_CHUNKS_MAX + 5)]
    begun = kept.ahead.begin(keys)
    assert len(begun[1]) == AHEAD_CHUNKS_MAX
    kept.opened(begun, *range(AHEAD_CHUNKS_MAX))
    assert kept.ahead.begin(["more"])[1] == []
    assert kept.take("0") == [0]
    assert kept.ahead.begin(["more"])[1] == ["more"]


def test_what_was_begun_by_one_who_is_gone_is_asked_for_anew(kept: Kept) -> None:
    begun = kept.ahead.begin([str(number) for number in range(AHEAD_CHUNKS_MAX)])
    assert kept.ahead.begin(["more"])[1] == []
    del begun  # as an interrupt leaves it
    assert kept.take("0") is None
    assert kept.ahead.begin(["more", "0"])[1] == ["more", "0"]


def test_what_is_not_over_yet_stays(kept: Kept) -> None:
    kept.opened(kept.ahead.begin(["a"]), 1)
    due = kept.ahead.due
    assert due is not None
    kept.ahead.expire()
    assert kept.let_go == []

    def is_over() -> bool:
        kept.ahead.expire()
        return kept.let_go == [1]

    wait_until(is_over, timeout_seconds=15, what="its time to be over")
    assert len(kept.ahead) == 0


def test_a_lane_tells_whether_its_server_knows_of_it(tmp_path: Path) -> None:
    with lane_in(tmp_path) as lane:
        assert lane.opens_ahead
    with lane_in(tmp_path, msgspec.msgpack.encode([1, VERSION])) as lane:
        assert not lane.opens_ahead


def test_credentials_of_others_open_nothing_ahead(server: ServerProcess) -> None:
    with client_of(server) as owner:
        names = stored(owner)
    wait_for_nothing_held(server)
    stranger = KvClient(server.endpoint, Credentials("nobody", "nothing"), "cache", timeout_seconds=5.0)
    with stranger:
        before = gauge(server, HITS)
        stranger.open_ahead(names)
        assert gauge(server, "kvobj_same_host_handles") == 0
        assert gauge(server, HITS) == before
