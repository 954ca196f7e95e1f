"""aiobotocore against a real server: many operations at once on one event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiobotocore.session
import pytest
from aiobotocore.config import AioConfig
from client_suite import NAMES, PART_BYTES, S3Client, body_of, client_server
from module_paths import ModulePaths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from server_process import ServerProcess

BUCKET = "aio-bucket"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("aiobotocore")) as running:
        yield running


@asynccontextmanager
async def open_client(server: ServerProcess) -> AsyncIterator[S3Client]:
    credentials = server.credentials()
    async with aiobotocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=credentials.region,
        config=AioConfig(s3={"addressing_style": "path"}, max_pool_connections=16),
    ) as client:
        await client.create_bucket(Bucket=BUCKET)
        yield client


async def read(client: S3Client, key: str, bucket: str = BUCKET, **more: object) -> bytes:
    reply = await client.get_object(Bucket=bucket, Key=key, **more)
    async with reply["Body"] as stream:
        body: bytes = await stream.read()
    return body


@pytest.mark.parametrize("bucket", [BUCKET, "chunks", "chunks-local"])
async def test_many_objects_are_put_and_read_at_once(server: ServerProcess, bucket: str) -> None:
    bodies = {f"at-once/{number}": body_of(1 + number * 37_003, number) for number in range(32)}
    async with open_client(server) as client:
        await asyncio.gather(*(client.put_object(Bucket=bucket, Key=key, Body=body) for key, body in bodies.items()))
        found = await asyncio.gather(*(read(client, key, bucket) for key in bodies))
        assert found == list(bodies.values())
        listed = await client.list_objects_v2(Bucket=bucket, Prefix="at-once/")
        assert [item["Key"] for item in listed["Contents"]] == sorted(bodies)
        deleted = await client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in bodies]})
        assert len(deleted["Deleted"]) == len(bodies)
        assert (await client.list_objects_v2(Bucket=bucket, Prefix="at-once/"))["KeyCount"] == 0


async def test_ranges_of_one_object_are_read_at_once(server: ServerProcess) -> None:
    body = body_of(2_000_003)
    async with open_client(server) as client:
        await client.put_object(Bucket=BUCKET, Key="ranged", Body=body)
        starts = range(0, len(body), 130_001)
        pieces = await asyncio.gather(
            *(read(client, "ranged", Range=f"bytes={start}-{start + 130_000}") for start in starts)
        )
    assert b"".join(pieces) == body


async def test_parts_are_uploaded_at_once(server: ServerProcess) -> None:
    pieces = [body_of(PART_BYTES, 1), body_of(PART_BYTES, 2), body_of(77, 3)]
    async with open_client(server) as client:
        for bucket in (BUCKET, "chunks"):
            place = {"Bucket": bucket, "Key": "in-parts"}
            place |= {"UploadId": (await client.create_multipart_upload(**place))["UploadId"]}
            replies = await asyncio.gather(
                *(client.upload_part(**place, PartNumber=number, Body=piece) for number, piece in enumerate(pieces, 1))
            )
            parts = [{"PartNumber": number, "ETag": reply["ETag"]} for number, reply in enumerate(replies, 1)]
            await client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
            assert await read(client, "in-parts", bucket) == b"".join(pieces)


async def test_names_come_back_as_they_were_sent(server: ServerProcess) -> None:
    async with open_client(server) as client:
        for key in NAMES:
            await client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
            assert await read(client, key) == key.encode()


async def test_of_racing_writers_of_one_chunk_one_wins_and_all_read_it(server: ServerProcess) -> None:
    bodies = [body_of(100_000, seed) for seed in range(8)]
    async with open_client(server) as client:
        replies = await asyncio.gather(*(client.put_object(Bucket="chunks", Key="raced", Body=body) for body in bodies))
        existed = [reply["ResponseMetadata"]["HTTPHeaders"].get("x-kvobj-existed") == "true" for reply in replies]
        assert existed.count(False) == 1
        assert await read(client, "raced", "chunks") == bodies[existed.index(False)]
        assert len({reply["ETag"] for reply in replies}) == 1
