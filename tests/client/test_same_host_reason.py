"""Why chunks go over HTTP on the server's own host: both clients tell what a user sees who may not open the socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from forked import in_child
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting

from kvobj.client import Credentials, KvClient
from kvobj.client.aio import AsyncKvClient

NOBODY = 65534
STRANGER = UserSetting("stranger", "stranger-access", "stranger-secret")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=128 * MIB,
        buckets=(BucketSetting("cache", kind="kv", durability="memory"),),
        users=(STRANGER,),
    )
    with ServerProcess(module_paths.mktemp("reason"), settings) as running:
        yield running


def client_of(server: ServerProcess, user: UserSetting | None = None, *, same_host: bool = True) -> KvClient:
    keys: Credentials | UserSetting = user or server.credentials()  # type: ignore[assignment]
    return KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache", same_host=same_host)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_who_may_not_open_the_socket_is_told_so(server: ServerProcess) -> None:
    client_of(server).close()  # what it imports is there before the user changes
    path = server.data / "same-host.sock"
    path.parent.chmod(0o700)

    def check() -> bool:
        with client_of(server) as client:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            client.put_chunk("other", b"bytes")
            reason = f"shared memory at {path} cannot be opened: Permission denied"
            return not client.is_same_host_now and client.same_host_reason == reason

    assert in_child(check)


def test_it_is_told_only_where_shared_memory_was_offered_and_until_it_is_used(server: ServerProcess) -> None:
    path = server.data / "same-host.sock"
    away = path.with_name("away.sock")
    path.rename(away)
    try:
        with (
            client_of(server) as offered,
            client_of(server, STRANGER) as refused,
            client_of(server, same_host=False) as unwanted,
        ):
            for client in (offered, refused, unwanted):
                assert not client.same_host_reason
                assert not client.is_same_host
            reason = f"shared memory at {path} cannot be opened: No such file or directory"
            assert [each.same_host_reason for each in (offered, refused, unwanted)] == [reason, "", ""]
    finally:
        away.rename(path)
    with client_of(server) as client:
        assert client.is_same_host
        assert not client.same_host_reason


def test_the_awaited_client_tells_it_too(server: ServerProcess) -> None:
    path = server.data / "same-host.sock"
    away = path.with_name("away.sock")
    keys = server.credentials()

    async def run() -> str:
        async with AsyncKvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache") as client:
            await client.put_chunk("awaited", b"bytes")
            return client.same_host_reason

    path.rename(away)
    try:
        assert "No such file or directory" in asyncio.run(run())
    finally:
        away.rename(path)
