"""What `status` shows of upstreams: of this process, and of its workers, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvobj.api.admin_view import UpstreamStatus
from kvobj.config.settings import UpstreamSettings
from kvobj.metrics import Family
from kvobj.store.upstream.health import UpstreamHealth, latest

_REQUESTS = "kvobj_upstream_requests_total"
_CHUNKS = "kvobj_upstream_chunks_total"
_BYTES = "kvobj_upstream_bytes_total"


def upstream_statuses(
    settings: Sequence[UpstreamSettings],
    found: Sequence[UpstreamHealth],
    families: Callable[[], Iterable[Family]],
) -> tuple[UpstreamStatus, ...]:
    """Everything that is known without asking them, in the order of the configuration. `found`: by each process; `families`: their
    metrics, summed."""
    samples = [sample for family in families() for sample in family.samples] if settings else []
    return tuple([_status(each, [one for one in found if one.bucket == each.bucket], samples) for each in settings])


def _status(
    settings: UpstreamSettings,
    found: Sequence[UpstreamHealth],
    samples: Sequence[tuple[str, dict[str, str], float]],
) -> UpstreamStatus:
    health = latest(found)
    sent = _counts(samples, _BYTES, settings.bucket, "direction")
    return UpstreamStatus(
        bucket=settings.bucket,
        endpoint=settings.server.endpoint,
        remote_bucket=settings.server.bucket,
        state=health.state,
        reason=health.reason,
        since_ms=health.since_ms,
        is_held_back=health.is_held_back,
        last_error=health.last_error,
        last_error_ms=health.last_error_ms,
        namespaces=health.namespaces,
        requests=_counts(samples, _REQUESTS, settings.bucket, "operation"),
        chunks=_counts(samples, _CHUNKS, settings.bucket, "outcome"),
        sent_bytes=sent.get("up", 0.0),
        received_bytes=sent.get("down", 0.0),
    )


def _counts(
    samples: Sequence[tuple[str, dict[str, str], float]], name: str, bucket: str, label: str
) -> Mapping[str, float]:
    """One bucket's samples of a counter, summed by one of its labels."""
    found: dict[str, float] = {}
    for sample, labels, value in samples:
        if sample == name and labels.get("bucket") == bucket:
            found[labels[label]] = found.get(labels[label], 0.0) + value
    return found
