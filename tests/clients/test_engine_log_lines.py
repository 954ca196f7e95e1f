"""What of the connectors' log lines an engine's own log has: with vLLM's configuration of its log, and one such as SGLang makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tests import BUCKET, connector_process, needs_engine_modules, store_settings
from module_paths import ModulePaths
from server_process import ServerProcess

needs_engine_modules()


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("lines"), store_settings()) as running:
        yield running


def place_of(server: ServerProcess) -> dict[str, Any]:
    credentials = server.credentials()
    return {
        "endpoint": server.endpoint,
        "bucket": BUCKET,
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
    }


def line_of(log: Path, text: str) -> str:
    (line,) = [each for each in log.read_text().splitlines() if text in each]
    return line


def test_vllms_log_has_the_namespace_and_what_cannot_be_used(server: ServerProcess, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    tier = {"type": "KvobjTier", "module_path": "kvobj.connectors.vllm", **place_of(server)}
    with connector_process("vllm_tier.py", log) as engine:
        engine.ask("configure_logging")
        opened = engine.ask("open", name="right", tier=tier, rows=8, row_bytes=4096)
        engine.ask("open", name="wrong", tier={**tier, "bucket": "absent"}, rows=8, row_bytes=4096)
        assert engine.ask("look_up", name="wrong", request="a", blocks=[1])["results"] == ["MISS"]
        line = line_of(log, f"chunks of 4096 bytes go to namespace {opened['info']['kvobj_namespace']} of {BUCKET}")
        assert " INFO " in line
        assert "[vllm.py:" in line, "not in the form of vLLM's lines"
        assert " WARNING " in line_of(log, f"kvobj: {server.endpoint}/absent")


@pytest.mark.parametrize("zero_copy", [True, False])
def test_sglangs_log_has_the_namespace_and_whether_pages_are_copied(
    server: ServerProcess, tmp_path: Path, *, zero_copy: bool
) -> None:
    log = tmp_path / "engine.log"
    extra = {
        "backend_name": "kvobj",
        "module_path": "kvobj.connectors.sglang",
        "class_name": "KvobjHiCache",
        **({"interface_v1": 1} if zero_copy else {}),
        **place_of(server),
    }
    with connector_process("sglang_backend.py", log) as engine:
        engine.ask("configure_logging")
        namespace = engine.ask("open", name="pages", extra=extra)["namespace"]
        line = line_of(log, f"pages go to namespace {namespace} at {server.endpoint}")
        assert ("without interface_v1" in line) is not zero_copy
