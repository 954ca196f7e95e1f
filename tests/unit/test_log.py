"""What a server process says on standard error: lines of JSON alone, whoever in the process says it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SAY = """
import logging
from kvobj.app.log import start_logging
from kvobj.config.settings import LogSettings

log = start_logging(LogSettings(level={level!r}))
log.debug("ours in detail")
log.info("ours")
log.error("ours and bad")
log.getChild("s3").info('{{"request_id": "1"}}')
for name in ("asyncio", "botocore.retries"):
    foreign = logging.getLogger(name)
    foreign.info("theirs in passing")
    foreign.warning("SSL connection is closed")
    foreign.error("{{'not': 'json'}}")
"""


def said(level: str) -> list[dict[str, Any]]:
    """The lines of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SAY.format(level=level)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def of(lines: list[dict[str, Any]], logger: str) -> list[str]:
    return [line["message"] for line in lines if line.get("logger") == logger]


@pytest.mark.parametrize("logger", ["asyncio", "botocore.retries"])
def test_what_libraries_warn_of_is_a_line_of_json_as_all_else(logger: str) -> None:
    for level in ("debug", "info", "warning"):
        lines = said(level)
        assert of(lines, logger) == ["SSL connection is closed", "{'not': 'json'}"]
        (warned, _) = [line for line in lines if line.get("logger") == logger]
        assert warned["level"] == "warning"
    assert of(said("error"), logger) == ["{'not': 'json'}"]


def test_each_line_is_said_once_and_a_requests_line_as_it_is() -> None:
    lines = said("debug")
    assert of(lines, "kvobj") == ["ours in detail", "ours", "ours and bad"]
    assert [line for line in lines if "logger" not in line] == [{"request_id": "1"}]
    assert of(said("error"), "kvobj") == ["ours and bad"]
