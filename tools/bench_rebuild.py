"""How fast a node is made again from its remote tier: `kvobj-admin rebuild --remote` against a radosgw that keeps its objects in
memory, on the same machine.

The store is written without a node, as one would have left it: a blob for each object, a snapshot of most of the rows, the rest in
journals with replaced and deleted ones among them. The command runs as a process of its own; its wall time counts, start of Python
included. Exits 1 below 5,000 objects/s, or where not all objects came back; 2 where radosgw is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import md5
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop
from bench_support import Row, medians, report
from blake3 import blake3
from command_line import Parser, one_or_more, output_file, run_tool
from radosgw_server import require_radosgw
from remote_nodes import gateway
from rich.console import Console

from kvobj.app.offline_opening import on_pool, open_bucket
from kvobj.catalog.log_entries import LogEntry, RowRemoved, encode_entry
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, Durability, ObjectRow
from kvobj.clock import SystemClock
from kvobj.codec.codec import codec_named
from kvobj.ids import make_blob_id
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import ManifestEntry, ManifestKind
from kvobj.manifests.snapshot import SnapshotPart
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.remote.identity import StoreIdentity
from kvobj.tiers.remote.names import RemoteNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvobj.config import RemoteSettings
    from kvobj.tiers.remote.bucket import RemoteBucket

TARGET_PER_SECOND: Final = 5000.0
STORE: Final = bytes(range(16))
_EPOCH: Final = 0x1234_5678_9ABC_DEF0
_ROWS_A_MANIFEST: Final = 30_000
_ENTRIES_A_JOURNAL: Final = 2_000
_PLAIN: Final = b"a small chunk " * 8
_JOURNALED_SHARE: Final = 0.2


def batched(entries: Iterable[LogEntry], size: int) -> Iterator[list[LogEntry]]:
    """Entries in lists."""
    rest = iter(entries)
    while batch := list(islice(rest, size)):
        yield batch


def row(number: int, blob: int, frame_bytes: int) -> ObjectRow:
    """An object as one PUT leaves it."""
    reference = BlobRef(make_blob_id(_EPOCH, blob), len(_PLAIN), frame_bytes, blake3(_PLAIN).digest())
    return ObjectRow(
        bucket="objects",
        key=f"folder-{number % 1000:03d}/object-{number:09d}",
        blobs=(reference,),
        size_bytes=len(_PLAIN),
        etag=md5(number.to_bytes(8, "big"), usedforsecurity=False).hexdigest(),
        modified_ms=1_700_000_000_000 + number,
        owner="root",
        durability=Durability.SHARED,
        headers={"content-type": "application/octet-stream"},
        digest=reference.digest,
        sequence=(1 << 40) + blob,
    )


def sealed_frame() -> bytes:
    """The frame of every object here."""
    codec = codec_named("raw")
    frame = bytearray(codec.encode_bound(len(_PLAIN)))
    codec.encode(memoryview(_PLAIN), memoryview(frame), digest=blake3(_PLAIN).digest())
    return bytes(frame)


async def write_blobs(bucket: RemoteBucket, names: RemoteNames, count: int, console: Console) -> None:
    """A blob for each object, many at a time."""
    frame = memoryview(sealed_frame())
    numbers = iter(range(count))
    began = time.monotonic()

    async def writer() -> None:
        for number in numbers:
            key = row(number, number + 1, len(frame)).key
            name = names.name(BlobNames("objects", key))
            await bucket.put(names.key(make_blob_id(_EPOCH, number + 1), name), frame)

    await asyncio.gather(*(writer() for _ in range(32)))
    console.print(f"{count} blobs written, {count / (time.monotonic() - began):,.0f}/s")


async def write_manifests(folder: ManifestFolder, count: int) -> None:
    """A snapshot of most rows, journals of the others; one in a hundred of the latter was replaced or deleted."""
    frame_bytes = len(sealed_frame())
    in_snapshot = int(count * (1 - _JOURNALED_SHARE))
    bucket = BucketRow("objects", BucketKind.ORDINARY, "root", 1, Durability.SHARED)

    def rows(numbers: Iterable[int]) -> Iterable[LogEntry]:
        return (row(number, number + 1, frame_bytes) for number in numbers)

    parts: list[ManifestEntry] = []
    for part in batched([bucket, *rows(range(in_snapshot))], _ROWS_A_MANIFEST):
        entries = [ManifestEntry(1, encode_entry(entry)) for entry in part]
        name, body = await folder.encode(ManifestKind.PART, entries, after=0, last=1)
        await folder.write(name, body)
        parts.append(ManifestEntry(1, msgspec.msgpack.encode(SnapshotPart(name.number, len(part)))))
    await folder.write(*await folder.encode(ManifestKind.HEAD, parts, after=0, last=1))

    later: list[LogEntry] = []
    for number in range(in_snapshot, count):
        added = row(number, number + 1, frame_bytes)
        later.append(added)
        if number % 100 == 0:
            later += [RowRemoved(added.bucket, added.key), added]
    position = 1
    for entries_of in batched(later, _ENTRIES_A_JOURNAL):
        entries = [ManifestEntry(position + 1 + index, encode_entry(entry)) for index, entry in enumerate(entries_of)]
        last = position + len(entries)
        await folder.write(*await folder.encode(ManifestKind.JOURNAL, entries, after=position, last=last))
        position = last


async def prepare(settings: RemoteSettings, directory: Path, count: int, console: Console) -> None:
    """The store as a node would have left it."""
    with ThreadPoolExecutor(2) as executor:
        async with open_bucket(settings, executor) as bucket:
            names = RemoteNames(settings.prefix)
            identity = StoreIdentity(bucket, names, claim_file=directory / "claim", clock=SystemClock())
            await identity.claim(STORE)
            folder = ManifestFolder(
                bucket, prefix=settings.prefix, store_id=STORE, identity=identity, epoch=_EPOCH, run=on_pool(executor)
            )
            await write_blobs(bucket, names, count, console)
            await write_manifests(folder, count)


def rebuild(settings: RemoteSettings, directory: Path) -> dict[str, float]:
    """One run of the command on an empty disk; its seconds, and those that it gives itself."""
    configuration = directory / "kvobj.toml"
    configuration.write_text(
        f'[server]\ndata = "{directory / "data"}"\n'
        f'[[tiers]]\nkind = "dram"\ncapacity = "64 MiB"\npath = "{directory / "dram"}"\n'
        '[[tiers]]\nkind = "nvme"\ncapacity = "256 MiB"\n'
        f'[[tiers]]\nkind = "remote"\nendpoint = "{settings.endpoint}"\nbucket = "{settings.bucket}"\n'
        f'access_key = "{settings.access_key}"\nsecret_key = "{settings.secret_key}"\n'
    )
    command = [sys.executable, "-m", "kvobj.admin", "--json", "rebuild", "--remote", "--config", str(configuration)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    found = json.loads(done.stdout)
    return {"seconds": seconds, "inside": float(found["seconds"]), "objects": float(found["objects"])}


def measure(
    settings: RemoteSettings, directory: Path, arguments: argparse.Namespace, console: Console
) -> Sequence[Row]:
    """Rebuild as often as asked, each time on an empty disk and in the next lineage."""
    rounds: list[dict[str, float]] = []
    for index in range(arguments.rounds):
        place = directory / f"node-{index}"
        place.mkdir()
        figures = rebuild(settings, place)
        if figures["objects"] != arguments.objects:
            raise RuntimeError(f"{figures['objects']:.0f} of {arguments.objects} objects came back")
        console.print(f"round {index + 1}: {figures['seconds']:.1f} s, {figures['inside']:.1f} s of them at work")
        rounds.append(figures)
    figures = medians(rounds)
    return [
        Row(
            name=f"rebuild of {arguments.objects:,} objects, {what}",
            value=arguments.objects / figures[key],
            limit=TARGET_PER_SECOND,
            limit_name="asked for",
            unit="objects/s",
            target=target,
        )
        for what, key, target in (("the whole command", "seconds", 1.0), ("without its start", "inside", None))
    ]


def main() -> int:
    """Start radosgw, write a store, rebuild it, report."""
    parser = Parser(__doc__)
    parser.add_argument("--objects", type=one_or_more, default=100_000)
    parser.add_argument("--rounds", type=one_or_more, default=3)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    require_radosgw()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-bench-")))
        remote = stack.enter_context(gateway(directory / "r", store_bytes=6 * 2**30))
        settings = remote.settings()
        uvloop.run(prepare(settings, directory, arguments.objects, console))
        rows = measure(settings, directory, arguments, console)
    return report("a node made again from radosgw in memory", rows, json_path=arguments.json, plot_path=arguments.plot)


if __name__ == "__main__":
    run_tool(main)
