"""Compares eviction policies on traces: token hit ratio by capacity, against LRU and the best that is possible.

Replays whole requests through the classes that the store uses (`policy_replay`); no server, no bytes. Capacity is in percent of
the trace's different blocks; two tiers are written DRAM+NVME. Every cell is a run of its own, on `--workers` processes.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from command_line import Parser, above_zero, existing_file, one_or_more, output_file, run_tool
from policy_replay import (
    Outcome,
    Trace,
    best_hit_percent,
    load_trace,
    make_policy,
    replay_one_tier,
    replay_two_tiers,
    uses_of,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ONE_TIER: Final = ("lru", "gipe", "gipe+out", "best")
TWO_TIERS: Final = ("lru", "gipe")
DEFAULT_PERCENTS: Final = {"mooncake_conversation": "1,5,10,25,50", "agentcode": "0.5,1,2,5,10"}
DEFAULT_TIERS: Final = "1+5,2+10,5+25"
_WIDTH: Final = 120
_LABELS: Final = {
    "best": "optimum, knows the future",
    "lru": "LRU, leaves first",
    "gipe+out": "gipe, told output lengths",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a policy at a capacity ("5", or "1+5" for two tiers)."""

    trace: Path
    policy: str
    capacity: str
    requests: int | None = None


@cache
def _trace(path: Path, requests: int | None) -> Trace:
    return load_trace(path, limit=requests)


def run(cell: Cell) -> Outcome:
    """Replay one cell, in whatever process."""
    trace = _trace(cell.trace, cell.requests)
    parts = [trace.capacity(float(part)) for part in cell.capacity.split("+")]
    if cell.policy == "best":
        return Outcome(best_hit_percent(trace, parts[0], uses=uses_of(trace)))
    policy = make_policy(cell.policy.removesuffix("+out"), *parts)
    if len(parts) > 1:
        return replay_two_tiers(trace, policy, (parts[0], parts[1]))
    return replay_one_tier(trace, policy, use_hints=cell.policy.endswith("+out"))


