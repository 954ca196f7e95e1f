"""Clients that live in environments of their own: their scripts (`scripts/`), started against a real server.

A script is told where the server is by its environment and answers with the versions of what it used; whatever it prints else is
its complaint. `[server] domains = ["localhost"]` makes BUCKET.localhost a bucket's own host name; names under `localhost` lead home
here by nss_wrapper, a library that answers a process's look-ups from a file, for not every resolver knows them.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from server_process import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server_process import ServerProcess

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
TIMEOUT_SECONDS: Final = 120.0
MADE_BUCKETS: Final = ("made-by-javascript", "made-by-minio", "made-by-pyarrow", "made-by-s3fs", "no-such-bucket-here")
"""Buckets that scripts make and remove, or miss: their host names have to be known beforehand."""


def run_script(
    command: Sequence[str],
    server: ServerProcess,
    home: Path,
    *,
    bucket: str,
    prefix: str,
    addressing: str = "path",
    environment: dict[str, str] | None = None,
) -> dict[str, str]:
    """Run a client's script to its end and return the versions that it reports. AssertionError with its output if it fails."""
    credentials = server.credentials()
    is_virtual_hosted = addressing == "virtual"
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "KVOBJ_HOST": f"localhost:{server.port}" if is_virtual_hosted else f"{server.host}:{server.port}",
        "KVOBJ_BUCKET": bucket,
        "KVOBJ_PREFIX": prefix,
        "KVOBJ_ADDRESSING": addressing,
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_DEFAULT_REGION": credentials.region,
        "AWS_REGION": credentials.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        **(home_names(home, bucket, *MADE_BUCKETS) if is_virtual_hosted else {}),
        **(environment or {}),
    }
    done = subprocess.run(
        command, env=variables, cwd=home, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{server.log_tail(10)}"
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def home_names(home: Path, *buckets: str) -> dict[str, str]:
    """Variables that make BUCKET.localhost lead to this machine, for one process. Skips the test where that cannot be had."""
    library = next(iter(sorted(Path("/usr").glob("lib*/**/libnss_wrapper.so"))), None)
    if library is None:
        pytest.skip("names under localhost need nss_wrapper: apt-get install --no-install-recommends libnss-wrapper")
    hosts = home / "hosts"
    hosts.write_text(
        "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *(f"{each}.localhost" for each in buckets)))
    )
    return {"LD_PRELOAD": str(library), "NSS_WRAPPER_HOSTS": str(hosts)}


@cache
def pinned_versions() -> dict[str, str]:
    """Every client's version, as the files of constraints have it, by lower-case name with `-` for `_`."""
    found: dict[str, str] = {}
    # Where two differ, constraints-clients.txt wins.
    for path in sorted(REPOSITORY.glob("constraints-*.txt"), reverse=True):
        for line in path.read_text().splitlines():
            name, equals, version = line.partition("#")[0].strip().partition("==")
            if equals:
                found[name.lower().replace("_", "-")] = version
    packages = json.loads((SCRIPTS / "javascript" / "package.json").read_text())
    return {**found, **packages["dependencies"]}


def failures(server: ServerProcess, prefix: str) -> list[dict[str, object]]:
    """The server's log lines of requests below `prefix` that failed by the server's own fault."""
    lines = [json.loads(line) for line in server.log_path.read_text().splitlines() if line.startswith('{"time_ms"')]
    return [line for line in lines if line.get("status", 0) >= 500 and str(line.get("key", "")).startswith(prefix)]
