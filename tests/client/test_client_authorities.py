"""A server whose certificate an authority of one's own has signed: both clients are told whom to trust."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.client import Credentials, KvClient, Session
from kvobj.client.aio import AsyncKvClient
from kvobj.errors import ConfigurationError, UnavailableError

BODY = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def authority(module_paths: ModulePaths) -> Authority:
    return Authority.make(module_paths.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority, module_paths: ModulePaths) -> Iterator[ServerProcess]:
    directory = module_paths.mktemp("authorities")
    certificate, key = directory / "tls.pem", directory / "tls.key"
    authority.sign().write(certificate, key)
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=128 * MIB,
        buckets=(BucketSetting("cache", kind="kv", durability="memory"),),
        sections={"server": {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}},
    )
    with ServerProcess(directory / "server", settings) as running:
        yield running


def keys_of(server: ServerProcess) -> Credentials:
    keys = server.credentials()
    return Credentials(keys.access_key, keys.secret_key)


def came(data: memoryview | None) -> bool:
    return data is not None and bytes(data) == BODY


@pytest.mark.parametrize("same_host", [True, False])
def test_a_client_trusts_the_authorities_that_it_is_given(
    server: ServerProcess, authority: Authority, *, same_host: bool
) -> None:
    bundle = authority.bundle
    with KvClient(server.endpoint, keys_of(server), "cache", ca_bundle=bundle, same_host=same_host) as client:
        client.put_chunk("trusted", BODY)
        assert came(client.get_chunk("trusted"))
        assert client.is_same_host is same_host
        with Session(client) as session:
            found = session.match(ids=["trusted"])
            assert found.pin is not None
            assert came(session.read(found.pin, "trusted"))


def test_the_awaited_client_does_as_well(server: ServerProcess, authority: Authority) -> None:
    async def run() -> None:
        bundle = str(authority.bundle)
        async with AsyncKvClient(server.endpoint, keys_of(server), "cache", ca_bundle=bundle) as client:
            await client.put_chunk("awaited", BODY)
            assert came(await client.get_chunk("awaited"))

    asyncio.run(run())


def test_a_server_that_others_vouch_for_is_not_spoken_to(
    server: ServerProcess, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority.make(tmp_path)
    for bundle in (stranger.bundle, None):
        with (
            KvClient(server.endpoint, keys_of(server), "cache", ca_bundle=bundle) as client,
            pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.get_chunk("trusted")
    both = tmp_path / "both.pem"
    both.write_bytes(stranger.bundle.read_bytes() + authority.bundle.read_bytes())
    with KvClient(server.endpoint, keys_of(server), "cache", ca_bundle=both) as client:
        assert client.get_chunk("absent") is None


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("kind", ["missing", "empty", "text", "key", "folder"])
def test_a_file_without_authorities_is_refused_when_the_client_is_made(
    authority: Authority, tmp_path: Path, kind: str, scheme: str
) -> None:
    file = tmp_path / "authorities.pem"
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        content = {"empty": b"", "text": b"no certificate\n", "key": authority.sign().key}[kind]
        file.write_bytes(content)
    for make in (KvClient, AsyncKvClient):
        with pytest.raises(ConfigurationError) as caught:
            make(f"{scheme}://127.0.0.1:9", Credentials("a", "s"), "cache", ca_bundle=file)
        (problem,) = caught.value.problems
        assert problem.startswith(f"ca_bundle: {file}: ")
