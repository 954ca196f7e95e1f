"""Upstreams of KV buckets, put together in front of a store and its chunks: of the node's, or of a worker's.

Where none is configured nothing is put in front of anything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Handler, Reply, RequestBody, RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.clock import Clock
from kvobj.config.settings import UpstreamSettings
from kvobj.metrics import Metrics

if TYPE_CHECKING:
    from kvobj.api.upstreams import Upstream, Upstreams
    from kvobj.store.upstream.health import UpstreamHealth


@dataclass(frozen=True, slots=True)
class Fronted:
    """What the S3 service is given; `metrics` have the upstreams' figures."""

    store: ObjectStore
    chunks: ChunkStore
    upstreams: Upstreams
    metrics: Metrics

    def health(self) -> list[UpstreamHealth]:
        """How each upstream has been answering this process."""
        return [each.client.health.present(each.agreement.problems) for each in self.upstreams.values()]

    def handler(self, handle: Handler) -> Handler:
        """The service's handler, which is told by which stores a request has come."""
        if not self.upstreams:
            return handle
        from kvobj.store.upstream.via import VIA_HEADER, Request  # noqa: PLC0415 - as below

        async def handled(head: RequestHead, body: RequestBody) -> Reply:
            with Request(head.header(VIA_HEADER) or "", request_id=head.request_id):
                return await handle(head, body)

        return handled

    async def aclose(self) -> None:
        """End what is on its way, and the connections. After the last request."""
        for upstream in self.upstreams.values():
            await upstream.fetcher.aclose()
            await upstream.passing.aclose()
            await upstream.client.aclose()


def check_upstreams(settings: Sequence[UpstreamSettings]) -> None:
    """`ConfigurationError` where `make_upstreams` would find the extra "remote" or a CA bundle missing."""
    if settings:
        from kvobj.store.upstream.client import access_to  # noqa: PLC0415 - a store without upstreams needs none of it

        for each in settings:
            access_to(each.server)


def make_upstreams(
    settings: Sequence[UpstreamSettings],
    store: ObjectStore,
    chunks: ChunkStore,
    *,
    store_id: str,
    has_remote: bool,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> Fronted:
    """`store_id` in hex. Raises `ConfigurationError` where the extra "remote" or a CA bundle is missing."""
    if not settings:
        return Fronted(store, chunks, {}, metrics)
    # Imported here: a store without upstreams needs none of it.
    from kvobj.api.upstream_writes import UpstreamWrites  # noqa: PLC0415 - see above
    from kvobj.api.upstreams import Upstream, UpstreamChunks, UpstreamStore  # noqa: PLC0415
    from kvobj.store.upstream.agreement import Agreement  # noqa: PLC0415
    from kvobj.store.upstream.batch_forwarding import BatchForwarder  # noqa: PLC0415
    from kvobj.store.upstream.client import UpstreamClient  # noqa: PLC0415
    from kvobj.store.upstream.fetching import Fetcher  # noqa: PLC0415
    from kvobj.store.upstream.forwarding import Forwarder  # noqa: PLC0415
    from kvobj.store.upstream.instruments import UpstreamInstruments, UpstreamMetrics  # noqa: PLC0415
    from kvobj.store.upstream.passing import Passing  # noqa: PLC0415
    from kvobj.store.upstream.storing import ChunkWriter  # noqa: PLC0415
    from kvobj.store.upstream.via import Via, tell_request  # noqa: PLC0415

    log = log.getChild("upstream")
    log.addFilter(tell_request)

    via, all_metrics = Via(store_id), UpstreamMetrics(metrics)
    upstreams: dict[str, Upstream] = {}
    for each in settings:
        instruments = UpstreamInstruments(all_metrics, each.bucket)
        client = UpstreamClient(each, via=via, instruments=instruments, clock=clock, log=log)
        agreement = Agreement(client, clock=clock, log=log)
        fetcher = Fetcher(
            client,
            agreement,
            catalog=store.catalog,
            writer=ChunkWriter(chunks.batch, store.start_put),
            instruments=instruments,
            clock=clock,
            log=log,
        )
        forwarder = Forwarder(client, agreement, instruments)
        writes = UpstreamWrites(
            client, forwarder, BatchForwarder(client, forwarder), store=store, has_remote=has_remote
        )
        passing = Passing(client, instruments)
        upstreams[each.bucket] = Upstream(client, agreement, fetcher, passing, writes)
    fronted = UpstreamStore(store, upstreams)
    return Fronted(fronted.as_store(), UpstreamChunks(chunks, store, upstreams).as_chunks(), upstreams, metrics)
