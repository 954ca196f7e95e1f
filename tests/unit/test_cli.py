"""`kvobj`'s command line, up to where the server begins."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvobj.announcement import announcement
from kvobj.cli import main
from kvobj.config import RootCredentials, ServerSettings, Settings
from kvobj.errors import UnavailableError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Stands in for the server: keeps the settings it was started with."""
    settings: list[Settings] = []
    serve = types.ModuleType("kvobj.app.serve")

    def run(given: Settings, _environment: Mapping[str, str]) -> int:
        settings.append(given)
        return 0

    serve.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvobj.app.serve", serve)
    return settings


def test_serve_without_options_is_the_embedded_default(
    started: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve"], environment={}) == 0
    assert started == [Settings(server=ServerSettings(data=tmp_path / "kvobj-data"))]


def test_options_win_over_the_file(started: list[Settings], tmp_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text('[server]\nlisten = "127.0.0.1:1"\n[log]\nlevel = "debug"\n')
    arguments = ["serve", "--config", str(config), "--data", str(tmp_path / "d"), "--listen", "127.0.0.1:0"]
    assert main(arguments, environment={}) == 0
    (settings,) = started
    assert (str(settings.server.listen), settings.server.data, settings.log.level) == (
        "127.0.0.1:0",
        tmp_path / "d",
        "debug",
    )


def test_a_bad_configuration_exits_2_with_every_problem(
    started: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text('colour = 1\n[gc]\ngrace = "soon"\n')
    assert main(["serve", "--config", str(config), "--listen", "nowhere"], environment={}) == 2
    error = capsys.readouterr().err
    assert all(f"\n  {path}: " in error for path in ("server.listen", "gc.grace", "colour"))
    assert started == []


def test_a_store_that_cannot_run_exits_1(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_settings: Settings, _environment: Mapping[str, str]) -> int:
        raise UnavailableError("data directory is in use by another process", pid=1)

    monkeypatch.setattr(sys.modules["kvobj.app.serve"], "run", run)
    assert main(["serve"], environment={}) == 1
    assert capsys.readouterr().err == "kvobj: data directory is in use by another process pid=1\n"
    assert started == []


def test_the_example_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example-config"], environment={}) == 0
    assert tomllib.loads(capsys.readouterr().out)["server"]["listen"] == "127.0.0.1:9000"


def test_a_check_says_whether_a_configuration_can_be_used_and_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text(f'[server]\ndata = "{tmp_path}/data"\n')
    assert main(["serve", "--config", str(config), "--check"], environment={}) == 0
    assert capsys.readouterr().out == "kvobj: this configuration can be used\n"
    config.write_text(f'[server]\ndata = "{tmp_path}/data"\ntls_certificate = "absent"\ntls_key = "absent"\n')
    assert main(["serve", "--config", str(config), "--check"], environment={}) == 2
    assert "  server.tls_certificate: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kvobj.toml"]


REMOTE = """[[tiers]]
kind = "dram"
[[tiers]]
kind = "nvme"
[[tiers]]
kind = "remote"
endpoint = "https://127.0.0.1:1"
bucket = "remote"
access_key = "remote-key"
secret_key = "remote-secret"
ca_bundle = "{directory}/absent"
"""
UPSTREAM = """[[buckets]]
name = "chunks"
kind = "kv"
[[upstreams]]
bucket = "chunks"
endpoint = "https://127.0.0.1:1"
access_key = "upstream-key"
secret_key = "upstream-secret"
ca_bundle = "{directory}/absent"
"""
HBM = """[[tiers]]
kind = "hbm"
capacity = "1 GiB"
device = 999
[[tiers]]
kind = "dram"
[[tiers]]
kind = "nvme"
"""


@pytest.mark.parametrize(
    ("text", "absent", "problem"),
    [
        (REMOTE, "", "tiers: ca_bundle of the remote tier cannot be read: "),
        (UPSTREAM, "", "upstreams: ca_bundle cannot be read: "),
        ('[events]\nzmq = "tcp://127.0.0.1:0"\n', "zmq.asyncio", "events.zmq: needs pyzmq"),
        (HBM, "cupy", "tiers: hbm: CuPy is not installed or does not load"),
    ],
    ids=["remote", "upstream", "zmq", "hbm"],
)
def test_a_check_refuses_what_a_start_refuses_of_its_configuration(  # noqa: PLR0917 - fixtures
    text: str,
    absent: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)
    config = tmp_path / "kvobj.toml"
    config.write_text(text.format(directory=tmp_path) + f'[server]\ndata = "{tmp_path}/data"\n')
    assert main(["serve", "--config", str(config), "--check"], environment={}) == 2
    assert f"\n  {problem}" in capsys.readouterr().err


def test_the_announcement_begins_with_the_ready_line_and_keeps_the_secret() -> None:
    credentials = RootCredentials("root-key", "root-secret")
    for settings in (Settings(), Settings(root_credentials=credentials)):
        text = announcement(settings, "http://127.0.0.1:9000", Path("/data/credentials"))
        assert text.splitlines()[0] == "kvobj ready http://127.0.0.1:9000"
        assert "aws --endpoint-url http://127.0.0.1:9000" in text
        assert 'boto3.client("s3", endpoint_url="http://127.0.0.1:9000"' in text
        assert "root-secret" not in text
    found = announcement(Settings(), "http://x", Path("/a b/credentials"), command="/opt/an env/bin/kvobj-admin")
    assert '''eval "$('/opt/an env/bin/kvobj-admin' --data '/a b' credentials)"''' in found
    assert '''eval "$(kvobj-admin --data /data credentials)"''' in announcement(
        Settings(), "http://x", Path("/data/credentials")
    )


def test_importing_the_package_the_client_and_the_holder_of_sockets_imports_nothing_heavy() -> None:
    # msgspec, the msgpack of the client, takes about as long as http.client, and no server is behind it.
    script = (
        "import sys, kvobj, kvobj.client, kvobj.cli, kvobj.app.holder\n"
        "heavy = {'torch', 'cupy', 'aiohttp', 'asyncpg', 'lmdb', 'botocore', 'uvloop', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"
