"""Tables for people. Takes the server's documents as they come, so that a newer server's extra fields do no harm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table

from kvobj.admin.output import visible

Document = Mapping[str, object]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024
_MINUTE_SECONDS: Final = 60
_HOUR_SECONDS: Final = 3600
_DAY_SECONDS: Final = 86400


def size_text(value: object) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    size, unit = float(value), 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{int(size)} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def time_text(milliseconds: object) -> str:
    """Milliseconds since the Unix epoch as UTC."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int):
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: object) -> str:
    """Seconds as days, hours, minutes."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
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
    console.print(
        f"kvobj {status.get('version', '?')}, store {status.get('store_id', '?')}, "
        f"up {duration_text(status.get('uptime_seconds'))}, "
        f"{'ready' if status.get('is_ready') else 'not ready'}, receives by {status.get('receive_mode') or '?'}",
        markup=False,
        highlight=False,
    )
    _print_tiers(console, status)
    _print_codecs(console, status)
    remote = status.get("remote")
    if isinstance(remote, Mapping):
        _print_remote(console, remote)
    for upstream in _documents(status.get("upstreams")):
        _print_upstream(console, upstream)
    for name in ("arena", "catalog", "queues", "gc", "leases", "rates", "gpu"):
        values = status.get(name)
        if isinstance(values, Mapping) and values:
            table = _table(name, "")
            for key, value in values.items():
                label, _, unit = str(key).rpartition("_")
                is_size = unit == "bytes"
                # Without its unit a size may have the name of a count beside it.
                is_named_by_label = is_size and label not in values
                table.add_row(
                    (label if is_named_by_label else str(key)).replace("_", " "),
                    size_text(value) if is_size else _text(value),
                )
            console.print(table)
    unfinished = _table("user", "unfinished uploads", "limit")
    by_user = status.get("unfinished")
    for user, held in by_user.items() if isinstance(by_user, Mapping) else ():
        limit = "none" if user == "root" else size_text(status.get("unfinished_limit_bytes"))
        unfinished.add_row(_text(user), size_text(held), limit)
    if unfinished.row_count:
        console.print(unfinished)
    _print_workers(console, status)
    notes = status.get("notes")
    for note in notes if isinstance(notes, list) else []:
        console.print(f"note: {visible(str(note))}", markup=False, highlight=False)


def _print_workers(console: Console, status: Document) -> None:
    """One line a worker process."""
    workers = _table("worker", "process", "requests", "connections", "CPU", "restarts", "last end")
    for number, worker in enumerate(_documents(status.get("workers"))):
        workers.add_row(
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
    tiers = _table("tier", "capacity", "used", "full", "blobs", "hit ratio", "dirty", "I/O", "place")
    for tier in _documents(status.get("tiers")):
        name = f"{tier.get('name')} (home)" if tier.get("is_home") else str(tier.get("name"))
        is_unbounded = tier.get("mode") == "unbounded"
        tiers.add_row(
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
    table = _table("remote", "")
    table.add_row("server", _text(f"{remote.get('endpoint')}/{remote.get('bucket')}/{remote.get('prefix')}"))
    table.add_row("state", _with_reason(remote.get("state"), remote.get("reason")))
    table.add_row("since", time_text(remote.get("since_ms")))
    table.add_row("circuit breaker", _text(remote.get("breaker")))
    skew = remote.get("clock_skew_seconds")
    table.add_row("clock ahead", f"{skew:.1f} s" if isinstance(skew, int | float) else "-")
    table.add_row("prefix", _with_reason(remote.get("claim"), remote.get("claim_reason")))
    table.add_row("lineage", _text(remote.get("lineage")))
    capabilities = remote.get("capabilities")
    if isinstance(capabilities, Mapping):
        known = ", ".join(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in capabilities.items())
        table.add_row("the server can", known or "not known yet")
    table.add_row("uploads", _text(remote.get("uploads_held_by") or "go on"))
    if remote.get("manifests_problem"):
        table.add_row("manifests", _text(remote.get("manifests_problem")))
    for part in ("queue", "manifests"):
        values = remote.get(part)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            label, _, unit = str(name).rpartition("_")
            is_size = unit == "bytes"
            text = size_text(value) if is_size else _text(value)
            table.add_row(f"{part}: {(label if is_size else str(name)).replace('_', ' ')}", text)
    requests = remote.get("requests")
    if isinstance(requests, Mapping):
        table.add_row("requests", _counts_text(requests))
    table.add_row("sent", size_text(remote.get("sent_bytes")))
    table.add_row("received", size_text(remote.get("received_bytes")))
    console.print(table)


def _print_upstream(console: Console, upstream: Document) -> None:
    """One bucket's upstream: how it answers, and what it was asked for and gave."""
    table = _table(f"upstream of {_text(upstream.get('bucket'))}", "")
    table.add_row("server", _text(f"{upstream.get('endpoint')}/{upstream.get('remote_bucket')}"))
    state = f"{upstream.get('state')}{', asked now and then' if upstream.get('is_held_back') else ''}"
    table.add_row("state", _with_reason(state, upstream.get("reason")))
    table.add_row("since", time_text(upstream.get("since_ms")))
    error = upstream.get("last_error")
    table.add_row("last error", f"{time_text(upstream.get('last_error_ms'))}: {_text(error)}" if error else "none")
    namespaces = upstream.get("namespaces")
    for name, why in namespaces.items() if isinstance(namespaces, Mapping) else ():
        table.add_row(f"namespace {_text(name)}", f"not used: {_text(why)}")
    for part in ("chunks", "requests"):
        counts = upstream.get(part)
        table.add_row(part, _counts_text(counts) if isinstance(counts, Mapping) else "-")
    table.add_row("sent", size_text(upstream.get("sent_bytes")))
    table.add_row("received", size_text(upstream.get("received_bytes")))
    console.print(table)


