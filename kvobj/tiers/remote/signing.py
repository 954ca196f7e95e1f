"""Heads of requests to the remote server, signed with Signature Version 4 by botocore: the one module that imports it.

Of botocore the signature alone is taken (`S3SigV4Auth`, 60 µs a request): what its clients do with bodies, retries and answers is
done here otherwise. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from kvobj.config import RemoteSettings

_UNRESERVED: Final = "-_.~"
_OWN_FIELDS: Final = "host: {host}\r\nuser-agent: kvobj\r\n"


class _Auth(S3SigV4Auth):  # type: ignore[misc] # botocore ships no types
    """Signs the payload hash that it is told, of a body that it never sees."""

    def payload(self, request: AWSRequest) -> str:
        """See botocore: the value of x-amz-content-sha256."""
        return str(request.context["payload_sha256"])


class RequestSigner:
    """Signed heads of requests to one bucket. `host` and `port` are where to connect, `is_tls` whether with TLS."""

    def __init__(self, settings: RemoteSettings) -> None:
        parts = urlsplit(settings.endpoint)
        self.is_tls = parts.scheme == "https"
        host = parts.hostname or ""
        self.port = parts.port or (443 if self.is_tls else 80)
        is_virtual = settings.addressing == "virtual"
        self.host = f"{settings.bucket}.{host}" if is_virtual else host
        written = f"[{self.host}]" if ":" in self.host else self.host
        has_port = parts.port is not None and parts.port != (443 if self.is_tls else 80)
        self._host_header = f"{written}:{self.port}" if has_port else written
        self._base = f"{parts.scheme}://{self._host_header}"
        self._root = "" if is_virtual else f"/{settings.bucket}"
        self._auth = _Auth(Credentials(settings.access_key, settings.secret_key), "s3", settings.region)
        self._fields = _OWN_FIELDS.format(host=self._host_header)

    def head(
        self,
        method: str,
        key: str,
        *,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        payload_sha256: str,
        length: int | None,
    ) -> bytes:
        """Request line and fields with the blank line behind them. `key`: not yet encoded, empty for the bucket itself. `headers`
        are signed; they are ours, never a client's. `length`: of the body, None where there is none."""
        target = f"{self._root}/{quote(key, safe='/' + _UNRESERVED)}" if key else self._root or "/"
        if query:
            target += "?" + "&".join(f"{name}={quote(value, safe=_UNRESERVED)}" for name, value in sorted(query))
        request = AWSRequest(method, self._base + target, headers=headers)
        request.context["payload_sha256"] = payload_sha256
        self._auth.add_auth(request)
        fields = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        framing = "" if length is None else f"content-length: {length}\r\n"
        return f"{method} {target} HTTP/1.1\r\n{self._fields}{fields}{framing}\r\n".encode("ascii")
