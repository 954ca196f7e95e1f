"""kvobj as a secondary tier of vLLM 0.33.0: vLLM's own tiering manager, factory, spec and CPU memory, over a real server.

What of vLLM runs is its wheel's; a worker's copies between GPU and CPU memory are played by the script.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, digest_of
from engine_tests import BUCKET, connector_process, delete_all, needs_engine_modules, store_settings
from link_world import settings_of
from module_paths import ModulePaths
from server_process import MIB, ServerProcess, wait_until

from kvobj.client import NewChunk
from kvobj.connectors import StoreLink
from kvobj.connectors.lookups import PINS_MAX

needs_engine_modules()

ROW_BYTES = 64 * 1024
ROWS = 8


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("vllm"), store_settings()) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: ServerProcess) -> Iterator[EngineProcess]:
    with connector_process("vllm_tier.py", server.directory / "engine.log") as process:
        yield process


@pytest.fixture
def manager(engine: EngineProcess, server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A manager of its own for each test, and a namespace of its own by the model's name."""
    opened = Managed(engine, server, model=f"example/{request.node.name}"[:60])
    yield opened
    opened.close()


class Managed:
    """Calls of the script that name one manager."""

    count = 0

    def __init__(self, engine: EngineProcess, server: ServerProcess, **options: Any) -> None:  # noqa: ANN401 - JSON
        Managed.count += 1
        self.name = f"m{Managed.count}"
        self._engine = engine
        credentials = server.credentials()
        tier = {
            "type": "KvobjTier",
            "module_path": "kvobj.connectors.vllm",
            "endpoint": server.endpoint,
            "bucket": BUCKET,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "timeout_seconds": 2.0,
            "rest_seconds": 0.1,
            "rest_seconds_max": 0.2,
            **options.pop("tier", {}),
        }
        self.opened = engine.ask("open", name=self.name, tier=tier, rows=ROWS, row_bytes=ROW_BYTES, **options)

    def __call__(self, command: str, *given: object, **fields: Any) -> Any:  # noqa: ANN401 - JSON
        order: dict[str, tuple[str, ...]] = dict.fromkeys(("store", "look_up", "ask", "read"), ("request", "blocks"))
        order |= {"finish": ("request",), "misfit": ("chunk_ids", "blocks")}
        named: dict[str, Any] = dict(zip(order.get(command, ()), given, strict=True))
        return self._engine.ask(command, name=self.name, **named, **fields)

    def close(self) -> None:
        self("close")


def digests(blocks: list[int]) -> list[str]:
    return [digest_of(ROW_BYTES, block) for block in blocks]


def test_blocks_that_left_the_cpu_come_back_from_the_store_byte_for_byte(manager: Managed) -> None:
    assert manager("store", "first", [1, 2, 3])["stored"] == [1, 2, 3]
    manager("finish", "first")
    evicted = manager("store", "other", list(range(10, 10 + ROWS)))["evicted"]
    assert evicted == 3
    manager("finish", "other")
    found = manager("look_up", "again", [1, 2, 3, 4])
    assert found["results"] == ["HIT", "HIT", "HIT", "MISS"]
    assert found["steps"] > 1  # RETRY first: nobody waited for the answer
    assert found["longest"] < 0.5
    assert manager("read", "again", [1, 2, 3]) == digests([1, 2, 3])
    manager("finish", "again")
    assert manager("report")["held"] == 0


def test_another_instance_finds_what_one_has_stored(engine: EngineProcess, server: ServerProcess) -> None:
    one, other = (Managed(engine, server, model="example/shared") for _ in range(2))
    assert one.opened["info"] == other.opened["info"]
    one("store", "a", [1, 2])
    assert other("look_up", "b", [1, 2, 3])["results"] == ["HIT", "HIT", "MISS"]
    assert other("read", "b", [1, 2]) == digests([1, 2])
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("common", "difference"),
    [
        ({}, {"dtype": "float8_e4m3"}),
        ({}, {"tensor": 2}),
        ({"says_free": True}, {"tensor": 2}),
        ({"pipeline": 2}, {"partition": "1,1"}),
        ({}, {"tier": {"revision": "v2"}}),
    ],
)
def test_instances_whose_bytes_differ_share_nothing(
    engine: EngineProcess, server: ServerProcess, common: dict[str, Any], difference: dict[str, Any]
) -> None:
    one = Managed(engine, server, model="example/differs", **common)
    other = Managed(engine, server, model="example/differs", **common, **difference)
    one("store", "a", [1])
    assert one.opened["info"]["kvobj_namespace"] != other.opened["info"]["kvobj_namespace"]
    assert other("look_up", "b", [1])["results"] == ["MISS"]
    one.close()
    other.close()


