"""Python's clients of S3, each as its users use it, against a real server.

What each does stands in `scripts/use_*.py`; every byte is checked there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client_scripts import SCRIPTS, failures, pinned_versions, run_script
from client_suite import ENVIRONMENTS, client_server
from module_paths import ModulePaths
from server_process import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import ServerProcess

BUCKET = "python-clients"
CLIENTS = (
    "awscrt",
    "deltalake",
    "duckdb",
    "minio",
    "obstore",
    "opendal",
    "pyarrow",
    "s3fs",
    "smart_open",
    "tensorstore",
)
VIRTUAL_HOSTED = ("awscrt", "minio", "obstore", "opendal", "pyarrow", "s3fs")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("python-clients")) as running:
        with running.raw() as raw:
            assert raw.request("PUT", f"/{BUCKET}").status == 200
        yield running


@pytest.mark.parametrize(
    ("client", "addressing"),
    [*((client, "path") for client in CLIENTS), *((client, "virtual") for client in VIRTUAL_HOSTED)],
)
def test_a_client_finds_everything_as_it_left_it(
    server: ServerProcess, tmp_path: Path, client: str, addressing: str
) -> None:
    python = ENVIRONMENTS / "python-clients" / "bin" / "python"
    assert python.exists(), "the clients are not installed: make client-envs"
    command = [str(python), str(SCRIPTS / f"use_{client}.py")]
    prefix = f"{client}-{addressing}"
    versions = run_script(command, server, tmp_path, bucket=BUCKET, prefix=prefix, addressing=addressing)
    pinned = pinned_versions()
    assert versions == {name: pinned[name.replace("_", "-")] for name in versions}
    assert failures(server, prefix) == []


def test_the_table_of_clients_names_the_versions_that_are_installed() -> None:
    section = (REPOSITORY / "docs" / "s3.md").read_text().partition("\n## Clients\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    told = {
        name: version for package, version, *_ in rows for name in [package.partition("`")[2].partition("`")[0]] if name
    }
    pinned = pinned_versions()
    assert told == {name: pinned[name] for name in told}
    assert {"awscrt", "duckdb", "minio", "obstore", "pyarrow", "s3cmd", "s3fs", "@aws-sdk/client-s3"} <= set(told)
