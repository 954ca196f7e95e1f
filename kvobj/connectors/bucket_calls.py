"""The S3 calls of a bucket that the KV API has no words for: listing keys and deleting many. Synchronous and thread-safe."""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

from kvobj.client.connection import Endpoint, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.errors import error_of
from kvobj.client.retry import RetryRule
from kvobj.client.transport import Transport
from kvobj.errors import KvobjError, UnavailableError

PAGE_KEYS_MAX: Final = 1000
"""Of one listing or deletion (Amazon S3 API Reference, ListObjectsV2 and DeleteObjects)."""

_ENTRY: Final = re.compile(r"<Contents>(.*?)</Contents>", re.DOTALL)
_KEY: Final = re.compile(r"<Key>(.*?)</Key>", re.DOTALL)
_SIZE: Final = re.compile(r"<Size>(\d+)</Size>")
_REFUSED: Final = re.compile(r"<Error>(.*?)</Error>", re.DOTALL)
_CODE: Final = re.compile(r"<Code>(.*?)</Code>", re.DOTALL)
_MESSAGE: Final = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no document of XML 1.0 has, not even as a reference (its production `Char`)."""
_REFERENCES: Final = {"\r": "&#13;"}
"""Read as a line feed where it stands as it is (XML 1.0, 2.11)."""
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
        tls: ssl.SSLContext | None = None,
    ) -> None:
        place = Endpoint.parse(endpoint)
        self._path = f"/{bucket}"
        self._transport = Transport(
            lambda: SignedConnection(place, credentials, region=region, timeout_seconds=timeout_seconds, tls=tls),
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
        """Remove up to `PAGE_KEYS_MAX` keys; absent ones are fine. Of keys that are refused by themselves one's error, once the
        others are gone. One request, and another for each key with characters that XML cannot carry."""
        listed = [key for key in keys if _NOT_IN_XML.search(key) is None]
        refused = self._delete_listed(listed) if listed else None
        for key in [key for key in keys if _NOT_IN_XML.search(key) is not None]:
            try:
                with self._transport.open("DELETE", f"{self._path}/{key}") as answer:
                    answer.read()
            except UnavailableError:
                raise
            except KvobjError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._transport.close()

    def _delete_listed(self, keys: Sequence[str]) -> KvobjError | None:
        objects = "".join(f"<Object><Key>{escape(key, _REFERENCES)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"content-md5": digest, "content-type": "application/xml"}
        with self._transport.open("POST", self._path, query=(("delete", ""),), headers=headers, body=body) as answer:
            refused = _REFUSED.search(answer.read().decode())
        if refused is None:
            return None
        code, message = (_text(element, refused[1]) for element in (_CODE, _MESSAGE))
        return error_of(_STATUSES.get(code, _BAD_REQUEST), code, message, {})


def _text(element: re.Pattern[str], entry: str) -> str:
    found = element.search(entry)
    return unquote(unescape(found[1])) if found else "0"
