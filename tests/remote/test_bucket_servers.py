"""The remote bucket against real servers: a kvobj (new) and radosgw 16 (old), each asked the same."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from odd_server import noise, run_on_pool
from remote_servers import RemoteStore

from kvobj.clock import SystemClock
from kvobj.config import RemoteSettings
from kvobj.errors import ConfigurationError, RemoteRefusedError, TierUnavailableError
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.bucket import RemoteBucket

MIB: Final = 2**20
PART: Final = 5 * MIB  # what old servers take


@asynccontextmanager
async def opened(
    settings: RemoteSettings, metrics: Metrics | None = None, *, is_probed: bool = True
) -> AsyncIterator[RemoteBucket]:
    bucket = await RemoteBucket.open(
        settings, clock=SystemClock(), metrics=metrics or Metrics(), run=run_on_pool, log=logging.getLogger("remote")
    )
    try:
        if is_probed:
            await bucket.probe()
        yield bucket
    finally:
        await bucket.aclose()


async def read(bucket: RemoteBucket, key: str, start: int, stop: int) -> bytes | None:
    into = bytearray(stop - start)
    return bytes(into) if await bucket.get(key, ByteRange(start, stop), memoryview(into), lambda _: None) else None


async def test_what_is_written_is_read_at_every_length_around_a_part(remote_store: RemoteStore) -> None:
    async with opened(replace(remote_store.settings(), part_bytes=PART)) as bucket:
        for size in (0, 1, 70_000, PART - 1, PART, PART + 1, 2 * PART + 12345):
            key, body = f"{remote_store.prefix}blobs/{size:x}/a b%2F+é~", noise(size, size)
            etag = await bucket.put(key, memoryview(body))
            assert etag
            found = await bucket.head(key)
            assert found is not None
            assert (found.key, found.size_bytes, found.etag) == (key, size, etag)
            assert await read(bucket, key, 0, size) == body
            for start, stop in ((size // 3, size), (0, size // 2), (size // 2, size // 2)):
                assert await read(bucket, key, start, stop) == body[start:stop]
            await bucket.put(key, memoryview(b"another"))
            assert await read(bucket, key, 0, 7) == b"another"
        assert remote_store.uploads() == []


async def test_what_is_not_there_is_a_miss(remote_store: RemoteStore) -> None:
    async with opened(remote_store.settings()) as bucket:
        assert await bucket.head("store/none") is None
        assert await read(bucket, "store/none", 0, 10) is None
        assert await read(bucket, "store/none", 5, 5) is None
        assert await bucket.get_small("store/none", max_bytes=10) is None
        await bucket.delete(["store/none"])
        assert [each async for each in bucket.list("store/none")] == []
        await bucket.put("store/short", memoryview(b"12345"))
        with pytest.raises(TierUnavailableError):
            await read(bucket, "store/short", 0, 10)


async def test_the_server_is_asked_what_it_can_do_and_nothing_of_that_stays(remote_store: RemoteStore) -> None:
    async with opened(remote_store.settings()) as bucket:
        found = await bucket.probe()
        is_new = remote_store.kind == "kvobj"
        assert found == bucket.capabilities
        assert found.upload_check == ("crc32c" if is_new else "md5")
        assert found.if_absent
        assert found.if_match
        assert found.delete_if_match == is_new
        assert found.delete_many
        assert found.ranges
        assert found.min_part_bytes == 5 * MIB
        health = bucket.health
        assert (health.state, health.breaker) == ("ok", "closed")
        assert health.clock_skew_seconds is not None
        assert abs(health.clock_skew_seconds) < 2
    assert remote_store.keys() == []
    assert remote_store.uploads() == []


async def test_conditional_writes_are_decided_by_the_server(remote_store: RemoteStore) -> None:
    async with opened(remote_store.settings()) as bucket:
        first = await bucket.put_small("store/s", b"one", if_absent=True)
        assert first is not None
        assert await bucket.put_small("store/s", b"two", if_absent=True) is None
        assert await bucket.put_small("store/s", b"two", if_match='"00000000000000000000000000000000"') is None
        second = await bucket.put_small("store/s", b"two", if_match=first)
        assert second is not None
        assert await bucket.get_small("store/s", max_bytes=100) == (b"two", second)
        assert await bucket.put_small("store/s", b"three") is not None
        with pytest.raises(TierUnavailableError):
            await bucket.get_small("store/s", max_bytes=4)
        tries = [bucket.put_small("store/race", bytes([number]), if_absent=True) for number in range(8)]
        assert sum(etag is not None for etag in await asyncio.gather(*tries)) == 1


async def test_listing_goes_in_order_over_pages_and_deleting_in_batches(
    remote_store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvobj.tiers.remote.bucket.DELETE_BATCH", 7)
    async with opened(remote_store.settings()) as bucket:
        keys = sorted([f"store/l/{number:03}" for number in range(17)] + ["store/l/&<>", "store/l/a+b c", "store/l/é"])
        await asyncio.gather(*[bucket.put(key, memoryview(key.encode())) for key in keys])
        await bucket.put("store/m", memoryview(b"x"))
        found = [each async for each in bucket.list("store/l/")]
        assert [each.key for each in found] == keys
        assert [each.size_bytes for each in found] == [len(key.encode()) for key in keys]
        assert all(each.etag and each.modified_ms > 1_600_000_000_000 for each in found)
        assert [each.key async for each in bucket.list("store/l/", after=keys[9])] == keys[10:]
        await bucket.delete([*keys, "store/l/none"])
        assert remote_store.keys() == ["store/m"]


async def test_unfinished_uploads_are_found_and_given_up(remote_store: RemoteStore) -> None:
    async with opened(remote_store.settings()) as bucket:
        with remote_store.raw() as raw:
            for key in ("store/u/1", "store/u/2", "store/v"):
                assert (
                    raw.request("POST", f"/{remote_store.bucket}/{key}", query={"uploads": ""}, payload=b"").status
                    == 200
                )
        found = [each async for each in bucket.list_uploads("store/u/")]
        assert [each.key for each in found] == ["store/u/1", "store/u/2"]
        assert all(each.initiated_ms > 1_600_000_000_000 for each in found)
        for upload in [*found, found[0]]:
            await bucket.abort(upload)
        assert [key for key, _ in remote_store.uploads()] == ["store/v"]


async def _probe(bucket: RemoteBucket) -> None:
    await bucket.probe()


async def _put(bucket: RemoteBucket) -> None:
    await bucket.put("store/a", memoryview(b"x"))


async def _get(bucket: RemoteBucket) -> None:
    await read(bucket, "store/a", 0, 1)


async def _head(bucket: RemoteBucket) -> None:
    await bucket.head("store/a")


async def _delete(bucket: RemoteBucket) -> None:
    await bucket.delete(["store/a"])


async def test_wrong_credentials_and_a_missing_bucket_are_told_in_words(remote_store: RemoteStore) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"secret_key": "another-secret-key"}, "credentials"),
        ({"access_key": "nobody-knows-me"}, "credentials"),
        ({"bucket": "no-such-bucket-here"}, "bucket"),
    ]
    for changes, reason in cases:
        async with opened(replace(remote_store.settings(), **changes), is_probed=False) as bucket:
            for call in (_probe, _put, _get, _head, _delete):
                with pytest.raises(RemoteRefusedError) as caught:
                    await call(bucket)
                assert caught.value.reason == reason
            assert bucket.health.state == "refused"
            assert bucket.health.reason
            assert bucket.capabilities is None


async def test_many_bodies_at_once_stay_apart(remote_store: RemoteStore) -> None:
    metrics = Metrics()
    async with opened(replace(remote_store.settings(), part_bytes=PART, connections=6), metrics) as bucket:
        bodies = {f"store/{number}": noise(6 * MIB + number, number) for number in range(4)}
        await asyncio.gather(*[bucket.put(key, memoryview(body)) for key, body in bodies.items()])
        reads = [read(bucket, key, 0, len(body)) for key, body in bodies.items() for _ in range(2)]
        assert await asyncio.gather(*reads) == [body for body in bodies.values() for _ in range(2)]
    assert metrics.registry.get_sample_value("kvobj_remote_bytes_total", {"direction": "down"}) == 2 * sum(
        len(body) for body in bodies.values()
    )


async def test_a_server_that_is_away_is_no_hindrance_at_the_start_and_is_found_when_it_comes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings = RemoteSettings(
            f"http://127.0.0.1:{taken.getsockname()[1]}", "bucket", "access", "secret", operation_timeout_seconds=2.0
        )
        async with opened(settings, is_probed=False) as bucket:
            assert bucket.health.state in ("probing", "down")
            with pytest.raises(TierUnavailableError):
                await bucket.put("a", memoryview(b"x"))
            assert not bucket.health.is_usable


async def test_a_ca_bundle_that_is_not_there_is_a_problem_of_the_configuration() -> None:
    settings = RemoteSettings("https://127.0.0.1:1", "bucket", "access", "secret", ca_bundle=Path("/none/ca.pem"))
    with pytest.raises(ConfigurationError, match="ca_bundle"):
        async with opened(settings):
            pass
