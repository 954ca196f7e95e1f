"""Three ways to move bodies between memory and an S3 server, with one face: kvobj's, awscrt's own client, and plain aiobotocore.

All of them read into, and write from, memory that is there already, as a node's arena is.
"""

from __future__ import annotations

import asyncio
import io
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from awscrt.auth import (  # type: ignore[import-untyped]
    AwsCredentialsProvider,
    AwsSigningAlgorithm,
    AwsSigningConfig,
)
from awscrt.http import HttpHeaders, HttpRequest  # type: ignore[import-untyped]
from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType  # type: ignore[import-untyped]

from kvobj.clock import SystemClock
from kvobj.config import RemoteSettings
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.bucket import RemoteBucket

if TYPE_CHECKING:
    from collections.abc import Callable

PART_BYTES: Final = 8 * 2**20
_GBPS: Final = 25.0


class Mover(Protocol):
    """Moves whole objects of one bucket."""

    async def get(self, key: str, into: memoryview) -> None:
        """Fill `into` with an object as long as it is."""
        ...

    async def put(self, key: str, body: memoryview) -> None:
        """Write an object."""
        ...


async def run_on_pool(work: Callable[..., Any], /, *arguments: object) -> Any:  # noqa: ANN401 - whatever the work gives
    """See `RunOnPool`."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


class KvobjMover:
    """`RemoteBucket`."""

    def __init__(self, bucket: RemoteBucket, metrics: Metrics) -> None:
        self.bucket = bucket
        self.metrics = metrics

    @classmethod
    async def open(cls, settings: RemoteSettings) -> Self:
        """Probe, so that the server's own check of bodies is used."""
        metrics = Metrics()
        bucket = await RemoteBucket.open(
            settings, clock=SystemClock(), metrics=metrics, run=run_on_pool, log=logging.getLogger("bench")
        )
        await bucket.probe()
        return cls(bucket, metrics)

    async def get(self, key: str, into: memoryview) -> None:
        """See `Mover`."""
        if not await self.bucket.get(key, ByteRange(0, len(into)), into, _nothing):
            raise RuntimeError(f"no such object: {key}")

    async def put(self, key: str, body: memoryview) -> None:
        """See `Mover`."""
        await self.bucket.put(key, body)

    async def aclose(self) -> None:
        """Close it."""
        await self.bucket.aclose()


class CrtMover:
    """awscrt's `S3Client`, as LMCache uses it: parts of 8 MiB, UNSIGNED-PAYLOAD, no checksums."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._root = f"/{settings.bucket}/"
        self._host = settings.endpoint.partition("://")[2]
        credentials = AwsCredentialsProvider.new_static(settings.access_key, settings.secret_key)
        self._client = S3Client(
            region=settings.region,
            tls_mode=S3RequestTlsMode.DISABLED,
            signing_config=AwsSigningConfig(
                algorithm=AwsSigningAlgorithm.V4,
                credentials_provider=credentials,
                region=settings.region,
                service="s3",
                use_double_uri_encode=False,
                should_normalize_uri_path=False,
                signed_body_value="UNSIGNED-PAYLOAD",
            ),
            part_size=PART_BYTES,
            throughput_target_gbps=_GBPS,
        )

    async def get(self, key: str, into: memoryview) -> None:
        """See `Mover`."""

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            into[offset : offset + len(chunk)] = chunk

        request = HttpRequest("GET", self._root + key, HttpHeaders([("host", self._host)]))
        await self._made(S3RequestType.GET_OBJECT, request, on_body=on_body)

    async def put(self, key: str, body: memoryview) -> None:
        """See `Mover`."""
        headers = HttpHeaders([("host", self._host), ("content-length", str(len(body)))])
        request = HttpRequest("PUT", self._root + key, headers, _ViewStream(body))
        await self._made(S3RequestType.PUT_OBJECT, request)

    async def _made(self, kind: S3RequestType, request: HttpRequest, **callbacks: object) -> None:
        made = self._client.make_request(type=kind, request=request, **callbacks)
        await asyncio.wrap_future(made.finished_future)


class BotoMover:
    """aiobotocore as its documentation has it: one request an object, the body as bytes."""

    def __init__(self, client: Any, stack: AsyncExitStack, bucket: str) -> None:  # noqa: ANN401 - it ships no types
        self._client = client
        self._stack = stack
        self._bucket = bucket

    @classmethod
    async def open(cls, settings: RemoteSettings) -> Self:
        """Connect."""
        stack = AsyncExitStack()
        client = await stack.enter_async_context(
            get_session().create_client(
                "s3",
                endpoint_url=settings.endpoint,
                region_name=settings.region,
                aws_access_key_id=settings.access_key,
                aws_secret_access_key=settings.secret_key,
                config=AioConfig(
                    s3={"addressing_style": "path"},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        )
        return cls(client, stack, settings.bucket)

    async def get(self, key: str, into: memoryview) -> None:
        """See `Mover`."""
        answer = await self._client.get_object(Bucket=self._bucket, Key=key)
        async with answer["Body"] as body:
            into[:] = await body.read()

    async def put(self, key: str, body: memoryview) -> None:
        """See `Mover`."""
        await self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(body))

    async def aclose(self) -> None:
        """Close it."""
        await self._stack.aclose()


class _ViewStream(io.RawIOBase):
    """A body that is read from memory without a copy of its own."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any buffer
        """See `io.RawIOBase`."""
        count = min(len(buffer), len(self._view) - self._at)
        buffer[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """See `io.RawIOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at


def _nothing(_: int) -> None:
    return
