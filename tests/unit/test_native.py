"""The native library: what it is made from, and that kvobj does without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvobj.native import build, library, status

REPOSITORY = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY, env=os.environ | environment
    )
    return done.stdout.strip()


def test_the_library_is_loaded_and_says_what_it_was_made_from() -> None:
    assert library() is not None, status().detail
    assert status().is_loaded
    assert build.fingerprint() in status().detail


def test_switched_off_everything_runs_on_the_pure_twins() -> None:
    code = (
        "from kvobj.native import library, status; from kvobj.policy import CacheTier, GipePolicy;"
        "p = GipePolicy({CacheTier.DRAM: 10}); p.request(bytes(16), now_ms=0);"
        "print(library(), status().detail, type(p._core).__name__)"
    )
    assert python(code, KVOBJ_NATIVE="off") == "None switched off by KVOBJ_NATIVE PythonCore"


def test_a_stale_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvobj.native import load  # noqa: PLC0415

    monkeypatch.setattr(load, "fingerprint", lambda: "0" * 16)
    load._load.cache_clear()
    try:
        assert library() is None
        assert "make native" in status().detail
    finally:
        monkeypatch.undo()
        load._load.cache_clear()
    assert library() is not None


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.build()
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(build.BuildError, match="/bin/false"):
        build.build()
    assert build.LIBRARY.exists(), "a build that fails leaves the library alone"
