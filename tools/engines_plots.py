"""Plots of the engines' benchmark, as SVG: LMCache's harness by adapter, and one chunk read in each way by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench_support import MIB
from engines_figures import GB, Figures
from engines_lmcache import PART as LMCACHE
from engines_lmcache import SUBJECTS as ADAPTERS
from engines_lmcache import Shape
from engines_zero_copy import PART as ZERO_COPY
from engines_zero_copy import SUBJECTS as WAYS
from engines_zero_copy import VIEW_TARGET_US

_COLOURS: Final = ("#1f77b4", "#7f7f7f", "#d62728", "#2ca02c", "#bcbd22", "#17becf")
_NO_METADATA: Final = {"Date": None, "Creator": None}
"""No time and no version in the files: the same figures give the same plot."""


def plot_lmcache(path: Path, figures: Figures, shapes: tuple[Shape, ...]) -> bool:
    """Stores and loads of each adapter, a panel for each shape; False, and no file, where nothing was measured."""
    measured = [name for shape in shapes for name in ADAPTERS if _speed(figures, shape, name, "load") is not None]
    if not measured:
        return False
    plots = _library()
    figure, panels = plots.subplots(len(shapes), 1, figsize=(9, 1 + 2.6 * len(shapes)), squeeze=False)
    for shape, axes in zip(shapes, panels[:, 0], strict=True):
        names = [name for name in ADAPTERS if _speed(figures, shape, name, "load") is not None]
        for offset, operation in ((-0.2, "store"), (0.2, "load")):
            speeds = [_speed(figures, shape, name, operation) or 0.0 for name in names]
            positions = [position + offset for position in range(len(names))]
            bars = axes.barh(positions, speeds, height=0.38, label=operation)
            axes.bar_label(bars, labels=[f"{speed:.2f}" for speed in speeds], padding=3, fontsize=8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set(title=f"lmcache bench l2, {shape.name}", xlabel="GB/s")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(plots, figure, path)
    return True


def plot_reads(path: Path, figures: Figures, sizes: tuple[int, ...]) -> bool:
    """Median and 99th percentile of a GET by size, both axes logarithmic; False, and no file, where nothing was measured."""
    measured = [way for way in WAYS if _points(figures, way, sizes, "p50")]
    if not measured:
        return False
    plots = _library()
    figure, axes = plots.subplots(figsize=(9, 5))
    for way, colour in zip(WAYS, _COLOURS, strict=True):
        if way not in measured:
            continue
        middle, tail = _points(figures, way, sizes, "p50"), _points(figures, way, sizes, "p99")
        axes.plot(*zip(*middle, strict=True), marker="o", color=colour, label=way)
        axes.plot(*zip(*tail, strict=True), linestyle=":", color=colour)
    axes.axhline(VIEW_TARGET_US, color="black", linewidth=0.8, linestyle="--", label="a view's target")
    axes.set(
        xscale="log", yscale="log", xlabel="chunk, MiB", ylabel="µs", title="GET of a pinned chunk: p50, p99 dotted"
    )
    axes.set_xticks([size / MIB for size in sizes], [f"{size // MIB}" for size in sizes])
    axes.minorticks_off()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(plots, figure, path)
    return True


def _speed(figures: Figures, shape: Shape, name: str, operation: str) -> float | None:
    value = figures.median(f"{LMCACHE} {shape.name}/{name}/{operation}")
    return None if value is None else value / GB


def _points(figures: Figures, way: str, sizes: tuple[int, ...], which: str) -> list[tuple[float, float]]:
    values = ((size, figures.median(f"{ZERO_COPY} {size}/{way}/{which}")) for size in sizes)
    return [(size / MIB, value * 1e6) for size, value in values if value is not None]


def _library() -> Any:  # noqa: ANN401 - ships no types
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvobj"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def _save(plots: Any, figure: Any, path: Path) -> None:  # noqa: ANN401 - the same
    figure.tight_layout()
    figure.savefig(path, metadata=_NO_METADATA)
    plots.close(figure)
