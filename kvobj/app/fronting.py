"""What the HTTP front of a node is told by the configuration: the same in one process and in workers."""

from __future__ import annotations

import os
from typing import Final

from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpSettings
from kvobj.api.request import HostRules
from kvobj.config.settings import Settings

_RECEIVER_THREADS_MAX: Final = 8
_BURSTS_SHARE: Final = 16
"""Of the arena one byte in so many may be kept for bursts on their way."""
_CHANCE: Final = 8
"""So many connections more than its share of them a worker takes in any case, beside the half of it."""
_BUSY_CORES: Final = 2
"""The event loop's, and one for digests and the database."""


def s3_settings(settings: Settings, *, host_id: str, dram_bytes: int, workers: int = 1) -> S3Settings:
    """Of the S3 service, or of one worker's. `host_id` is the store's; `dram_bytes` what its arena has."""
    server = settings.server
    rules = HostRules(
        hosts=dict(server.hosts),
        domains=server.domains,
        path_style=frozenset({"localhost", server.listen.host.lower()}),
        default_bucket=server.default_bucket,
    )
    return S3Settings(
        region=server.region,
        host_rules=rules,
        host_id=host_id,
        unsigned_payload_needs_tls=server.unsigned_payload_needs_tls,
        explain_signatures=settings.debug.explain_signatures,
        trusted_proxies=server.trusted_proxies,
        bucket_uploads=settings.limits.bucket_uploads,
        has_remote=settings.remote is not None,
        upstream_buckets=frozenset(upstream.bucket for upstream in settings.upstreams),
        bursts_bytes=dram_bytes // _BURSTS_SHARE // workers,
    )


def http_settings(settings: Settings, name: str, *, workers: int = 1) -> HttpSettings:
    """Of one port, or of one worker's share of it: numbers of connections and requests are divided, rounded up, and connections
    have room for chance."""
    limits = settings.limits
    return HttpSettings(
        name=name,
        request_line_bytes=limits.request_line_bytes,
        head_bytes=limits.request_line_bytes + limits.header_bytes,
        header_fields=limits.header_fields,
        header_seconds=limits.header_timeout_seconds,
        keep_alive_seconds=limits.idle_timeout_seconds,
        body_stall_seconds=limits.progress_timeout_seconds,
        send_stall_seconds=limits.progress_timeout_seconds,
        connections=_connections_share(limits.connections, workers),
        address_connections=_connections_share(limits.address_connections, workers),
        handler_requests=-(-limits.concurrent_requests // workers),
        queue_seconds=limits.reserve_timeout_seconds,
        receiver_threads=receiver_threads(len(os.sched_getaffinity(0)), workers=workers),
    )


def _connections_share(limit: int, workers: int) -> int:
    """How many connections one worker takes. The kernel deals them out by chance, and again by chance those of a worker that died:
    with the bare quotient the first would be refused long before all have the limit."""
    return min(limit, -(-3 * limit // (2 * workers)) + _CHANCE)


def receiver_threads(cores: int, *, workers: int = 1) -> int:
    """How many threads should receive bodies beside the event loop: as many as find cores that nobody else needs. On two cores they
    take the event loop's, which then tells too late that bodies still come, so that hashing begins between them: four connections
    with 32 MiB got 1.4 to 4.6 GB/s from one run to the next. Workers have their cores already."""
    return min(_RECEIVER_THREADS_MAX, max(0, cores - _BUSY_CORES)) if workers == 1 else 0
