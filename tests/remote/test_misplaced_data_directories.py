"""A data directory and a remote that are not each other's any more: one put back from a copy, one begun anew elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from remote_servers import RemoteStore
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from test_kill_in_upload import lose_and_rebuild

from kvobj.app.offline_remote import rebuild_remote
from kvobj.config import load_settings

SHARED = {"x-kvobj-durability": "shared"}
OFTEN = {"sweep_interval": '"200 ms"', "reconcile_interval": '"200 ms"'}


def settings_of(remote: RemoteStore, sections: Mapping[str, Mapping[str, str]] | None = None) -> ServerSettings:
    return ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=64 * MIB,
        buckets=(BucketSetting("plain", "ordinary", "local"),),
        remote=remote.tier(),
        sections=sections or {},
        workers=1,
    )


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
    settings = settings_of(kvobj_remote, {"log": {"requests": "false"}, "gc": OFTEN})
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


def test_a_store_that_begins_anew_elsewhere_does_not_take_what_lay_there_for_what_lies_here(
    kvobj_remote: RemoteStore, tmp_path: Path
) -> None:
    settings = settings_of(kvobj_remote)
    with ServerProcess(tmp_path / "node", settings) as server:
        assert put(server, "before") == 200
        assert server.tier("remote")["blobs"] == 1
        server.terminate()
        # As the message says that tells of a store.json that is gone.
        (server.data / "remote").unlink()
        server.settings = replace(settings, remote=replace(kvobj_remote, prefix="elsewhere/").tier())
        server.start()
        assert server.tier("remote")["blobs"] == 0
        assert get(server, "before") == b"before" * 100  # from nvme, where it is the only copy now
        assert put(server, "after") == 200
        assert len(kvobj_remote.keys("elsewhere/blobs/")) == 1


def test_no_node_starts_where_a_rebuild_was_cut_short(
    kvobj_remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has claimed the prefix and knows of nothing there: its sweep would take all of it for leftovers."""
    settings = settings_of(kvobj_remote, {"gc": OFTEN})

    def cut_short(*_: object, **__: object) -> NoReturn:
        raise InterruptedError

    with ServerProcess(tmp_path / "node", settings) as server:
        assert put(server, "before") == 200
        server.terminate()
        shutil.rmtree(server.data)
        node_settings = load_settings(server.configuration, environment={})
        with monkeypatch.context() as patched:
            patched.setattr(
                "kvobj.app.offline_remote.open_database", cut_short
            )  # right after the prefix was taken over
            with pytest.raises(InterruptedError):
                rebuild_remote(node_settings, cut_nothing, cut_nothing)
        with pytest.raises(RuntimeError, match=r"cannot be used(?s:.*)rebuild --remote"):
            server.start()
        assert len(kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/")) == 1
        lose_and_rebuild(server)
        server.start()
        assert get(server, "before") == b"before" * 100


def cut_nothing(*_: object) -> None:
    """Told of what the rebuild does."""
