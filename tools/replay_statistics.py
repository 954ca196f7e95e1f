"""What a replay counts, and how it is shown: a table for people, JSON for scripts, a plot of the run over time."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sample:
    """The running totals when a request had been replayed."""

    at_seconds: float
    tokens: int
    token_hits: int
    bytes_read: int
    bytes_written: int


def percentile(values: array[float], fraction: float) -> float:
    """The value that the fraction of all values does not exceed; 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


@dataclass(slots=True)
class ReplayStatistics:
    """Running totals of a replay. Written from one event loop."""

    requests: int = 0
    blocks: int = 0
    block_hits: int = 0
    tokens: int = 0
    token_hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    blocks_read: int = 0
    blocks_written: int = 0
    blocks_existed: int = 0
    read_past_a_miss: int = 0
    wrong_blocks: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    token_hits_by_tier: Counter[str] = field(default_factory=Counter)
    get_seconds: array[float] = field(default_factory=lambda: array("d"))
    put_seconds: array[float] = field(default_factory=lambda: array("d"))
    samples: list[Sample] = field(default_factory=list)

    def sample(self, at_seconds: float) -> None:
        """Remember the totals of this instant for the plot."""
        self.samples.append(
            Sample(at_seconds, self.tokens, self.token_hits, self.bytes_read, self.bytes_written),
        )

    def summary(self, elapsed_seconds: float) -> dict[str, Any]:
        """Totals, ratios and rates by name, units in the names."""
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "block_hit_ratio": self.block_hits / max(1, self.blocks),
            "token_hit_ratio": self.token_hits / max(1, self.tokens),
            "blocks_read": self.blocks_read,
            "blocks_written": self.blocks_written,
            "blocks_existed": self.blocks_existed,
            "read_past_a_miss": self.read_past_a_miss,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "elapsed_seconds": elapsed_seconds,
            "read_gb_per_second": self.bytes_read / elapsed_seconds / 1e9,
            "write_gb_per_second": self.bytes_written / elapsed_seconds / 1e9,
            "get_p50_ms": percentile(self.get_seconds, 0.50) * 1e3,
            "get_p99_ms": percentile(self.get_seconds, 0.99) * 1e3,
            "put_p50_ms": percentile(self.put_seconds, 0.50) * 1e3,
            "put_p99_ms": percentile(self.put_seconds, 0.99) * 1e3,
            "wrong_blocks": self.wrong_blocks,
            "errors": dict(self.errors),
            "reads_by_tier": dict(self.tiers),
            "token_hit_ratio_by_tier": {
                tier: hits / max(1, self.tokens) for tier, hits in sorted(self.token_hits_by_tier.items())
            },
        }


def summary_table(title: str, summary: dict[str, Any]) -> Table:
    """The summary for people."""
    table = Table("measure", "value", title=title)
    table.add_row("requests replayed", f"{summary['requests']:,}")
    table.add_row("blocks in their chains", f"{summary['blocks']:,}")
    table.add_row("token prefix hit ratio", f"{summary['token_hit_ratio']:.4f}")
    table.add_row("the same, nothing ever forgotten", f"{summary['infinite_cache_token_hit_ratio']:.4f}")
    table.add_row("block prefix hit ratio", f"{summary['block_hit_ratio']:.4f}")
    table.add_row("blocks read / written", f"{summary['blocks_read']:,} / {summary['blocks_written']:,}")
    table.add_row(
        "blocks found by PUT / read past a miss", f"{summary['blocks_existed']:,} / {summary['read_past_a_miss']:,}"
    )
    table.add_row("read", f"{summary['bytes_read'] / 1e9:.2f} GB at {summary['read_gb_per_second']:.3f} GB/s")
    table.add_row("written", f"{summary['bytes_written'] / 1e9:.2f} GB at {summary['write_gb_per_second']:.3f} GB/s")
    table.add_row("GET p50 / p99", f"{summary['get_p50_ms']:.2f} / {summary['get_p99_ms']:.2f} ms")
    table.add_row("PUT p50 / p99", f"{summary['put_p50_ms']:.2f} / {summary['put_p99_ms']:.2f} ms")
    tiers = ", ".join(f"{name} {count:,}" for name, count in sorted(summary["reads_by_tier"].items()))
    table.add_row("blocks read by tier", tiers or "none")
    table.add_row("wrong blocks", str(summary["wrong_blocks"]))
    table.add_row("errors", ", ".join(f"{name} {count}" for name, count in summary["errors"].items()) or "none")
    table.add_row("elapsed", f"{summary['elapsed_seconds']:.1f} s")
    return table


def write_plot(path: Path, title: str, samples: list[Sample]) -> None:
    """Hit ratio and throughput over the run, in windows of a fiftieth of it. Needs matplotlib (extra `bench`)."""
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    step = max(1, len(samples) // 50)
    marks = [samples[index] for index in range(0, len(samples), step)]
    times, ratios, read_rates, write_rates = [], [], [], []
    for before, after in pairwise(marks):
        seconds = max(1e-9, after.at_seconds - before.at_seconds)
        times.append(after.at_seconds)
        ratios.append((after.token_hits - before.token_hits) / max(1, after.tokens - before.tokens))
        read_rates.append((after.bytes_read - before.bytes_read) / seconds / 1e9)
        write_rates.append((after.bytes_written - before.bytes_written) / seconds / 1e9)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    upper.plot(times, ratios, label="in the window")
    upper.plot(
        [mark.at_seconds for mark in marks[1:]],
        [mark.token_hits / max(1, mark.tokens) for mark in marks[1:]],
        label="since the start",
    )
    upper.set(title=title, ylabel="token prefix hit ratio", ylim=(0, 1))
    upper.legend()
    lower.plot(times, read_rates, label="read")
    lower.plot(times, write_rates, label="written")
    lower.set(xlabel="seconds", ylabel="GB/s")
    lower.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
