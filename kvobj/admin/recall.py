"""`recall`: asks the server to remove chunks by writer, namespace or time, and shows how far it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from kvobj.admin.output import Output, tell, visible
from kvobj.admin.render import size_text
from kvobj.client import AdminClient

POLL_SECONDS: Final = 0.2


def time_ms(text: str) -> int:
    """Milliseconds since the Unix epoch of an ISO 8601 time, UTC where it names no zone. `ArgumentTypeError`."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no ISO 8601 time, like 2026-01-31T08:00") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def recall(
    client: AdminClient,
    output: Output,
    *,
    bucket: str,
    namespace: str | None,
    writer: str | None,
    from_ms: int | None,
    to_ms: int | None,
    dry_run: bool,
    wait: Callable[[float], None],
) -> int:
    """Recall and wait for the end; `wait` sleeps between two questions. Returns 0, or 1 where it did not come to its end.

    A recall that is interrupted here is stopped on the server too; what it removed stays removed.
    """
    report: Mapping[str, object] = client.start_recall(
        bucket, namespace=namespace, writer=writer, from_ms=from_ms, to_ms=to_ms, dry_run=dry_run
    )
    columns = (SpinnerColumn(), TextColumn("recall: {task.fields[text]}", markup=False), TimeElapsedColumn())
    try:
        with output.progress(*columns) as progress:
            bar = progress.add_task("recall", total=None, text="")
            while report.get("state") == "running":
                progress.update(bar, text=visible(f"{_text(report)} of {report.get('total_chunks')} in the bucket"))
                wait(POLL_SECONDS)
                report = client.recall()
    except KeyboardInterrupt:
        client.cancel_recall()
        output.complain("recall stopped; what it removed stays removed")
        return 1
    output.show(report, lambda console: _print_report(console, report))
    return 0 if report.get("state") == "done" else 1


def _text(report: Mapping[str, object]) -> str:
    return f"{report.get('chunks')} chunks, {size_text(report.get('size_bytes'))}"


def _print_report(console: Console, report: Mapping[str, object]) -> None:
    ending = f": {report['failure']}" if report.get("failure") else ""
    what = "would be removed, and what descends from them" if report.get("dry_run") else "removed"
    tell(console, f"{report.get('state')}{ending}; {_text(report)} {what}")
