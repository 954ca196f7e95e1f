"""Replay a trace of real inference requests against a running server: read each stored token prefix, write the rest.

One object a block, through aiobotocore with bounded concurrency; every byte read is compared with its block's own bytes.
Timestamps are ignored unless `--speed` is given. Exits 0 if every byte was right and no request failed, else 1.
With `--api match`, whole requests at a time through the KV API, by holders that pin and crash (`replay_match.py`).
With `--policy` nothing is sent anywhere: the trace goes through the store's eviction policy in this process (`simulate_policy.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiobotocore.config
import aiobotocore.session
import botocore.exceptions
import replay_match_command
import simulate_policy
from command_line import (
    Parser,
    ToolError,
    above_zero,
    existing_file,
    one_or_more,
    output_file,
    run_tool,
    size_bytes,
    zero_or_more,
)
from replay_match import is_right
from replay_statistics import ReplayStatistics, summary_table, write_plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from trace_blocks import BlockContent, TraceRequest, block_tokens, infinite_cache_token_hit_ratio, read_trace

from kvobj.client import Endpoint
from kvobj.data_directory import read_credentials
from kvobj.errors import InvalidRequestError

BUCKET_KIND_HEADER: Final = "x-kvobj-bucket-kind"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay: where to, how much at once, how many bytes a token is."""

    bucket: str
    bytes_per_token: int
    requests_in_flight: int
    concurrency: int
    lookahead: int
    speed: float | None


class Replay:
    """One run over one bucket. All state belongs to one event loop."""

    def __init__(self, client: Any, settings: ReplaySettings, content: BlockContent, tokens: dict[int, int]) -> None:  # noqa: ANN401 - aiobotocore has no types
        self._client = client
        self._settings = settings
        self._content = content
        self._tokens = tokens
        self._operations = asyncio.Semaphore(settings.concurrency)
        self._started = time.monotonic()
        self.statistics = ReplayStatistics()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._started

    def _size(self, block_id: int) -> int:
        return self._tokens[block_id] * self._settings.bytes_per_token

    async def run(self, requests: list[TraceRequest], progress: Progress) -> None:
        """Replay the requests in order, several in flight."""
        task = progress.add_task("replay", total=len(requests))
        queue = iter(requests)

        async def worker() -> None:
            for request in queue:
                if self._settings.speed is not None:
                    await asyncio.sleep(request.at_seconds / self._settings.speed - self.elapsed_seconds)
                await self._replay(request)
                self.statistics.sample(self.elapsed_seconds)
                progress.advance(task)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.requests_in_flight):
                group.create_task(worker())

    async def _replay(self, request: TraceRequest) -> None:
        statistics = self.statistics
        hits, found_later = await self._read_prefix(request.block_ids)
        missing = [block_id for block_id in request.block_ids[hits:] if block_id not in found_later]
        async with asyncio.TaskGroup() as group:
            for block_id in dict.fromkeys(missing):
                group.create_task(self._put(block_id))
        statistics.requests += 1
        statistics.blocks += len(request.block_ids)
        statistics.block_hits += hits
        statistics.tokens += sum(self._tokens[block_id] for block_id in request.block_ids)
        statistics.token_hits += sum(self._tokens[block_id] for block_id in request.block_ids[:hits])

    async def _read_prefix(self, block_ids: tuple[int, ...]) -> tuple[int, set[int]]:
        """How many leading blocks are stored, and which blocks past the first miss the look-ahead met."""
        hits = 0
        for first in range(0, len(block_ids), self._settings.lookahead):
            window = block_ids[first : first + self._settings.lookahead]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._get(block_id)) for block_id in window]
            tiers = [task.result() for task in tasks]
            miss = tiers.index("") if "" in tiers else len(tiers)
            for block_id, tier in zip(window[:miss], tiers[:miss], strict=True):
                self.statistics.token_hits_by_tier[tier] += self._tokens[block_id]
            if miss == len(tiers):
                hits += len(window)
                continue
            later = {block_id for block_id, tier in zip(window[miss:], tiers[miss:], strict=True) if tier}
            self.statistics.read_past_a_miss += len(later)
            return hits + miss, later
        return hits, set()

    async def _get(self, block_id: int) -> str:
        """Where the block was; "" where it is not stored."""
        statistics = self.statistics
        async with self._operations:
            began = time.perf_counter()
            try:
                reply = await self._client.get_object(Bucket=self._settings.bucket, Key=self._content.key(block_id))
                async with reply["Body"] as stream:
                    body = await stream.read()
            except botocore.exceptions.ClientError as error:
                code = error.response["Error"]["Code"]
                if code not in {"NoSuchKey", "404"}:
                    statistics.errors[f"GET {code}"] += 1
                return ""
            except (botocore.exceptions.BotoCoreError, OSError) as error:
                statistics.errors[f"GET {type(error).__name__}"] += 1
                return ""
            statistics.get_seconds.append(time.perf_counter() - began)
        tier: str = reply["ResponseMetadata"]["HTTPHeaders"].get("x-kvobj-tier", "unnamed")
        statistics.tiers[tier] += 1
        statistics.blocks_read += 1
        statistics.bytes_read += len(body)
        if not self._content.is_right(block_id, self._size(block_id), body):
            statistics.wrong_blocks += 1
        return tier

    async def _put(self, block_id: int) -> None:
        statistics = self.statistics
        async with self._operations:
            body = self._content.make(block_id, self._size(block_id))
            began = time.perf_counter()
            try:
                reply = await self._client.put_object(
                    Bucket=self._settings.bucket, Key=self._content.key(block_id), Body=body
                )
            except botocore.exceptions.ClientError as error:
                statistics.errors[f"PUT {error.response['Error']['Code']}"] += 1
                return
            except (botocore.exceptions.BotoCoreError, OSError) as error:
                statistics.errors[f"PUT {type(error).__name__}"] += 1
                return
            statistics.put_seconds.append(time.perf_counter() - began)
        if reply["ResponseMetadata"]["HTTPHeaders"].get("x-kvobj-existed") == "true":
            statistics.blocks_existed += 1
        else:
            statistics.blocks_written += 1
            statistics.bytes_written += len(body)


