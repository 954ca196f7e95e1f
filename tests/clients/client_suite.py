"""Small things that the tests of several real clients share: bodies to send, and a server with both kinds of buckets."""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import boto3
from botocore.config import Config
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

S3Client: TypeAlias = Any
"""A boto3 or aiobotocore client: their classes are made at run time and have no types."""

PART_BYTES: Final = 5 * MIB
NAMES: Final = (
    "plain.bin",
    "with space and + plus.bin",
    "ünïcödé/ключ/鍵/🔑.bin",
    "percent%2Fslash%20.bin",
    "a//b/../c/./d.bin",
    "quote\"<&>'.bin",
)
BUCKETS: Final = (BucketSetting("chunks", "kv", "memory"), BucketSetting("chunks-local", "kv", "local"))
ENVIRONMENTS: Final = REPOSITORY / ".envs"


def body_of(size_bytes: int, seed: int = 1) -> bytes:
    """Random bytes that are the same each time."""
    return random.Random(seed).randbytes(size_bytes)


@contextmanager
def client_server(directory: Path) -> Iterator[ServerProcess]:
    """A server with a small arena, for one module of tests."""
    with ServerProcess(directory, ServerSettings(dram_bytes=64 * MIB, buckets=BUCKETS)) as server:
        yield server


def boto3_client(server: ServerProcess, *, endpoint: str | None = None, **options: object) -> S3Client:
    """A boto3 client for the server; options are botocore's Config."""
    credentials = server.credentials()
    settings: dict[str, object] = {
        "signature_version": "s3v4",
        "retries": {"max_attempts": 1},
        "s3": {"addressing_style": "path"},
        **options,
    }
    return boto3.client(
        "s3",
        endpoint_url=endpoint or server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=credentials.region,
        config=Config(**settings),
    )


def client_binary(name: str) -> Path:
    """The program of a client that lives in an environment of its own. AssertionError names the command that makes it."""
    path = next(iter(sorted(ENVIRONMENTS.glob(f"*/bin/{name}"))), None)
    assert path is not None, f"{name} is not installed: make client-envs"
    return path