def compare(cells: list[Cell], *, workers: int, console: Console, quiet: bool = False) -> dict[Cell, Outcome]:
    """Run all cells, several at once, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    outcomes: dict[Cell, Outcome] = {}
    with Progress(*columns, console=console, disable=quiet) as progress, ProcessPoolExecutor(workers) as pool:
        task = progress.add_task("simulate", total=len(cells))
        waiting: dict[Future[Outcome], Cell] = {pool.submit(run, cell): cell for cell in cells}
        for done in as_completed(waiting):
            outcomes[waiting[done]] = done.result()
            progress.advance(task)
    return outcomes


def cells_of(
    trace: Path, percents: str | None, tiers: str | None, requests: int | None, policies: tuple[str, ...]
) -> list[Cell]:
    """Every policy at every capacity; the slow ones first, so that they do not end last."""
    name = trace.name.removesuffix(".zst").removesuffix(".jsonl")
    one = (percents or DEFAULT_PERCENTS.get(name, "1,5,10,25")).split(",")
    two = [pair for pair in (DEFAULT_TIERS if tiers is None else tiers).split(",") if pair]
    cells = [Cell(trace, policy, pair, requests) for policy in TWO_TIERS if policy in policies for pair in two]
    return cells + [Cell(trace, policy, percent, requests) for policy in policies for percent in one]


def tables(outcomes: dict[Cell, Outcome], trace: Path) -> list[Table]:
    """What was found for one trace: one tier, then two."""
    name = trace.name.removesuffix(".zst").removesuffix(".jsonl")
    mine = {(cell.policy, cell.capacity): outcome for cell, outcome in outcomes.items() if cell.trace == trace}
    percents = sorted({float(capacity) for _, capacity in mine if "+" not in capacity})
    labels = {f"{percent:g}" for percent in percents}
    by_cell = {(policy, f"{float(c):g}"): o.hit_percent for (policy, c), o in mine.items() if "+" not in c}
    one = Table(
        "policy", *(f"{percent:g} %" for percent in percents), title=f"{name}: token hit ratio in % (of the optimum)"
    )
    for policy in ONE_TIER:
        row = []
        if not any(kind == policy for kind, _ in by_cell):
            continue
        for label in sorted(labels, key=float):
            hit, best = by_cell[policy, label], by_cell["best", label]
            row.append(f"{hit:.2f}" if policy == "best" or not best else f"{hit:.2f} ({100 * hit / best:.0f})")
        one.add_row(_LABELS.get(policy, policy), *row)
    pairs = sorted({capacity for _, capacity in mine if "+" in capacity}, key=lambda pair: float(pair.split("+")[0]))
    two = Table("dram + nvme", "policy", "total", "in dram", "writes a block", title=f"{name}: two tiers")
    for pair in pairs:
        for policy in TWO_TIERS:
            found = mine.get((policy, pair))
            if found is None:
                continue
            two.add_row(
                f"{pair} %",
                _LABELS.get(policy, policy),
                f"{found.hit_percent:.2f}",
                f"{found.dram_percent:.2f}",
                f"{found.nvme_writes:.2f}",
            )
    return [one, two] if pairs else [one]


def write_plot(path: Path, outcomes: dict[Cell, Outcome]) -> None:
    """Hit ratio over capacity, a panel a trace. Needs matplotlib (extra `bench`)."""
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvobj"  # the same picture is the same file
    from matplotlib import pyplot as plt  # noqa: PLC0415

    traces = sorted({cell.trace for cell in outcomes}, key=lambda trace: trace.name, reverse=True)
    figure, axes = plt.subplots(1, len(traces), figsize=(5.2 * len(traces), 4), squeeze=False)
    styles = {"best": ("0.35", "--"), "gipe": ("tab:blue", "-"), "lru": ("tab:orange", "-")}
    for axis, trace in zip(axes[0], traces, strict=True):
        for policy, (colour, line) in styles.items():
            points = sorted(
                (float(cell.capacity), outcome.hit_percent)
                for cell, outcome in outcomes.items()
                if cell.trace == trace and cell.policy == policy and "+" not in cell.capacity
            )
            if not points:
                continue
            axis.plot(*zip(*points, strict=True), line, color=colour, marker="o", label=_LABELS.get(policy, policy))
        axis.set(
            title=trace.name.removesuffix(".zst").removesuffix(".jsonl"),
            xscale="log",
            xlabel="capacity, % of the trace's blocks",
            ylabel="token hit ratio, %",
            ylim=(0, None),
        )
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def report(
    traces: list[Path],
    *,
    policies: tuple[str, ...] = ONE_TIER,
    percents: str | None = None,
    tiers: str | None = None,
    requests: int | None = None,
    workers: int = 2,
    plot: Path | None = None,
    results: Path | None = None,
    quiet: bool = False,
) -> dict[Cell, Outcome]:
    """Run, print the tables, write the plot and the results as JSON."""
    cells = [cell for trace in traces for cell in cells_of(trace, percents, tiers, requests, policies)]
    outcomes = compare(cells, workers=workers, console=Console(stderr=True), quiet=quiet)
    for trace in traces:
        for table in tables(outcomes, trace):
            Console(width=_WIDTH).print(table)
    if results is not None:
        rows = [
            {"trace": c.trace.name, "policy": c.policy, "capacity": c.capacity} | asdict(o) for c, o in outcomes.items()
        ]
        results.write_text(json.dumps(rows, indent=2) + "\n")
    if plot is not None:
        write_plot(plot, outcomes)
    return outcomes


def percents_of_one(text: str) -> str:
    """Capacities as `cells_of` takes them."""
    return _percents(text, tiers=1)


def percents_of_two(text: str) -> str:
    """Capacities of two tiers as `cells_of` takes them, or none."""
    return text and _percents(text, tiers=2)


def _percents(text: str, *, tiers: int) -> str:
    for capacity in text.split(","):
        parts = capacity.split("+")
        if len(parts) != tiers:
            raise argparse.ArgumentTypeError(f"{capacity!r} is not {'DRAM+NVME' if tiers > 1 else 'one number'}")
        for part in parts:
            above_zero(part)
    return text


def main() -> int:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--trace", type=existing_file, action="append", required=True, help="a trace file; may be given again"
    )
    parser.add_argument("--requests", type=one_or_more, help="only the first N requests")
    parser.add_argument("--percents", type=percents_of_one, help="capacities of one tier, such as 1,5,10")
    parser.add_argument(
        "--tiers", type=percents_of_two, help=f"capacities of two, default {DEFAULT_TIERS}; empty: none"
    )
    parser.add_argument("--workers", type=one_or_more, default=2, help="processes")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    arguments = parser.parse_args()
    report(
        arguments.trace,
        percents=arguments.percents,
        tiers=arguments.tiers,
        requests=arguments.requests,
        workers=arguments.workers,
        plot=arguments.plot,
        results=arguments.json,
        quiet=arguments.quiet,
    )
    return 0


if __name__ == "__main__":
    run_tool(main)