@asynccontextmanager
async def s3_client(
    endpoint: str, keys: tuple[str, str], *, region: str, concurrency: int, attempts: int
) -> AsyncIterator[Any]:
    """A client as the replay uses it: path-style, no checksums of its own, so many tries an operation."""
    config = aiobotocore.config.AioConfig(
        max_pool_connections=concurrency,
        retries={"mode": "standard", "max_attempts": attempts},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    async with aiobotocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        region_name=region,
        config=config,
    ) as client:
        yield client


async def ensure_bucket(client: Any, name: str, kind: str) -> None:  # noqa: ANN401 - aiobotocore has no types
    """Create the bucket with its kind, unless it is the caller's already."""

    def add_kind(request: Any, **_: object) -> None:  # noqa: ANN401 - botocore's event argument
        request.headers[BUCKET_KIND_HEADER] = kind

    client.meta.events.register("before-sign.s3.CreateBucket", add_kind)
    try:
        await client.create_bucket(Bucket=name)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
            raise
    finally:
        client.meta.events.unregister("before-sign.s3.CreateBucket", add_kind)


def key_pair(arguments: argparse.Namespace) -> tuple[str, str]:
    """The key pair from the options, a data directory's credentials file, or the environment."""
    if arguments.data is not None:
        found = read_credentials(arguments.data)
        return found.access_key, found.secret_key
    access = arguments.access_key or os.environ.get("AWS_ACCESS_KEY_ID")
    secret = arguments.secret_key or os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        raise ToolError("no credentials: give --data, --access-key and --secret-key, or the AWS environment variables")
    return access, secret


