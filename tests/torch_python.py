"""A Python with torch, which the tests' own environment has not: that of the engines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PYTHON: Final = REPOSITORY / ".envs" / "engines" / "bin" / "python"
RUN_SECONDS: Final = 120


def run_with_torch(arguments: Sequence[str | Path]) -> str:
    """What a program printed; a failure of the test, with what it said, where it failed. Skips without that environment, but in CI,
    which makes it."""
    if not PYTHON.exists():
        reason = "no environment with torch: make engine-envs"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    paths = [REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tools"]
    done = subprocess.run(
        [PYTHON, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
