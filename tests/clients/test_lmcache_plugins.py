"""kvobj's plug-ins in the real LMCache, against a real server: the L2 adapter of its multi-process server, and the connector inside
an engine. LMCache's own harnesses, `bench l2` and `basic_check`, run over both and verify what they read."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from client_suite import body_of
from engine_process import PYTHON, EngineProcess, digest_of, needs_engines
from module_paths import ModulePaths
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings, UserSetting, wait_until

from kvobj.client import NewChunk
from kvobj.connectors import LinkSettings, StoreLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

needs_engines()

SETTINGS: Final = ServerSettings(
    dram_bytes=384 * MIB,
    nvme_bytes=384 * MIB,
    buckets=(BucketSetting("cache", "kv", "memory"),),
    sections={"server.hosts": {"localhost": '"cache"'}},  # for LMCache's S3 adapter, which has no path style
)
SMALL: Final = ServerSettings(
    dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=(BucketSetting("cache", "kv", "memory"),)
)
"""Of servers that are started often: to populate an arena is what costs."""
ENVIRONMENT: Final = {
    "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tools'}",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
DECLARATION: Final = {"model": "any", "chunk_tokens": 256, "layout": {"kind": "opaque"}, "ids": "foreign"}
SIZES: Final = (1, 4096, MIB, 3 * MIB + 1)
TOKENS: Final = 16


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("plugins"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("plugins-log") / "log"
    with EngineProcess("lmcache_plugins.py", log, ENVIRONMENT) as running:
        yield running


def params_of(server: ServerProcess, **fields: object) -> dict[str, Any]:
    keys = server.credentials()
    return {
        "endpoint": server.endpoint,
        "bucket": "cache",
        "access_key": keys.access_key,
        "secret_key": keys.secret_key,
        "rest_seconds": 0.1,
        "rest_seconds_max": 0.2,
        "timeout_seconds": 3.0,
        **fields,
    }


def key(number: int, salt: str = "") -> tuple[str, str]:
    return f"{number:064x}", salt


def keys_from(first: int, count: int, salt: str = "") -> list[tuple[str, str]]:
    return [key(first + position, salt) for position in range(count)]


def digests(sizes: Sequence[int], first_seed: int) -> list[str]:
    return [digest_of(size, first_seed + position) for position, size in enumerate(sizes)]


class TestL2Adapter:
    @pytest.mark.parametrize("arena_bytes", [0, 64 * MIB])
    def test_chunks_come_back_whole(self, engine: EngineProcess, server: ServerProcess, arena_bytes: int) -> None:
        first = 100 + bool(arena_bytes) * 10
        engine.ask("open", name="whole", params=params_of(server), arena_bytes=arena_bytes)
        stored = [
            (one, size, first + at) for at, (one, size) in enumerate(zip(keys_from(first, 4), SIZES, strict=True))
        ]
        assert engine.ask("look_up", name="whole", keys=keys_from(first, 4)) == [False] * 4
        assert engine.ask("store_result", name="whole", objects=stored) == [True, sum(SIZES)]
        assert engine.ask("store_result", name="whole", objects=stored) == [True, 0], "nothing of it was new"
        assert engine.ask("lock", name="whole", keys=[*keys_from(first, 4), key(9999)]) == [True] * 4 + [False]
        loaded = engine.ask("load", name="whole", objects=list(zip(keys_from(first, 4), SIZES, strict=True)))
        assert loaded["digests"] == digests(SIZES, first)
        engine.ask("unlock", name="whole", keys=[*keys_from(first, 4), key(9999)])
        state = engine.ask("state", name="whole")
        assert state["descriptors"] == 3
        assert state["status"]["is_healthy"]
        assert state["status"]["held"] == 0
        assert state["status"]["arena_bytes"] == arena_bytes

    def test_what_is_locked_is_loaded_even_if_it_was_deleted_and_what_is_not_is_a_miss(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="locked", params=params_of(server))
        keys = keys_from(200, 3)
        assert engine.ask("store", name="locked", objects=[(one, 5000, 200 + at) for at, one in enumerate(keys)])
        assert engine.ask("lock", name="locked", keys=keys[:2]) == [True, True]
        engine.ask("delete", name="locked", keys=keys)
        asked = [(one, 5000) for one in keys]
        assert engine.ask("load", name="locked", objects=asked)["digests"] == [*digests([5000] * 2, 200), None]
        engine.ask("unlock", name="locked", keys=keys)
        assert engine.ask("load", name="locked", objects=asked)["digests"] == [None] * 3

    def test_a_chunk_of_another_size_than_its_memory_is_a_miss(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="sizes", params=params_of(server))
        assert engine.ask("store", name="sizes", objects=[(one, 4096, 1) for one in keys_from(300, 3)])
        asked = list(zip(keys_from(300, 3), (4095, 4096, 4097), strict=True))
        assert engine.ask("load", name="sizes", objects=asked)["digests"] == [None, digest_of(4096, 1), None]
        assert not engine.ask("store", name="sizes", objects=[(key(300), 8192, 1)]), "a rank that disagrees is told"
        assert engine.ask("state", name="sizes")["status"]["disagreements"] == 1

    def test_salts_and_namespaces_are_apart(self, engine: EngineProcess, server: ServerProcess) -> None:
        engine.ask("open", name="plain", params=params_of(server))
        engine.ask("open", name="spaced", params=params_of(server, namespace="lmcache", declaration=DECLARATION))
        assert engine.ask("store", name="plain", objects=[(key(400), 100, 1), (key(400, "alice"), 100, 2)])
        assert engine.ask("store", name="spaced", objects=[(key(400), 200, 3)])
        asked = [(key(400), 100), (key(400, "alice"), 100), (key(400, "bob"), 100)]
        assert engine.ask("load", name="plain", objects=asked)["digests"] == [*digests([100, 100], 1), None]
        assert engine.ask("load", name="spaced", objects=[(key(400), 200)])["digests"] == [digest_of(200, 3)]
        assert engine.ask("state", name="plain")["by_salt"] == {"": 100, "alice": 100}
        engine.ask("delete", name="plain", keys=[key(400, "alice")])
        assert engine.ask("state", name="plain")["by_salt"] == {"": 100}
        wait_until(
            lambda: bool(engine.ask("state", name="spaced")["used_bytes"] == 200),
            timeout_seconds=10,
            what="the usage to be asked for",
        )

    def test_salts_with_control_characters_are_deleted_with_their_neighbours(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="odd", params=params_of(server))
        keys = [key(450 + at, salt) for at, salt in enumerate(("cr\rx", "\x01ctl", "plain"))]
        assert engine.ask("store", name="odd", objects=[(one, 100, 1) for one in keys])
        engine.ask("delete", name="odd", keys=keys)
        assert engine.ask("look_up", name="odd", keys=keys) == [False] * 3
        state = engine.ask("state", name="odd")
        assert (state["by_salt"], state["status"]["errors"]) == ({}, 0)

    def test_what_the_store_removed_and_is_stored_again_counts_once(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        for name in ("counting", "removing"):
            engine.ask("open", name=name, params=params_of(server))
        keys = keys_from(470, 3, "tenant")
        for size in (1000, 1000, 300):
            assert engine.ask("store_result", name="counting", objects=[(one, size, 1) for one in keys]) == [
                True,
                3 * size,
            ]
            assert engine.ask("state", name="counting")["by_salt"] == {"tenant": 3 * size}
            engine.ask("delete", name="removing", keys=keys)
        assert engine.ask("store", name="counting", objects=[(keys[0], 200, 1)])
        engine.ask("delete", name="counting", keys=keys)
        assert engine.ask("state", name="counting")["by_salt"] == {}

    def test_keys_are_listed_in_pages_and_named_as_lmcaches_s3_adapter_names_them(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        params = params_of(server, namespace="listed", declaration=DECLARATION)
        engine.ask("open", name="listed", params=params)
        assert engine.ask("store", name="listed", objects=[(one, 50, 1) for one in keys_from(500, 5)])
        pages = engine.ask("list", name="listed", page_size=2)
        assert [[entry[0] for entry in page] for page in pages] == [
            [one for one, _ in keys_from(500, 2)],
            [one for one, _ in keys_from(502, 2)],
            [one for one, _ in keys_from(504, 1)],
        ]
        with server.raw() as raw:
            path = f"/cache/listed/example/Model-8B@00000001@0@{500:064x}"
            assert len(raw.request("GET", path).body) == 50

    @pytest.mark.parametrize("cursor", ["\0junk", "x" * 2000])
    def test_a_cursor_that_is_none_is_refused_as_lmcache_has_it(
        self, engine: EngineProcess, server: ServerProcess, cursor: str
    ) -> None:
        engine.ask("open", name="cursors", params=params_of(server))
        with pytest.raises(RuntimeError, match=r"ValueError.*cursor is not the end of a page"):
            engine.ask("list_behind", name="cursors", cursor=cursor)

    def test_a_model_that_climbs_out_is_stored_found_listed_and_deleted(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="climbing", params=params_of(server))
        keys, chunks = keys_from(530, 2, "salt"), chunks_from(0xC000, (TOKENS, 5))
        objects = [(one, 5000, 530 + at) for at, one in enumerate(keys)]
        model = "../../models/x"
        engine.ask("call_model", model=model)
        try:
            assert engine.ask("store", name="climbing", objects=objects)
            assert engine.ask("lock", name="climbing", keys=keys) == [True, True]
            loaded = engine.ask("load", name="climbing", objects=[(one, 5000) for one in keys])
            assert loaded["digests"] == digests([5000] * 2, 530)
            engine.ask("unlock", name="climbing", keys=keys)
            assert engine.ask("list", name="climbing", page_size=5) == [[[one, 5000] for one, _ in keys]]
            engine.ask("delete", name="climbing", keys=keys)
            assert engine.ask("list", name="climbing", page_size=5) == [[]]
            assert engine.ask("open_engine", name="climbing", params=params_of(server))
            engine.ask("engine_put", name="climbing", chunks=chunks)
            expected = engine.ask("expected", name="climbing", chunks=chunks)
            assert engine.ask("engine_get", name="climbing", chunks=chunks) == expected
            state = engine.ask("engine_state", name="climbing")
            assert [each for each in state["list"] if "models/x" in each] == [
                f"{model}@2@0@c000@bfloat16",
                f"{model}@2@0@c001@bfloat16@user%u1",
            ]
            assert state["report"]["errors"] == 0
        finally:
            engine.ask("call_model", model=None)

    def test_what_is_looked_up_above_a_sessions_pins_is_found_and_loaded(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="rows", params=params_of(server, namespace="rows", declaration=DECLARATION))
        keys = keys_from(0x10000, 4200)
        for start in range(0, len(keys), 1000):
            assert engine.ask("store", name="rows", objects=[(one, 64, 1) for one in keys[start : start + 1000]])
        assert engine.ask("lock", name="rows", keys=[*keys, key(9999)]) == [True] * 4200 + [False]
        assert engine.ask("lock", name="rows", keys=keys[:600]) == [True] * 600, "another request, of the same chunks"
        status = engine.ask("state", name="rows")["status"]
        assert (status["held"], status["found_unheld"], status["errors"]) == (4096, 704, 0)
        loaded = engine.ask("load", name="rows", objects=[(one, 64) for one in keys[4000:]])
        assert loaded["digests"] == [digest_of(64, 1)] * 200
        engine.ask("unlock", name="rows", keys=keys)
        engine.ask("unlock", name="rows", keys=keys[:600])
        assert engine.ask("state", name="rows")["status"]["held"] == 0

    def test_it_shares_its_chunks_with_lmcaches_s3_adapter(self, engine: EngineProcess, server: ServerProcess) -> None:
        credentials = server.credentials()
        engine.ask(
            "open_s3",
            name="s3",
            settings={
                "type": "s3",
                "s3_endpoint": f"s3://localhost:{server.port}",
                "s3_region": credentials.region,
                "disable_tls": True,
                "s3_prefer_http2": False,
                "s3_num_io_threads": 2,
                "aws_access_key_id": credentials.access_key,
                "aws_secret_access_key": credentials.secret_key,
            },
        )
        engine.ask("open", name="shared", params=params_of(server))
        keys = [*keys_from(550, 2), key(552, "alice")]
        assert engine.ask("store", name="s3", objects=[(one, MIB, 550 + at) for at, one in enumerate(keys[:2])])
        assert engine.ask("store", name="shared", objects=[(keys[2], MIB, 552)])
        asked = [(one, MIB) for one in keys]
        assert engine.ask("look_up", name="s3", keys=keys) == [True] * 3
        for name in ("s3", "shared"):
            assert engine.ask("load", name=name, objects=asked)["digests"] == digests([MIB] * 3, 550)

    @pytest.mark.parametrize(("count", "size_kib"), [(32, 1024), (4, 32 * 1024)])
    def test_lmcaches_own_harness_stores_looks_up_loads_and_verifies(
        self, engine: EngineProcess, server: ServerProcess, tmp_path: Path, count: int, size_kib: int
    ) -> None:
        params = params_of(server, namespace=f"bench{size_kib}", declaration=DECLARATION)
        plugin = {
            "type": "plugin",
            "module_path": "kvobj.connectors.lmcache",
            "class_name": "KvobjL2Adapter",
            "adapter_params": params,
        }
        arguments = ["--l2-adapter", json.dumps(plugin), "--num-keys", str(count), "--data-size-kb", str(size_kib)]
        arguments += ["--rounds", "1", "--in-flight", "1", "--lookup-max-hit-rate", "1.0", "--no-skip-verify"]
        ran = engine.ask("bench", arguments=arguments, output=str(tmp_path / "report.json"))
        assert ran["exit_status"] == 0, ran["printed"]
        assert f"All {count} keys data verified OK" in ran["printed"]
        assert "TIMEOUT" not in ran["printed"]
        for operation in ("Store", "Lookup", "Load"):
            assert f"[{operation}] Round 1" in ran["printed"]
        assert f"loaded={count}/{count}" in ran["printed"]
        assert f"success_keys={count}/{count}" in ran["printed"]

    def test_the_yardstick_of_benchmarks_stores_and_loads_as_well(self, engine: EngineProcess, tmp_path: Path) -> None:
        plugin = {
            "type": "plugin",
            "module_path": "dict_l2_plugin",
            "class_name": "DictL2Adapter",
            "adapter_params": {"bytes": 16 * MIB},
        }
        arguments = ["--l2-adapter", json.dumps(plugin), "--num-keys", "8", "--data-size-kb", "500", "--rounds", "1"]
        arguments += ["--lookup-max-hit-rate", "1.0", "--no-skip-verify"]
        ran = engine.ask("bench", arguments=arguments, output=str(tmp_path / "report.json"))
        assert ran["exit_status"] == 0, ran["printed"]
        assert "All 8 keys data verified OK" in ran["printed"]
        assert "success_keys=8/8" in ran["printed"]

    def test_a_restart_costs_misses_and_the_adapter_goes_on(self, engine: EngineProcess, tmp_path: Path) -> None:
        sizes = [MIB] * 4
        keys = keys_from(600, 4)
        asked = list(zip(keys, sizes, strict=True))
        with ServerProcess(tmp_path / "restart", SMALL) as server:
            engine.ask("open", name="restart", params=params_of(server))
            assert engine.ask("store", name="restart", objects=[(one, MIB, 600 + at) for at, one in enumerate(keys)])
            assert engine.ask("lock", name="restart", keys=keys) == [True] * 4
            for end in (server.terminate, server.kill):
                end()
                assert engine.ask("load", name="restart", objects=asked)["digests"] == [None] * 4
                assert engine.ask("lock", name="restart", keys=keys) == [False] * 4
                assert not engine.ask("store", name="restart", objects=[(key(650), MIB, 1)])
                assert not engine.ask("state", name="restart")["status"]["is_healthy"]
                engine.ask("unlock", name="restart", keys=keys)
                server.start()
                wait_until(
                    lambda: engine.ask("load", name="restart", objects=asked)["digests"] == digests(sizes, 600),
                    timeout_seconds=15,
                    what="the adapter to heal",
                )
                assert engine.ask("lock", name="restart", keys=keys) == [True] * 4
            assert engine.ask("state", name="restart")["status"]["is_healthy"]
            engine.ask("close", name="restart")

    def test_a_server_that_is_down_from_the_start_is_used_once_it_is_there(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        with ServerProcess(tmp_path / "late", SMALL) as server:
            server.terminate()
            engine.ask("open", name="late", params=params_of(server))
            assert not engine.ask("store", name="late", objects=[(key(700), 1000, 7)])
            assert engine.ask("lock", name="late", keys=[key(700)]) == [False]
            server.start()
            wait_until(
                lambda: bool(engine.ask("store", name="late", objects=[(key(700), 1000, 7)])),
                timeout_seconds=15,
                what="the adapter to heal",
            )
            assert engine.ask("load", name="late", objects=[(key(700), 1000)])["digests"] == [digest_of(1000, 7)]
            engine.ask("close", name="late")

    def test_a_server_that_hangs_costs_a_deadline_and_not_more(self, engine: EngineProcess, tmp_path: Path) -> None:
        with ServerProcess(tmp_path / "hang", SMALL) as server:
            engine.ask("open", name="hang", params=params_of(server, timeout_seconds=1.0))
            assert engine.ask("store", name="hang", objects=[(key(800), 1000, 8)])
            os.kill(server.pid, signal.SIGSTOP)
            try:
                loaded = engine.ask("load", name="hang", objects=[(key(800), 1000)])
                assert loaded["digests"] == [None]
                assert loaded["seconds"] < 3.0
            finally:
                os.kill(server.pid, signal.SIGCONT)
            wait_until(
                lambda: engine.ask("load", name="hang", objects=[(key(800), 1000)])["digests"] != [None],
                timeout_seconds=10,
                what="the adapter to heal",
            )
            engine.ask("close", name="hang")

    def test_a_session_that_ended_while_lmcache_stood_still_costs_what_is_gone_and_nothing_else(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        keys = keys_from(850, 2)
        asked = [(one, 5000) for one in keys]
        with ServerProcess(tmp_path / "stall", SMALL) as server:
            engine.ask("open", name="stall", params=params_of(server, lease_ms=1000))
            assert engine.ask("store", name="stall", objects=[(one, 5000, 850 + at) for at, one in enumerate(keys)])
            assert engine.ask("lock", name="stall", keys=keys) == [True, True]
            with engine.stopped_past_its_lease(server), server.raw() as raw:
                name = f"example/Model-8B@00000001@0@{keys[0][0]}"
                assert raw.request("DELETE", f"/cache/{name}", payload=None).status == 204
            assert engine.ask("load", name="stall", objects=asked)["digests"] == [None, digest_of(5000, 851)]
            assert engine.ask("lock", name="stall", keys=keys) == [False, True]
            assert engine.ask("store", name="stall", objects=[(keys[0], 5000, 852)])
            loaded = engine.ask("load", name="stall", objects=asked)["digests"]
            assert loaded == [digest_of(5000, 852), digest_of(5000, 851)]
            engine.ask("close", name="stall")

    def test_a_forked_process_has_misses_at_once_and_its_parent_goes_on(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        engine.ask("open", name="forked", params=params_of(server))
        keys = keys_from(2500, 2)
        assert engine.ask("store", name="forked", objects=[(one, 5000, 1) for one in keys])
        assert engine.ask("lock", name="forked", keys=keys) == [True, True]
        assert engine.ask("look_up_in_child", name="forked", keys=keys) == 0
        assert engine.ask("lock", name="forked", keys=keys) == [True, True]
        engine.ask("unlock", name="forked", keys=keys * 2)

    def test_wrong_settings_are_refused_by_name(self, engine: EngineProcess, server: ServerProcess) -> None:
        with pytest.raises(RuntimeError, match=r"load_threads.*"):
            engine.ask("open", name="wrong", params=params_of(server, load_threads=0))
        with pytest.raises(RuntimeError, match=r"colour: no such setting"):
            engine.ask("open", name="wrong", params=params_of(server, colour="red"))


def chunks_from(first: int, tokens: Sequence[int], layer: int | None = None) -> list[list[int]]:
    tail = [] if layer is None else [layer]
    return [[first + at, count, first + at, *tail] for at, count in enumerate(tokens)]


class TestEngineConnector:
    def test_full_and_short_chunks_come_back_with_their_shape_by_every_way(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        assert engine.ask("open_engine", name="whole", params=params_of(server))
        chunks = chunks_from(0x1000, (TOKENS, TOKENS, 5, 1))
        assert engine.ask("engine_contains", name="whole", chunks=chunks) == [0, 0, 0, 0, 0, 0]
        engine.ask("engine_put", name="whole", chunks=chunks)
        assert engine.ask("engine_contains", name="whole", chunks=chunks) == [4, 4, 1, 1, 1, 1]
        expected = engine.ask("expected", name="whole", chunks=chunks)
        for way in ("single", "batched", "non-blocking"):
            assert engine.ask("engine_get", name="whole", chunks=chunks, way=way) == expected
        assert engine.ask("engine_used_bytes", name="whole") == 0

    def test_what_follows_the_first_miss_counts_for_nothing_and_is_given_back(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        assert engine.ask("open_engine", name="prefix", params=params_of(server))
        chunks = chunks_from(0x2000, (TOKENS,) * 4)
        engine.ask("engine_put", name="prefix", chunks=[chunks[0], chunks[1], chunks[3]])
        expected = engine.ask("expected", name="prefix", chunks=chunks)
        assert engine.ask("engine_contains", name="prefix", chunks=chunks) == [2, 2, 1, 1, 0, 1]
        assert engine.ask("engine_get", name="prefix", chunks=chunks, way="non-blocking") == expected[:2]
        got = engine.ask("engine_get", name="prefix", chunks=chunks, way="batched")
        assert got == [*expected[:2], None, expected[3]]
        assert engine.ask("engine_used_bytes", name="prefix") == 0

    def test_a_chunk_that_is_gone_or_of_another_form_is_a_miss_and_its_neighbours_come(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        with ServerProcess(tmp_path / "forms", SMALL) as server:
            assert engine.ask("open_engine", name="forms", params=params_of(server))
            chunks = chunks_from(0x2800, (TOKENS,) * 3)
            engine.ask("engine_put", name="forms", chunks=chunks[:2])
            with server.raw() as raw:
                listing = raw.request("GET", "/cache", query={"list-type": "2"})
                gone, other = (part.split(b"</Key>")[0].decode() for part in listing.body.split(b"<Key>")[1:])
                for name in (gone, other):
                    assert raw.request("DELETE", f"/cache/{name}", payload=None).status == 204
                assert raw.request("PUT", f"/cache/{other}", b"short").status == 200
            engine.ask("engine_put", name="forms", chunks=chunks[2:])
            expected = engine.ask("expected", name="forms", chunks=chunks)
            assert engine.ask("engine_get", name="forms", chunks=chunks, way="batched") == [None, None, expected[2]]
            assert engine.ask("engine_used_bytes", name="forms") == 0
            engine.ask("close_engine", name="forms")

    def test_serialized_chunks_come_back_with_the_bytes_that_were_put_by_every_way(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        assert engine.ask("open_engine", name="serialized", params=params_of(server))
        engine.ask("engine_serialize", name="serialized", size_bytes=777)
        chunks = chunks_from(0x2C00, (TOKENS,) * 3)
        engine.ask("engine_put", name="serialized", chunks=chunks)
        for way in ("single", "batched", "non-blocking"):
            got = engine.ask("engine_get", name="serialized", chunks=chunks, way=way)
            assert [each[1] for each in got] == ["BINARY_BUFFER"] * 3
            full = [body_of(2048, chunk[2]) for chunk in chunks]
            assert [each[2] for each in got] == [hashlib.sha256(each[:777]).hexdigest() for each in full]
        assert engine.ask("engine_used_bytes", name="serialized") == 0

    def test_layers_are_chunks_of_their_own(self, engine: EngineProcess, server: ServerProcess) -> None:
        assert engine.ask("open_engine", name="layers", params=params_of(server), layerwise=True)
        layers = [chunks_from(0x3000, (TOKENS, 7), layer) for layer in range(2)]
        for layer in layers:
            engine.ask("engine_put", name="layers", chunks=layer)
        for layer in layers:
            expected = engine.ask("expected", name="layers", chunks=layer)
            assert engine.ask("engine_get", name="layers", chunks=layer) == expected
        assert engine.ask("engine_contains", name="layers", chunks=chunks_from(0x3000, (TOKENS, 7), 2)) == [0] * 4
        assert engine.ask("engine_used_bytes", name="layers") == 0

    def test_ranks_of_an_mla_model_share_what_rank_0_wrote(self, engine: EngineProcess, server: ServerProcess) -> None:
        chunks = chunks_from(0x4000, (TOKENS, 3))
        for rank in (0, 1):
            assert engine.ask("open_engine", name=f"rank{rank}", params=params_of(server), mla_rank=rank)
        engine.ask("engine_put", name="rank0", chunks=chunks)
        expected = engine.ask("expected", name="rank0", chunks=chunks)
        for rank in (0, 1):
            for way in ("single", "batched", "non-blocking"):
                assert engine.ask("engine_get", name=f"rank{rank}", chunks=chunks, way=way) == expected
            assert engine.ask("engine_contains", name=f"rank{rank}", chunks=chunks) == [2, 2, 1, 1]

    def test_a_scheduler_looks_up_without_memory(self, engine: EngineProcess, server: ServerProcess) -> None:
        chunks = chunks_from(0x5000, (TOKENS, TOKENS))
        assert engine.ask("open_engine", name="worker", params=params_of(server))
        engine.ask("engine_put", name="worker", chunks=chunks)
        assert engine.ask("open_engine", name="scheduler", params=params_of(server), scheduler=True)
        assert engine.ask("engine_contains", name="scheduler", chunks=chunks) == [2, 2, 1, 1]
        assert engine.ask("engine_get", name="scheduler", chunks=chunks) == [None, None]

    def test_where_there_is_no_memory_a_chunk_is_a_miss_at_once(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        chunks = chunks_from(0x6000, (TOKENS, TOKENS))
        assert engine.ask("open_engine", name="full", params=params_of(server), memory_mib=2)
        engine.ask("engine_put", name="full", chunks=chunks)
        assert engine.ask("engine_fill", name="full") > 0
        assert engine.ask("engine_get", name="full", chunks=chunks, timeout_seconds=5.0) == [None, None]

    def test_what_comes_for_a_call_that_was_given_up_is_given_back(
        self, engine: EngineProcess, server: ServerProcess
    ) -> None:
        chunks = chunks_from(0x7000, (TOKENS,) * 8)
        assert engine.ask("open_engine", name="cancelled", params=params_of(server))
        engine.ask("engine_put", name="cancelled", chunks=chunks)
        for _ in range(20):
            engine.ask("engine_cancel_get", name="cancelled", chunks=chunks)
        expected = engine.ask("expected", name="cancelled", chunks=chunks)
        assert engine.ask("engine_get", name="cancelled", chunks=chunks) == expected
        wait_until(
            lambda: bool(engine.ask("engine_used_bytes", name="cancelled") == 0),
            timeout_seconds=10,
            what="memory to be given back",
        )

    def test_a_forked_process_finds_what_its_parent_finds(self, engine: EngineProcess, server: ServerProcess) -> None:
        engine.ask("open_engine", name="forked_engine", params=params_of(server))
        chunks = chunks_from(0xA000, (TOKENS, TOKENS))
        engine.ask("engine_put", name="forked_engine", chunks=chunks)
        assert engine.ask("engine_contains", name="forked_engine", chunks=chunks)[0] == 2
        assert engine.ask("engine_contains_in_child", name="forked_engine", chunks=chunks) == 2
        assert engine.ask("engine_contains", name="forked_engine", chunks=chunks)[0] == 2

    def test_it_lists_removes_and_answers_pings(self, engine: EngineProcess, server: ServerProcess) -> None:
        params = params_of(server, namespace="engine", declaration=DECLARATION)
        assert engine.ask("open_engine", name="listing", params=params)
        chunks = chunks_from(0x8000, (TOKENS, 4))
        engine.ask("engine_put", name="listing", chunks=chunks)
        state = engine.ask("engine_state", name="listing")
        assert state["ping"] == 0
        assert state["list"] == [
            "/models/Example-8B@2@0@8000@bfloat16",
            "/models/Example-8B@2@0@8001@bfloat16@user%u1",
        ]
        assert engine.ask("engine_remove", name="listing", chunk=chunks[0])
        assert engine.ask("engine_contains", name="listing", chunks=chunks) == [0, 0, 0, 1]

    def test_a_restart_costs_misses_and_the_connector_goes_on(self, engine: EngineProcess, tmp_path: Path) -> None:
        chunks = chunks_from(0x9000, (TOKENS, 9))
        with ServerProcess(tmp_path / "engine", SMALL) as server:
            server.terminate()
            assert engine.ask("open_engine", name="again", params=params_of(server)), (
                "down from the start is no failure"
            )
            expected = engine.ask("expected", name="again", chunks=chunks)
            for _ in range(2):
                assert engine.ask("engine_get", name="again", chunks=chunks) == [None, None]
                assert engine.ask("engine_contains", name="again", chunks=chunks) == [0, 0, 0, 0]
                engine.ask("engine_put", name="again", chunks=chunks)
                assert not engine.ask("engine_remove", name="again", chunk=chunks[0])
                assert engine.ask("engine_state", name="again")["ping"] != 0
                server.start()
                wait_until(
                    lambda: bool(engine.ask("engine_state", name="again")["ping"] == 0),
                    timeout_seconds=15,
                    what="the connector to heal",
                )
                engine.ask("engine_put", name="again", chunks=chunks)
                assert engine.ask("engine_get", name="again", chunks=chunks) == expected
                server.kill()
            assert engine.ask("engine_used_bytes", name="again") == 0
            engine.ask("close_engine", name="again")

    def test_what_is_under_way_or_waits_when_it_is_closed_is_a_miss_and_so_is_what_comes_later(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        chunks = chunks_from(0xA000, (TOKENS, TOKENS))
        with ServerProcess(tmp_path / "closing", SMALL) as server:
            assert engine.ask("open_engine", name="closing", params=params_of(server, timeout_seconds=1.0))
            engine.ask("engine_put", name="closing", chunks=chunks)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                ended = engine.ask("engine_close_under_calls", name="closing", chunks=chunks)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            misses = {"exists": [False], "contains": [0], "get": [[None, None]], "run": [[]], "put": [None]}
            assert ended["before"] == misses
            assert ended["after"] == {**misses, "ping": [1], "list": [[]]}
            assert engine.ask("engine_used_bytes", name="closing") == 0

    def test_lmcaches_health_check_finds_a_store_that_answers_well_again_also_where_it_may_only_read(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        user = UserSetting("engine", "KVENGINE000000000000", "s" * 40)
        settings = replace(SMALL, users=(user,), domains=("localhost",))
        with ServerProcess(tmp_path / "health", settings) as server:
            params = params_of(server, namespace="health", declaration={**DECLARATION, "access": {"engine": "read"}})
            assert engine.ask("open_engine", name="owner", params=params)
            granted = {"access_key": user.access_key, "secret_key": user.secret_key}
            assert engine.ask("open_engine", name="other", params=params_of(server, namespace="health", **granted))
            for seed in range(3):
                for name in ("owner", "other"):
                    assert engine.ask("engine_recovers", name=name, seed=2 * seed + (name == "other"))
            assert engine.ask("engine_state", name="owner")["list"] == [], "it leaves nothing"
            server.kill()
            assert not engine.ask("engine_recovers", name="owner", seed=7)
            for name in ("owner", "other"):
                engine.ask("close_engine", name=name)

    def test_puts_that_wait_for_room_keep_nothing_else_waiting_and_are_given_up(
        self, engine: EngineProcess, tmp_path: Path
    ) -> None:
        chunks = chunks_from(0xD000, (TOKENS, 5))
        with ServerProcess(tmp_path / "full", SMALL) as server:
            params = params_of(server, timeout_seconds=2.0)
            assert engine.ask("open_engine", name="waiting", params=params, memory_mib=256)
            engine.ask("engine_put", name="waiting", chunks=chunks)
            expected = engine.ask("expected", name="waiting", chunks=chunks)
            with closing(StoreLink(LinkSettings.parse(params_of(server, timeout_seconds=1.0), {}))) as filler:
                names = engine.ask("engine_state", name="waiting")["list"]
                assert filler.hold(names) == [True, True]
                for number in itertools.count():
                    chunk = NewChunk(f"full/{number}", body_of(4 * MIB, number))
                    if not filler.store([chunk])[0]:
                        break
                    filler.hold([chunk.id])
                begun = 12
                large = [[0xD100 + 2 * at, TOKENS * 2048, at] for at in range(begun)]
                engine.ask("engine_begin_puts", name="waiting", chunks=large)
                assert engine.ask("engine_is_well", name="waiting"), "its ping waited behind puts"
                assert engine.ask("engine_contains", name="waiting", chunks=chunks) == [2, 2, 1, 1]
                assert engine.ask("engine_get", name="waiting", chunks=chunks) == expected
                assert engine.ask("engine_puts_underway") >= begun - 2, "puts went first"
                wait_until(
                    lambda: bool(engine.ask("engine_puts_underway") == 0),
                    timeout_seconds=30,
                    what="the puts to end",
                )
                report = engine.ask("engine_state", name="waiting")["report"]
                assert report["is_up"], "a full store was taken for one that is away"
                assert report["store_failures"] > begun // 2
                assert report["errors"] < report["store_failures"], "none was given up while it waited"
                assert engine.ask("engine_used_bytes", name="waiting") == 0
            engine.ask("close_engine", name="waiting")

    def test_the_pages_configuration_makes_one_backend_that_stores_and_loads(
        self, engine: EngineProcess, server: ServerProcess, tmp_path: Path
    ) -> None:
        page = (REPOSITORY / "docs" / "engines" / "lmcache.md").read_text()
        (block,) = re.findall(r"(?:^    .*\n)*^    remote_storage_plugins: .*\n(?:^    .*\n)+", page, re.MULTILINE)
        credentials = tmp_path / "credentials"
        keys = server.credentials()
        credentials.write_text(f'access_key = "{keys.access_key}"\nsecret_key = "{keys.secret_key}"\n')
        configuration = textwrap.dedent(block)
        for told, here in (
            ("chunk_size: 256", f"chunk_size: {TOKENS}"),
            ("max_local_cpu_size: 5", "max_local_cpu_size: 0.05"),
            ("http://127.0.0.1:9000", server.endpoint),
            ("/etc/kvobj/credentials", str(credentials)),
        ):
            assert configuration.count(told) == 1
            configuration = configuration.replace(told, here)
        file = tmp_path / "lmcache.yaml"
        file.write_text(configuration)
        made = engine.ask("open_configured", name="page", file=str(file))
        assert made == ["LocalCPUBackend", "RemoteBackend-kvobj"]
        chunks = chunks_from(0xB000, (TOKENS, TOKENS))
        engine.ask("engine_put", name="page", chunks=chunks)
        expected = engine.ask("expected", name="page", chunks=chunks)
        assert engine.ask("engine_get", name="page", chunks=chunks) == expected

    def test_lmcaches_own_check_passes(self, server: ServerProcess, tmp_path: Path) -> None:
        fields = {
            "module_path": "kvobj.connectors.lmcache",
            "class_name": "KvobjConnectorAdapter",
            **params_of(server, namespace="check", declaration=DECLARATION),
        }
        configuration = {
            "chunk_size": 256,
            "local_cpu": True,
            "max_local_cpu_size": 0.1,
            "remote_url": "plugin://kvobj",  # the check's backend is made of it, and the connector found by the other
            "remote_storage_plugins": ["kvobj"],
            "extra_config": {f"remote_storage_plugin.kvobj.{field}": value for field, value in fields.items()},
        }
        file = tmp_path / "lmcache.yaml"
        file.write_text(json.dumps(configuration))  # which is YAML too
        ran = subprocess.run(
            [str(PYTHON), "-m", "lmcache.v1.basic_check", "--mode", "test_remote", "--num-keys", "5"],
            env={**os.environ, **ENVIRONMENT, "LMCACHE_CONFIG_FILE": str(file)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "Validation (content correct): 5/5 passed" in ran.stdout, ran.stdout
        for operation in ("EXISTS (non-exist)", "PUT", "EXISTS (exist)", "GET"):
            (line,) = [line for line in ran.stdout.splitlines() if line.startswith(f"| {operation} ")]
            assert "5/5" in line