async def replay(arguments: argparse.Namespace, console: Console) -> tuple[ReplayStatistics, dict[str, Any]]:
    """Read the trace, replay it, return what was counted."""
    requests = list(read_trace(arguments.trace, limit=arguments.requests))
    tokens = block_tokens(requests)
    bytes_per_token = arguments.bytes_per_token or max(1, arguments.target_bytes // max(1, sum(tokens.values())))
    content = BlockContent(seed=arguments.seed, largest_bytes=max(tokens.values()) * bytes_per_token)
    settings = ReplaySettings(
        bucket=arguments.bucket or f"replay-{arguments.bucket_kind}",
        bytes_per_token=bytes_per_token,
        requests_in_flight=arguments.requests_in_flight,
        concurrency=arguments.concurrency,
        lookahead=arguments.lookahead,
        speed=arguments.speed,
    )
    console.print(
        f"{arguments.trace.name}: {len(requests):,} requests, {len(tokens):,} different blocks, "
        f"{bytes_per_token:,} bytes a token, working set {sum(tokens.values()) * bytes_per_token / 1e9:.2f} GB"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with s3_client(
        arguments.endpoint,
        key_pair(arguments),
        region=arguments.region,
        concurrency=settings.concurrency,
        attempts=arguments.attempts,
    ) as client:
        await ensure_bucket(client, settings.bucket, arguments.bucket_kind)
        run = Replay(client, settings, content, tokens)
        with Progress(*columns, console=console, disable=arguments.quiet) as progress:
            await run.run(requests, progress)
    summary = run.statistics.summary(run.elapsed_seconds) | {
        "trace": arguments.trace.name,
        "bytes_per_token": bytes_per_token,
        "different_blocks": len(tokens),
        "infinite_cache_token_hit_ratio": infinite_cache_token_hit_ratio(requests, tokens),
        "bucket_kind": arguments.bucket_kind,
        "concurrency": settings.concurrency,
        "lookahead": settings.lookahead,
    }
    return run.statistics, summary


def endpoint(text: str) -> str:
    """The URL of a server."""
    try:
        Endpoint.parse(text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--trace", type=existing_file, required=True, help="a trace file, .jsonl or .jsonl.zst")
    parser.add_argument("--requests", type=one_or_more, help="replay only the first N requests")
    parser.add_argument("--endpoint", type=endpoint, default="http://127.0.0.1:9000")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--data", type=Path, help="the server's data directory: its credentials are used")
    parser.add_argument("--access-key")
    parser.add_argument("--secret-key")
    parser.add_argument("--bucket", help="default: replay-KIND")
    parser.add_argument("--bucket-kind", choices=("kv", "ordinary"), default="kv")
    parser.add_argument(
        "--bytes-per-token", type=one_or_more, help="default: scaled so that all blocks sum to --target-bytes"
    )
    parser.add_argument("--target-bytes", type=size_bytes, default="4 GiB", help="of all blocks together")
    parser.add_argument("--concurrency", type=one_or_more, default=16, help="S3 operations in flight")
    parser.add_argument("--requests-in-flight", type=one_or_more, default=4)
    parser.add_argument("--lookahead", type=one_or_more, default=8, help="blocks of a chain read at once")
    parser.add_argument("--speed", type=above_zero, help="keep the trace's timing, this many times faster")
    parser.add_argument(
        "--attempts", type=one_or_more, default=8, help="tries an operation when the server says SlowDown"
    )
    parser.add_argument("--seed", type=zero_or_more, default=1)
    replay_match_command.add_arguments(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    parser.add_argument(
        "--policy",
        choices=("gipe", "lru"),
        help="no server: token hit ratio of this policy by capacity, against LRU and the optimum, as table and --plot",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def main() -> int:
    """Replay and report."""
    arguments = parse_arguments()
    if arguments.policy is not None:
        simulate_policy.report(
            [arguments.trace],
            policies=("lru", "best") if arguments.policy == "lru" else simulate_policy.ONE_TIER,
            requests=arguments.requests,
            plot=arguments.plot,
            results=arguments.json,
            quiet=arguments.quiet,
        )
        return 0
    console = Console(stderr=True)
    statistics: ReplayStatistics
    if arguments.api == "match":
        statistics, summary = replay_match_command.run_match(arguments, console, key_pair)
        failed = not is_right(summary)
    else:
        try:
            statistics, summary = asyncio.run(replay(arguments, console))
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise ToolError(str(error)) from error
        Console().print(summary_table(f"{summary['trace']} into a {summary['bucket_kind']} bucket", summary))
        failed = bool(statistics.wrong_blocks or statistics.errors)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    if arguments.plot is not None:
        write_plot(arguments.plot, str(summary["trace"]), statistics.samples)
    return int(failed)


if __name__ == "__main__":
    run_tool(main)
