"""The remote over TLS: the bundle decides whom to trust, and bodies come right through the copying path of either loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop
from certificates import Authority, Pair
from odd_server import noise, odd_world

from kvobj.errors import RemoteRefusedError
from kvobj.tiers.protocol import ByteRange

KIB: Final = 1024


def server_context(authority: Authority, directory: Path, pair: Pair | None = None) -> ssl.SSLContext:
    certificate, key = directory / "server.pem", directory / "server.key"
    (pair or authority.sign()).write(certificate, key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_bodies_go_both_ways_over_tls(tmp_path: Path, loop: Callable[..., Any]) -> None:
    authority = Authority.make(tmp_path)

    async def main() -> None:
        tls = server_context(authority, tmp_path)
        async with odd_world(tls=tls, ca_bundle=authority.bundle, part_bytes=512 * KIB, checksums="none") as world:
            body = noise(1500 * KIB)
            await world.bucket.put("t/a", memoryview(body))
            assert world.server.objects["t/a"] == body
            into = bytearray(len(body))
            assert await world.bucket.get("t/a", ByteRange(0, len(body)), memoryview(into), lambda _: None)
            assert into == body
            puts = world.server.of("PUT")
            assert {each.headers["x-amz-content-sha256"] for each in puts} == {"UNSIGNED-PAYLOAD"}

    loop(asyncio.wait_for(main(), 30))


async def test_a_certificate_of_somebody_else_is_refused_by_name(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    bundle = Authority.make(other).bundle
    async with odd_world(tls=server_context(authority, tmp_path), ca_bundle=bundle, is_probed=False) as world:
        with pytest.raises(RemoteRefusedError) as caught:
            await world.bucket.put("t/a", memoryview(b"secret"))
        assert caught.value.reason == "certificate"
        assert "ca_bundle" in str(caught.value)
        assert "issuer" in str(caught.value)
        assert world.bucket.health.state == "refused"
        assert world.server.asked == []


async def test_a_certificate_that_has_expired_is_said_to_have_and_no_bundle_is_blamed(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    tls = server_context(authority, tmp_path, authority.sign(days=-1))
    async with odd_world(tls=tls, ca_bundle=authority.bundle, is_probed=False) as world:
        with pytest.raises(RemoteRefusedError) as caught:
            await world.bucket.put("t/a", memoryview(b"secret"))
        assert caught.value.reason == "certificate"
        assert "certificate has expired" in world.bucket.health.reason
        assert "ca_bundle" not in str(caught.value)


async def test_a_certificate_of_another_name_is_said_to_be_one(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    tls = server_context(authority, tmp_path)
    async with odd_world(tls=tls, host="127.0.0.2", ca_bundle=authority.bundle, is_probed=False) as world:
        with pytest.raises(RemoteRefusedError) as caught:
            await world.bucket.put("t/a", memoryview(b"secret"))
        assert caught.value.reason == "certificate"
        assert "127.0.0.2" in world.bucket.health.reason
        assert "ca_bundle" not in str(caught.value)
