"""`verify`: asks the server to re-hash what it holds, shows how far it is, and lists what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from kvobj.admin.output import Output, tell
from kvobj.admin.render import documents, size_text
from kvobj.client import AdminClient

POLL_SECONDS: Final = 0.2


def verify(client: AdminClient, output: Output, *, bucket: str | None, wait: Callable[[float], None]) -> int:
    """Verify a bucket, or all; `wait` sleeps between two questions. Returns 0, or 1 when something is wrong.

    A verification that is interrupted here is stopped on the server too.
    """
    report: Mapping[str, object] = client.start_verification(bucket)
    columns = (
        TextColumn("verify"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    try:
        with output.progress(*columns) as progress:
            bar = progress.add_task("verify", total=_number(report, "total_objects"), size="")
            while report.get("state") == "running":
                wait(POLL_SECONDS)
                report = client.verification()
                checked_bytes = size_text(report.get("checked_bytes"))
                progress.update(bar, completed=_number(report, "checked_objects"), size=checked_bytes)
    except KeyboardInterrupt:
        client.cancel_verification()
        output.complain("verification stopped")
        return 1
    output.show(report, lambda console: _print_report(console, report))
    return 0 if report.get("state") == "done" and not _number(report, "problem_count") else 1


def _print_report(console: Console, report: Mapping[str, object]) -> None:
    for problem in documents(report.get("problems")):
        tell(console, f"{problem.get('bucket')}/{problem.get('key')}: {problem.get('problem')}")
    ending = f": {report['failure']}" if report.get("failure") else ""
    tell(
        console,
        f"{report.get('state')}{ending}; {_number(report, 'checked_objects')} objects, "
        f"{size_text(report.get('checked_bytes'))} verified, {_number(report, 'problem_count')} wrong",
    )


def _number(report: Mapping[str, object], name: str) -> int:
    value = report.get(name)
    return value if isinstance(value, int) else 0
