"""What an installation compiles: all that can be, within a time, and nothing that was switched off."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvobj.tensors.kernels import build as installed

REPOSITORY = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
case "$*" in *{refused}*) echo "cannot do {refused}" >&2; exit 1;; esac
while [ "$1" != -o ]; do case "$1" in -DKVOBJ*) made="$1";; esac; shift; done
echo "$made" > "$2"
"""
"""Stands for a compiler: what it makes says what it was made from, as a library does."""


@pytest.fixture
def build(tmp_path: Path) -> ModuleType:
    """The kernels' build in a directory of its own."""
    directory = tmp_path / "kernels"
    shutil.copytree(installed.DIRECTORY, directory, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".build-*"))
    return loaded(directory / "build.py")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_compiler(monkeypatch: pytest.MonkeyPatch, directory: Path, *, refused: str) -> None:
    compiler = directory / "c++"
    compiler.write_text(COMPILER.format(refused=refused))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def last_variant(build: ModuleType) -> tuple[str, str]:
    """The last one that has a flag of its own, with that flag."""
    variant, flags = list(build.variants().items())[-1]
    return variant, (*flags, "-O3")[0]


def test_variants_that_cannot_be_compiled_leave_out_no_others(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variant, flag = last_variant(build)
    if len(build.variants()) == 1:
        pytest.skip("this machine has one variant")
    use_compiler(monkeypatch, tmp_path, refused=flag)
    others = [build.library(each) for each in build.variants() if each != variant]
    assert build.build() == others
    assert all(each.exists() for each in others)
    told = capsys.readouterr().err
    assert f"variant {variant}" in told
    assert f"cannot do {flag}" in told
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX")
    assert build.build() == others, "what was compiled before is there still"


def test_where_no_variant_can_be_compiled_the_build_says_why(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path, refused="-O3")
    with pytest.raises(build.BuildError, match="cannot do -O3"):
        build.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build()


def test_all_variants_have_one_time_together(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path, refused="nothing")
    monkeypatch.setattr(build, "SECONDS", 0)
    with pytest.raises(build.BuildError, match="timed out"):
        build.build()


def test_an_installation_says_what_it_compiles_and_leaves_out_what_is_switched_off(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interface: Any = ModuleType("hatchling.builders.hooks.plugin.interface")  # which only an installation has
    interface.BuildHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook: Any = loaded(REPOSITORY / "hatch_build.py")
    use_compiler(monkeypatch, tmp_path, refused="nothing")
    monkeypatch.setenv("KVOBJ_KERNELS", "off")
    path = build.DIRECTORY / "build.py"
    assert hook.built(path, "KVOBJ_KERNELS") == []
    assert "left out: kernels, switched off by KVOBJ_KERNELS" in capsys.readouterr().err
    monkeypatch.delenv("KVOBJ_KERNELS")
    assert hook.built(path, "KVOBJ_KERNELS") == [build.library(each) for each in build.variants()]
    assert "compiling kernels for at most 300 s" in capsys.readouterr().err
