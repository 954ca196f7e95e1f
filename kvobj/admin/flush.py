"""`flush`: asks the server to write down and upload what waits for it, in steps, and shows how much is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, TextColumn

from kvobj.admin.output import Output, tell, visible
from kvobj.admin.render import size_text
from kvobj.client import AdminClient

STEP_SECONDS: Final = 1.0
_SUMMED: Final = ("blobs", "size_bytes", "uploaded_objects", "uploaded_bytes")


def flush(
    client: AdminClient, output: Output, *, local: bool, timeout_seconds: float, monotonic: Callable[[], float]
) -> int:
    """Flush until nothing is left, or the time is over. Returns 0, or 1 where something is left. `local`: only what is in memory
    alone is written down, and nothing is uploaded."""
    until = monotonic() + timeout_seconds
    sums = dict.fromkeys(_SUMMED, 0)
    columns = (TextColumn("flush"), BarColumn(), TextColumn("{task.fields[left]}", markup=False))
    with output.progress(*columns) as progress:
        bar = progress.add_task("flush", total=None, left="")
        most = 0
        while True:
            step = client.flush(local=local, timeout_seconds=max(0.0, min(STEP_SECONDS, until - monotonic())))
            for name in _SUMMED:
                sums[name] += _number(step, name)
            left_bytes = _number(step, "left_in_memory_bytes") + _number(step, "left_to_upload_bytes")
            most = max(most, left_bytes)
            progress.update(bar, total=most or None, completed=most - left_bytes, left=visible(_left_text(step)))
            if step.get("is_done") or monotonic() >= until:
                break
    output.show({**step, **sums}, lambda console: _print(console, step, sums))
    if not step.get("is_done"):
        output.complain(f"not everything could be done in time: {_left_text(step)}")
        return 1
    return 0


def _print(console: Console, step: Mapping[str, object], sums: Mapping[str, int]) -> None:
    text = f"wrote down {sums['blobs']} blobs, {size_text(sums['size_bytes'])}"
    if sums["uploaded_objects"] or "left_to_upload" in step:
        text += f"; uploaded {sums['uploaded_objects']} objects, {size_text(sums['uploaded_bytes'])}"
    tell(console, text)


def _left_text(step: Mapping[str, object]) -> str:
    parts = [
        f"{_number(step, name)} {what} ({size_text(step.get(size))})" if size else f"{_number(step, name)} {what}"
        for name, what, size in (
            ("left_in_memory", "objects in memory", "left_in_memory_bytes"),
            ("left_to_upload", "objects to upload", "left_to_upload_bytes"),
            ("left_to_tell", "records to tell the remote", ""),
        )
        if _number(step, name)
    ]
    held_by = step.get("held_by")
    return ", ".join(parts) + (f"; {held_by}" if held_by and parts else "")


def _number(document: Mapping[str, object], name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) else 0
