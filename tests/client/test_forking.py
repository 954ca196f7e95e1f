"""A client in a process that forks: parent and child both go on, and never on one connection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from real_client import credentials_of, kv_server

SCRIPT = Path(__file__).with_name("fork_script.py")
BESIDE_SCRIPT = Path(__file__).with_name("fork_beside_script.py")


@pytest.mark.parametrize("path", ["http", "same-host"])
def test_parent_and_child_go_on_each_for_itself(tmp_path: Path, path: str) -> None:
    with kv_server(tmp_path) as server:
        keys = credentials_of(server)
        arguments = [server.endpoint, keys.access_key, keys.secret_key, path]
        command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["mapping", "tables", "region"])
def test_a_child_is_not_held_up_by_what_another_thread_was_in_the_middle_of_and_keeps_none_of_it(step: str) -> None:
    command = [sys.executable, "-W", "ignore", str(BESIDE_SCRIPT), step]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
