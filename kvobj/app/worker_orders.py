"""What a worker process is told before it begins: settings and places, in one message over the pair; and how one that cannot begin
ends.

It is not read from the configuration's file again, which may have changed since the node started. The program's files may have
changed too, and a worker is started from what is there then: the message begins with a digest of what both ends must agree on.
"""

from __future__ import annotations

import socket
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Final, Self

import msgspec

from kvobj import __version__
from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpSettings
from kvobj.api.request import HostRules
from kvobj.api.same_host.rights import Levels
from kvobj.config.settings import LogSettings, TlsSettings, UpstreamSettings
from kvobj.workers.calls import StoreCalls, WorkerCalls
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.wire import agreement, decode_hook, encode_hook

OTHER_VERSION: Final = 3
CANNOT_SERVE: Final = 4
ENDS: Final = {
    OTHER_VERSION: "it is of another version of kvobj, restart the server",
    CANNOT_SERVE: "it could not begin to serve, the log says why",
}
"""Exit statuses of workers that say why they end, beside Python's own 1 and 2."""
_LENGTH_BYTES: Final = 4
_BYTES_MAX: Final = 16 * 1024 * 1024
_PEM_BYTES_MAX: Final = 1024 * 1024


class S3Orders(msgspec.Struct, frozen=True):
    """`S3Settings` in values that a message has words for."""

    region: str
    hosts: dict[str, str]
    domains: tuple[str, ...]
    path_style: frozenset[str]
    default_bucket: str | None
    host_id: str
    unsigned_payload_needs_tls: bool
    explain_signatures: bool
    trusted_proxies: tuple[str, ...]
    bucket_uploads: int
    has_remote: bool
    upstream_buckets: frozenset[str]
    bursts_bytes: int

    @classmethod
    def of(cls, settings: S3Settings) -> S3Orders:
        """The settings as they travel."""
        rules = settings.host_rules
        return cls(
            region=settings.region,
            hosts=dict(rules.hosts),
            domains=tuple(rules.domains),
            path_style=frozenset(rules.path_style),
            default_bucket=rules.default_bucket,
            host_id=settings.host_id,
            unsigned_payload_needs_tls=settings.unsigned_payload_needs_tls,
            explain_signatures=settings.explain_signatures,
            trusted_proxies=tuple(str(network) for network in settings.trusted_proxies),
            bucket_uploads=settings.bucket_uploads,
            has_remote=settings.has_remote,
            upstream_buckets=settings.upstream_buckets,
            bursts_bytes=settings.bursts_bytes,
        )

    def settings(self) -> S3Settings:
        """The reverse."""
        rules = HostRules(
            hosts=self.hosts, domains=self.domains, path_style=self.path_style, default_bucket=self.default_bucket
        )
        return S3Settings(
            region=self.region,
            host_rules=rules,
            host_id=self.host_id,
            unsigned_payload_needs_tls=self.unsigned_payload_needs_tls,
            explain_signatures=self.explain_signatures,
            trusted_proxies=tuple(ip_network(network) for network in self.trusted_proxies),
            bucket_uploads=self.bucket_uploads,
            has_remote=self.has_remote,
            upstream_buckets=self.upstream_buckets,
            bursts_bytes=self.bursts_bytes,
        )


class TlsPair(msgspec.Struct, frozen=True):
    """The contents of both files of a `TlsSettings`."""

    certificate: bytes
    key: bytes

    @classmethod
    def read(cls, settings: TlsSettings) -> Self:
        """As they are now; empty where one cannot be read."""
        return cls(_content(settings.certificate), _content(settings.key))


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX + 1)  # what is longer is refused by who checks the pair
    except OSError:
        return b""


class WorkerOrders(msgspec.Struct, frozen=True):
    """See the module's text. `listeners`: which of the sockets that were inherited are this worker's; `wrapping_key` is that of
    namespace keys; `tls` is a pair that was checked, whatever the files hold when a worker starts; `levels` None: there is no
    same-host path."""

    listeners: tuple[int, ...]
    s3: S3Orders
    http: HttpSettings
    log: LogSettings
    tls: TlsPair | None
    arena: Path
    huge_pages: bool
    durable: Path
    volatile: Path
    map_bytes: int
    volatile_map_bytes: int
    wrapping_key: bytes
    levels: Levels | None
    keeping: Keeping
    upstreams: tuple[UpstreamSettings, ...] = ()


def send_orders(pair: socket.socket, orders: WorkerOrders) -> None:
    """Write the message; it waits in the pair's buffer for the worker to start."""
    encoded = msgspec.msgpack.encode(orders, enc_hook=encode_hook)
    pair.sendall(_agreement() + len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)


def receive_orders(pair: socket.socket) -> WorkerOrders | None:
    """Read it; None where the store process is of another version. `ConnectionError` where the pair has ended,
    `msgspec.MsgspecError` for what are no orders."""
    expected = _agreement()  # before it waits: it has the time
    if _read(pair, len(expected)) != expected:
        return None
    length = int.from_bytes(_read(pair, _LENGTH_BYTES), "little")
    if length > _BYTES_MAX:
        raise ConnectionError("no orders")
    return msgspec.msgpack.decode(_read(pair, length), type=WorkerOrders, dec_hook=decode_hook)


@cache
def _agreement() -> bytes:
    return agreement(__version__, (StoreCalls, WorkerCalls), WorkerOrders)


def _read(pair: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = pair.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("the store process is gone")
        data += piece
    return bytes(data)
