"""`pip install kvobj`: the client without the server. Nothing of the server's is needed, or loaded, and no compiler either."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from module_paths import ModulePaths
from real_client import credentials_of, kv_server

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("client_only_script.py")
CLIENT_NEEDS = ("blake3", "msgspec")


@pytest.fixture(scope="module")
def python(module_paths: ModulePaths) -> Path:
    """The interpreter of an environment into which kvobj and what its client needs were copied, and nothing else."""
    directory = module_paths.mktemp("alone") / "venv"
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for name in CLIENT_NEEDS:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, site / name)
    ignored = shutil.ignore_patterns("__pycache__", "libkvobj.so")
    shutil.copytree(REPOSITORY / "kvobj", site / "kvobj", ignore=ignored)
    return directory / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-I", *arguments], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


def test_what_is_installed_by_default_is_what_the_client_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(each.partition(">")[0] for each in project["dependencies"]) == sorted(CLIENT_NEEDS)
    assert any(each.startswith("aiohttp") for each in project["optional-dependencies"]["server"])


def test_a_client_alone_makes_a_round_trip_and_loads_nothing_of_the_servers(python: Path, tmp_path: Path) -> None:
    with kv_server(tmp_path) as server:
        keys = credentials_of(server)
        done = run(python, str(SCRIPT), server.endpoint, keys.access_key, keys.secret_key)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted([*CLIENT_NEEDS, "kvobj"])


@pytest.mark.parametrize("module", ["kvobj", "kvobj.admin"])
def test_a_server_that_is_not_installed_is_told_in_one_line(python: Path, module: str) -> None:
    arguments = ["serve"] if module == "kvobj" else ["status"]
    done = run(python, "-m", module, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("in a clone pip install '.[server]', from a release pip install 'kvobj[server]'")


def test_the_servers_settings_are_shown_without_it(python: Path) -> None:
    assert run(python, "-m", "kvobj", "example-config").stdout.startswith("#")
    assert run(python, "-m", "kvobj", "--version").returncode == 0


def test_a_machine_without_a_compiler_does_without_the_native_library(python: Path) -> None:
    (build,) = python.parent.parent.glob("lib/python*/site-packages/kvobj/native/build.py")
    done = subprocess.run(
        [str(python), str(build)], env={"CC": "/nowhere/cc"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "pure Python twins" in done.stderr
    assert not list(build.parent.glob("*.so"))
