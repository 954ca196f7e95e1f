"""What a worker process is told before it begins: settings and places, in one message over the pair.

It is not read from the configuration's file again, which may have changed since the node started.
"""

from __future__ import annotations

import socket
from ipaddress import ip_network
from pathlib import Path
from typing import Final

import msgspec

from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpSettings
from kvobj.api.request import HostRules
from kvobj.api.same_host.rights import Levels
from kvobj.config.settings import LogSettings, TlsSettings, UpstreamSettings
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.wire import decode_hook, encode_hook

_LENGTH_BYTES: Final = 4
_BYTES_MAX: Final = 16 * 1024 * 1024


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


class WorkerOrders(msgspec.Struct, frozen=True):
    """See the module's text. `listeners`: which of the sockets that were inherited are this worker's; `wrapping_key` is that of
    namespace keys; `levels` None: there is no same-host path."""

    listeners: tuple[int, ...]
    s3: S3Orders
    http: HttpSettings
    log: LogSettings
    tls: TlsSettings | None
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
    pair.sendall(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)


def receive_orders(pair: socket.socket) -> WorkerOrders:
    """Read it. `ConnectionError` where the pair has ended, `msgspec.MsgspecError` for what are no orders."""
    length = int.from_bytes(_read(pair, _LENGTH_BYTES), "little")
    if length > _BYTES_MAX:
        raise ConnectionError("no orders")
    return msgspec.msgpack.decode(_read(pair, length), type=WorkerOrders, dec_hook=decode_hook)


def _read(pair: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = pair.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("the store process is gone")
        data += piece
    return bytes(data)
