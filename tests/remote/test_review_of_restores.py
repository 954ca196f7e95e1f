"""A data directory that is put back from a copy: it knows less than the remote was told, and must not make that true there."""

from __future__ import annotations

import shutil
from pathlib import Path

from remote_servers import RemoteStore
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from test_kill_in_upload import lose_and_rebuild

SHARED = {"x-kvobj-durability": "shared"}


def put(server: ServerProcess, key: str) -> int:
    with server.raw() as raw:
        return raw.request("PUT", f"/plain/{key}", key.encode() * 100, headers=SHARED).status


def get(server: ServerProcess, key: str) -> bytes:
    with server.raw() as raw:
        reply = raw.request("GET", f"/plain/{key}", payload=None)
    return reply.body if reply.status == 200 else b""


def test_a_restored_data_directory_removes_nothing_that_was_shared_since_its_copy_was_made(
    kvobj_remote: RemoteStore, tmp_path: Path
) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=64 * MIB,
        buckets=(BucketSetting("plain", "ordinary", "local"),),
        remote=kvobj_remote.tier(),
        sections={"log": {"requests": "false"}, "gc": {"sweep_interval": '"200 ms"', "reconcile_interval": '"200 ms"'}},
        workers=1,
    )
    with ServerProcess(tmp_path / "node", settings) as server:
        assert put(server, "before") == 200
        server.terminate()
        shutil.copytree(server.data, tmp_path / "copy", symlinks=True)
        server.start()
        assert put(server, "since") == 200
        server.terminate()
        shutil.rmtree(server.data)
        shutil.copytree(tmp_path / "copy", server.data, symlinks=True)
        server.start()
        wait_until(
            lambda: server.status()["remote"]["claim"] == "refused",
            timeout_seconds=10,
            what=f"the restored node to be refused: {server.status()['remote']}",
        )
        assert "rebuild" in server.status()["remote"]["claim_reason"]
        assert get(server, "before") == b"before" * 100
        assert put(server, "refused") == 503
        blobs = kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/")
        assert any(key.endswith("plain/since") for key in blobs)
        server.terminate()
        lose_and_rebuild(server)
        server.start()
        assert get(server, "before") == b"before" * 100
        assert get(server, "since") == b"since" * 100
        assert put(server, "after") == 200
