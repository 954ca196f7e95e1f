"""What the script of a client is given by the test that starts it, and what both know.

A script runs in its client's own environment, with nothing of kvobj or its tests beside this file. It does what the client's users
do, checks every byte by `assert`, and ends with `report`; whatever it raises is the reason why the test fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, NoReturn

MIB: Final = 1024 * 1024
NAMES: Final = (
    "plain.bin",
    "with space and + plus.bin",
    "ünïcödé/ключ/鍵/🔑.bin",
    "percent%2Fslash%20.bin",
    "quote'(!)*;=&$@,~^[].bin",
)
SIZES: Final = (0, 1, 65_537, 3 * MIB + 17)


@dataclass(frozen=True, slots=True)
class Given:
    """The server, one bucket of it, and how its name is to be told: in the path or in the host.

    `host` is host and port, without the bucket. Only this client writes under `prefix`.
    """

    host: str
    access_key: str
    secret_key: str
    region: str
    bucket: str
    prefix: str
    is_virtual_hosted: bool

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://{self.host}"

    @property
    def bucket_endpoint(self) -> str:
        """The bucket's own URL, of clients that are told that instead."""
        return f"http://{self.bucket}.{self.host}"

    def key(self, name: str) -> str:
        """A key of this client's."""
        return f"{self.prefix}/{name}"

    def uri(self, name: str) -> str:
        """The key as an s3:// address."""
        return f"s3://{self.bucket}/{self.key(name)}"


def given() -> Given:
    """What the environment says."""
    return Given(
        host=os.environ["KVOBJ_HOST"],
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region=os.environ["AWS_DEFAULT_REGION"],
        bucket=os.environ["KVOBJ_BUCKET"],
        prefix=os.environ["KVOBJ_PREFIX"],
        is_virtual_hosted=os.environ["KVOBJ_ADDRESSING"] == "virtual",
    )


def body_of(size_bytes: int, seed: int = 1) -> bytes:
    """Random bytes that are the same each time."""
    return random.Random(seed).randbytes(size_bytes)


def same(found: object, expected: bytes) -> None:
    """Assert that these are those bytes, without printing megabytes where they are not."""
    data = found if isinstance(found, bytes) else bytes(found)  # type: ignore[call-overload]
    if data != expected:
        told = hashlib.sha256(data).hexdigest(), hashlib.sha256(expected).hexdigest()
        raise AssertionError(f"{len(data)} bytes with digest {told[0]}, expected {len(expected)} with {told[1]}")


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[list[Any]]:
    """Assert that the block ends with one of these exceptions, which is in the list afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    else:
        raise AssertionError(f"none of {kinds} was raised")


def fetch(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """One plain request, as a browser would make it of a presigned URL: status and body."""
    request = urllib.request.Request(url, data=body, method=method)  # noqa: S310 - our own server's
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def report(*packages: str) -> NoReturn:
    """The script's last word: all went well, with these versions.

    Ends the process at once: native threads of some clients abort an interpreter that winds itself up (seen once with deltalake's,
    after all was done), which says nothing of the store.
    """
    print(json.dumps({name: version(name) for name in packages}), flush=True)  # noqa: T201 - the answer to the test
    os._exit(0)
