"""The store as engines use it, beside what they have: LMCache's harness, reads without a copy, batches, the client alone.

    lmcache     `lmcache bench l2` through kvobj's plug-in, a dictionary, Redis, LMCache's file adapters, and its S3 adapter
    zero-copy   a pinned chunk of 1 to 80 MiB: seen in place, copied, over HTTP; Redis and Mooncake Store beside
    batch       match-and-pin of 1,000 chunks and mget of the hits over HTTP, against a bare socket
    client      what the client adds to a GET into a caller's buffer, against a bare loop that sends the same request

Rounds are interleaved, medians compared. What is not installed is named with how to install it, and its line says so. Exits 1
where a target is missed or could not be judged. Everything that runs is started and stopped here, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import engines_client
import engines_lmcache
import engines_zero_copy
import mooncake_peer
from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings, own_server, settle
from command_line import Parser, one_or_more, output_file, run_tool
from engines_client import Batches, Gets, Ways
from engines_figures import Figures, Line, installed_versions, is_passed, markdown_table
from engines_lmcache import PLUGIN_BUCKET, S3_BUCKET, S3_HOST, Harness
from engines_plots import plot_lmcache, plot_reads
from engines_zero_copy import Reads
from limits import BARE_KINDS, bare_server, redis_server
from load_client import hardware
from mooncake_peer import mooncake_store
from rich.console import Console
from rich.table import Table

from kvobj.errors import KvobjError

PARTS: Final = ("lmcache", "zero-copy", "batch", "client")
_GIB: Final = 1024 * MIB
_STOPPED: Final = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    shapes: tuple[engines_lmcache.Shape, ...]
    reads: tuple[int, ...]
    read_count: int
    read_seconds: float
    chunks: int
    chunk_bytes: int
    batch_repeats: int
    gets: dict[int, int]
    dram_bytes: int


FULL: Final = Sizes(
    shapes=engines_lmcache.SHAPES,
    reads=engines_zero_copy.SIZES,
    read_count=2000,
    read_seconds=3.0,
    chunks=engines_client.CHUNKS,
    chunk_bytes=engines_client.CHUNK_BYTES,
    batch_repeats=3,
    gets=engines_client.GETS,
    dram_bytes=6 * _GIB,
)
QUICK: Final = Sizes(
    shapes=engines_lmcache.QUICK_SHAPES,
    reads=engines_zero_copy.QUICK_SIZES,
    read_count=50,
    read_seconds=0.3,
    chunks=100,
    chunk_bytes=256 * 1024,
    batch_repeats=1,
    gets=engines_client.QUICK_GETS,
    dram_bytes=512 * MIB,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement of a round. `places`: the figures that have no value where it fails."""

    name: str
    run: Callable[[], None]
    places: tuple[str, ...]


class Bench:
    """The servers and peers that the chosen parts need, and the steps of a round."""

    def __init__(self, stack: ExitStack, directory: Path, sizes: Sizes, parts: Sequence[str]) -> None:
        self.figures = Figures()
        self.steps: list[Step] = []
        self._stack = stack
        self._directory = directory
        self._sizes = sizes
        self._redis_port = None
        if {"lmcache", "zero-copy"} & set(parts):
            self._redis_port = stack.enter_context(redis_server(directory / "redis"))
        self._server: ServerProcess = stack.enter_context(own_server(directory / "kvobj", _settings(sizes)))
        if "lmcache" in parts:
            self._add_lmcache()
        if {"zero-copy", "batch", "client"} & set(parts):
            ways = stack.enter_context(closing(Ways(self._server)))
            if "zero-copy" in parts:
                self._add_reads(ways)
            if "batch" in parts:
                self._add_batches(ways)
            if "client" in parts:
                gets = Gets(self._server, ways, self.figures, counts=sizes.gets)
                places = tuple(f"{engines_client.GET_PART} {size}" for size in sizes.gets)
                self.steps.append(Step("the client's own time", gets.measure, places))
        settle(self._server)

    def _add_lmcache(self) -> None:
        try:
            harness = Harness(self._server, self._redis_port, self._directory / "lmcache", self.figures)
        except RuntimeError as error:
            for shape in self._sizes.shapes:
                self.figures.miss(f"{engines_lmcache.PART} {shape.name}", str(error))
            return
        for shape in self._sizes.shapes:
            for name in engines_lmcache.SUBJECTS:
                place = f"{engines_lmcache.PART} {shape.name}/{name}"
                run = partial(harness.run, shape, name)
                self.steps.append(Step(f"lmcache bench l2, {shape.name}, {name}", run, (place,)))
            bare = engines_lmcache.BARE_S3
            place = f"{engines_lmcache.PART} {shape.name}/{bare}"
            step = Step(f"lmcache bench l2, {shape.name}, {bare}", partial(harness.run_bare, shape), (place,))
            self.steps.append(step)

    def _add_reads(self, ways: Ways) -> None:
        sizes = self._sizes
        mooncake = None
        mooncake_absence = mooncake_peer.absence()
        if mooncake_absence is None:
            mooncake = self._stack.enter_context(mooncake_store(self._directory / "mooncake", sizes.reads))
        else:
            for size in sizes.reads:
                for subject in (engines_zero_copy.MOONCAKE, engines_zero_copy.MOONCAKE_OWN):
                    self.figures.miss(f"{engines_zero_copy.PART} {size}/{subject}", mooncake_absence)
        reads = Reads(
            ways,
            self._redis_port,
            mooncake,
            self.figures,
            sizes=sizes.reads,
            count=sizes.read_count,
            seconds=sizes.read_seconds,
        )
        self._stack.enter_context(closing(reads))
        for size in sizes.reads:
            place = f"{engines_zero_copy.PART} {size}"
            self.steps.append(Step(f"one chunk of {size // MIB} MiB each way", partial(reads.measure, size), (place,)))
        place = engines_zero_copy.TOGETHER_PLACE
        self.steps.append(Step(f"views of {engines_zero_copy.TOGETHER} together", reads.measure_together, (place,)))

    def _add_batches(self, ways: Ways) -> None:
        ports = {kind: self._stack.enter_context(bare_server(kind)) for kind in BARE_KINDS}
        sizes = self._sizes
        batches = Batches(self._server, ways, ports, self.figures, chunks=sizes.chunks, size=sizes.chunk_bytes)
        step = Step(f"match, pin and mget of {sizes.chunks} chunks", batches.measure, (engines_client.BATCH_PART,))
        self.steps += [step] * sizes.batch_repeats

    def take(self, step: Step) -> None:
        """Run a step; what it fails with stands in its lines, and the others are measured."""
        try:
            step.run()
        except (OSError, RuntimeError, KvobjError) as error:
            for place in step.places:
                self.figures.miss(place, f"{type(error).__name__}: {error}")

    def lines(self, parts: Sequence[str]) -> list[Line]:
        """What the chosen parts came to."""
        lines: list[Line] = []
        if "lmcache" in parts:
            lines += engines_lmcache.lmcache_lines(self.figures, self._sizes.shapes)
        if "zero-copy" in parts:
            lines += engines_zero_copy.zero_copy_lines(self.figures, self._sizes.reads)
        if "batch" in parts:
            lines += engines_client.batch_lines(self.figures)
        if "client" in parts:
            lines += engines_client.get_lines(self.figures, list(self._sizes.gets))
        return lines