def test_instances_of_other_sizes_share_rows_that_are_canonical(engine: EngineProcess, server: ServerProcess) -> None:
    free = {"model": "example/canonical", "canonical": True, "says_free": True}
    one, other = Managed(engine, server, **free), Managed(engine, server, tensor=2, **free)
    assert one.opened["info"]["kvobj_namespace"] == other.opened["info"]["kvobj_namespace"]
    one("store", "a", [1])
    assert other("look_up", "b", [1])["results"] == ["HIT"]
    one.close()
    other.close()


def test_what_an_owner_has_declared_otherwise_is_refused_by_who_does_not_declare(
    engine: EngineProcess, server: ServerProcess
) -> None:
    one = Managed(engine, server, model="example/owners")
    one("store", "a", [1])
    tier = {"namespace": one.opened["info"]["kvobj_namespace"], "declare": False}
    same, other = (
        Managed(engine, server, model="example/owners", tier=tier),
        Managed(engine, server, model="example/owners", tier=tier, dtype="float16"),
    )
    assert same("look_up", "b", [1])["results"] == ["HIT"]
    assert other("look_up", "b", [1])["results"] == ["MISS"]
    assert "NamespaceConflictError" in other("report")["last_error"]
    assert "salt" in other("report")["last_error"]
    for each in (one, same, other):
        each.close()


def test_a_namespace_that_is_declared_otherwise_is_refused_with_the_fields_that_differ(
    engine: EngineProcess, server: ServerProcess
) -> None:
    tier = {"namespace": "production"}
    one = Managed(engine, server, model="example/one", tier=tier)
    one("store", "a", [1])
    other = Managed(engine, server, model="example/two", tier={**tier, "revision": "main"})
    assert other("look_up", "b", [1])["results"] == ["MISS"]
    error = other("report")["last_error"]
    assert "NamespaceConflictError" in error
    assert "model" in error
    assert "revision" in error
    one.close()
    other.close()


def test_a_found_block_stays_though_it_is_deleted_before_it_is_loaded(manager: Managed, server: ServerProcess) -> None:
    manager("store", "first", [5])
    manager("finish", "first")
    manager("store", "other", list(range(20, 20 + ROWS)))
    manager("finish", "other")
    assert manager("look_up", "again", [5], until="RETRY")["results"] == ["RETRY"]
    assert manager("look_up", "again", [5], until="HIT_PENDING")["results"] == ["HIT_PENDING"]  # found, not yet loaded
    delete_all(server, manager.opened["info"]["kvobj_namespace"])
    assert manager("look_up", "again", [5])["results"] == ["HIT"]
    assert manager("read", "again", [5]) == digests([5])
    manager("finish", "again")


def test_what_a_request_asked_for_that_has_ended_meanwhile_is_not_held_by_an_idle_engine(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, store_settings()) as server:
        manager = Managed(engine, server, tier={"timeout_seconds": 10.0})
        manager("store", "first", [1, 2, 3])
        manager("reset")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert manager("look_up", "aborted", [1, 2, 3], until="RETRY")["results"] == ["RETRY"] * 3
            manager("settle")  # the step ends: the question is on its way
            manager("finish", "aborted")
            asked = manager("report")["hits"]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(  # and no step any more
            lambda: bool(manager("report")["hits"] == asked + 3 and manager("report")["held"] == 0),
            timeout_seconds=20,
            what="what was found to be let go of",
        )
        manager.close()