def _counts_text(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in sorted(counts.items())) or "-"


def _with_reason(state: object, reason: object) -> str:
    return f"{_text(state)}: {_text(reason)}" if reason else _text(state)


def _print_codecs(console: Console, status: Document) -> None:
    """How each tier's blobs lie, where any lies otherwise than it was put."""
    codecs = _table("tier", "codec", "blobs", "plain", "stored", "ratio")
    found = [(tier, codec) for tier in _documents(status.get("tiers")) for codec in _documents(tier.get("codecs"))]
    for tier, codec in found:
        ratio = codec.get("ratio")
        codecs.add_row(
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
    table = _table("bucket", "kind", "durability", "remote", "codec", "objects", "size", "owner", "created")
    for bucket in buckets:
        table.add_row(
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
        line = f"{modified}  {size:>10}  {row.get('durability')!s:6}  {visible(str(row.get('key')))}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_inspection(console: Console, inspection: Document) -> None:
    """One object and its blobs."""
    table = _table("object", "")
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
                table.add_row("size", f"{size_text(value)} ({value} B)")
            case "modified_ms":
                table.add_row("modified", time_text(value))
            case _:
                table.add_row(name, _text(value))
    for name in ("headers", "metadata", "checksums"):
        values = inspection.get(name)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            table.add_row(f"{name}: {_text(key)}", _text(value))
    console.print(table)
    blobs = _table("blob", "plain", "frame", "codec", "tiers", "blocks", "digest")
    for blob in _documents(inspection.get("blobs")):
        frame = blob.get("frame")
        header: Document = frame if isinstance(frame, Mapping) else {}
        tiers = blob.get("tiers")
        blobs.add_row(
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
    victims = _documents(plan.get("victims"))
    if victims:
        table = _table("reason", "bucket", "key", "size", "unused")
        for victim in victims:
            table.add_row(
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
    console.print(
        f"{chunks} chunks{more}, {size_text(plan.get('size_bytes'))} would go; home tier holds {used}, its watermark is "
        f"{limit}; {plan.get('marked')} condemned already, {plan.get('waiting_for_pins')} deleted and still pinned",
        markup=False,
        highlight=False,
    )
    if plan.get("quiet"):
        console.print("quiet time: nothing is removed until holders could pin again", highlight=False)


def print_users(console: Console, users: Iterable[Document]) -> None:
    """One line a user."""
    table = _table("user", "display name", "access key", "root")
    for user in users:
        table.add_row(
            _text(user.get("id")),
            _text(user.get("display_name")),
            _text(user.get("access_key")),
            "yes" if user.get("is_root") else "",
        )
    console.print(table)


def print_values(console: Console, title: str, values: Document) -> None:
    """Any flat document, name by name."""
    table = _table(title, "")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _text(value))
    console.print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _documents(values: object) -> list[Document]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(value: object) -> str:
    # Brackets would be read as markup by rich, and names come from whoever wrote the object.
    match value:
        case None | "":
            return "-"
        case float():
            return f"{value:.3g}"
        case _:
            return visible(str(value)).replace("[", r"\[")


def _share_text(part: object, whole: object) -> str:
    if not isinstance(part, int) or not isinstance(whole, int) or not whole:
        return "-"
    return f"{100 * part / whole:.0f} %"
