"""Tables for people. Takes the server's documents as they come, so that a newer server's extra fields do no harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from rich.console import Console

from kvobj.admin.output import Rows, tell

Document = Mapping[str, object]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024
_SIZE_MAX: Final = 2**90  # no number, infinity and what no store holds are shown as unknown
_MINUTE_SECONDS: Final = 60
_HOUR_SECONDS: Final = 3600
_DAY_SECONDS: Final = 86400
_PLAIN_FROM: Final = 1000.0  # larger ones are shown whole, without a power of ten
_TIME_MAX_MS: Final = 250_000_000_000_000  # of the year 9892: datetime ends with 9999
_QUIET: Final = "quiet time: nothing is removed until holders could pin again"


def size_text(value: object) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_SIZE_MAX < value < _SIZE_MAX:
        return "-"
    size, unit = float(value), 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{int(size)} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def time_text(milliseconds: object) -> str:
    """Milliseconds since the Unix epoch as UTC."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int) or abs(milliseconds) > _TIME_MAX_MS:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: object) -> str:
    """Seconds as days, hours, minutes."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return "-"
    whole = int(seconds)
    if whole >= _DAY_SECONDS:
        return f"{whole // _DAY_SECONDS} d {whole % _DAY_SECONDS // _HOUR_SECONDS} h"
    if whole >= _HOUR_SECONDS:
        return f"{whole // _HOUR_SECONDS} h {whole % _HOUR_SECONDS // _MINUTE_SECONDS} min"
    if whole >= _MINUTE_SECONDS:
        return f"{whole // _MINUTE_SECONDS} min {whole % _MINUTE_SECONDS} s"
    return f"{whole} s"


def ratio_text(value: object) -> str:
    """A ratio in percent, `-` where there is none yet."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and not isinstance(value, bool) else "-"


def print_status(console: Console, status: Document) -> None:
    """Everything of a status: the store, its tiers, its arena, its catalog, queues, rates, notes."""
    tell(
        console,
        f"kvobj {status.get('version', '?')}, store {status.get('store_id', '?')}, "
        f"up {duration_text(status.get('uptime_seconds'))}, "
        f"{'ready' if status.get('is_ready') else 'not ready'}, receives by {status.get('receive_mode') or '?'}",
    )
    _print_tiers(console, status)
    _print_codecs(console, status)
    remote = status.get("remote")
    if isinstance(remote, Mapping):
        _print_remote(console, remote)
    for upstream in documents(status.get("upstreams")):
        _print_upstream(console, upstream)
    for name in ("arena", "catalog", "queues", "gc", "leases", "rates", "gpu"):
        values = status.get(name)
        if isinstance(values, Mapping) and values:
            table = Rows(name, "")
            for label, text in _named(values):
                table.add(label, text)
            console.print(table)
    unfinished = Rows("user", "unfinished uploads", "limit")
    by_user = status.get("unfinished")
    for user, held in by_user.items() if isinstance(by_user, Mapping) else ():
        limit = "none" if user == "root" else size_text(status.get("unfinished_limit_bytes"))
        unfinished.add(_text(user), size_text(held), limit)
    if unfinished.row_count:
        console.print(unfinished)
    _print_workers(console, status)
    notes = status.get("notes")
    for note in notes if isinstance(notes, list) else []:
        tell(console, f"note: {note}")


def _print_workers(console: Console, status: Document) -> None:
    """One line a worker process."""
    workers = Rows("worker", "process", "requests", "connections", "CPU", "restarts", "last end")
    for number, worker in enumerate(documents(status.get("workers"))):
        workers.add(
            f"{number}{'' if worker.get('is_ready') else ' (starting)'}",
            _text(worker.get("pid")),
            _text(worker.get("requests")),
            _text(worker.get("connections")),
            duration_text(worker.get("cpu_seconds")),
            _text(worker.get("restarts")),
            _text(worker.get("last_end")),
        )
    if workers.row_count:
        console.print(workers)


def _print_tiers(console: Console, status: Document) -> None:
    """One line a tier, and how full it is."""
    tiers = Rows("tier", "capacity", "used", "full", "blobs", "hit ratio", "dirty", "I/O", "place")
    for tier in documents(status.get("tiers")):
        name = f"{tier.get('name')} (home)" if tier.get("is_home") else str(tier.get("name"))
        is_unbounded = tier.get("mode") == "unbounded"
        tiers.add(
            name,
            "-" if is_unbounded else size_text(tier.get("capacity_bytes")),
            size_text(tier.get("used_bytes")),
            "-" if is_unbounded else _share_text(tier.get("used_bytes"), tier.get("capacity_bytes")),
            _text(tier.get("blobs")),
            ratio_text(tier.get("hit_ratio")),
            size_text(tier.get("dirty_bytes")),
            _text(", ".join(str(how) for how in (tier.get("mode"), tier.get("transfers")) if how)),
            _text(tier.get("location")),
        )
    console.print(tiers)


