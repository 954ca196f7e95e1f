"""Holders that die, stall or outlive their server: nothing of theirs stays, and stale memory is never taken for right bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from same_host_world import (
    READER,
    STRANGER,
    Holder,
    client_of,
    grant_of,
    payload,
    pinned_bytes,
    raw_peer,
    settings,
    viewed,
    wait_for_nothing_held,
)
from server_process import MIB, ServerProcess, wait_until

from kvobj.client import KvClient, NewChunk, StoredChunk
from kvobj.errors import NoSuchSessionError, UnavailableError
from kvobj.same_host.messages import VERSION, Failed, Hello, NewItem, Open, Opened, Reserve, Reserved, Welcome
from kvobj.store.extents import extent_bytes

SIZE = 3 * MIB
ENTRY = payload("k", 8).hex()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    # Leases of a second, so that stalling past one takes no longer.
    with ServerProcess(tmp_path, settings(lease="1 s")) as running:
        yield running


def put(server: ServerProcess, name: str = "k", size_bytes: int = SIZE) -> None:
    with client_of(server, same_host=False) as client:
        client.put_chunk(name, payload(name, size_bytes))


def test_a_killed_client_gives_back_what_it_held_and_leaves_nothing_visible(server: ServerProcess) -> None:
    put(server)
    before = server.settled_occupancy()
    with Holder(server) as holder:
        assert holder.ask("view k") == "shared"
        assert holder.ask(f"reserve unfinished {2 * MIB}") == "reserved"
        assert pinned_bytes(server) == extent_bytes(SIZE)
        assert server.occupancy()["arena reserved_bytes"] > before["arena reserved_bytes"]
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        wait_for_nothing_held(server)
    server.wait_for_occupancy(before)
    with client_of(server) as client:
        assert client.get_chunk("unfinished") is None
        assert client.get_chunk("k") == payload("k", SIZE)


def test_a_client_that_stalls_past_its_lease_is_told_so_when_it_wakes(server: ServerProcess) -> None:
    put(server)
    with Holder(server) as holder:
        assert holder.ask("view k") == "shared"
        assert holder.ask("check k") == f"{ENTRY} True"
        holder.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: pinned_bytes(server) == 0, timeout_seconds=15, what="the pins of who stalls to go")
        holder.process.send_signal(signal.SIGCONT)
        assert holder.ask("check k").endswith("False")
        assert holder.ask("get k") == ENTRY  # by whichever way is up now
    wait_for_nothing_held(server)


def test_room_of_a_trusted_writer_that_stalls_is_nobody_elses_until_it_is_gone(server: ServerProcess) -> None:
    before = server.settled_occupancy()
    with Holder(server) as holder:
        assert holder.ask(f"reserve half {2 * MIB}") == "reserved"
        held = server.occupancy()["arena reserved_bytes"]
        holder.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "is revoked" in server.log_tail(80), timeout_seconds=15, what="the revocation")
        assert server.occupancy()["arena reserved_bytes"] == held > before["arena reserved_bytes"]
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        server.wait_for_occupancy(before)
    wait_for_nothing_held(server)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGUSR2])
def test_room_of_a_writer_that_outlives_its_server_is_nobody_elses_in_the_next_life(
    server: ServerProcess, by: signal.Signals
) -> None:
    names = [f"other-{number}" for number in range(8)]
    with Holder(server) as holder:
        holder.say(f"fill-late mine {8 * MIB}")
        assert holder.hear() == "reserved"
        server.terminate(by=by)
        server.start()
        withheld = server.status()["arena"]["withheld_bytes"]
        assert 8 * MIB <= withheld <= 9 * MIB
        with client_of(server) as client:
            client.mput([NewChunk(name, payload(name, SIZE)) for name in names])
            holder.process.send_signal(signal.SIGCONT)
            assert holder.hear() == "written"
            for name in names:
                assert client.get_chunk(name) == payload(name, SIZE)
        with client_of(server, same_host=False) as client:
            for name in names:
                assert client.get_chunk(name) == payload(name, SIZE)
        # The writer has found out, and mapped the memory anew: nothing of before can be written to any more.
        assert holder.ask("get other-0") == payload("other-0", 8).hex()

        def is_given_back() -> bool:
            return bool(server.status()["arena"]["withheld_bytes"] == 0)

        wait_until(is_given_back, timeout_seconds=20, what="the room of the writer of before")


def test_writers_that_stall_with_all_they_may_reserve_do_not_keep_others_from_storing(server: ServerProcess) -> None:
    grants = [grant_of(server) for _ in range(2)]
    with ExitStack() as stack:
        peers = [stack.enter_context(raw_peer(grant.socket)) for grant in grants]
        for number, (peer, grant) in enumerate(zip(peers, grants, strict=True)):
            assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
            items = [NewItem(f"stalled-{number}-{index}", 5 * MIB) for index in range(6)]
            assert isinstance(peer.ask(Reserve("default", items)), Reserved)  # of 256 MiB one may reserve 32
            refused = peer.ask(Reserve("default", [NewItem("more", 2 * MIB)]))
            assert isinstance(refused, Failed)
            assert refused.status == 503
        held = server.occupancy()["arena reserved_bytes"]
        wait_until(lambda: server.log_tail(200).count("is revoked") == 2, timeout_seconds=15, what="the revocations")
        with client_of(server) as client, client_of(server, same_host=False) as far:
            for each in (client, far):
                (told,) = each.mput([NewChunk(f"stored-{each is far}", payload("k", 16 * MIB))])
                assert isinstance(told, StoredChunk)
        assert server.occupancy()["arena reserved_bytes"] > held
    wait_for_nothing_held(server)


def test_a_client_falls_back_while_its_server_is_away_and_comes_back_with_it(server: ServerProcess) -> None:
    put(server)
    with client_of(server) as client:
        view = viewed(client, "k")
        assert view.is_valid
        server.kill()
        assert not view.is_valid
        told = client.mput_batches([[NewChunk(f"gone-{batch}", payload("k", SIZE))] for batch in range(3)])
        assert [type(answer) for answer in told] == [UnavailableError] * 3
        server.start()
        assert not view.is_valid
        view.release()
        assert client.get_chunk("k") == payload("k", SIZE)  # over HTTP if need be
        wait_until(lambda: client.is_same_host, timeout_seconds=20, what="the same-host path to be back")
        with viewed(client, "k") as found:
            assert found.is_shared
            assert found.data == payload("k", SIZE)
        assert client.same_host_fallbacks > 0


def test_a_stop_revokes_what_is_held_first(server: ServerProcess) -> None:
    put(server)
    with client_of(server) as client:
        view = viewed(client, "k")
        assert server.terminate() == 0
        assert not view.is_valid


def test_a_client_that_does_not_renew_loses_its_connection(server: ServerProcess) -> None:
    put(server)
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
        control = peer.descriptors[-1]  # behind the regions that a trusted writer is shown
        opened = peer.ask(Open(["k"]))
        assert isinstance(opened, Opened)
        assert os.pread(control, 1, 0) == b"\0"
        assert peer.is_ended()  # it asks for nothing, and a lease passes
        assert os.pread(control, 1, 0) == b"\1"
    wait_for_nothing_held(server)


def test_nothing_is_held_for_a_client_that_could_not_be_shown_the_memory(server: ServerProcess) -> None:
    with client_of(server, STRANGER, bucket="apart", same_host=False) as client:
        client.put_chunk("k", payload("k", SIZE))
    grant = grant_of(server, STRANGER, bucket="apart")
    regions = list(server.shared_memory.rglob("region-*"))
    with raw_peer(grant.socket) as peer:
        assert isinstance(peer.ask(Hello(VERSION, grant.token)), Welcome)
        for region in regions:
            region.rename(f"{region}.away")
        try:
            failed = peer.ask(Open(["k"]))
            held = pinned_bytes(server)
        finally:
            for region in regions:
                region.with_name(f"{region.name}.away").rename(region)
        assert isinstance(failed, Failed)
        assert failed.status == 503
        assert held == 0
        assert isinstance(peer.ask(Open(["k"])), Opened)


def test_a_token_is_of_no_use_after_its_connection_has_ended(server: ServerProcess) -> None:
    grant = grant_of(server)
    with raw_peer(grant.socket) as peer:
        peer.ask(Hello(VERSION, grant.token))
    wait_for_nothing_held(server)
    with client_of(server) as client, pytest.raises(NoSuchSessionError):
        client._renew_grant(grant.id)


def test_a_user_whose_rights_end_loses_the_connection_within_a_lease(server: ServerProcess) -> None:
    with client_of(server, same_host=False) as root:
        root.declare_namespace("theirs", DECLARATION | {"access": {READER.id: "read"}})
        with Holder(server, READER) as holder:
            assert holder.ask("up x") == "True"
            root.declare_namespace("theirs", DECLARATION | {"access": {}})
            wait_for_nothing_held(server)


def test_many_clients_come_and_go_and_nothing_is_left(server: ServerProcess) -> None:
    put(server)
    before = server.settled_occupancy()
    clients: list[KvClient] = []
    for _ in range(10):
        client = client_of(server)
        clients.append(client)
        assert client.view_chunk("k") is not None
        client.put_chunk("k", payload("k", SIZE))
    for client in clients:
        client.close()
    wait_for_nothing_held(server)
    server.wait_for_occupancy(before)


DECLARATION = {
    "model": "m",
    "chunk_tokens": 16,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": 4, "kv_heads": 8, "head_dim": 64},
    "ids": "kvobj",
}
