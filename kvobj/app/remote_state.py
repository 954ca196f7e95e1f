"""What `status` shows of the remote tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from kvobj.api.admin_view import RemoteStatus
from kvobj.app.remote import Remote, RemoteWriting
from kvobj.catalog.remote_protocol import Outbox
from kvobj.metrics import Metrics

_REQUESTS = "kvobj_remote_requests_total"
_BYTES = "kvobj_remote_bytes_total"


def remote_place(remote: Remote) -> str:
    """Where the tier lies, for people."""
    settings = remote.settings
    return f"{settings.endpoint}/{settings.bucket}/{settings.prefix}"


def remote_status(
    remote: Remote | None, writing: RemoteWriting | None, outbox: Outbox, metrics: Metrics
) -> RemoteStatus | None:
    """Everything that is known without asking the server; None where there is no remote."""
    if remote is None or writing is None:
        return None
    settings, health, lag = remote.settings, remote.bucket.health, remote.manifests.lag
    uploads, backlog = writing.uploads, writing.uploads.backlog
    capabilities = remote.bucket.capabilities
    return RemoteStatus(
        endpoint=settings.endpoint,
        bucket=settings.bucket,
        prefix=settings.prefix,
        state=health.state,
        reason=health.reason,
        since_ms=health.since_ms,
        breaker=health.breaker,
        clock_skew_seconds=health.clock_skew_seconds,
        capabilities={} if capabilities is None else asdict(capabilities),
        lineage=remote.identity.lineage,
        claim=remote.identity.state,
        claim_reason=remote.identity.reason,
        queue={
            "queued_objects": backlog.objects,
            "queued_bytes": backlog.size_bytes,
            "queue_limit_bytes": settings.queue_bytes,
            "oldest_seconds": round(backlog.oldest_seconds, 3),
            "failures": backlog.failures,
            "uploaded_objects": uploads.uploaded_objects,
            "uploaded_bytes": uploads.uploaded_bytes,
            "stale_entries": uploads.dropped_entries,
            "found_by_rule_objects": writing.rules.found_objects,
            "read_again_objects": writing.rules.reused_objects,
        },
        uploads_held_by=uploads.state,
        manifests={
            "untold_records": lag.entries,
            "untold_bytes": outbox.size_bytes,
            "untold_limit_bytes": settings.outbox_bytes,
            "oldest_seconds": round(lag.oldest_seconds, 3),
            "failures": lag.failures,
        },
        manifests_problem=lag.problem,
        requests=_requests(metrics),
        sent_bytes=_sample(metrics, _BYTES, direction="up"),
        received_bytes=_sample(metrics, _BYTES, direction="down"),
    )


def _requests(metrics: Metrics) -> Mapping[str, float]:
    """By operation, whatever came of them: what a provider bills."""
    found: dict[str, float] = {}
    for family in metrics.registry.restricted_registry([_REQUESTS]).collect():
        for sample in family.samples:
            operation = sample.labels.get("operation", "")
            found[operation] = found.get(operation, 0.0) + sample.value
    return found


def _sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.value(name, **labels)
