"""Figures that are judged by a ratio with a goal on either side, as a table, JSON, Markdown and a plot.

A figure's ratio is the median of the rounds' own ratios, each of two medians taken moments apart; its spread is the least and the
greatest of them. What has no second value beside it (a count) is judged by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from load_client import hardware
from rich.console import Console
from rich.table import Table

_NO_METADATA = {"Date": None, "Creator": None}


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound: `at_most` or at least."""

    bound: float
    at_most: bool = True

    def is_met(self, value: float) -> bool:
        """Whether the value keeps within it."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: kvobj's value, what it is measured beside (None: nothing), and what is judged: their ratio, or the value itself."""

    name: str
    value: float
    unit: str
    beside: float | None = None
    beside_name: str = ""
    judged: float = 0.0
    least: float | None = None
    greatest: float | None = None
    goal: Goal | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        """True where there is no goal."""
        return self.goal is None or self.goal.is_met(self.judged)


def compared(
    name: str,
    values: Sequence[float],
    beside: Sequence[float],
    beside_name: str,
    unit: str,
    *,
    goal: Goal | None = None,
    note: str = "",
) -> Figure:
    """A figure from one value a round and what was measured beside it in the same round."""
    ratios = [value / other for value, other in zip(values, beside, strict=True)]
    return Figure(
        name,
        median(values),
        unit,
        median(beside),
        beside_name,
        median(ratios),
        min(ratios),
        max(ratios),
        goal,
        note,
    )


def shown(name: str, values: Sequence[float], unit: str, *, goal: Goal | None = None, note: str = "") -> Figure:
    """A figure with nothing beside it: the median of the rounds."""
    middle = median(values)
    return Figure(name, middle, unit, judged=middle, least=min(values), greatest=max(values), goal=goal, note=note)


def _cells(figure: Figure) -> tuple[str, ...]:
    beside = "" if figure.beside is None else f"{figure.beside:,.2f} {figure.unit}"
    ratio = "" if figure.beside is None else f"{figure.judged:.2f}"
    spread = ""
    if figure.least is not None and figure.greatest is not None and figure.least != figure.greatest:
        spread = f"{figure.least:.2f} to {figure.greatest:.2f}"
    goal = "" if figure.goal is None else f"{figure.goal} {'met' if figure.is_met else 'MISSED'}"
    name = f"{figure.name} ({figure.note})" if figure.note else figure.name
    return name, f"{figure.value:,.2f} {figure.unit}".strip(), beside, figure.beside_name, ratio, spread, goal


_COLUMNS = ("what", "kvobj", "beside it", "", "ratio", "spread", "goal")


def markdown(title: str, figures: Sequence[Figure]) -> str:
    """The figures as a table for docs/benchmarks.md."""
    machine = hardware()
    told = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}"
    lines = [f"{title}. {told}.", "", f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    lines += [f"| {' | '.join(_cells(figure))} |" for figure in figures]
    return "\n".join([*lines, ""])


def report(
    title: str,
    figures: Sequence[Figure],
    *,
    json_path: Path | None,
    markdown_path: Path | None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Print the figures, write the files asked for; 0 if every goal is met, else 1."""
    table = Table(*_COLUMNS, title=title)
    for figure in figures:
        table.add_row(*_cells(figure))
    Console(width=170).print(table)
    if json_path is not None:
        rows = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
        record = {"title": title, "hardware": hardware(), "figures": rows, **(more or {})}
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    if markdown_path is not None:
        markdown_path.write_text(markdown(title, figures))
    return 0 if all(figure.is_met for figure in figures) else 1


def plot_shares(path: Path, title: str, times: Mapping[str, Sequence[float]], *, unit: str = "ms") -> None:
    """Of each named set of times in seconds, the share that took no longer, on a logarithmic axis. Needs matplotlib."""
    plots = plotting()
    figure, axes = plots.subplots(figsize=(8, 4.5))
    for name, values in times.items():
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step([value * 1000 for value in ordered], shares, where="post", label=name)
    axes.set(title=title, xlabel=unit, ylabel="share of reads", xscale="log", ylim=(0.5, 1.005))
    axes.axhline(0.99, color="grey", linewidth=0.6)
    axes.legend(loc="lower right")
    save(figure, path)


def plotting() -> Any:  # noqa: ANN401 - matplotlib ships no types
    """What draws plots, without a display."""
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def save(figure: Any, path: Path) -> None:  # noqa: ANN401 - matplotlib ships no types
    """Write it, the same file for the same figures."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata=_NO_METADATA if path.suffix == ".svg" else None)
    plotting().close(figure)
