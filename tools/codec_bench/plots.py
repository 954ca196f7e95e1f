"""Plots as SVG, readable on white and on black: rate against attention error, and lossless ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec_bench.rows import Row

_INK: Final = "#808080"
_OURS: Final = "#1f8fe0"
_OTHERS: Final = ("#d65f5f", "#4fa34f", "#c98a1b", "#9a7bd0", "#2aa6a6", "#c86fb0", "#8c8c3c")
_NO_METADATA: Final = {"Date": None, "Creator": None}
"""No time and no version in the files: the same figures give the same plot."""
_FAMILIES: Final = ("KIVI", "TurboQuant", "CacheGen", "NVFP4", "q4_0", "fp8", "int8")
_VARIANTS: Final = ("centred", "LMCache")


def plot_rate(path: Path, rows: Sequence[Row], windows: dict[str, int]) -> None:
    """b/v against attention error, both of the lossy codecs; a panel for each set; lower and further left is better."""
    plots = _library()
    figure, panels = plots.subplots(1, len(windows), figsize=(6.4 * len(windows), 5), squeeze=False)
    for (data, tokens), axes in zip(windows.items(), panels[0], strict=True):
        found = [row for row in rows if (row.data, row.tokens) == (data, tokens) and not row.is_lossless]
        ours = [row for row in found if row.group == "ours"]
        for family, marker in (("eq", "o"), ("ek", "D"), ("h4", "s"), ("f8", "X")):
            _line(axes, [row for row in ours if row.codec.startswith(family)], _OURS, f"{family} (ours)", marker)
        for family, colour in zip(_FAMILIES, _OTHERS, strict=True):
            members = [row for row in found if row.group == "other" and row.codec.startswith(family)]
            for variant in _VARIANTS:
                own = [row for row in members if row.codec.endswith(variant)]
                _line(axes, own, colour, f"{family} {variant}", "v")
                members = [row for row in members if row not in own]
            _line(axes, members, colour, family, "^")
        axes.set(yscale="log", xlabel="bits a value", ylabel="attention error", title=f"{data}, {tokens} tokens")
        axes.grid(visible=True, which="both", color=_INK, alpha=0.25, linewidth=0.5)
        _inked(axes)
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_INK)
    _save(plots, figure, path)


def plot_lossless(path: Path, rows: Sequence[Row], windows: dict[str, int]) -> None:
    """Ratios of the lossless codecs, a bar for each set."""
    plots = _library()
    figure, axes = plots.subplots(figsize=(9, 4))
    names = sorted(
        {row.codec for row in rows if row.is_lossless and row.data in windows and row.group != "model"},
        key=lambda name: max(row.ratio for row in rows if row.codec == name and row.data in windows),
    )
    for number, ((data, tokens), colour) in enumerate(zip(windows.items(), (_OURS, "#c98a1b"), strict=False)):
        ratios = {row.codec: row.ratio for row in rows if (row.data, row.tokens) == (data, tokens) and row.is_lossless}
        places = [place + 0.36 * number for place, name in enumerate(names) if name in ratios]
        bars = axes.barh(places, [ratios[name] for name in names if name in ratios], 0.34, color=colour, label=data)
        axes.bar_label(bars, fmt="%.2f", color=_INK, padding=3)
    axes.set_yticks([place + 0.18 for place in range(len(names))], names)
    axes.set(xlim=(1.0, None), xlabel="plain bytes over stored bytes")
    axes.legend(frameon=False, labelcolor=_INK, loc="lower right")
    _inked(axes)
    _save(plots, figure, path)


def _line(axes: Any, rows: Sequence[Row], colour: str, label: str, marker: str) -> None:  # noqa: ANN401 - no types
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row.bits)
    axes.plot([row.bits for row in rows], [row.attention for row in rows], marker=marker, color=colour, label=label)
    for row in rows if colour == _OURS else ():
        axes.annotate(
            row.codec, (row.bits, row.attention), xytext=(4, 4), textcoords="offset points", fontsize=6, color=colour
        )


def _inked(axes: Any) -> None:  # noqa: ANN401 - matplotlib has no types
    axes.tick_params(colors=_INK, which="both")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_color(_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)


def _library() -> Any:  # noqa: ANN401 - matplotlib has no types
    import matplotlib as mpl  # noqa: PLC0415 - only where plots are asked for

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvobj"
    import matplotlib.pyplot as plt  # noqa: PLC0415

    return plt


def _save(plots: Any, figure: Any, path: Path) -> None:  # noqa: ANN401 - matplotlib has no types
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata=_NO_METADATA, transparent=True, bbox_inches="tight")
    plots.close(figure)
