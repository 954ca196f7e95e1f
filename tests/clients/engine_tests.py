"""What the tests of engines' connectors share: a server with a KV bucket, and a script beside the engine's modules and kvobj's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
from client_suite import ENVIRONMENTS
from engine_process import EngineProcess, needs_engines
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

BUCKET: Final = "engines"


def needs_engine_modules() -> None:
    """Skip the calling module where vLLM's and SGLang's modules are not there. CI has them, so there it fails instead."""
    needs_engines()
    if not (ENVIRONMENTS / "engine-modules" / ".installed").exists():
        reason = "the engines' modules are not there: make engine-envs"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)


def store_settings(*, durability: str = "memory") -> ServerSettings:
    """A small server with one KV bucket."""
    return ServerSettings(dram_bytes=128 * MIB, buckets=(BucketSetting(BUCKET, kind="kv", durability=durability),))


def connector_process(script: str, log: Path) -> EngineProcess:
    """A script that imports kvobj's connectors from this tree."""
    return EngineProcess(script, log, {"PYTHONPATH": str(REPOSITORY)})


def delete_all(server: ServerProcess, namespace: str) -> list[str]:
    """DELETE every chunk of a namespace, as somebody else might; their keys."""
    with server.raw() as raw:
        listing = raw.request("GET", f"/{BUCKET}", query={"list-type": "2", "prefix": f"{namespace}/"})
        keys = [part.split(b"</Key>")[0].decode() for part in listing.body.split(b"<Key>")[1:]]
        assert keys
        for key in keys:
            assert raw.request("DELETE", f"/{BUCKET}/{key}").status == 204
    return keys
