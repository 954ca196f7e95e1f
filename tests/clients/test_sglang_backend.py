"""kvobj as the `dynamic` HiCache backend of SGLang 0.5.23: its own factory and host memory pools, over a real server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from engine_tests import BUCKET, connector_process, delete_all, needs_engine_modules, store_settings
from module_paths import ModulePaths
from server_process import ServerProcess, UserSetting, wait_until

from kvobj.client import Credentials, KvClient

needs_engine_modules()


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("sglang"), store_settings()) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: ServerProcess) -> Iterator[EngineProcess]:
    with connector_process("sglang_backend.py", server.directory / "engine.log") as process:
        yield process


class Backend:
    """Calls of the script that name one backend."""

    count = 0

    def __init__(
        self,
        engine: EngineProcess,
        server: ServerProcess,
        *,
        zero_copy: bool = True,
        **options: Any,  # noqa: ANN401 - JSON
    ) -> None:
        Backend.count += 1
        self.name = f"b{Backend.count}"
        self._engine = engine
        credentials = server.credentials()
        extra = {
            "backend_name": "kvobj",
            "module_path": "kvobj.connectors.sglang",
            "class_name": "KvobjHiCache",
            "interface_v1": int(zero_copy),
            "endpoint": server.endpoint,
            "bucket": BUCKET,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "timeout_seconds": 2.0,
            "rest_seconds": 0.1,
            "rest_seconds_max": 0.2,
            **options.pop("extra", {}),
        }
        self.opened = engine.ask("open", name=self.name, extra=extra, **options)

    def ask(self, command: str, **fields: object) -> Any:  # noqa: ANN401 - JSON
        return self._engine.ask(command, name=self.name, **fields)  # type: ignore[arg-type]  # a time-out is a number


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("mla", [False, True])
def test_pages_come_back_byte_for_byte_whatever_the_memorys_layout(
    engine: EngineProcess, server: ServerProcess, layout: str, *, mla: bool
) -> None:
    backend = Backend(engine, server, layout=layout, mla=mla, model=f"example/{layout}-{mla}")
    pages = [1, 2, 3]
    written = backend.ask("fill", pages=pages, slots=[4, 0, 7])
    assert backend.ask("exists", pages=[*pages, 4]) == 0
    assert backend.ask("set_v1", pages=pages, slots=[4, 0, 7]) == [True] * 3
    assert backend.ask("exists", pages=[*pages, 4]) == 3
    assert backend.ask("exists", pages=[4, *pages]) == 0
    before = backend.ask("digests", slots=[12])
    assert backend.ask("get_v1", pages=[*pages, 4], slots=[9, 10, 11, 12]) == [True, True, True, False]
    assert backend.ask("digests", slots=[9, 10, 11, 12]) == [*written, *before]


def test_pages_of_the_older_interface_come_back_too_and_under_names_of_their_own(
    engine: EngineProcess, server: ServerProcess
) -> None:
    backend = Backend(engine, server, zero_copy=False, model="example/older")
    written = backend.ask("fill", pages=[1, 2], slots=[0, 1])
    assert backend.ask("set_pages", pages=[1, 2], slots=[0, 1])
    assert backend.ask("exists", pages=[1, 2, 3]) == 2
    assert backend.ask("get_pages", pages=[1, 3, 2], slots=[5, 6, 7]) == [True, False, True]
    assert backend.ask("digests", slots=[5, 7]) == written


def test_ranks_have_pages_of_their_own_and_ranks_of_a_latent_model_share_them(
    engine: EngineProcess, server: ServerProcess
) -> None:
    one, two = (Backend(engine, server, rank=rank, ranks=2, model="example/ranks") for rank in (0, 1))
    one.ask("fill", pages=[1], slots=[0])
    assert one.ask("set_v1", pages=[1], slots=[0]) == [True]
    assert one.ask("exists", pages=[1]) == 1
    assert two.ask("exists", pages=[1]) == 0
    writer, reader = (Backend(engine, server, rank=rank, ranks=2, mla=True, model="example/mla") for rank in (0, 1))
    written = writer.ask("fill", pages=[1], slots=[0])
    reader.ask("fill", pages=[2], slots=[0])
    assert reader.ask("set_v1", pages=[2], slots=[0]) == [True]  # the writer's to store
    assert reader.ask("exists", pages=[2]) == 0
    assert writer.ask("set_v1", pages=[1], slots=[0]) == [True]
    assert reader.ask("get_v1", pages=[1], slots=[3]) == [True]
    assert reader.ask("digests", slots=[3]) == written


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("extra", [{}, {"namespace": "sglang-context"}])
def test_ranks_that_split_a_sequence_have_pages_of_their_own_under_a_derived_name_and_a_given_one(
    engine: EngineProcess, server: ServerProcess, extra: dict[str, Any], *, mla: bool
) -> None:
    extra = {name: f"{value}-{mla}" for name, value in extra.items()}
    ranks = [
        Backend(engine, server, part=part, parts=2, mla=mla, model=f"example/context-{mla}", extra=extra)
        for part in (0, 1)
    ]
    for page, rank in enumerate(ranks):
        written = rank.ask("fill", pages=[page], slots=[0])
        assert rank.ask("set_v1", pages=[page], slots=[0]) == [True]
        assert [rank.ask("exists", pages=[each]) for each in (0, 1)] == [int(each == page) for each in (0, 1)]
        assert rank.ask("get_v1", pages=[page], slots=[3]) == [True]
        assert rank.ask("digests", slots=[3]) == written
        assert not rank.ask("report")["last_error"]
    if extra:
        assert [rank.opened["namespace"] for rank in ranks] == [f"sglang-context-{mla}.cp{part}of2" for part in (0, 1)]


@pytest.mark.parametrize(
    ("common", "difference"),
    [
        ({}, {"dtype": "float32"}),
        ({}, {"layout": "layer_first"}),
        ({}, {"model": "example/other"}),
        ({"stage": 1, "stages": 4, "first_layer": 15}, {"first_layer": 16}),
        ({"stage": 1, "stages": 4}, {"partition": "16,15,15,15"}),
        ({"dtype": "uint8", "kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_instances_whose_bytes_differ_share_nothing(
    engine: EngineProcess, server: ServerProcess, common: dict[str, Any], difference: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"model": "example/differs", **common}
    one, other = Backend(engine, server, **options), Backend(engine, server, **{**options, **difference})
    assert one.opened["namespace"] != other.opened["namespace"]
    one.ask("fill", pages=[1], slots=[0])
    one.ask("set_v1", pages=[1], slots=[0])
    assert other.ask("exists", pages=[1]) == 0


def test_a_namespace_that_is_declared_otherwise_is_refused_with_the_fields_that_differ(
    engine: EngineProcess, server: ServerProcess
) -> None:
    one = Backend(engine, server, model="example/one", extra={"namespace": "sglang-production"})
    one.ask("fill", pages=[1], slots=[0])
    assert one.ask("set_v1", pages=[1], slots=[0]) == [True]
    other = Backend(engine, server, model="example/two", extra={"namespace": "sglang-production"})
    assert other.ask("exists", pages=[1]) == 0
    assert "NamespaceConflictError" in other.ask("report")["last_error"]
    assert "model" in other.ask("report")["last_error"]


def test_pages_of_a_chain_hang_under_the_pages_before_them(engine: EngineProcess, server: ServerProcess) -> None:
    backend = Backend(engine, server, model="example/chains", extra={"chains": True})
    backend.ask("fill", pages=[1, 2, 3, 4], slots=[0, 1, 2, 3])
    assert backend.ask("set_v1", pages=[3, 4], slots=[2, 3], prefix=[1, 2]) == [False, False]  # nothing to hang under
    assert backend.ask("set_v1", pages=[1, 2], slots=[0, 1], prefix=[]) == [True, True]
    assert backend.ask("set_v1", pages=[3, 4], slots=[2, 3], prefix=[1, 2]) == [True, True]
    assert backend.ask("exists", pages=[1, 2, 3, 4, 5], prefix=[]) == 4
    assert backend.ask("exists", pages=[3, 4, 5], prefix=[1, 2]) == 2
    assert backend.ask("get_v1", pages=[3, 4], slots=[8, 9]) == [True, True]


@pytest.mark.parametrize("chains", [False, True])
def test_sglangs_own_controller_backs_up_finds_and_prefetches_a_sequence_in_batches(
    engine: EngineProcess, server: ServerProcess, *, chains: bool
) -> None:
    backend = Backend(engine, server, model=f"example/controller-{chains}", extra={"chains": chains})
    done = backend.ask("control", tokens=160, known=2, passes_prefix=chains, batch=4)
    assert done == {"backed_up": 160, "found": 128, "fetched": 8, "same": True}


def test_states_beside_the_pages_say_which_prefixes_can_be_restored(
    engine: EngineProcess, server: ServerProcess
) -> None:
    backend = Backend(engine, server, mamba=True, model="example/hybrid")
    pages = [1, 2, 3, 4, 5]
    backend.ask("fill", pages=pages, slots=[0, 1, 2, 3, 4])
    states = backend.ask("fill", pages=[2, 4], slots=[0, 1], pool="mamba")
    stored = backend.ask("set_v2", pages=[], slots=[], mamba_pages=[2, 4], mamba_slots=[0, 1])
    assert stored == {"mamba": [True, True]}
    assert backend.ask("set_v1", pages=pages, slots=[0, 1, 2, 3, 4]) == [True] * 5
    found = backend.ask("exists_v2", pages=[*pages, 6], policy="trailing_pages")
    assert found == {"pages": 4, "reach": {"kv": 5, "mamba": 4}, "lengths": [2, 4]}
    found = backend.ask("exists_v2", pages=pages, policy="all_pages")
    assert found == {"pages": 0, "reach": {"kv": 5}, "lengths": []}
    found = backend.ask("exists_v2", pages=[2, 4, 5], policy="block_groups", count=3, block_pages=2, group_pages=1)
    assert found == {"pages": 3, "reach": {"kv": 3, "mamba": 3}, "lengths": [1, 2, 3]}
    came = backend.ask("get_v2", pages=[1, 9], slots=[6, 7], mamba_pages=[4], mamba_slots=[9])
    assert came == {"kv": [True, False], "mamba": [True]}
    assert backend.ask("digests", slots=[9], pool="mamba") == states[1:]


@pytest.mark.parametrize(("kind", "is_shared"), [("mla", True), ("mha", False)])
def test_a_draft_of_a_latent_model_is_shared_by_ranks_where_it_is_the_same_on_all_of_them(
    engine: EngineProcess, server: ServerProcess, kind: str, *, is_shared: bool
) -> None:
    writer, reader = (
        Backend(engine, server, rank=rank, ranks=2, mla=True, model=f"example/draft-{kind}") for rank in (0, 1)
    )
    for each in (writer, reader):
        each.ask("add_pool", pool="draft", kind=kind)
    pages, slots = [1, 2, 3], [0, 1, 2]
    writer.ask("fill", pages=pages, slots=slots)
    written = writer.ask("fill", pages=pages, slots=slots, pool="draft")
    assert writer.ask("set_pool", pool="draft", pages=pages, slots=slots) == [True] * 3
    assert writer.ask("set_v1", pages=pages, slots=slots) == [True] * 3
    for each, found in ((writer, True), (reader, is_shared)):
        told = each.ask("exists_v2", pages=pages, policy="all_pages", count=3, pool="draft")
        assert told["lengths"] == ([1, 2, 3] if found else [])
    assert reader.ask("get_pool", pool="draft", pages=pages, slots=[4, 5, 6]) == [is_shared] * 3
    if is_shared:
        assert reader.ask("digests", slots=[4, 5, 6], pool="draft") == written


def test_states_of_another_data_type_are_other_states_and_those_of_more_memory_are_not(
    engine: EngineProcess, server: ServerProcess
) -> None:
    half, brain, larger = (Backend(engine, server, model="example/states") for _ in range(3))
    half.ask("add_pool", pool="mamba", kind="mamba", dtype="float16")
    brain.ask("add_pool", pool="mamba", kind="mamba", dtype="bfloat16")
    larger.ask("add_pool", pool="mamba", kind="mamba", dtype="float16", capacity=128)
    written = half.ask("fill", pages=[1], slots=[0], pool="mamba")
    assert half.ask("set_pool", pool="mamba", pages=[1], slots=[0]) == [True]
    before = brain.ask("digests", slots=[3], pool="mamba")
    assert brain.ask("get_pool", pool="mamba", pages=[1], slots=[3]) == [False]
    assert brain.ask("digests", slots=[3], pool="mamba") == before
    assert larger.ask("get_pool", pool="mamba", pages=[1], slots=[3]) == [True]
    assert larger.ask("digests", slots=[3], pool="mamba") == written


@pytest.mark.parametrize(
    ("pool", "kind", "layout"),
    [
        ("indexer", "indexer", "layer_first"),
        ("indexer", "indexer", "page_first"),
        ("mamba", "mamba_sides", "page_first"),
    ],
)
def test_pages_of_a_pool_come_back_byte_for_byte_also_where_it_does_not_tell_where_they_lie(
    engine: EngineProcess, server: ServerProcess, pool: str, kind: str, layout: str
) -> None:
    backend = Backend(engine, server, mla=True, layout=layout, model=f"example/{kind}-{layout}")
    backend.ask("add_pool", pool=pool, kind=kind)
    pages, slots = [1, 2, 3], [4, 0, 7]
    backend.ask("fill", pages=pages, slots=slots)
    written = backend.ask("fill", pages=pages, slots=slots, pool=pool)
    assert backend.ask("set_pool", pool=pool, pages=pages, slots=slots) == [True] * 3
    assert backend.ask("set_v1", pages=pages, slots=slots) == [True] * 3
    told = backend.ask("exists_v2", pages=[*pages, 4], policy="all_pages", count=4, pool=pool)
    assert told == {"pages": 3, "reach": {"kv": 3, pool: 3}, "lengths": [1, 2, 3]}
    before = backend.ask("digests", slots=[12], pool=pool)
    came = backend.ask("get_pool", pool=pool, pages=[*pages, 4], slots=[9, 10, 11, 12])
    assert came == [True, True, True, False]
    assert backend.ask("digests", slots=[9, 10, 11, 12], pool=pool) == [*written, *before]


def test_a_pool_whose_pages_cannot_be_had_is_told_of_once_and_its_prefixes_are_misses(
    engine: EngineProcess, server: ServerProcess
) -> None:
    backend = Backend(engine, server, model="example/logical")
    backend.ask("add_pool", pool="swa", kind="logical")
    backend.ask("fill", pages=[1, 2], slots=[0, 1])
    assert backend.ask("set_v1", pages=[1, 2], slots=[0, 1]) == [True, True]
    for _ in range(3):
        assert backend.ask("set_pool", pool="swa", pages=[1, 2], slots=[0, 1]) == [False, False]
        assert backend.ask("get_pool", pool="swa", pages=[1, 2], slots=[0, 1]) == [False, False]
        told = backend.ask("exists_v2", pages=[1, 2], policy="all_pages", count=2, pool="swa")
        assert told == {"pages": 0, "reach": {"kv": 2}, "lengths": []}
    assert engine.log_tail(200).count("pool swa") == 1


def test_indices_that_do_not_fit_are_misses_and_touch_nothing(engine: EngineProcess, server: ServerProcess) -> None:
    backend = Backend(engine, server, model="example/misfit")
    before = backend.ask("digests", slots=[0])
    missed = [False, False]
    assert backend.ask("misfit", pages=[1, 2], slots=[0]) == {
        "get": missed, "set": missed, "none": missed, "unknown": missed,
    }  # fmt: skip
    assert backend.ask("digests", slots=[0]) == before


def test_a_page_that_is_gone_or_of_another_size_is_a_miss_and_its_neighbours_come(
    engine: EngineProcess, server: ServerProcess
) -> None:
    backend = Backend(engine, server, mla=True, model="example/gone", extra={"namespace": "gone"})
    pages = [1, 2, 3]
    written = backend.ask("fill", pages=pages, slots=[0, 1, 2])
    assert backend.ask("set_v1", pages=[2], slots=[1]) == [True]
    (second,) = delete_all(server, "gone")
    assert backend.ask("set_v1", pages=[1, 3], slots=[0, 2]) == [True, True]
    assert backend.ask("get_v1", pages=pages, slots=[4, 5, 6]) == [True, False, True]
    assert backend.ask("digests", slots=[4, 6]) == [written[0], written[2]]
    with server.raw() as raw:
        assert raw.request("PUT", f"/{BUCKET}/{second}", b"short").status == 200
    assert backend.ask("get_v1", pages=pages, slots=[4, 5, 6]) == [True, False, True]
    assert backend.ask("set_v1", pages=[2], slots=[1]) == [False], "the first writer's bytes stand"
    assert backend.ask("digests", slots=[4, 6]) == [written[0], written[2]]


def test_metrics_and_clear(engine: EngineProcess, server: ServerProcess) -> None:
    backend, other = (Backend(engine, server, model=model) for model in ("example/clear", "example/kept"))
    for each in (backend, other):
        each.ask("fill", pages=[1, 2], slots=[0, 1])
        each.ask("set_v1", pages=[1, 2], slots=[0, 1])
    backend.ask("get_v1", pages=[1, 2], slots=[3, 4])
    assert backend.ask("stats") == {"prefetch_pgs": [2], "backup_pgs": [2], "speeds": 1}
    assert backend.ask("stats") == {"prefetch_pgs": [], "backup_pgs": [], "speeds": 0}
    backend.ask("clear")
    assert backend.ask("exists", pages=[1]) == 0
    assert other.ask("exists", pages=[1, 2]) == 2


def test_a_clear_that_the_server_does_not_answer_is_an_error_and_leaves_the_pages(
    engine: EngineProcess, server: ServerProcess
) -> None:
    backend = Backend(engine, server, model="example/unanswered")
    backend.ask("fill", pages=[1, 2], slots=[0, 1])
    assert backend.ask("set_v1", pages=[1, 2], slots=[0, 1]) == [True, True]
    with (
        server.hanging(),
        pytest.raises(RuntimeError, match=r"UnavailableError: the chunks in namespace .* not removed"),
    ):
        backend.ask("clear")
    wait_until(
        lambda: bool(backend.ask("exists", pages=[1, 2]) == 2), timeout_seconds=20, what="the store to be asked again"
    )
    backend.ask("clear")
    assert backend.ask("exists", pages=[1]) == 0


def test_a_clear_by_who_may_not_delete_is_an_error_and_leaves_the_pages(engine: EngineProcess, tmp_path: Path) -> None:
    user = UserSetting("engine", "KVENGINE000000000000", "s" * 40)
    with ServerProcess(tmp_path, replace(store_settings(), users=(user,))) as server:
        owner = Backend(engine, server, model="example/owned")
        owner.ask("fill", pages=[1], slots=[0])
        assert owner.ask("set_v1", pages=[1], slots=[0]) == [True]
        root = server.credentials()
        with KvClient(server.endpoint, Credentials(root.access_key, root.secret_key), BUCKET) as client:
            declared = client.namespace(owner.opened["namespace"]).declaration
            client.declare_namespace(owner.opened["namespace"], {**declared, "access": {"engine": "write"}})
        keys = {"access_key": user.access_key, "secret_key": user.secret_key, "declare": False}
        granted = Backend(engine, server, model="example/owned", extra=keys)
        assert granted.ask("exists", pages=[1]) == 1
        with pytest.raises(RuntimeError, match=r"AccessDeniedError: the chunks in namespace .* not removed"):
            granted.ask("clear")
        assert owner.ask("exists", pages=[1]) == 1


def test_a_server_that_is_away_makes_misses_and_is_used_again_when_it_is_back(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, store_settings()) as server:
        backend = Backend(engine, server, extra={"timeout_seconds": 1.0})
        written = backend.ask("fill", pages=[1, 2], slots=[0, 1])
        assert backend.ask("set_v1", pages=[1, 2], slots=[0, 1]) == [True, True]
        os.kill(server.pid, signal.SIGSTOP)  # its sockets accept and say nothing
        try:
            assert backend.ask("get_v1", pages=[1, 2], slots=[3, 4], timeout_seconds=20.0) == [False, False]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(
            lambda: bool(backend.ask("exists", pages=[1, 2]) == 2),
            timeout_seconds=20,
            what="the store to be asked again",
        )
        os.kill(server.pid, signal.SIGSTOP)
        killed = threading.Timer(0.3, server.kill)  # while the pages are being read
        killed.start()
        assert backend.ask("get_v1", pages=[1, 2], slots=[3, 4], timeout_seconds=20.0) == [False, False]
        killed.join()
        assert backend.ask("exists", pages=[1, 2], timeout_seconds=10.0) == 0
        assert backend.ask("set_v1", pages=[1], slots=[0], timeout_seconds=10.0) == [False]
        server.start()
        wait_until(
            lambda: bool(backend.ask("exists", pages=[1, 2]) == 2),
            timeout_seconds=20,
            what="the store to be asked again",
        )
        assert backend.ask("get_v1", pages=[1, 2], slots=[3, 4]) == [True, True]
        assert backend.ask("digests", slots=[3, 4]) == written


def test_pages_of_the_older_interface_may_come_in_one_tensor(engine: EngineProcess, server: ServerProcess) -> None:
    backend = Backend(engine, server, zero_copy=False, model="example/stacked")
    written = backend.ask("fill", pages=[1, 2], slots=[0, 1])
    assert backend.ask("set_stacked", pages=[1, 2], slots=[0, 1])
    assert backend.ask("get_pages", pages=[1, 2], slots=[5, 6]) == [True, True]
    assert backend.ask("digests", slots=[5, 6]) == written


def test_a_wrong_setting_is_told_when_the_engine_starts(engine: EngineProcess, server: ServerProcess) -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        Backend(engine, server, extra={"no_such_setting": 1})
    with pytest.raises(RuntimeError, match="chains"):
        Backend(engine, server, extra={"chains": 1})
    with pytest.raises(RuntimeError, match="namespace: is no namespace's name"):
        Backend(engine, server, extra={"namespace": "a/b c"})
    with pytest.raises(RuntimeError, match="model: the declaration's model has 1025 characters"):
        Backend(engine, server, model="m" * 1025)