def _settings(sizes: Sizes) -> ServerSettings:
    names = (engines_client.BUCKET, PLUGIN_BUCKET, S3_BUCKET)
    return ServerSettings(
        dram_bytes=sizes.dram_bytes,
        nvme_bytes=max(2 * sizes.dram_bytes, 2 * _GIB),
        buckets=tuple(BucketSetting(name, "kv", "memory") for name in names),
        sections={"server.hosts": {f'"{S3_HOST}"': f'"{S3_BUCKET}"'}},
    )


def show(title: str, lines: Sequence[Line]) -> None:
    """The lines as one table."""
    table = Table("what", "value", "beside", "ratio", "target", "note", title=title)
    part = ""
    for line in lines:
        if line.part != part:
            table.add_section()
        part = line.part
        value = "-" if line.value is None else f"{line.value:,.2f} {line.unit}"
        beside = "" if not line.limit_name else f"{line.limit_name} -"
        if line.limit is not None:
            beside = f"{line.limit_name} {line.limit:,.2f}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.name, value, beside, ratio, line.verdict, line.note)
    Console(width=190).print(table)


def versions() -> dict[str, str]:
    """What stood beside kvobj."""
    found = installed_versions(engines_lmcache.ENVIRONMENT, ("lmcache", "torch"))
    found |= installed_versions(mooncake_peer.ENVIRONMENT, ("mooncake_transfer_engine_non_cuda",))
    redis = shutil.which("redis-server")
    if redis is not None:
        words = subprocess.run([redis, "--version"], stdout=subprocess.PIPE, check=True).stdout.decode().split()
        found["redis"] = next((word[2:] for word in words if word.startswith("v=")), "unknown")
    return found


def record(title: str, arguments: argparse.Namespace, bench: Bench, lines: Sequence[Line]) -> dict[str, object]:
    """Everything, for a file."""
    return {
        "title": title,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "lines": [asdict(line) | {"ratio": line.ratio, "is_met": line.is_met} for line in lines],
        "figures": bench.figures.values,
        "reasons": bench.figures.reasons,
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and one round: shows that it runs, not how fast"
    )
    parser.add_argument("--directory", type=Path, help="where all data goes; default: a temporary directory")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="the table as docs/engines.md has it")
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="writes engines_lmcache.svg, engines_reads.svg")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    return arguments


def main() -> int:
    """Start everything, measure, report."""
    arguments = parse_arguments()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))  # what was started is stopped on the way out
    sizes = QUICK if arguments.quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir=arguments.directory) as directory,
        ExitStack() as stack,
    ):
        bench = Bench(stack, Path(directory), sizes, arguments.only)
        total = arguments.rounds * len(bench.steps)
        for number in range(total):
            step = bench.steps[number % len(bench.steps)]
            console.print(f"{number + 1} of {total}, round {number // len(bench.steps) + 1}: {step.name}")
            bench.take(step)
        lines = bench.lines(arguments.only)
    title = f"kvobj as engines use it, medians of {arguments.rounds} interleaved rounds"
    show(title, lines)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record(title, arguments, bench, lines), indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown_table(lines))
    if arguments.plots is not None:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        plot_lmcache(arguments.plots / "engines_lmcache.svg", bench.figures, sizes.shapes)
        plot_reads(arguments.plots / "engines_reads.svg", bench.figures, sizes.reads)
    return 0 if is_passed(lines) else 1


if __name__ == "__main__":
    run_tool(main)
