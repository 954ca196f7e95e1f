"""What the conformance tests share: a server with two users, clients of each and of nobody, and a fresh bucket a test.

The tests hold S3's behaviour as its API reference tells it, one behaviour a test, spoken by boto3 over loopback. They cover the
subjects of the public suite that self-hosted servers are measured by (ceph/s3-tests), whose code is not used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from raw_http import Credentials, RawReply, RawS3
from server_process import MIB, ServerProcess, ServerSettings, UserSetting

Call: TypeAlias = Callable[..., Any]
"""A call of a client, where a table lists several."""
S3Client: TypeAlias = Any
"""A boto3 client: its class is made at run time and has no type."""

MAIN: Final = UserSetting("main", "mainaccesskey0000001", "mainsecretkey00000000000000000000000001")
ALT: Final = UserSetting("alt", "altaccesskey00000002", "altsecretkey000000000000000000000000002")
PART: Final = 5 * MIB
LIFECYCLE_DAY_SECONDS: Final = 1

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class World:
    """A running server and who talks to it."""

    server: ServerProcess
    main: S3Client
    alt: S3Client
    nobody: S3Client

    def bucket(self, client: S3Client | None = None, **more: object) -> str:
        """A new bucket of `main`'s, or of another client's."""
        name = f"conform-{next(_numbers)}"
        (client or self.main).create_bucket(Bucket=name, **more)
        return name

    def raw(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RawReply:
        """A request as no SDK would send it, signed by `main`."""
        credentials = Credentials(MAIN.access_key, MAIN.secret_key, "us-east-1")
        with RawS3("127.0.0.1", self.server.port, credentials) as client:
            return client.request(method, path, body, query=query, headers=headers)


def client_of(server: ServerProcess, user: UserSetting | None, **options: object) -> S3Client:
    """A client that signs as the user, or not at all."""
    settings: dict[str, object] = {
        "signature_version": "s3v4" if user is not None else UNSIGNED,
        "retries": {"max_attempts": 1},
        "s3": {"addressing_style": "path"},
        **options,
    }
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=user.access_key if user else None,
        aws_secret_access_key=user.secret_key if user else None,
        region_name="us-east-1",
        config=Config(**settings),
    )


@contextmanager
def running_world(directory: Path) -> Iterator[World]:
    """A server and its clients; both end with the block."""
    settings = ServerSettings(
        dram_bytes=128 * MIB,
        users=(MAIN, ALT),
        sections={"debug": {"lifecycle_day": f'"{LIFECYCLE_DAY_SECONDS} s"'}},
    )
    with ServerProcess(directory, settings) as server:
        clients = [client_of(server, user) for user in (MAIN, ALT, None)]
        yield World(server, *clients)
        for client in clients:
            client.close()


def put_keys(client: S3Client, bucket: str, keys: Iterable[str]) -> None:
    """An object under each key, whose body is the key."""
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())


def body_of(client: S3Client, bucket: str, key: str, **more: object) -> bytes:
    """The bytes of a GET."""
    with client.get_object(Bucket=bucket, Key=key, **more)["Body"] as stream:
        data: bytes = stream.read()
    return data


@contextmanager
def refused(status: int, code: str | None = None) -> Iterator[pytest.ExceptionInfo[ClientError]]:
    """The block's call is refused with this status and code (a HEAD has no code to tell)."""
    with pytest.raises(ClientError) as raised:
        yield raised
    response = raised.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    if code is not None:
        assert response["Error"]["Code"] == code


def status_of(response: dict[str, Any]) -> int:
    """The HTTP status of what a client returned."""
    status: int = response["ResponseMetadata"]["HTTPStatusCode"]
    return status
