"""`replay_trace.py --api match`: its options, a server of its own where asked for, the run, and what is told of it."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench_support import ServerSettings, own_server
from command_line import amount, share, size_bytes, zero_or_more
from policy_replay import load_trace
from replay_match import MatchReplay, MatchSettings, MatchStatistics, bounds, clear_away, match_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from trace_blocks import BlockContent, block_tokens, infinite_cache_token_hit_ratio, read_trace

from kvobj.client import AdminClient, Credentials, Endpoint, KvClient, SignedConnection
from kvobj.errors import BucketExistsError

HOME_SHARE: Final = 0.9
"""`high_watermark` of the home tier, by default."""

Endpoints = tuple[str, str]
KeyPair = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this way to replay."""
    parser.add_argument("--api", choices=("s3", "match"), default="s3", help="default: s3")
    group = parser.add_argument_group("with --api match")
    group.add_argument("--ids", choices=("kvobj", "foreign"), default="kvobj", help="default: kvobj")
    group.add_argument("--admin", default="http://127.0.0.1:9001", help="the admin port; --data knows it")
    group.add_argument("--held-requests", type=zero_or_more, default=4, help="requests that a holder keeps pinned")
    group.add_argument("--crash-share", type=share, default=0.01, help="requests after which a holder crashes")
    group.add_argument("--ttl", type=amount, default=5.0, help="of sessions, seconds")
    group.add_argument("--grace", type=amount, default=30.0, help="[gc] grace of the server, seconds")
    group.add_argument("--sweep", type=amount, default=10.0, help="[gc] sweep_interval of the server, seconds")
    group.add_argument("--bytes-a-put", type=size_bytes, default="4 MiB", help="of one ?mput, about")
    group.add_argument("--keep", dest="clear_away", action="store_false", help="leave the chunks in the store")
    group.add_argument("--own-server", action="store_true", help="start a small server with these times and sizes")
    group.add_argument("--dram", type=size_bytes, default="128 MiB")
    group.add_argument("--nvme", type=size_bytes, default="256 MiB")


def run_match(
    arguments: argparse.Namespace, console: Console, key_pair: Callable[[argparse.Namespace], KeyPair]
) -> tuple[MatchStatistics, dict[str, Any]]:
    """Replay and print; what was counted."""
    with _served(arguments, key_pair) as (endpoints, keys):
        statistics, summary = _replay(arguments, console, endpoints, keys)
    Console().print(match_table(summary))
    return statistics, summary


@contextmanager
def _served(
    arguments: argparse.Namespace, key_pair: Callable[[argparse.Namespace], KeyPair]
) -> Iterator[tuple[Endpoints, KeyPair]]:
    if not arguments.own_server:
        admin = arguments.admin
        if arguments.data is not None and (arguments.data / "endpoints").exists():
            admin = tomllib.loads((arguments.data / "endpoints").read_text())["admin"]
        yield (arguments.endpoint, admin), key_pair(arguments)
        return
    gc = {
        "grace": f'"{arguments.grace} s"',
        "sweep_interval": f'"{arguments.sweep} s"',
        "lease_ttl": f'"{arguments.ttl} s"',
    }
    sizes = ServerSettings(dram_bytes=arguments.dram, nvme_bytes=arguments.nvme, sections={"gc": gc})
    with TemporaryDirectory() as directory, own_server(Path(directory), sizes) as server:
        keys = server.credentials()
        yield (server.endpoint, f"http://127.0.0.1:{server.admin_port}"), (keys.access_key, keys.secret_key)


def _replay(
    arguments: argparse.Namespace, console: Console, endpoints: Endpoints, keys: KeyPair
) -> tuple[MatchStatistics, dict[str, Any]]:
    requests = list(read_trace(arguments.trace, limit=arguments.requests))
    tokens = block_tokens(requests)
    bytes_per_token = arguments.bytes_per_token or max(1, arguments.target_bytes // max(1, sum(tokens.values())))
    content = BlockContent(seed=arguments.seed, largest_bytes=max(tokens.values()) * bytes_per_token)
    settings = MatchSettings(
        namespace="replay",
        ids=arguments.ids,
        bytes_per_token=bytes_per_token,
        workers=arguments.requests_in_flight,
        held_requests=arguments.held_requests,
        crash_share=arguments.crash_share,
        ttl_ms=round(arguments.ttl * 1000),
        grace_seconds=arguments.grace,
        sweep_seconds=arguments.sweep,
        bytes_a_put=arguments.bytes_a_put,
        seed=arguments.seed,
    )
    console.print(
        f"{arguments.trace.name}: {len(requests):,} requests, {len(tokens):,} different blocks, "
        f"working set {sum(tokens.values()) * bytes_per_token / 1e9:.2f} GB"
    )
    credentials = Credentials(*keys)
    bucket = arguments.bucket or "replay-match"
    with SignedConnection(Endpoint.parse(endpoints[1]), credentials) as connection:
        admin = AdminClient(connection)
        with suppress(BucketExistsError):
            admin.create_bucket(bucket, kind="kv")
        with KvClient(endpoints[0], credentials, bucket, connections=2 * settings.workers) as client:
            run = MatchReplay(client, settings, content, tokens)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console, disable=arguments.quiet) as progress:
                run.run(requests, progress)
            summary = run.statistics.summary(run.elapsed_seconds) | run.statistics.match_summary()
            status: Any = admin.status()
            if arguments.clear_away:
                if not arguments.quiet:
                    console.print(f"removing the chunks: up to {settings.garbage_seconds_max:.0f} s")
                summary |= clear_away(run, admin)
    home = next(tier for tier in status["tiers"] if tier["is_home"])
    block_bytes = max(1, summary["bytes_written"] // max(1, summary["blocks_written"]))
    blocks = max(1, int(home["capacity_bytes"] * HOME_SHARE) // block_bytes)
    return run.statistics, {
        **summary,
        **bounds(load_trace(arguments.trace, limit=arguments.requests), blocks),
        "trace": arguments.trace.name,
        "ids": settings.ids,
        "bytes_per_token": bytes_per_token,
        "different_blocks": len(tokens),
        "infinite_cache_token_hit_ratio": infinite_cache_token_hit_ratio(requests, tokens),
        "workers": settings.workers,
        **{name: int(status["gc"][name]) for name in ("claimed_chunks", "condemned_chunks", "rescued_chunks")},
        "home_capacity_bytes": home["capacity_bytes"],
        "home_used_bytes": home["used_bytes"],
    }