def test_a_load_that_fails_makes_the_block_a_miss_and_the_request_goes_on(
    engine: EngineProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with ServerProcess(tmp_path, store_settings()) as server:
        manager = Managed(engine, server, model=request.node.name)
        manager("store", "first", [1, 2])
        manager("finish", "first")
        manager("store", "other", list(range(30, 30 + ROWS)))
        manager("finish", "other")
        found = manager("look_up", "again", [1, 2], until="HIT_PENDING")
        assert found["results"] == ["HIT_PENDING", "HIT_PENDING"]  # found, not yet loaded
        server.kill()
        assert manager("look_up", "again", [1, 2])["results"] == [
            "MISS",
            "MISS",
        ]  # and no hit that fails again and again
        assert manager("look_up", "again", [1, 2])["results"] == ["MISS", "MISS"]
        assert manager("stats")["vllm:kv_offload_kvobj_load_failures"] == 2
        manager("finish", "again")
        # While it is down: misses at once, stores that fail, nothing that waits.
        assert manager("look_up", "down", [1])["results"] == ["MISS"]
        assert manager("store", "down", [7])["stored"] == [7]
        manager("finish", "down")
        assert manager("stats")["vllm:kv_offload_kvobj_up"] == 0
        server.start()
        wait_until(lambda: heals(manager), timeout_seconds=20, what="the store to be asked again")
        manager("store", "healed", [8])  # a request that comes after it
        assert manager("stats")["vllm:kv_offload_kvobj_up"] == 1
        manager("reset")
        assert manager("look_up", "healed", [8])["results"] == ["HIT"]
        assert manager("read", "healed", [8]) == digests([8])
        manager.close()


def heals(manager: Managed) -> bool:
    """Whether the store answers again, asked as a new request does."""
    manager("look_up", "probe", [99])
    manager("finish", "probe")
    return bool(manager("report")["is_up"])


def test_a_server_that_hangs_costs_a_request_its_time_out_and_no_more(engine: EngineProcess, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, store_settings()) as server:
        manager = Managed(engine, server, tier={"timeout_seconds": 1.0})
        manager("store", "first", [1])
        manager("reset")
        assert manager("look_up", "loading", [1], until="HIT_PENDING")["results"] == ["HIT_PENDING"]
        os.kill(server.pid, signal.SIGSTOP)  # its sockets accept and say nothing
        try:
            loading = manager("look_up", "loading", [1], timeout_seconds=20.0)  # its job goes out now
            asking = manager("look_up", "asking", [2], timeout_seconds=20.0)
            for found in (loading, asking):
                assert found["results"] == ["MISS"]
                assert found["longest"] < 0.5
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: heals(manager), timeout_seconds=20, what="the store to be asked again")
        assert manager("look_up", "later", [1])["results"] == ["HIT"]
        assert manager("read", "later", [1]) == digests([1])
        manager.close()


def test_a_server_that_is_started_again_under_a_job_fails_it_and_serves_the_next(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, store_settings(durability="local")) as server:
        manager = Managed(engine, server, tier={"timeout_seconds": 5.0})
        blocks = list(range(ROWS))
        manager("store", "first", blocks)
        manager("reset")
        assert set(manager("look_up", "loading", blocks, until="HIT_PENDING")["results"]) == {"HIT_PENDING"}
        os.kill(server.pid, signal.SIGSTOP)
        stopped = threading.Timer(0.5, server.kill)  # while the job waits for it
        stopped.start()
        found = manager("look_up", "loading", blocks, timeout_seconds=30.0)
        stopped.join()
        assert found["results"] == ["MISS"] * ROWS
        server.start()
        wait_until(lambda: heals(manager), timeout_seconds=20, what="the store to be asked again")
        assert manager("look_up", "later", blocks)["results"] == ["HIT"] * ROWS
        assert manager("read", "later", blocks) == digests(blocks)
        manager.close()


def test_a_session_that_ended_while_the_engine_stood_still_costs_what_is_gone_and_nothing_else(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, store_settings()) as server:
        manager = Managed(engine, server, tier={"lease_ms": 1000})
        manager("store", "first", [1, 2])
        manager("reset")
        found = manager("look_up", "again", [1, 2], until="HIT_PENDING")
        assert found["results"] == ["HIT_PENDING"] * 2  # found and held, not yet loaded
        with engine.stopped_past_its_lease(server):
            delete_all(server, manager.opened["info"]["kvobj_namespace"])
        assert manager("look_up", "again", [1, 2])["results"] == ["MISS", "MISS"]
        manager("finish", "again")
        manager("store", "later", [1, 3])
        manager("reset")
        assert manager("look_up", "last", [1, 3])["results"] == ["HIT", "HIT"]
        assert manager("read", "last", [1, 3]) == digests([1, 3])
        manager.close()


def test_a_block_of_another_size_is_no_block(manager: Managed, server: ServerProcess) -> None:
    manager("store", "first", [1])
    manager("finish", "first")
    namespace = manager.opened["info"]["kvobj_namespace"]
    key = delete_all(server, namespace)[0]
    with server.raw() as raw:
        reply = raw.request("PUT", f"/{BUCKET}/{key}", b"short")
        assert reply.status == 200, reply.body
    manager("reset")
    assert manager("look_up", "again", [1])["results"] == ["MISS"]  # found, not loaded, and not asked for again
    assert manager("stats")["vllm:kv_offload_kvobj_load_failures"] == 1
    assert manager("look_up", "again", [1])["results"] == ["MISS"]
    manager("store", "again", [1])  # nor is it taken for stored
    told = manager("stats")
    assert "vllm:kv_offload_kvobj_load_failures" not in told
    assert told["vllm:kv_offload_kvobj_store_failures"] == 1
    assert manager("report")["disagreements"] == 1


