"""A node whose loss is tried: its settings, `kvobj-admin` on it, running or stopped, and how a machine goes."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

from raw_http import RawReply, RawS3
from remote_servers import RemoteStore
from server_process import MIB, ServerProcess, ServerSettings, write_configuration

from kvobj.admin.cli import main
from kvobj.client import Credentials, KvClient

WRAPPING_KEY = "5a" * 32
ENVIRONMENT = {"KVOBJ_TEST_WRAPPING": WRAPPING_KEY}
SHARED = {"x-kvobj-durability": "shared"}


def node_settings(store: RemoteStore, **more: object) -> ServerSettings:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=256 * MIB,
        nvme_segment_bytes=64 * MIB,
        remote=store.tier(manifest_interval='"100 ms"'),
        sections={"security": {"wrapping_key_env": '"KVOBJ_TEST_WRAPPING"'}},
        environment=ENVIRONMENT,
        workers=1,
    )
    return replace(settings, **more)  # type: ignore[arg-type]


def admin(
    node: ServerProcess, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """`kvobj-admin --json`, of a running store or a stopped one: status and document."""
    status, text, complaint = run(node, "--json", *arguments, environment=environment)
    return status, json.loads(text.splitlines()[-1]) if text else {"complaint": complaint}


def run(node: ServerProcess, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """`kvobj-admin` as people see it: status, output, complaints."""
    access = ["--data", str(node.data)] if node.is_running else ["--config", str(node.configuration)]
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = main([*arguments, *access], environment=ENVIRONMENT if environment is None else environment)
    return status, out.getvalue(), errors.getvalue()


def configure(node: ServerProcess, settings: ServerSettings) -> None:
    """Write a server's configuration without starting it."""
    write_configuration(
        node.configuration,
        settings,
        data=node.data,
        dram_path=node.shared_memory,
        listen="127.0.0.1:0",
        admin_port=node.admin_port,
    )


def lose(node: ServerProcess) -> None:
    """The machine is gone: its disk and its memory. Only the configuration is somewhere else."""
    node.kill()
    shutil.rmtree(node.data)
    for leftover in node.shared_memory.parent.glob(node.shared_memory.name + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


@dataclass
class World:
    node: ServerProcess
    store: RemoteStore

    def put(self, raw: RawS3, path: str, body: bytes, **headers: str) -> RawReply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = raw.request("PUT", path, body, headers={**SHARED, **named}, payload=body)
        assert reply.status == 200, reply
        assert reply.headers["x-kvobj-durability"] == "shared"
        return reply


def seen(raw: RawS3, path: str) -> tuple[int, bytes, dict[str, str]]:
    """What of a reply has to be the same afterwards."""
    reply = raw.request("GET", path, payload=None)
    kept = ("etag", "content-type", "last-modified", "x-amz-tagging-count", "x-kvobj-digest", "x-kvobj-durability")
    headers = {name: value for name, value in reply.headers.items() if name in kept or name.startswith("x-amz-meta-")}
    return reply.status, reply.body, headers


def settle(node: ServerProcess) -> None:
    """Until the remote has been told everything."""
    status, outcome = admin(node, "flush")
    assert status == 0, outcome


def document(raw: RawS3, path: str, name: str) -> bytes:
    reply = raw.request("GET", path, query={name: ""}, payload=None)
    assert reply.status == 200, (path, name, reply)
    return reply.body


def kv_client(node: ServerProcess, bucket: str = "cache") -> KvClient:
    keys = node.credentials()
    return KvClient(node.endpoint, Credentials(keys.access_key, keys.secret_key), bucket, same_host=False)
