"""Replay a trace of real inference requests against a node with little dram and nvme in front of a radosgw, and lose the node.

Starts radosgw and the nodes itself, on ports and in folders of its own. What is replayed is one in `--conversations-every` of the
trace's conversations, from its beginning to its end: so reuse is about what it is in the whole. It is replayed three times, into a
KV bucket:

- healthy: token prefix hits by the tier that had the block, and what the remote was asked for; bucket's rule `--rule`
- faulty: the same through a proxy that does something bad to some of the requests: 503s, stalls, resets, wrong bytes, lost replies
- lost: after half of the requests the node is killed, its data directory and its arena are removed, `kvobj-admin rebuild --remote`
  makes another from the bucket alone, and the rest of the requests is replayed on that; bucket's rule `--lost-rule`. What the rule
  `evicted` had sent is what nvme had no room for: what policy valued least, chains in pieces

Every byte that is read is compared. Exits 0 if none was wrong and no request failed, 1 if not, 2 where radosgw is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings
from command_line import Parser, existing_file, one_or_more, output_file, run_tool, share, size_bytes, zero_or_more
from load_client import hardware
from radosgw_server import require_radosgw
from remote_nodes import Gateway, ProxyProcess, end_in_order, gateway, node_settings, remote_of, running_node
from replay_statistics import ReplayStatistics
from replay_trace import Replay, ReplaySettings, s3_client
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from trace_blocks import BlockContent, TraceRequest, block_tokens, infinite_cache_token_hit_ratio, read_trace

PARTS: Final = ("healthy", "faulty", "lost")
TOXICS: Final = (
    "UNAVAILABLE",
    "UNAVAILABLE_BARE",
    "SLOW_DOWN",
    "STALL_HEAD",
    "STALL_BODY",
    "RESET_BODY",
    "TRUNCATED",
    "WRONG_BYTE_DOWN",
    "WRONG_BYTE_UP",
    "LOST_REPLY",
    "HALF_HEAD",
)
"""One of these, drawn anew for each request that is hit."""
_TRACE: Final = Path(__file__).resolve().parent.parent / "tests" / "replay" / "mooncake_conversation.jsonl.zst"
_BUCKET: Final = "replay"
_STORE_BYTES: Final = 6 * 2**30
_SEGMENT_BYTES: Final = 64 * MIB
_STALL_SECONDS: Final = 1.0
_REBUILD_SECONDS: Final = 300
_WRAPPING: Final = "KVOBJ_REPLAY_WRAPPING_KEY"
_ENVIRONMENT: Final = {_WRAPPING: "5a" * 32}
_TIERS: Final = ("dram", "nvme", "remote")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed, and how the bytes are made. `tokens` is of all requests: the same in each part."""

    requests: Sequence[TraceRequest]
    tokens: dict[int, int]
    content: BlockContent
    settings: ReplaySettings

    @property
    def half(self) -> int:
        """How many requests come before the loss."""
        return len(self.requests) // 2

    def bound(self, requests: Sequence[TraceRequest]) -> float:
        """What a store that begins empty and forgets nothing would hit of these requests."""
        return infinite_cache_token_hit_ratio(requests, self.tokens)


@dataclass(slots=True)
class Runner:
    """Replays requests against nodes and keeps what was counted."""

    plan: Plan
    console: Console
    is_quiet: bool
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def replay(self, name: str, server: ServerProcess, requests: Sequence[TraceRequest]) -> None:
        """Replay these; note under the name what was counted, with the remote's share of it."""
        before = _asked(server)
        statistics, seconds = asyncio.run(self._run(name, server, list(requests)))
        asked = _asked(server)
        row = statistics.summary(seconds) | {
            "infinite_cache_token_hit_ratio": self.plan.bound(requests),
            "remote": {key: asked[key] - before.get(key, 0.0) for key in asked},
        }
        self.rows[name] = row
        self.console.print(
            f"{name}: {row['requests']:,} requests in {seconds:.0f} s, token prefix hits {row['token_hit_ratio']:.4f}, "
            f"{row['wrong_blocks']} wrong, errors {row['errors'] or 'none'}"
        )

    async def _run(
        self, name: str, server: ServerProcess, requests: list[TraceRequest]
    ) -> tuple[ReplayStatistics, float]:
        pair, settings = server.credentials(), self.plan.settings
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        async with s3_client(
            server.endpoint,
            (pair.access_key, pair.secret_key),
            region=pair.region,
            concurrency=settings.concurrency,
            attempts=8,
        ) as client:
            run = Replay(client, settings, self.plan.content, self.plan.tokens)
            self.console.print(name)
            with Progress(*columns, console=self.console, disable=self.is_quiet) as progress:
                await run.run(requests, progress)
            return run.statistics, run.elapsed_seconds


