"""A node with a remote tier beside the remote itself: one radosgw in memory, nodes in front of it, the same client, alternating
rounds, ratios within the run.

- cold GETs of 32 MiB (neither in dram nor in nvme, by the node's own word) beside GETs of the same bytes from radosgw; when their
  first byte comes; what warm ones ask of the remote
- the 99th percentile of cold GETs of 1 to 4 MiB through a proxy: healthy, and with 2 % of the answers 2 s late, hedged and not
- how fast what was written behind drains beside the remote's own rate, and what warm GETs feel of it
- PUT of class `shared` from end to end beside a PUT to radosgw

Starts everything itself, on ports and in folders of its own. Exits 1 if a goal is missed, 2 where radosgw is not installed.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from command_line import Parser, one_or_more, output_file, run_tool, zero_or_more
from goals import Figure, plot_shares, report
from radosgw_server import require_radosgw
from remote_nodes import end_in_order, gateway
from rich.console import Console
from shared_reads import large_reads, tail
from shared_writes import shared_puts, write_behind

PARTS: Final = ("cold", "tail", "behind", "shared")
_STORE_BYTES: Final = 8 * 2**30


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cold-reads", type=zero_or_more, default=8, help="cold GETs of 32 MiB in one round")
    parser.add_argument(
        "--tail-reads", type=zero_or_more, default=200, help="cold GETs of 1 to 4 MiB in one round, each way"
    )
    parser.add_argument(
        "--objects", type=one_or_more, default=64, help="8 MiB objects that are written behind in one round"
    )
    parser.add_argument("--puts", type=zero_or_more, default=6, help="PUTs of class shared in one round, each size")
    parser.add_argument("--directory", type=Path, help="where the nodes' files go; default: a temporary folder")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG plots of the times there")
    return parser.parse_args()


def main() -> int:
    """Start radosgw, measure part by part, report."""
    arguments = parse_arguments()
    console = Console(stderr=True)
    require_radosgw()
    end_in_order()
    figures: list[Figure] = []
    times: dict[str, dict[str, list[float]]] = {}
    rounds = arguments.rounds
    with ExitStack() as stack:
        parent = arguments.directory
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir=parent)))
        remote = stack.enter_context(gateway(folder / "r", store_bytes=_STORE_BYTES))
        if "cold" in arguments.only:
            figures += large_reads(remote, folder, rounds=rounds, reads=arguments.cold_reads, console=console)
        if "tail" in arguments.only:
            found, times["cold GETs of 1 to 4 MiB"] = tail(
                remote, folder, rounds=rounds, reads=arguments.tail_reads, console=console
            )
            figures += found
        if "behind" in arguments.only:
            found, times["warm GETs while the queue drains"] = write_behind(
                remote, folder, rounds=rounds, objects=arguments.objects, console=console
            )
            figures += found
        if "shared" in arguments.only:
            figures += shared_puts(remote, folder, rounds=rounds, puts=arguments.puts, console=console)
    if arguments.plots is not None:
        for title, sets in times.items():
            plot_shares(arguments.plots / f"bench_shared_{title.split(' ', 1)[0]}.svg", title, sets)
    title = f"a node in front of radosgw in memory, medians of {rounds} alternating rounds"
    return report(title, figures, json_path=arguments.json, markdown_path=arguments.markdown)


if __name__ == "__main__":
    run_tool(main)