def _print_remote(console: Console, remote: Document) -> None:
    """The remote tier: how it answers, whose it is, what waits to go there, and what it has cost."""
    table = Rows("remote", "")
    table.add("server", _text(f"{remote.get('endpoint')}/{remote.get('bucket')}/{remote.get('prefix')}"))
    table.add("state", _with_reason(remote.get("state"), remote.get("reason")))
    table.add("since", time_text(remote.get("since_ms")))
    table.add("circuit breaker", _text(remote.get("breaker")))
    skew = remote.get("clock_skew_seconds")
    table.add("clock ahead", f"{skew:.1f} s" if isinstance(skew, int | float) else "-")
    table.add("prefix", _with_reason(remote.get("claim"), remote.get("claim_reason")))
    table.add("lineage", _text(remote.get("lineage")))
    capabilities = remote.get("capabilities")
    if isinstance(capabilities, Mapping):
        known = ", ".join(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in capabilities.items())
        table.add("the server can", known or "not known yet")
    table.add("uploads", _text(remote.get("uploads_held_by") or "go on"))
    if remote.get("manifests_problem"):
        table.add("manifests", _text(remote.get("manifests_problem")))
    for part in ("queue", "manifests"):
        values = remote.get(part)
        for label, text in _named(values) if isinstance(values, Mapping) else ():
            table.add(f"{part}: {label}", text)
    requests = remote.get("requests")
    if isinstance(requests, Mapping):
        table.add("requests", _counts_text(requests))
    table.add("sent", size_text(remote.get("sent_bytes")))
    table.add("received", size_text(remote.get("received_bytes")))
    console.print(table)


def _print_upstream(console: Console, upstream: Document) -> None:
    """One bucket's upstream: how it answers, and what it was asked for and gave."""
    table = Rows(f"upstream of {_text(upstream.get('bucket'))}", "")
    table.add("server", _text(f"{upstream.get('endpoint')}/{upstream.get('remote_bucket')}"))
    state = f"{upstream.get('state')}{', asked now and then' if upstream.get('is_held_back') else ''}"
    table.add("state", _with_reason(state, upstream.get("reason")))
    table.add("since", time_text(upstream.get("since_ms")))
    error = upstream.get("last_error")
    table.add("last error", f"{time_text(upstream.get('last_error_ms'))}: {_text(error)}" if error else "none")
    namespaces = upstream.get("namespaces")
    for name, why in namespaces.items() if isinstance(namespaces, Mapping) else ():
        table.add(f"namespace {_text(name)}", f"not used: {_text(why)}")
    for part in ("chunks", "requests"):
        counts = upstream.get(part)
        table.add(part, _counts_text(counts) if isinstance(counts, Mapping) else "-")
    table.add("sent", size_text(upstream.get("sent_bytes")))
    table.add("received", size_text(upstream.get("received_bytes")))
    console.print(table)


def _counts_text(counts: Document) -> str:
    return (
        ", ".join(f"{name} {value:.0f}" for name, value in sorted(counts.items()) if isinstance(value, int | float))
        or "-"
    )


def _with_reason(state: object, reason: object) -> str:
    return f"{_text(state)}: {_text(reason)}" if reason else _text(state)


def _print_codecs(console: Console, status: Document) -> None:
    """How each tier's blobs lie, where any lies otherwise than it was put."""
    codecs = Rows("tier", "codec", "blobs", "plain", "stored", "ratio")
    found = [(tier, codec) for tier in documents(status.get("tiers")) for codec in documents(tier.get("codecs"))]
    for tier, codec in found:
        ratio = codec.get("ratio")
        codecs.add(
            _text(tier.get("name")),
            _text(codec.get("codec")),
            _text(codec.get("blobs")),
            size_text(codec.get("plain_bytes")),
            size_text(codec.get("stored_bytes")),
            f"{ratio:.2f}" if isinstance(ratio, int | float) else "-",
        )
    if any(codec.get("codec") != "raw" for _, codec in found):
        console.print(codecs)


def print_buckets(console: Console, buckets: Iterable[Document]) -> None:
    """One line a bucket."""
    table = Rows("bucket", "kind", "durability", "remote", "codec", "objects", "size", "owner", "created")
    for bucket in buckets:
        table.add(
            _text(bucket.get("name")),
            _text(bucket.get("kind")),
            _text(bucket.get("durability")),
            _text(bucket.get("remote")),
            _text(bucket.get("codec")),
            _text(bucket.get("objects")),
            size_text(bucket.get("size_bytes")),
            _text(bucket.get("owner")),
            time_text(bucket.get("created_ms")),
        )
    console.print(table)


def print_objects(console: Console, objects: Iterable[Document]) -> None:
    """One line an object, printed as they come: a bucket may hold millions, and a table would have to hold them all."""
    for row in objects:
        modified, size = time_text(row.get("modified_ms")), size_text(row.get("size_bytes"))
        tell(console, f"{modified}  {size:>10}  {row.get('durability')!s:6}  {row.get('key')}")