def _asked(server: ServerProcess) -> dict[str, float]:
    """What the node has asked of the remote since it started, by operation, and bytes."""
    remote = remote_of(server)
    figures: dict[str, float] = dict(remote["requests"])
    return figures | {"sent_bytes": remote["sent_bytes"], "received_bytes": remote["received_bytes"]}


def run_parts(remote: Gateway, folder: Path, runner: Runner, arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts asked for; what is known beyond what was counted."""
    more: dict[str, Any] = {}
    requests, half = runner.plan.requests, runner.plan.half
    for part in arguments.only:
        if part == "healthy":
            with running_node(folder / part, _settings(remote.tier(part), arguments.rule, arguments)) as node:
                runner.replay("healthy, first half", node, requests[:half])
                runner.replay("healthy, second half", node, requests[half:])
        elif part == "faulty":
            server = remote.server
            with (
                ProxyProcess(server.host, server.port) as proxy,
                running_node(
                    folder / part, _settings(remote.tier(part, port=proxy.port), arguments.rule, arguments)
                ) as node,
            ):
                proxy.plan(*TOXICS, rate=arguments.rate, stall_seconds=_STALL_SECONDS, seed=arguments.seed)
                runner.replay("faulty", node, requests)
                more["proxy"] = proxy.record()
                proxy.plan()
        else:
            with running_node(folder / part, _settings(remote.tier(part), arguments.lost_rule, arguments)) as node:
                runner.replay("before the loss", node, requests[:half])
                if arguments.flushed:
                    node.admin("POST", "/api/v1/flush")
                more["queue at the loss"] = remote_of(node)["queue"]
                more["rebuild"] = lose_and_rebuild(node, runner.console)
                runner.replay("after the loss", node, requests[half:])
    return more


def _settings(tier: dict[str, str], rule: str, arguments: argparse.Namespace) -> ServerSettings:
    settings = node_settings(
        tier,
        [BucketSetting(_BUCKET, "kv", "memory", remote=rule)],
        dram_bytes=arguments.dram,
        nvme_bytes=arguments.nvme,
        nvme_segment_bytes=_SEGMENT_BYTES,
        environment=_ENVIRONMENT,
    )
    return replace(settings, sections={**settings.sections, "security": {"wrapping_key_env": f'"{_WRAPPING}"'}})


def lose_and_rebuild(node: ServerProcess, console: Console) -> dict[str, Any]:
    """Kill the node, remove its disk and memory, make it again from the remote alone, start it. What the rebuild told."""
    node.kill()
    shutil.rmtree(node.data)
    for leftover in node.shared_memory.parent.glob(node.shared_memory.name + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    console.print("the node is lost: killed, data directory and arena removed")
    command = [str(Path(sys.executable).with_name("kvobj-admin")), "--json", "rebuild", "--remote"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--config", str(node.configuration)],
        env={**_ENVIRONMENT, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=_REBUILD_SECONDS,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"the rebuild failed: {done.stdout[-600:]} {done.stderr[-1000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["process_seconds"] = time.monotonic() - began
    console.print(
        f"rebuilt: {told['objects']:,} objects in {told['seconds']:.2f} s (process {told['process_seconds']:.2f} s), "
        f"lineage {told['lineage']}, {told['missing_objects']} without blobs"
    )
    node.start()
    return told


# -- what is told ------------------------------------------------------------------------------------------------------
_COLUMNS: Final = (
    "part",
    "requests, blocks",
    "token prefix hits",
    "dram / nvme / remote",
    "never forgets",
    "remote: requests, up, down",
    "wrong",
    "errors",
    "time",
)


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    remote = row["remote"]
    requests = sum(value for key, value in remote.items() if not key.endswith("_bytes"))
    by_tier = row["token_hit_ratio_by_tier"]
    return (
        name,
        f"{row['requests']:,}, {row['blocks']:,}",
        f"{row['token_hit_ratio']:.4f}",
        " / ".join(f"{by_tier.get(tier, 0.0):.4f}" for tier in _TIERS),
        f"{row['infinite_cache_token_hit_ratio']:.4f}",
        f"{requests:,.0f}, {remote['sent_bytes'] / 1e6:,.0f} MB, {remote['received_bytes'] / 1e6:,.0f} MB",
        str(row["wrong_blocks"]),
        ", ".join(f"{error} {count}" for error, count in row["errors"].items()) or "0",
        f"{row['elapsed_seconds']:.0f} s",
    )


def markdown(title: str, rows: dict[str, dict[str, Any]], notes: Sequence[str]) -> str:
    """The record for docs/benchmarks.md."""
    lines = [f"{title}.", "", f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    lines += [f"| {' | '.join(_cells(name, row))} |" for name, row in rows.items()]
    return "\n".join([*lines, "", *notes, ""])


def notes_of(more: dict[str, Any]) -> list[str]:
    """Sentences on the proxy and on the rebuild."""
    notes = []
    if (proxy := more.get("proxy")) is not None:
        injected = sum(sum(counts.values()) for counts in proxy["injected"].values())
        kinds = ", ".join(f"{toxic} {sum(counts.values())}" for toxic, counts in proxy["injected"].items())
        notes.append(
            f"The proxy did something to {injected:,} of {sum(proxy['requests'].values()):,} requests: {kinds}."
        )
    if (rebuild := more.get("rebuild")) is not None:
        queue = more["queue at the loss"]
        rate = rebuild["objects"] / max(1e-9, rebuild["seconds"])
        notes.append(
            f"When the node was killed {queue['queued_objects']:,.0f} objects waited to be uploaded. The rebuild found "
            f"{rebuild['objects']:,} objects in {rebuild['seconds']:.2f} s ({rate:,.0f} a second), "
            f"{rebuild['missing_objects']} without their blobs."
        )
    return notes


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--trace", type=existing_file, default=_TRACE, help="default: Mooncake's conversation trace")
    parser.add_argument(
        "--conversations-every", type=one_or_more, default=24, metavar="N", help="one in so many (default: 24)"
    )
    parser.add_argument("--requests", type=one_or_more, help="the first N of their requests only")
    rules = ("evicted", "always")
    parser.add_argument("--rule", choices=rules, default="evicted", help="of the bucket (default: evicted)")
    parser.add_argument("--lost-rule", choices=rules, default="always", help="where the node is lost (default: always)")
    parser.add_argument("--flushed", action="store_true", help="lose the node once everything is uploaded")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--target-bytes", type=size_bytes, default="1 GiB", help="all blocks together")
    parser.add_argument("--dram", type=size_bytes, default="128 MiB")
    parser.add_argument("--nvme", type=size_bytes, default="256 MiB")
    parser.add_argument("--rate", type=share, default=0.03, help="share of the remote's requests that the proxy hits")
    parser.add_argument("--concurrency", type=one_or_more, default=16, help="S3 operations in flight")
    parser.add_argument("--requests-in-flight", type=one_or_more, default=4)
    parser.add_argument("--lookahead", type=one_or_more, default=8, help="blocks of a chain read at once")
    parser.add_argument("--seed", type=zero_or_more, default=1)
    parser.add_argument("--directory", type=Path, help="where the nodes' files go; default: a temporary folder")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Read the trace."""
    every = arguments.conversations_every
    requests = [request for request in read_trace(arguments.trace) if _conversation(request) % every == 0]
    requests = requests[: arguments.requests]
    tokens = block_tokens(requests)
    bytes_per_token = max(1, arguments.target_bytes // max(1, sum(tokens.values())))
    settings = ReplaySettings(
        bucket=_BUCKET,
        bytes_per_token=bytes_per_token,
        requests_in_flight=arguments.requests_in_flight,
        concurrency=arguments.concurrency,
        lookahead=arguments.lookahead,
        speed=None,
    )
    content = BlockContent(seed=arguments.seed, largest_bytes=max(tokens.values()) * bytes_per_token)
    return Plan(requests, tokens, content, settings)


def _conversation(request: TraceRequest) -> int:
    """What the requests of one conversation have in common: the first block that is its own. The very first is everybody's."""
    return request.block_ids[min(1, len(request.block_ids) - 1)]


def main() -> int:
    """Start radosgw, replay part by part, tell."""
    arguments = parse_arguments()
    console = Console(stderr=True)
    require_radosgw()
    end_in_order()
    plan = make_plan(arguments)
    runner = Runner(plan, console, arguments.quiet)
    total_bytes = sum(plan.tokens.values()) * plan.settings.bytes_per_token
    title = (
        f"{arguments.trace.name}, 1 in {arguments.conversations_every} conversations: {len(plan.requests):,} requests, "
        f"{len(plan.tokens):,} different blocks, {total_bytes / 1e9:.2f} GB; dram {arguments.dram // MIB} MiB, nvme "
        f"{arguments.nvme // MIB} MiB; rule `{arguments.rule}`, where the node is lost `{arguments.lost_rule}`"
    )
    console.print(title)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-replay-", dir=arguments.directory)))
        remote = stack.enter_context(gateway(folder / "r", store_bytes=_STORE_BYTES))
        more = run_parts(remote, folder, runner, arguments)
    table = Table(*_COLUMNS, title=title)
    for name, row in runner.rows.items():
        table.add_row(*_cells(name, row))
    shown = Console(width=170)
    shown.print(table)
    for note in notes_of(more):
        shown.print(note)
    if arguments.json is not None:
        record = {"title": title, "hardware": hardware(), "parts": runner.rows, **more}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(title, runner.rows, notes_of(more)))
    is_right = all(not row["wrong_blocks"] and not row["errors"] for row in runner.rows.values())
    return 0 if is_right else 1


if __name__ == "__main__":
    run_tool(main)
