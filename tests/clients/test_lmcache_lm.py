"""LMCache's own connector for `lm://` and its `basic_check`, against a real server in the place of `lmcache_server`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import pytest
from client_suite import body_of
from engine_process import PYTHON, EngineProcess, digest_of, needs_engines
from free_ports import free_port
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()

ENVIRONMENT: Final = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
    "PYTHONHASHSEED": "0",
}
FORMS: Final = (
    ([2, 4, 256, 1024], "bfloat16", "KV_2LTD"),
    ([2, 2, 16, 64], "float16", "KV_2LTD"),
    ([2, 1, 1, 1], "float32", "KV_2LTD"),
    ([1, 8, 256, 576], "bfloat16", "KV_MLA_FMT"),
    ([1_000_003], "uint8", "KV_2LTD"),
)


class LmServerProcess(ServerProcess):
    """A server that listens for `lm://` too."""

    def __init__(self, directory: Path) -> None:
        self.lm_port = free_port()
        section = {"listen": f'"127.0.0.1:{self.lm_port}"', "bucket": '"cache"'}
        buckets = (BucketSetting("cache", "kv", "memory"),)
        super().__init__(directory, ServerSettings(dram_bytes=128 * MIB, buckets=buckets, sections={"lm": section}))

    def requests(self, command: str, result: str) -> int:
        """How many requests came to this, as its metrics tell."""
        text = str(self.metrics())
        found = re.search(rf'kvobj_lm_requests_total\{{command="{command}",result="{result}"\}} (\d+)', text)
        return int(found[1]) if found else 0

    def metrics(self) -> str:
        with urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[LmServerProcess]:
    with LmServerProcess(module_paths.mktemp("lm")) as running:
        assert isinstance(running, LmServerProcess)
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("lm-engine") / "engine.log"
    with EngineProcess("lmcache_lm.py", log, ENVIRONMENT) as running:
        yield running


def test_basic_check_passes(server: LmServerProcess) -> None:
    environment = {**os.environ, **ENVIRONMENT, "LMCACHE_REMOTE_URL": f"lm://127.0.0.1:{server.lm_port}"}
    command = [str(PYTHON), "-m", "lmcache.v1.basic_check", "--mode", "test_remote", "--num-keys", "5"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    printed = ran.stdout + ran.stderr
    assert "Failed" not in printed, printed
    assert server.requests("put", "stored") == 5, printed
    assert server.requests("get", "ok") == 5, printed
    assert server.requests("exist", "miss") >= 5, printed


def test_chunks_of_every_form_come_back_over_another_connection(engine: EngineProcess, server: LmServerProcess) -> None:
    engine.ask("open", name="writer", port=server.lm_port)
    engine.ask("open", name="reader", port=server.lm_port)
    for number, (shape, dtype, fmt) in enumerate(FORMS):
        key = f"form-{number}"
        assert engine.ask("get", name="reader", key=key) is None
        digest = engine.ask("put", name="writer", key=key, shape=shape, dtype=dtype, fmt=fmt, seed=number)
        assert engine.ask("exists", name="writer", key=key)
        told = engine.ask("get", name="reader", key=key)
        assert told == {"shape": shape, "dtype": dtype, "fmt": fmt, "digest": digest}
    assert not engine.ask("exists", name="reader", key="absent")


def test_chunks_are_under_lmcaches_keys_for_s3_clients_too(engine: EngineProcess, server: LmServerProcess) -> None:
    engine.ask("open", name="writer", port=server.lm_port)
    digest = engine.ask("put", name="writer", key="shared", shape=[2, 1, 8, 64], dtype="float16", fmt="KV_2LTD", seed=9)
    assert engine.ask("exists", name="writer", key="shared")
    with server.raw() as raw:
        reply = raw.request("GET", f"/cache/{engine.ask('key', key='shared')}", payload=None)
    assert reply.status == 200
    assert reply.body == body_of(2048, 9)
    assert digest == digest_of(2048, 9)


def test_lmcaches_health_check_finds_the_server_well_again_however_often_and_by_each_engine(
    engine: EngineProcess, server: LmServerProcess
) -> None:
    for name in ("one", "other"):
        engine.ask("open_backend", name=name, port=server.lm_port)
    for seed in range(3):
        for name in ("one", "other"):
            assert engine.ask("backend_recovers", name=name, seed=2 * seed + (name == "other"))


def test_chunks_outlive_the_server(tmp_path: Path, engine: EngineProcess) -> None:
    with LmServerProcess(tmp_path / "node") as server:
        assert isinstance(server, LmServerProcess)
        engine.ask("open", name="first", port=server.lm_port)
        put: dict[str, Any] = {"shape": [2, 2, 256, 1024], "dtype": "bfloat16", "fmt": "KV_2LTD"}
        digest = engine.ask("put", name="first", key="kept", seed=3, **put)
        assert engine.ask("exists", name="first", key="kept")
        assert server.terminate() == 0  # with an idle connection open
        assert json.dumps(server.log_tail()).count("Traceback") == 0
        server.start()
        engine.ask("open", name="second", port=server.lm_port)
        assert engine.ask("get", name="second", key="kept") == {**put, "digest": digest}
        os.kill(server.pid, signal.SIGSTOP)
        killed = threading.Timer(0.3, server.kill)  # while the chunk is being read
        killed.start()
        with pytest.raises(RuntimeError, match="ConnectionResetError"):  # a miss, says LMCache's remote backend
            engine.ask("get", name="second", key="kept")
        killed.join()
        server.start()
        engine.ask("open", name="third", port=server.lm_port)
        assert engine.ask("get", name="third", key="kept") == {**put, "digest": digest}
        wait_until(lambda: server.requests("get", "ok") == 1, timeout_seconds=10, what="the read to be counted")
