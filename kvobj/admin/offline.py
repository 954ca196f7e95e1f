"""`fsck` and `rebuild`: a stopped store's data, through `kvobj.app.offline` and its kin, imported only here and only then.

The store is locked while either runs, so a running server is refused. Results are dataclasses of the server's side; here
they are shown by field name and never interpreted, but for `problems`, whose number decides the exit.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvobj.admin.output import Output, tell
from kvobj.admin.render import print_values
from kvobj.config import Settings, load_settings
from kvobj.errors import ConfigurationError


def fsck(output: Output, *, config: Path | None, data: Path | None, environment: Mapping[str, str]) -> int:
    """Check a stopped store and change nothing. Returns 0, or 1 when something is wrong."""
    settings = _settings_of_existing(config, data, environment)
    findings, report = _findings(output)
    notes, notice = _notes(output)
    module = importlib.import_module("kvobj.app.offline")
    result = _fields_of(module.fsck(settings, report, is_configured=config is not None, notice=notice))
    output.show({**result, "findings": findings, "notes": notes}, lambda console: print_values(console, "fsck", result))
    return 1 if _is_wrong(result) else 0


def rebuild_remote(
    output: Output,
    *,
    config: Path | None,
    data: Path | None,
    environment: Mapping[str, str],
    replace: bool,
    keep_missing: bool,
    without_secrets: bool,
    accept_unsigned: bool,
    accept_gaps: bool,
) -> int:
    """Make a store again from its remote tier alone. Returns 0, or 1 when something was lost or cannot be used."""
    settings = load_settings(config, environment=environment, data=None if data is None else str(data))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    findings, report = _findings(output)
    with output.progress(*columns) as bars:
        bar = bars.add_task("rebuild", total=None, rate="")

        def progress(done: int, total: int, step: str) -> None:
            speed = bars.tasks[0].speed
            rate = "" if speed is None else f"{speed:,.0f}/s"
            bars.update(bar, completed=done, total=total, description=step, rate=rate)

        module = importlib.import_module("kvobj.app.offline_remote")
        result = _fields_of(
            module.rebuild_remote(
                settings,
                progress,
                report,
                replace=replace,
                keep_missing=keep_missing,
                without_secrets=without_secrets,
                accept_unsigned=accept_unsigned,
                accept_gaps=accept_gaps,
            )
        )
    output.show({**result, "findings": findings}, lambda console: print_values(console, "rebuild", result))
    if result.get("made_credentials") and not output.is_json:
        tell(output.console, "root's keys are new: kvobj-admin credentials")
    return 1 if _is_wrong(result) else 0


def fsck_remote(
    output: Output, *, config: Path | None, data: Path | None, environment: Mapping[str, str], read: bool
) -> int:
    """Compare a stopped store with its remote tier and change nothing. Returns 0, or 1 when something is lost."""
    settings = _settings_of_existing(config, data, environment)
    findings, report = _findings(output)
    module = importlib.import_module("kvobj.app.offline_remote_check")
    result = _fields_of(module.fsck_remote(settings, report, read=read))
    output.show({**result, "findings": findings}, lambda console: print_values(console, "fsck", result))
    return 1 if _is_wrong(result) else 0


def _findings(output: Output) -> tuple[list[dict[str, object]], Callable[[str, dict[str, object]], None]]:
    """A list, and what adds to it and tells people at once."""
    findings: list[dict[str, object]] = []

    def report(kind: str, finding: dict[str, object]) -> None:
        findings.append({"kind": kind, **finding})
        if not output.is_json:
            text = " ".join(f"{name}={value}" for name, value in finding.items())
            tell(output.console, f"{kind}: {text}")

    return findings, report


def _notes(output: Output) -> tuple[list[str], Callable[[str], None]]:
    """A list, and what adds to it and tells people at once."""
    notes: list[str] = []

    def notice(text: str) -> None:
        notes.append(text)
        if not output.is_json:
            tell(output.console, text)

    return notes, notice


def rebuild(
    output: Output,
    *,
    config: Path | None,
    data: Path | None,
    environment: Mapping[str, str],
    keep_missing: bool,
) -> int:
    """Make the catalog and directories of a stopped store again from its home tier. Returns 0, or 1 when something was lost."""
    settings = _settings_of_existing(config, data, environment)
    notes, notice = _notes(output)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with output.progress(*columns) as bars:
        bar = bars.add_task("rebuild", total=None)

        def progress(done: int, total: int, step: str) -> None:
            bars.update(bar, completed=done, total=total, description=step)

        module = importlib.import_module("kvobj.app.offline")
        result = _fields_of(
            module.rebuild(
                settings, progress, is_configured=config is not None, keep_missing=keep_missing, notice=notice
            )
        )
    output.show({**result, "notes": notes}, lambda console: print_values(console, "rebuild", result))
    return 1 if _is_wrong(result) else 0


def _settings_of_existing(config: Path | None, data: Path | None, environment: Mapping[str, str]) -> Settings:
    # What --data names wins; without it the configuration says, and without one the default does.
    settings = load_settings(config, environment=environment, data=None if data is None else str(data))
    if not (settings.server.data / "FORMAT").is_file():
        raise ConfigurationError([f"{settings.server.data}: is no kvobj data directory"])
    return settings


def _fields_of(result: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        return {"result": str(result)}
    # `problems` may be a sum that the dataclass computes rather than a field of it.
    return {**dataclasses.asdict(result), "problems": getattr(result, "problems", 0)}


def _is_wrong(result: Mapping[str, object]) -> bool:
    problems = result.get("problems", 0)
    return bool(problems)
