"""The S3 calls of a bucket that the KV API has no words for: listing keys and deleting many. Synchronous and thread-safe."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

from kvobj.client.connection import Endpoint, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.errors import error_of
from kvobj.client.retry import RetryRule
from kvobj.client.transport import Transport

PAGE_KEYS_MAX: Final = 1000
"""Of one listing or deletion (Amazon S3 API Reference, ListObjectsV2 and DeleteObjects)."""

_ENTRY: Final = re.compile(r"<Contents>(.*?)</Contents>", re.DOTALL)
_KEY: Final = re.compile(r"<Key>(.*?)</Key>", re.DOTALL)
_SIZE: Final = re.compile(r"<Size>(\d+)</Size>")
_REFUSED: Final = re.compile(r"<Error>(.*?)</Error>", re.DOTALL)
_CODE: Final = re.compile(r"<Code>(.*?)</Code>", re.DOTALL)
_MESSAGE: Final = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_BAD_REQUEST: Final = 400
_STATUSES: Final = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503, "ServiceUnavailable": 503}
"""What a key's own error in an answer of 200 would have been as an answer."""


class BucketCalls:
    """One bucket. Errors are those of `SignedConnection.request`."""

    def __init__(
        self,
        endpoint: str,
        credentials: Credentials,
        bucket: str,
        *,
        region: str,
        timeout_seconds: float,
        retry: RetryRule,
    ) -> None:
        place = Endpoint.parse(endpoint)
        self._path = f"/{bucket}"
        self._transport = Transport(
            lambda: SignedConnection(place, credentials, region=region, timeout_seconds=timeout_seconds),
            connections=1,
            timeout_seconds=timeout_seconds,
            retry=retry,
        )

    def page(self, *, prefix: str, after: str, limit: int) -> list[tuple[str, int]]:
        """Keys with their sizes, in order, strictly after `after`; fewer than `limit` only at the end."""
        query = (
            ("list-type", "2"),
            ("encoding-type", "url"),
            ("prefix", prefix),
            ("start-after", after),
            ("max-keys", str(min(limit, PAGE_KEYS_MAX))),
        )
        with self._transport.open("GET", self._path, query=query) as answer:
            text = answer.read().decode()
        return [(_text(_KEY, entry), int(_text(_SIZE, entry))) for entry in _ENTRY.findall(text)]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove up to `PAGE_KEYS_MAX` keys; absent ones are fine. Of keys that are refused by themselves the first one's error."""
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"content-md5": digest, "content-type": "application/xml"}
        with self._transport.open("POST", self._path, query=(("delete", ""),), headers=headers, body=body) as answer:
            refused = _REFUSED.search(answer.read().decode())
        if refused is not None:
            code, message = (_text(element, refused[1]) for element in (_CODE, _MESSAGE))
            raise error_of(_STATUSES.get(code, _BAD_REQUEST), code, message, {})

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._transport.close()


def _text(element: re.Pattern[str], entry: str) -> str:
    found = element.search(entry)
    return unquote(unescape(found[1])) if found else "0"
