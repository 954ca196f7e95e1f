"""A connector's link against a real server: what is stored, held and loaded, and that whatever happens is a miss in time."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from link_world import settings_of
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting, wait_until

from kvobj.client import Credentials, KvClient, NewChunk
from kvobj.client.kv_values import ROOT
from kvobj.connectors import StoreLink
from kvobj.connectors.lmcache.tasks import TaskRunner
from kvobj.connectors.storing import Outcome

USER = UserSetting("engine", "KVENGINE000000000000", "s" * 40)
SETTINGS = ServerSettings(
    dram_bytes=96 * MIB,
    nvme_bytes=256 * MIB,
    buckets=(
        *(BucketSetting(name, kind="kv", durability="memory") for name in ("cache", "far")),
        BucketSetting("ordinary"),
    ),
    users=(USER,),
    sections={"gc": {"grace": '"1 s"'}},
)
SMALL = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=128 * MIB, buckets=SETTINGS.buckets)
FOREIGN: dict[str, object] = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign"}
TENSORS: dict[str, object] = {
    "model": "m",
    "chunk_tokens": 16,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": 4, "kv_heads": 1, "head_dim": 8},
    "ids": "kvobj",
}
CHUNK_BYTES = 2048
SIZES = (1, 4096, MIB, 100_000)
WAIT_SECONDS = 30.0
"""A call of these tests takes no longer on any machine."""


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("link"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def kept_frail(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("frail"), SMALL) as running:
        yield running


@pytest.fixture
def frail(kept_frail: ServerProcess) -> Iterator[ServerProcess]:
    """One that a test may stop, kill and start: afterwards it runs and answers, whatever became of the test."""
    yield kept_frail
    if kept_frail.is_running:
        os.kill(kept_frail.pid, signal.SIGCONT)
    else:
        kept_frail.start()


@contextmanager
def done_on(what: Callable[[], None], *, threads: int) -> Iterator[None]:
    """So many threads do it again and again within the block; what one of them raises fails it."""
    is_over = threading.Event()
    failed: list[BaseException] = []

    def go_on() -> None:
        try:
            while not is_over.wait(0.01):
                what()
        except BaseException as error:  # noqa: BLE001 - the test is to have it, whatever it is
            failed.append(error)

    started = [threading.Thread(target=go_on, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in started:
            thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in started)
    assert not failed, failed


@pytest.fixture(params=["cache", "far"])
def link(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[StoreLink]:
    """By both ways that chunks go, each in a bucket of its own: shared memory, and HTTP."""
    link = StoreLink(
        settings_of(server, bucket=request.param, same_host=request.param == "cache", timeout_seconds=WAIT_SECONDS)
    )
    yield link
    link.close()


def body(name: str, size_bytes: int) -> bytes:
    return blake3(name.encode()).digest(length=size_bytes)


def chunks_of(prefix: str, sizes: tuple[int, ...] = SIZES) -> list[NewChunk]:
    return [NewChunk(f"{prefix}/{at}", body(f"{prefix}/{at}", size)) for at, size in enumerate(sizes)]


def names_of(chunks: list[NewChunk]) -> list[str | bytes]:
    return [chunk.id for chunk in chunks]


def loaded(link: StoreLink, chunks: list[NewChunk]) -> list[bytes | None]:
    """What comes for these chunks, in rooms of their sizes that were filled with something else before."""
    rooms = [bytearray(b"\xa5" * len(chunk.data)) for chunk in chunks]
    came = link.load(names_of(chunks), [memoryview(room) for room in rooms])
    return [bytes(room) if is_there else None for room, is_there in zip(rooms, came, strict=True)]


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}/metrics", timeout=10) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    (value,) = [float(line.split()[1]) for line in lines if line.startswith(f"{name} ")]
    return value


def wait_for_nothing_pinned(server: ServerProcess) -> None:
    """Until no extent is held for a client that reads out of shared memory."""
    wait_until(
        lambda: metric(server, "kvobj_same_host_pinned_bytes") == 0, timeout_seconds=15, what="no extents to be held"
    )


def bodies(chunks: list[NewChunk]) -> list[bytes]:
    return [bytes(chunk.data) for chunk in chunks]


class TestChunks:
    def test_what_was_stored_is_found_and_loaded_whole(self, link: StoreLink) -> None:
        chunks = chunks_of("whole")
        absent = NewChunk("whole/absent", b"x")
        assert link.present([*names_of(chunks), "whole/absent"]) == [False] * 5
        assert link.store(chunks) == [True] * 4
        assert link.store(chunks) == [True] * 4, "what is there already counts as stored"
        asked = [*chunks[:2], absent, *chunks[2:]]
        found = [True, True, False, True, True]
        assert link.present(names_of(asked)) == found
        assert link.hold(names_of(asked)) == found
        assert loaded(link, asked) == [
            bytes(each.data) if there else None for each, there in zip(asked, found, strict=True)
        ]
        link.release(names_of(asked))
        report = link.report()
        assert (report["is_up"], report["held"], report["errors"], report["loads"]) == (True, 0, 0, 4)
        assert report["same_host"] is link.settings.same_host

    def test_a_run_ends_at_the_first_miss(self, link: StoreLink) -> None:
        chunks = chunks_of("run")
        assert link.store([chunks[0], chunks[1], chunks[3]]) == [True] * 3
        assert link.hold_run(names_of(chunks)) == 2
        assert link.report()["held"] == 2
        assert link.hold_run(["run/none", *names_of(chunks)]) == 0
        link.release(names_of(chunks))
        assert link.report()["held"] == 0
        assert link.run(names_of(chunks)) == 2
        assert link.run(names_of(chunks)[2:]) == 0
        assert link.hold_run([]) == link.run([]) == 0

    def test_a_chain_is_held_by_its_tail(self, server: ServerProcess) -> None:
        link = StoreLink(settings_of(server, namespace="chained", declaration=TENSORS))
        keys = server.credentials()
        with KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache") as client:
            namespace = client.declare_namespace("chained", TENSORS)
            ids = namespace.chunk_ids(list(range(16 * 5)))
            chunks = [
                NewChunk(each, body(each.hex(), CHUNK_BYTES), parent=ids[at - 1] if at else ROOT)
                for at, each in enumerate(ids)
            ]
            assert link.store(chunks[:4]) == [True] * 4
            assert link.present(ids[1:]) == [True, True, True, False], "and its middle is found by itself"
            assert link.hold_run(ids) == 4
            with server.raw() as raw:
                assert raw.request("DELETE", f"/cache/{ids[0].hex()}").status == 204
            assert client.match(namespace=namespace, ids=ids).matched == 0
            assert loaded(link, chunks) == [*bodies(chunks[:4]), None], "what is held is read after a DELETE too"
        link.close()

    def test_a_chunk_comes_into_a_room_of_its_size_or_not_at_all(self, link: StoreLink) -> None:
        chunks = chunks_of("rooms", (5000, 5000, 5000))
        assert link.store(chunks) == [True] * 3
        rooms = [bytearray(5000), bytearray(4999), bytearray(5001)]
        assert link.load(names_of(chunks), [memoryview(room) for room in rooms]) == [True, False, False]
        assert bytes(rooms[0]) == chunks[0].data
        assert link.load(names_of(chunks), [memoryview(bytes(5000))] * 3) == [False] * 3, (
            "a room that cannot be written"
        )
        assert link.load(names_of(chunks), [memoryview(bytearray(5000))]) == [False] * 3, "fewer rooms than chunks"
        assert loaded(link, chunks) == bodies(chunks), "and the link goes on"

    def test_chunks_of_unknown_sizes_come_in_memory_of_their_own(self, link: StoreLink) -> None:
        chunks = chunks_of("sized", (5000, 300, 70_000))
        assert link.put(chunks) == [Outcome.STORED] * 3
        assert link.put(chunks[:1]) == [Outcome.EXISTED]
        rooms = [memoryview(bytearray(5000)) for _ in range(4)]
        found = link.fetch([*names_of(chunks), "sized/none"], rooms)
        assert [None if each is None else bytes(each) for each in found] == [*bodies(chunks), None]
        assert [each is room for each, room in zip(found, rooms, strict=True)] == [True, False, False, False]
        assert link.hold(names_of(chunks)) == [True] * 3
        link.delete(names_of(chunks))
        for came in (link.read(names_of(chunks)), link.fetch(names_of(chunks), rooms[:3])):
            assert [None if each is None else bytes(each) for each in came] == bodies(chunks)
        link.release(names_of(chunks))
        assert link.read(names_of(chunks)) == [None] * 3

    def test_large_batches_are_moved_by_several_threads_and_are_as_right(self, server: ServerProcess) -> None:
        chunks = chunks_of("threads", (3 * MIB,) * 7 + (5, 0, MIB))
        for same_host in (True, False):
            link = StoreLink(settings_of(server, bucket="cache", same_host=same_host, threads=3))
            assert link.store(chunks) == [True] * 10
            assert loaded(link, chunks) == bodies(chunks)
            link.close()

    def test_rooms_may_be_of_any_shape(self, link: StoreLink) -> None:
        (chunk,) = chunks_of("shaped", (4096,))
        link.store([chunk])
        room = memoryview(bytearray(4096)).cast("B", (4, 32, 32))
        assert link.load([chunk.id], [room]) == [True]
        assert bytes(room) == chunk.data

    def test_ranks_that_disagree_about_a_chunk_are_told_and_the_others_stand(
        self, server: ServerProcess, link: StoreLink
    ) -> None:
        other = StoreLink(settings_of(server, bucket=link.settings.bucket))
        mine, theirs = chunks_of("ranks", (4096, 4096)), chunks_of("ranks", (4096, 8192, 100))
        assert link.store(mine) == [True, True]
        assert other.store(theirs) == [True, False, True]
        assert other.store([theirs[1]]) == [False]
        report = other.report()
        assert report["disagreements"] == 2
        assert report["last_disagreement"]
        assert loaded(other, mine) == bodies(mine)
        other.close()

    def test_a_chunk_that_is_not_of_the_namespaces_layout_is_refused_alone(self, server: ServerProcess) -> None:
        link = StoreLink(settings_of(server, namespace="tensors", declaration={**TENSORS, "ids": "foreign"}))
        right, wrong = NewChunk("a", body("a", CHUNK_BYTES)), NewChunk("b", body("b", CHUNK_BYTES + 2))
        assert link.store([wrong]) == [False]
        assert link.store([right, wrong]) == [True, False]
        assert link.report()["last_disagreement"] != ""
        link.close()

    def test_more_than_one_call_takes_is_split(self, link: StoreLink) -> None:
        chunks = [NewChunk(f"many/{at:05}", b"%d" % at) for at in range(4200)]
        assert all(link.store(chunks))
        names = names_of(chunks)
        assert link.present([*names, "many/none"]) == [True] * 4200 + [False]
        assert link.present(["many/none", *names]) == [False] + [True] * 4200
        assert loaded(link, chunks) == bodies(chunks)
        held = link.hold(names)
        assert sum(held) == 4096, "a session pins no more, and what it does not pin is told as a miss"
        assert held == [True] * 4096 + [False] * 104
        assert link.present(["many/none", *names]) == [False] + [True] * 4200, "whatever is held"
        assert link.report()["held"] == 4096
        link.release(names)
        assert link.hold(names[4000:]) == [True] * 200
        link.release(names)
        assert link.report()["errors"] == 0

    def test_what_may_not_be_pinned_any_more_is_found_without_and_told_once(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        chunks = [NewChunk(f"rows/{at:05}", b"%d" % at) for at in range(4200)]
        names = names_of(chunks)
        with closing(StoreLink(settings_of(server))) as link:
            assert all(link.store(chunks))
            assert link.hold_or_find(names[:10]) == [(True, True)] * 10
            assert link.report()["found_unheld"] == 0
            asked = ["rows/none", *names[:4095], "rows/gone", *names[4095:]]
            pinned = [(False, False), *[(True, True)] * 4086]
            assert link.hold_or_find(asked) == [*pinned, *[(True, False)] * 9, (False, False), *[(True, False)] * 105]
            for _ in range(2):
                assert link.hold_or_find(names[:2]) == [(True, False)] * 2
            report = link.report()
            assert (report["held"], report["found_unheld"], report["errors"]) == (4096, 118, 0)
            assert (report["hits"], report["misses"]) == (10 + 4200 + 4, 2)
            link.release([*names, *names[:10]])
            assert link.report()["held"] == 0
            assert link.hold_or_find(names[:2]) == [(True, True)] * 2
        (line,) = caplog.messages
        assert "114 chunks were found and not pinned" in line

    def test_names_with_any_characters_are_stored_found_listed_and_deleted(self, link: StoreLink) -> None:
        control = ["\r", "\n", "\r\n", "\t", "\x01", "\x1f", "\x7f", "\x85"]
        odd = [*control, "\ufffe", "\uffff", "\U0010ffff", "&<>\"'", "&#13;", "]]>", "%0D"]
        chunks = [NewChunk(f"odd/{each} {each}", each.encode()) for each in odd]
        names = names_of(chunks)
        assert link.store(chunks) == [True] * len(chunks)
        assert link.present(names) == [True] * len(chunks)
        assert sorted(name for name, _ in link.page(key_prefix="odd/") or ()) == sorted(map(str, names))
        assert link.delete(names[:-1])
        assert link.present(names) == [False] * (len(chunks) - 1) + [True]
        assert link.delete([*names, "odd/absent", "odd/\x02"]), "absent ones are fine"
        assert link.page(key_prefix="odd/") == []
        assert link.report()["errors"] == 0

    def test_names_are_listed_in_pages_and_by_namespace(self, server: ServerProcess) -> None:
        plain = StoreLink(settings_of(server))
        spaced = StoreLink(settings_of(server, namespace="listed", declaration=FOREIGN))
        assert all(spaced.store(chunks_of("l é/<&>", (1, 2, 3))))
        assert all(plain.store(chunks_of("list", (7, 8))))
        assert spaced.usage() == (3, 6)
        first = spaced.page(limit=2)
        assert first is not None
        assert first == [("l é/<&>/0", 1), ("l é/<&>/1", 2)]
        assert spaced.page(after=first[-1][0]) == [("l é/<&>/2", 3)]
        assert spaced.page(key_prefix="x") == []
        assert plain.page(key_prefix="list") == [("list/0", 7), ("list/1", 8)]
        spaced.delete(["l é/<&>/0", "l é/<&>/1", "absent"])
        assert spaced.page() == [("l é/<&>/2", 3)]
        chunks, size_bytes = plain.usage()
        assert chunks > 0
        assert size_bytes > 0
        plain.close()
        spaced.close()


class TestFaults:
    def test_a_server_that_is_gone_is_a_miss_at_once_and_used_again_when_it_is_back(
        self, frail: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        chunks = chunks_of("gone")
        link = StoreLink(settings_of(frail, timeout_seconds=2.0))
        with caplog.at_level(logging.WARNING, "kvobj.connectors"), closing(link):
            assert link.store(chunks) == [True] * 4
            assert link.hold(names_of(chunks)) == [True] * 4
            frail.terminate()
            for _ in range(20):
                began = time.monotonic()
                assert loaded(link, chunks) == [None] * 4
                assert link.hold(names_of(chunks)) == [False] * 4
                assert link.store(chunks) == [False] * 4
                assert (link.page(), link.usage(), link.hold_run(["gone/0"])) == (None, (0, 0), 0)
                link.delete(["gone/0"])
                assert time.monotonic() - began < 2.0
            assert link.report()["is_up"] is False
            frail.start()
            wait_until(lambda: link.hold(names_of(chunks)) == [True] * 4, timeout_seconds=10, what="the link to heal")
            assert loaded(link, chunks) == bodies(chunks)
            link.release(names_of(chunks) * 3)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2, told
        assert "misses" in told[0]
        assert "again" in told[1]

    def test_a_server_that_hangs_costs_one_deadline_and_then_nothing(self, frail: ServerProcess) -> None:
        chunks = chunks_of("hang")
        with closing(
            StoreLink(settings_of(frail, timeout_seconds=1.0, rest_seconds=1.0, rest_seconds_max=1.0))
        ) as link:
            assert link.store(chunks) == [True] * 4
            assert link.hold(names_of(chunks)) == [True] * 4
            with frail.hanging():
                began = time.monotonic()
                assert loaded(link, chunks) == [None] * 4
                assert time.monotonic() - began < 3.0
                began = time.monotonic()
                assert link.hold(names_of(chunks)) == [False] * 4
                assert link.store(chunks) == [False] * 4
                assert time.monotonic() - began < 0.5
            wait_until(lambda: link.hold(names_of(chunks)) == [True] * 4, timeout_seconds=10, what="the link to heal")
            assert loaded(link, chunks) == bodies(chunks)

    def test_an_interrupt_of_the_call_that_asks_again_after_an_outage_leaves_that_to_the_next(
        self, frail: ServerProcess
    ) -> None:
        class Interrupted(list[str]):
            """Names in whose use the thread is interrupted."""

            def __getitem__(self, index: object) -> Any:  # noqa: ANN401 - as `list` has it
                raise KeyboardInterrupt

        def is_interrupted(link: StoreLink) -> bool:
            try:
                link.present(Interrupted(["a"]))
            except KeyboardInterrupt:
                return True
            return False  # it still rests

        with closing(StoreLink(settings_of(frail, timeout_seconds=1.0))) as link:
            with frail.hanging():
                assert link.present(["a"]) == [False]
                assert not link.is_up
            wait_until(lambda: is_interrupted(link), timeout_seconds=10, what="the rest to end")
            wait_until(link.ping, timeout_seconds=10, what="the link to heal")

    def test_a_place_that_cannot_be_used_is_told_of_at_the_start_and_by_name(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "kvobj.connectors"):
            wrong = replace(settings_of(server), bucket="absent")
            with closing(StoreLink(wrong)) as link:
                assert link.is_up
                link.connect()
                wait_until(lambda: bool(caplog.messages), timeout_seconds=10, what="the place to be found wrong")
                assert not link.is_up
            (told,) = caplog.messages
            assert told.startswith(f"kvobj: {server.endpoint}/absent (namespace default) cannot be used")

    def test_the_admin_port_is_a_place_that_cannot_be_used(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "kvobj.connectors"):
            wrong = replace(settings_of(server), endpoint=f"http://127.0.0.1:{server.admin_port}")
            with closing(StoreLink(wrong)) as link:
                assert link.present(["a"]) == [False]
                assert not link.is_up
            (told,) = caplog.messages
            assert "this is the admin port: S3 is at another" in told

    def test_a_refusal_of_single_chunks_is_told_of_once(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "kvobj.connectors"):
            with closing(StoreLink(replace(settings_of(server), durability="shared"))) as link:
                for _ in range(2):
                    assert link.store(chunks_of("shared", (100, 200))) == [False, False]
                assert link.is_up
            (told,) = caplog.messages
            assert "refused a call: " in told

    def test_what_is_closed_while_its_session_opens_leaves_no_session(self, frail: ServerProcess) -> None:
        def has_no_sessions() -> bool:
            return metric(frail, "kvobj_lease_sessions") == 0

        (chunk,) = chunks_of("closing", (100,))
        wait_until(has_no_sessions, timeout_seconds=WAIT_SECONDS, what="sessions of others to end")
        link = StoreLink(settings_of(frail))
        assert link.store([chunk]) == [True]
        held: list[bool] = []
        with frail.hanging():
            opening = threading.Thread(target=lambda: held.extend(link.hold([chunk.id])), daemon=True)
            opening.start()
            wait_until(lambda: link._calls._opening.is_full, timeout_seconds=10, what="the session to be asked for")
            link.close()
        opening.join(WAIT_SECONDS)
        assert held == [False]
        wait_until(has_no_sessions, timeout_seconds=15, what="the session to end")

    @pytest.mark.parametrize("same_host", [True, False], ids=["same host", "http"])
    def test_tasks_that_wait_for_a_server_that_hangs_end_when_they_are_closed_and_touch_no_memory_after_it(
        self, frail: ServerProcess, caplog: pytest.LogCaptureFixture, *, same_host: bool
    ) -> None:
        chunks, others = (chunks_of(name, (3 * MIB,) * 6) for name in ("closed", "others"))
        link = StoreLink(settings_of(frail, timeout_seconds=600.0, same_host=same_host))
        assert link.store(chunks) == [True] * 6
        assert loaded(link, chunks) == bodies(chunks)
        runner = TaskRunner[object]("link", threads=2, failure=int, notify=lambda: None)
        with frail.hanging():
            numbers = [
                runner.submit(6, lambda: link.store(others)),
                runner.submit(6, lambda: loaded(link, chunks)),
            ]
            wait_until(lambda: len(runner._running) == 2, timeout_seconds=10, what="the tasks to run")
            began = time.monotonic()
            runner.close(began + 0.5)
            assert time.monotonic() - began < 5.0
            assert [runner.take(number) for number in numbers] == [[False] * 6, [None] * 6]
            assert link.is_up, "a call that was ended says nothing of the server"
            assert not caplog.messages
            began = time.monotonic()
            link.close()
            assert time.monotonic() - began < 5.0

    @pytest.mark.parametrize("same_host", [True, False], ids=["same host", "http"])
    def test_a_store_that_is_full_for_longer_than_the_deadline_fails_stores_and_its_chunks_are_loaded_on(
        self,
        tmp_path: Path,
        same_host: bool,  # noqa: FBT001
    ) -> None:
        full = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=SETTINGS.buckets)
        with (
            ServerProcess(tmp_path, full) as server,
            closing(StoreLink(settings_of(server, same_host=same_host, timeout_seconds=1))) as link,
        ):
            kept: list[NewChunk] = []
            for chunk in chunks_of("full", (4 * MIB,) * 64):
                if not link.store([chunk])[0]:
                    break
                if link.hold([chunk.id]) == [True]:
                    kept.append(chunk)
                else:  # all others are pinned: where they fill it, the collector may take this one before it is, too
                    assert len(kept) >= 12, "a chunk gave way though there was room"
            assert 12 <= len(kept) < 64
            assert link.is_up, "a full store was taken for one that is away"
            assert "BusyError" in str(link.report()["last_error"]) or "StoreFullError" in str(
                link.report()["last_error"]
            )
            assert loaded(link, kept[:1]) == bodies(kept[:1])
            link.release(names_of(kept))

    def test_stores_that_wait_for_room_over_the_network_leave_connections_to_loads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)  # as many threads as the settings have
        full = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=SETTINGS.buckets)
        with (
            ServerProcess(tmp_path, full) as server,
            closing(StoreLink(settings_of(server, timeout_seconds=1))) as filler,
            closing(StoreLink(settings_of(server, timeout_seconds=3, same_host=False))) as link,
        ):
            kept: list[NewChunk] = []
            for chunk in chunks_of("room", (4 * MIB,) * 64):
                if not filler.store([chunk])[0]:
                    break
                if filler.hold([chunk.id]) == [True]:
                    kept.append(chunk)
            asked = kept[:1]
            assert loaded(link, asked) == bodies(asked)
            transport = link._calls._client._transport
            batches = [chunks_of(front, (4 * MIB,) * 16) for front in ("one", "other")]
            threads = [threading.Thread(target=link.store, args=(batch,), daemon=True) for batch in batches]
            for thread in threads:
                thread.start()
            lent: list[int] = []
            found: list[list[bool]] = []
            while threads[0].is_alive() and threads[1].is_alive():
                lent.append(len(transport._lent))
                found.append(link.present(names_of(asked)))
                assert loaded(link, asked) == bodies(asked)
            for thread in threads:
                thread.join(WAIT_SECONDS)
            assert not any(thread.is_alive() for thread in threads)
            assert found == [[True]] * len(found)
            assert max(lent) <= link.settings.connections // 2
            assert max(lent) > 1, "the stores took turns"

    @pytest.mark.parametrize("right", ["read", "write"])
    def test_what_a_user_may_not_do_is_refused_and_costs_no_hit_of_what_it_may(
        self, server: ServerProcess, right: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept, new, namespace = chunks_of("kept"), chunks_of("new"), f"shared-{right}"
        declaration = {**FOREIGN, "access": {USER.id: right}}
        keys = {"access_key": USER.access_key, "secret_key": USER.secret_key}
        with (
            closing(StoreLink(settings_of(server, namespace=namespace, declaration=declaration))) as owner,
            closing(StoreLink(settings_of(server, namespace=namespace, **keys))) as link,
        ):
            assert owner.store(kept) == [True] * 4
            for _ in range(2):
                assert link.store(new) == [right == "write"] * 4
                assert link.page() is None, "the bucket's owner lists, and to others the store is not empty"
                assert not link.delete(names_of(kept)), "and deletes"
                assert not link.delete(["odd\x01"])
                assert link.is_up, "what it may not do was taken for an outage"
                assert link.hold(names_of(kept)) == [True] * 4
                assert loaded(link, kept) == bodies(kept)
                link.release(names_of(kept))
            assert "NotGrantedError" in str(link.report()["last_error"])
            assert not [each for each in caplog.messages if "cannot be used" in each]

    def test_a_report_waits_for_nothing_while_the_server_hangs(self, frail: ServerProcess) -> None:
        with closing(StoreLink(settings_of(frail, timeout_seconds=5))) as link, frail.hanging():
            began = time.monotonic()
            assert link.report()["same_host"] is False
            assert time.monotonic() - began < 1, "an engine's scheduler asks for it"

    def test_a_server_killed_under_many_loads_costs_misses_and_never_wrong_bytes(self, frail: ServerProcess) -> None:
        chunks = chunks_of("killed", (MIB,) * 12)
        with closing(StoreLink(settings_of(frail))) as link:
            assert link.store(chunks) == [True] * 12

            def load() -> None:
                for came, chunk in zip(loaded(link, chunks), chunks, strict=True):
                    assert came in (None, chunk.data), "wrong bytes"

            with done_on(load, threads=2):
                for _ in range(2):
                    frail.kill()
                    frail.start()
                wait_until(
                    lambda: link.store(chunks) == [True] * 12 and link.hold_run(names_of(chunks)) == 12,
                    timeout_seconds=15,
                    what="the link to heal",
                )
            assert loaded(link, chunks) == bodies(chunks)

    def test_a_session_that_the_server_lost_is_opened_anew_with_all_that_is_held(
        self, server: ServerProcess, link: StoreLink
    ) -> None:
        chunks = chunks_of("lost")
        link.store(chunks)
        assert link.hold(names_of(chunks)) == [True] * 4
        session = link._calls._session
        assert session is not None
        lost = session.id
        keys = server.credentials()
        bucket = link.settings.bucket
        with KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), bucket) as client:
            client.close_session(lost)
        assert link.hold(names_of(chunks)[:1]) == [True]
        assert session.id != lost
        link.release(names_of(chunks))
        with server.raw() as raw:
            assert raw.request("DELETE", f"/{bucket}/lost/0").status == 204
        assert loaded(link, chunks)[0] == chunks[0].data, "held once more than it was released"
        assert link.report()["errors"] == 0

    def test_what_is_held_is_read_until_it_is_released_and_what_is_not_is_a_miss_once_deleted(
        self, link: StoreLink
    ) -> None:
        chunks = chunks_of("deleted")
        link.store(chunks)
        assert link.hold(names_of(chunks)[:2]) == [True] * 2
        link.delete(names_of(chunks))
        assert loaded(link, chunks) == [*bodies(chunks[:2]), None, None]
        link.release(names_of(chunks))
        assert loaded(link, chunks) == [None] * 4

    def test_what_is_held_and_opened_ahead_is_loaded_as_it_was_whatever_somebody_else_does(
        self, server: ServerProcess, link: StoreLink
    ) -> None:
        chunks = chunks_of("ahead")
        bucket = link.settings.bucket
        link.store(chunks)
        assert link.hold(names_of(chunks)) == [True] * 4
        link.open_ahead(names_of(chunks))
        with server.raw() as raw:
            assert raw.request("DELETE", f"/{bucket}/ahead/0").status == 204
        assert loaded(link, chunks) == bodies(chunks)
        assert loaded(link, chunks) == bodies(chunks), "it is still held"
        link.release(names_of(chunks))
        assert loaded(link, chunks) == [None, *bodies(chunks[1:])]
        assert link.report()["errors"] == 0

    def test_what_was_opened_ahead_goes_with_its_hold_and_with_a_delete_of_ones_own(
        self, server: ServerProcess, link: StoreLink
    ) -> None:
        chunks = chunks_of("unread")
        others = [NewChunk(chunk.id, body("other", len(chunk.data))) for chunk in chunks]
        link.store(chunks)
        assert link.hold(names_of(chunks)) == [True] * 4
        link.open_ahead(names_of(chunks))
        link.release(names_of(chunks))
        wait_for_nothing_pinned(server)
        link.open_ahead(names_of(chunks))
        wait_for_nothing_pinned(server)  # they are not held any more
        assert link.hold(names_of(chunks)[:2]) == [True] * 2
        link.open_ahead(names_of(chunks)[:2])
        link.delete(names_of(chunks))
        link.store(others)
        assert loaded(link, chunks) == bodies(others)
        link.release(names_of(chunks))
        wait_for_nothing_pinned(server)

    def test_opening_ahead_fails_for_nobody(
        self, server: ServerProcess, link: StoreLink, caplog: pytest.LogCaptureFixture
    ) -> None:
        link.open_ahead([])
        link.open_ahead(["never/stored"])
        assert loaded(link, [NewChunk("never/stored", b"x")]) == [None]
        wrong = StoreLink(settings_of(server, bucket="ordinary"))
        wrong.open_ahead(["k"])
        assert wrong.is_up, "what only saves time was taken for an outage"
        wrong.close()
        wrong.open_ahead(["k"])
        assert [each.report()["errors"] for each in (link, wrong)] == [0, 0]
        assert not caplog.messages
        wait_for_nothing_pinned(server)

    def test_damaged_bytes_are_a_miss_and_their_neighbours_come(self, frail: ServerProcess) -> None:
        chunks = chunks_of("damage", (700_000,) * 5)
        with closing(StoreLink(settings_of(frail, durability="local"))) as link:
            assert link.store(chunks) == [True] * 5
            frail.terminate()
            for leftover in frail.shared_memory.parent.glob(frail.shared_memory.name + "*"):
                shutil.rmtree(leftover)
            assert flip_bit(frail.data, bytes(chunks[2].data)[300_000:300_064]) > 0
            frail.start()
            wait_until(link.ping, timeout_seconds=10, what="the link to heal")
            expected: list[bytes | None] = [*bodies(chunks)]
            expected[2] = None
            assert loaded(link, chunks) == expected
            assert loaded(link, chunks) == expected
            assert link.store([chunks[2]]) == [True], "it can be stored again"
            assert loaded(link, chunks) == bodies(chunks)

    def test_a_namespace_declared_otherwise_is_refused_by_name_and_used_once_it_is_right(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = server.credentials()
        with (
            KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache") as client,
            caplog.at_level(logging.WARNING, "kvobj.connectors"),
        ):
            client.declare_namespace("clash", {**FOREIGN, "model": "another"})
            link = StoreLink(settings_of(server, namespace="clash", declaration=FOREIGN))
            assert link.store(chunks_of("clash")) == [False] * 4
            assert link.hold(["clash/0"]) == [False]
            assert "model" in str(link.report()["last_error"])
            client.remove_namespace("clash")
            wait_until(lambda: all(link.store(chunks_of("clash"))), timeout_seconds=5, what="the link to heal")
            link.close()
        assert len(caplog.records) == 2

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"bucket": "none"}, "bucket=none"),
            ({"bucket": "ordinary"}, "kind kv, and this one is ordinary"),
            ({"bucket": "ordinary", "namespace": "m", "declaration": FOREIGN}, "kind kv, and this one is ordinary"),
            ({"secret_key": "wrong"}, "SignatureDoesNotMatch"),
            ({"namespace": "undeclared"}, "NoSuchNamespace"),
        ],
    )
    def test_a_wrong_place_is_told_in_one_line_and_all_is_a_miss(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture, fields: dict[str, object], told: str
    ) -> None:
        link = StoreLink(settings_of(server, **fields))
        with caplog.at_level(logging.WARNING, "kvobj.connectors"):
            assert link.store(chunks_of("wrong")) == [False] * 4
            assert link.hold(["a"]) == [False]
            assert link.load(["a"], [memoryview(bytearray(1))]) == [False]
        (line,) = caplog.records
        assert told in line.getMessage()
        assert line.exc_info is None
        assert (link.report()["is_up"], link.report()["last_error"]) != (True, "")
        link.close()

    def test_a_forked_process_has_a_link_of_its_own(self, link: StoreLink) -> None:
        chunks = chunks_of("forked")
        link.store(chunks)
        assert link.hold(names_of(chunks)) == [True] * 4
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                is_right = link.report()["held"] == 0
                link.release(names_of(chunks))
                is_right &= link.hold(names_of(chunks)) == [True] * 4 and loaded(link, chunks) == bodies(chunks)
                link.close()
                os.write(writer, b"right" if is_right else b"wrong")
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            assert told.read() == b"right"
        os.waitpid(child, 0)
        assert link.report()["held"] == 4
        link.delete(names_of(chunks))
        assert loaded(link, chunks) == bodies(chunks), "the parent's pins are its own"
        link.release(names_of(chunks))

    def test_a_closed_link_answers_misses(self, server: ServerProcess) -> None:
        link = StoreLink(settings_of(server))
        chunks = chunks_of("closed")
        assert link.store(chunks) == [True] * 4
        assert link.hold(names_of(chunks)) == [True] * 4
        link.close()
        link.close()
        assert loaded(link, chunks) == [None] * 4
        link.release(names_of(chunks))


def flip_bit(data: Path, needle: bytes) -> int:
    """Flip one bit at every place where the needle is at rest; how many places there were."""
    places = 0
    for file in data.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        at = content.find(needle)
        while at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(bytes([content[at] ^ 0x10]))
            places += 1
            at = content.find(needle, at + 1)
    return places
