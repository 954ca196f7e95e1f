"""The few S3 calls that need no SDK: objects as whole bytes, path style.

For small programs and tests; who moves many or large objects takes an S3 SDK.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvobj.client.connection import Answer, SignedConnection
from kvobj.errors import InvalidRequestError, NoSuchKeyError, NotFoundError


class S3Client:
    """S3 over one signed connection. Errors are those of `SignedConnection.request`."""

    def __init__(self, connection: SignedConnection) -> None:
        self._connection = connection

    def create_bucket(self, bucket: str, *, kind: str = "ordinary") -> None:
        """Create a bucket; `kind` is ordinary or kv."""
        self._connection.request("PUT", f"/{bucket}", headers={"x-kvobj-bucket-kind": kind})

    def delete_bucket(self, bucket: str) -> None:
        """Remove an empty bucket."""
        self._connection.request("DELETE", f"/{bucket}")

    def put(self, bucket: str, key: str, body: bytes, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Store an object; the answer's headers tell ETag and `x-kvobj-durability`."""
        return self._connection.request("PUT", f"/{bucket}/{key}", headers=headers, body=body)

    def get(self, bucket: str, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """The object's bytes `[start, stop)`, or None if there is no such key. An empty range is no HTTP range: refused."""
        if stop is not None and stop <= start:
            raise InvalidRequestError("an empty range", start=start, stop=stop)
        is_range = start != 0 or stop is not None
        headers = {"range": f"bytes={start}-{'' if stop is None else stop - 1}"} if is_range else {}
        try:
            return self._connection.request("GET", f"/{bucket}/{key}", headers=headers).body
        except NoSuchKeyError:
            return None

    def head(self, bucket: str, key: str) -> Mapping[str, str] | None:
        """The object's headers, or None if there is no such object."""
        try:
            return self._connection.request("HEAD", f"/{bucket}/{key}").headers
        except NotFoundError:
            return None

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object; absent is fine."""
        self._connection.request("DELETE", f"/{bucket}/{key}")
