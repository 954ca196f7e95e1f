"""kill -9 under concurrent writers, again and again: nothing acknowledged is lost in any class, and nothing leaks.

`KVOBJ_CRASH_CYCLES` sets the number of kills (20 by default, 200 for the full run), `KVOBJ_CRASH_SEED` what the writers do.
The instant of each kill is random on purpose; the record names it, the journals say what was open then.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crash_model import ABSENT, Model
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CYCLES = int(os.environ.get("KVOBJ_CRASH_CYCLES", "20"))
SEED = int(os.environ.get("KVOBJ_CRASH_SEED", "20240229"))
BUCKETS = (
    BucketSetting("kv-memory", "kv", "memory"),
    BucketSetting("kv-local", "kv", "local"),
    BucketSetting("plain-local", "ordinary", "local"),
)
KEYS_A_WRITER = 10
WRITERS = (*BUCKETS, *BUCKETS)
TESTS = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Record:
    """What the loop did: the figures that a run is judged by."""

    seed: int
    cycles: int = 0
    acknowledged: int = 0
    refused: int = 0
    in_flight: int = 0
    objects_read: int = 0
    reads_by_tier: dict[str, int] = field(default_factory=dict)
    slowest_start_seconds: float = 0.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=192 * MIB,
        nvme_bytes=2048 * MIB,
        buckets=BUCKETS,
        sections={"log": {"requests": "false"}, "gc": {"upload_ttl": '"5 s"'}},
    )
    with ServerProcess(tmp_path, settings) as running:
        yield running


def start_writers(server: ServerProcess, directory: Path, cycle: int) -> list[tuple[subprocess.Popen[bytes], Path]]:
    credentials = server.credentials()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "crash")])}
    writers = []
    for index, bucket in enumerate(WRITERS):
        journal = directory / f"journal-{index}"
        journal.unlink(missing_ok=True)
        assignment = {
            "host": server.host,
            "port": server.port,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "journal": str(journal),
            "seed": SEED + cycle * 100 + index,
            "first_version": (cycle * len(WRITERS) + index) * 1_000_000,
            "bucket": bucket.name,
            "keys": [f"writer-{index}/key-{number}" for number in range(KEYS_A_WRITER)],
        }
        command = [sys.executable, str(TESTS / "crash" / "crash_writer.py"), json.dumps(assignment)]
        writers.append((subprocess.Popen(command, env=environment), journal))
    return writers


def lines_written(journals: list[Path]) -> int:
    return sum(journal.read_bytes().count(b"\n") for journal in journals if journal.exists())


def write_until_killed(server: ServerProcess, directory: Path, cycle: int, chance: random.Random, model: Model) -> None:
    writers = start_writers(server, directory, cycle)
    journals = [journal for _, journal in writers]
    try:
        wait_until(
            lambda: all(journal.exists() and journal.stat().st_size for journal in journals),
            timeout_seconds=60,
            what="every writer at work",
            pause_seconds=0.01,
        )
        # Not a wait for anything: the kill comes at a random instant.
        threading.Event().wait(chance.uniform(0.0, 1.0))
    finally:
        server.kill()
        for process, _ in writers:
            process.wait(60)
    for journal in journals:
        model.absorb(journal)


def check_everything(server: ServerProcess, model: Model, record: Record) -> int:
    """Read every key that was ever written; the number of memory-class objects that were served from dram."""
    warm = 0
    with server.raw() as raw:
        for (bucket, key), history in model.histories.items():
            reply = raw.request("GET", f"/{bucket}/{key}")
            if reply.status == 404:
                assert reply.code == "NoSuchKey"
                history.observe(ABSENT)
                continue
            assert reply.status == 200, (bucket, key, reply.status, reply.code, history.possible)
            history.observe(history.identify(key, reply.body))
            tier = reply.headers.get("x-kvobj-tier", "unnamed")
            record.objects_read += 1
            record.reads_by_tier[tier] = record.reads_by_tier.get(tier, 0) + 1
            warm += bucket == "kv-memory" and tier == "dram"
    return warm


def check_listings(server: ServerProcess, model: Model) -> None:
    with server.raw() as raw:
        for bucket in BUCKETS:
            reply = raw.request("GET", f"/{bucket.name}", query={"list-type": "2"}, payload=None)
            listed = {piece.partition("</Key>")[0] for piece in reply.body.decode().split("<Key>")[1:]}
            known = {
                key
                for (name, key), history in model.histories.items()
                if name == bucket.name and ABSENT not in history.possible
            }
            assert listed == known


def delete_everything(server: ServerProcess, model: Model) -> None:
    with server.raw() as raw:
        for bucket, key in model.histories:
            assert raw.request("DELETE", f"/{bucket}/{key}").status == 204
        for bucket_setting in BUCKETS:
            text = raw.request("GET", f"/{bucket_setting.name}", query={"uploads": ""}, payload=None).body.decode()
            for piece in text.split("<Upload>")[1:]:
                key = piece.partition("<Key>")[2].partition("</Key>")[0]
                upload_id = piece.partition("<UploadId>")[2].partition("</UploadId>")[0]
                reply = raw.request("DELETE", f"/{bucket_setting.name}/{key}", query={"uploadId": upload_id})
                assert reply.status in {204, 404}  # it may have expired meanwhile
            text = raw.request("GET", f"/{bucket_setting.name}", query={"uploads": ""}, payload=None).body.decode()
            assert "<Upload>" not in text
    server.wait_for_occupancy(dict.fromkeys(server.occupancy(), 0), timeout_seconds=60)


def test_kill_under_concurrent_writers_loses_nothing_acknowledged_and_leaks_nothing(
    server: ServerProcess, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    model = Model(kv_buckets=frozenset(bucket.name for bucket in BUCKETS if bucket.kind == "kv"))
    record = Record(SEED)
    for cycle in range(CYCLES):
        write_until_killed(server, tmp_path, cycle, chance, model)
        server.start()
        live_memory = sum(
            bucket == "kv-memory" and ABSENT not in history.possible for (bucket, _), history in model.histories.items()
        )
        warm = check_everything(server, model, record)
        assert warm > 0 or live_memory == 0, f"dram was cold after restart {cycle}: {live_memory} objects lived in it"
        check_listings(server, model)
        record.cycles += 1
        record.slowest_start_seconds = max(record.slowest_start_seconds, server.start_seconds)
    record.acknowledged, record.refused, record.in_flight = model.acknowledged, model.refused, model.in_flight
    print(json.dumps(asdict(record)))  # noqa: T201 - the run's record, shown by pytest -s
    delete_everything(server, model)
    assert record.acknowledged > 10 * CYCLES
    assert record.in_flight > 0, "no kill met an operation in flight: the loop tests nothing"
