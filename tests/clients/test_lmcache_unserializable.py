"""LMCache's in-process connector with chunks that LMCache has no head for: they are left out, and their neighbours are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine_process import EngineProcess, needs_engines
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

needs_engines()

SETTINGS: Final = ServerSettings(
    dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=(BucketSetting("cache", "kv", "memory"),)
)
ENVIRONMENT: Final = {
    "PYTHONPATH": str(REPOSITORY),
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
TOKENS: Final = 16


def test_a_chunk_that_lmcache_cannot_serialize_is_left_out_counted_and_told(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with (
        ServerProcess(tmp_path / "server", SETTINGS) as server,
        EngineProcess("lmcache_plugins.py", log, ENVIRONMENT) as engine,
    ):
        keys = server.credentials()
        params = {
            "endpoint": server.endpoint,
            "bucket": "cache",
            "access_key": keys.access_key,
            "secret_key": keys.secret_key,
        }
        assert engine.ask("open_engine", name="mixed", params=params)
        chunks = [[0x100 + number, TOKENS, number] for number in range(4)]
        engine.ask("engine_put", name="mixed", chunks=chunks, dtypes=["bfloat16", "int8", "bfloat16", "int8"])
        got = engine.ask("engine_get", name="mixed", chunks=chunks)
        expected = engine.ask("expected", name="mixed", chunks=chunks)
        assert got == [expected[0], None, expected[2], None]
        engine.ask("engine_put", name="mixed", chunks=chunks[1:2], dtypes=["int8"])
        report = engine.ask("engine_state", name="mixed")["report"]
        assert (report["stores"], report["store_failures"]) == (2, 3)
        assert engine.ask("engine_used_bytes", name="mixed") == 0
        engine.ask("close_engine", name="mixed")
    assert log.read_text().count("LMCache has no head for chunks of this form") == 1