def test_jobs_that_do_not_fit_the_memory_fail_and_touch_nothing(manager: Managed) -> None:
    manager("store", "first", [1])
    assert manager("misfit", [0, 1], [1]) == [False]
    assert manager("misfit", [ROWS], [1]) == [False]
    assert manager("misfit", [-1], [1]) == [False]


def test_stored_blocks_are_hits_whatever_other_requests_of_the_same_step_ask_for(manager: Managed) -> None:
    manager("store", "first", [1, 2])
    manager("reset")
    new = list(range(1000, 1000 + PINS_MAX + 100))  # more than may be held: nobody has them, and they take up no room
    assert manager("ask", "long", new) == len(new)
    assert manager("look_up", "short", [1, 2])["results"] == ["HIT", "HIT"]
    assert manager("read", "short", [1, 2]) == digests([1, 2])


def test_loads_wait_for_no_store_that_waits_for_room(engine: EngineProcess, tmp_path: Path) -> None:
    full = replace(store_settings(), dram_bytes=64 * MIB, nvme_bytes=64 * MIB)
    with ServerProcess(tmp_path, full) as server:
        manager = Managed(engine, server, tier={"io_threads": 1, "same_host": False})
        manager("store", "first", [1, 2])
        manager("reset")
        assert manager("look_up", "held", [1, 2], until="HIT_PENDING")["results"] == ["HIT_PENDING"] * 2
        with full_of_pins(server):
            manager("store", "waiting", [11, 12], settled=False)
            assert manager("look_up", "held", [1, 2])["results"] == ["HIT", "HIT"]
            assert manager("report")["store_failures"] == 0, "the loads came behind the store"
            manager("settle")
            assert manager("report")["store_failures"] == 2
        assert manager("read", "held", [1, 2]) == digests([1, 2])
        manager.close()


@contextmanager
def full_of_pins(server: ServerProcess) -> Iterator[None]:
    """Within the block the server has no room, and nothing that it may evict."""
    settings = settings_of(server, bucket=BUCKET, timeout_seconds=1.0)
    with closing(StoreLink(settings)) as link:
        for size_bytes in (4 * MIB, ROW_BYTES):
            for index in count():
                name = f"full/{size_bytes}/{index}"
                if link.store([NewChunk(name, bytes(size_bytes))]) != [True]:
                    break
                assert link.hold([name]) == [True]
        yield


def test_what_is_stored_is_not_sent_again(engine: EngineProcess, server: ServerProcess) -> None:
    one = Managed(engine, server, model="example/once")
    one("store", "a", [1, 2])
    other = Managed(engine, server, model="example/once")
    other("store", "b", [1, 2, 3])
    assert other("report")["stores"] == 1
    one.close()
    other.close()


def test_events_and_metrics_tell_what_went_where(engine: EngineProcess, server: ServerProcess) -> None:
    manager = Managed(engine, server, model="example/told", events=True, tier={"enable_kv_events": True})
    assert "vllm:kv_offload_kvobj_lookup_hits" in manager.opened["metrics"]
    manager("store", "a", [1, 2])
    assert {"medium": "STORAGE", "keys": 2, "removed": False} in manager("events")
    manager("finish", "a")
    manager("reset")
    manager("look_up", "b", [1, 2, 3])
    told = manager("stats")
    assert told["vllm:kv_offload_kvobj_lookup_hits"] == 2
    assert told["vllm:kv_offload_kvobj_lookup_misses"] == 1
    assert told["vllm:kv_offload_kvobj_up"] == 1
    assert any(name.startswith("vllm:kv_offload_tiering_read_bytes") for name in told)
    manager.close()


def test_a_reset_waits_for_what_is_being_copied(manager: Managed) -> None:
    manager("store", "a", [1, 2, 3, 4], settled=False)
    manager("reset")
    assert manager("look_up", "b", [1, 2, 3, 4])["results"] == ["HIT"] * 4
    assert manager("read", "b", [1, 2, 3, 4]) == digests([1, 2, 3, 4])


def test_a_wrong_setting_is_told_when_the_engine_starts(engine: EngineProcess, server: ServerProcess) -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        Managed(engine, server, tier={"no_such_setting": 1})
    with pytest.raises(RuntimeError, match="io_threads"):
        Managed(engine, server, tier={"io_threads": 0})
    with pytest.raises(RuntimeError, match=r"tenant: the declaration's salt has .* characters"):
        Managed(engine, server, tier={"tenant": "t" * 1024})
