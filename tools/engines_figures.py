"""What the engines' benchmark measures and how it is judged: figures by name, their medians, lines with targets. Pure.

A figure is noted once or more a round under a name that says all of it (`lmcache 32 x 1 MiB/redis/load`). What could not be
measured has a reason in its place, which the line that needs it shows: no line is ever left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

GB: Final = 1e9
_KIB: Final = 1024
_MILLI: Final = 1e-3


@dataclass(slots=True)
class Figures:
    """All that was measured so far. For one thread."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        """Remember a value of one round."""
        self.values[name].append(value)

    def miss(self, name: str, reason: str) -> None:
        """Remember why there is no value; `name` stands for all figures below it, too (`redis` for `redis/load`)."""
        self.reasons.setdefault(name, reason)

    def median(self, name: str) -> float | None:
        """The median over the rounds, None where nothing was measured."""
        values = self.values.get(name)
        return median(values) if values else None

    def reason(self, name: str) -> str | None:
        """Why a figure has no value, or was not measured in some round: its own reason, or that of what it stands below."""
        parts = name.split("/")
        names = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.reasons[each] for each in names if each in self.reasons), None)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result: a median, beside a limit's where it has one, and what either should be.

    `least_ratio` is of `value` to `limit`; `most` and `least` are of the value itself. `note` says why a value is missing.
    """

    part: str
    name: str
    unit: str
    value: float | None
    limit: float | None = None
    limit_name: str = ""
    least_ratio: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The value in terms of its limit, None where one of the two is missing."""
        if self.value is None or not self.limit:
            return None
        return self.value / self.limit

    @property
    def has_target(self) -> bool:
        """Whether it is judged, and not only shown."""
        return self.least_ratio is not None or self.most is not None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None where there is none, or where it could not be judged."""
        if self.least_ratio is not None:
            return None if self.ratio is None else self.ratio >= self.least_ratio
        if self.most is not None:
            return None if self.value is None else self.value <= self.most
        return None

    @property
    def verdict(self) -> str:
        """The target and what became of it, for people; empty where there is none."""
        if not self.has_target:
            return ""
        target = f"≥ {self.least_ratio:g}" if self.least_ratio is not None else f"≤ {self.most:g} {self.unit}"
        came = {True: "met", False: "MISSED", None: "not judged"}[self.is_met]
        return f"{target}: {came}"


def line_of(
    figures: Figures,
    part: str,
    name: str,
    figure: str,
    unit: str,
    *,
    scale: float = 1.0,
    limit: str | None = None,
    limit_name: str = "",
    least_ratio: float | None = None,
    most: float | None = None,
    note: str = "",
) -> Line:
    """A line from the medians of the named figures, both divided by `scale`; the reason in the note where one is missing."""
    value = figures.median(figure)
    bound = None if limit is None else figures.median(limit)
    notes = [note, _missing(figures, figure, value)]
    if limit is not None:
        missing = _missing(figures, limit, bound)
        notes.append(missing and f"{limit_name}: {missing}")
    return Line(
        part=part,
        name=name,
        unit=unit,
        value=None if value is None else value / scale,
        limit=None if bound is None else bound / scale,
        limit_name=limit_name,
        least_ratio=least_ratio,
        most=most,
        note="; ".join(each for each in notes if each),
    )


def _missing(figures: Figures, name: str, value: float | None) -> str:
    reason = figures.reason(name)
    if value is None:
        return reason or "not measured"
    return f"a round failed: {reason}" if reason else ""


def markdown_table(lines: Sequence[Line]) -> str:
    """The lines as a document has them."""
    rows = ["| what | value | beside | ratio | target | note |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines:
        value = "-" if line.value is None else f"{line.value:,.2f} {line.unit}"
        limit = "-" if line.limit is None else f"{line.limit:,.2f} {line.unit}"
        beside = f"{line.limit_name} {limit}" if line.limit_name else ""
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        cells = (line.name, value, beside, ratio, line.verdict, line.note)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def is_passed(lines: Sequence[Line]) -> bool:
    """Whether every target is met: one that could not be judged is none that is met."""
    return all(line.is_met for line in lines if line.has_target)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share (0 … 1) of the values lies, by nearest rank. ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[min(len(ordered), max(1, rank)) - 1]


def installed_versions(environment: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of these packages (names as in their `dist-info` folders) in a virtual environment; those that are not there are
    left out."""
    found: dict[str, str] = {}
    for folder in sorted(environment.glob("lib/python3*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if name in packages:
            found[name] = version
    return found


@dataclass(frozen=True, slots=True)
class HarnessFigures:
    """What one run of `lmcache bench l2` came to. Bytes a second at the median of its rounds; look-ups in seconds a batch.

    None: the operation was not run.
    """

    store: float | None
    load: float | None
    lookup: float | None


def harness_figures(report: Mapping[str, Any]) -> HarnessFigures:
    """The JSON report of `lmcache bench l2` (0.5.6). ValueError where an operation failed or timed out for any key: what it then
    says of its speed is of no use. Its `MB` are MiB, and its medians those of the rounds it counts as successful."""
    found: dict[str, float] = {}
    metrics = report.get("metrics", {})
    size_bytes = int(metrics.get("config", {}).get("data_size_kb", 0)) * _KIB
    for entry in metrics.values():
        operation = entry.get("operation")
        if operation is None:
            continue
        keys, came = int(entry["total_keys"]), int(entry["total_success"])
        if entry["rounds_timed_out"] or came != keys or not keys:
            raise ValueError(f"{operation}: {came} of {keys} keys, {entry['rounds_timed_out']} rounds timed out")
        seconds = float(entry["duration_p50_ms"]) * _MILLI
        if operation == "Lookup":
            found[operation] = seconds
        else:
            # Durations are rounded to 10 µs: nothing is faster than half of that.
            found[operation] = int(entry["keys_per_round"]) * size_bytes / max(seconds, 5e-6)
    if not found:
        raise ValueError("the report has no operation")
    return HarnessFigures(found.get("Store"), found.get("Load"), found.get("Lookup"))