def print_inspection(console: Console, inspection: Document) -> None:
    """One object and its blobs."""
    table = Rows("object", "")
    for name in (
        "bucket",
        "key",
        "size_bytes",
        "etag",
        "modified_ms",
        "durability",
        "state",
        "owner",
        "sequence",
        "digest",
    ):
        value = inspection.get(name)
        match name:
            case "size_bytes":
                table.add("size", f"{size_text(value)} ({value} B)")
            case "modified_ms":
                table.add("modified", time_text(value))
            case _:
                table.add(name, _text(value))
    for name in ("headers", "metadata", "checksums"):
        values = inspection.get(name)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            table.add(f"{name}: {_text(key)}", _text(value))
    console.print(table)
    blobs = Rows("blob", "plain", "frame", "codec", "tiers", "blocks", "digest")
    for blob in documents(inspection.get("blobs")):
        frame = blob.get("frame")
        header: Document = frame if isinstance(frame, Mapping) else {}
        tiers = blob.get("tiers")
        blobs.add(
            _text(blob.get("blob_id")),
            size_text(blob.get("plain_bytes")),
            size_text(blob.get("frame_bytes")),
            _text(header.get("codec") or blob.get("codec")),
            ", ".join(str(tier) for tier in tiers) if isinstance(tiers, list) and tiers else "none",
            _text(header.get("blocks")),
            _text(header.get("digest") or blob.get("digest")),
        )
    console.print(blobs)


def print_gc_plan(console: Console, plan: Document) -> None:
    """What the collector would remove: chunk by chunk, then the sums."""
    victims = documents(plan.get("victims"))
    if victims:
        table = Rows("reason", "bucket", "key", "size", "unused")
        for victim in victims:
            table.add(
                _text(victim.get("reason")),
                _text(victim.get("bucket")),
                _text(victim.get("key")),
                size_text(victim.get("size_bytes")),
                duration_text(victim.get("unused_seconds")),
            )
        console.print(table)
    chunks = plan.get("chunks")
    more = f" ({len(victims)} listed)" if isinstance(chunks, int) and chunks > len(victims) else ""
    used, limit = size_text(plan.get("home_used_bytes")), size_text(plan.get("home_limit_bytes"))
    tell(
        console,
        f"{chunks} chunks{more}, {size_text(plan.get('size_bytes'))} would go; home tier holds {used}, its watermark is "
        f"{limit}; {plan.get('marked')} condemned already, {plan.get('waiting_for_pins')} deleted and still pinned",
    )
    if plan.get("quiet"):
        tell(console, _QUIET)


def print_gc_report(console: Console, report: Document) -> None:
    """What a run of the collector did."""
    removed = f"{report.get('claimed')} ({size_text(report.get('claimed_bytes'))})"
    done = f"condemned {report.get('condemned')} chunks, removed {removed}, {report.get('rescued')} were asked for and stay"
    tell(console, _QUIET if report.get("quiet") else done)


def print_users(console: Console, users: Iterable[Document]) -> None:
    """One line a user."""
    table = Rows("user", "display name", "access key", "root")
    for user in users:
        table.add(
            _text(user.get("id")),
            _text(user.get("display_name")),
            _text(user.get("access_key")),
            "yes" if user.get("is_root") else "",
        )
    console.print(table)


def print_namespaces(console: Console, namespaces: Iterable[Document]) -> None:
    """One line a namespace."""
    table = Rows("namespace", "ids", "chunk tokens", "chunks", "size", "fingerprint")
    for each in namespaces:
        table.add(
            _text(each.get("name")),
            _text(each.get("ids")),
            _text(each.get("chunk_tokens")),
            _text(each.get("chunks")),
            size_text(each.get("size_bytes")),
            _text(each.get("fingerprint"))[:16],
        )
    console.print(table)


def print_values(console: Console, title: str, values: Document) -> None:
    """Any flat document, name by name."""
    table = Rows(title, "")
    for label, text in _named(values):
        table.add(label, text)
    console.print(table)


def _named(values: Document) -> Iterator[tuple[str, str]]:
    """Names and values for people: a unit that ends a name stands with its value."""
    for key, value in values.items():
        name = str(key)
        unit = next((each for each in _UNIT_TEXTS if name.endswith(f"_{each}")), None)
        label, text = (name, _text(value)) if unit is None else (name[: -len(unit) - 1], _UNIT_TEXTS[unit](value))
        # Without its unit a size may have the name of a count beside it.
        yield (name if label in values else label).replace("_", " "), text


def documents(values: object) -> list[Document]:
    """Those of a list that are documents; none where it is no list."""
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            is_count = value.is_integer() or abs(value) >= _PLAIN_FROM
            return f"{value:.0f}" if is_count else f"{value:.3g}"
        case _:
            return str(value)


_UNIT_TEXTS: Final[dict[str, Callable[[object], str]]] = {
    "bytes_per_second": lambda value: f"{size_text(value)}/s",
    "per_second": lambda value: f"{_text(value)}/s",
    "bytes": size_text,
    "seconds": lambda value: f"{_text(value)} s",
    "ms": time_text,
}


def _share_text(part: object, whole: object) -> str:
    if not isinstance(part, int) or not isinstance(whole, int) or not whole:
        return "-"
    return f"{100 * part / whole:.0f} %"
