"""kill -9 in the middle of uploads to the remote, again and again: what was acknowledged as `shared` outlives process and node.

Looked at twice each time: on the remote alone while the node is dead, and through the node once it is back. Then the queue drains,
and the next sweep leaves nothing behind: no unfinished multipart upload, no blob that no row names. At the end the node is lost
with its disk, and a new one is made from the remote. `KVOBJ_UPLOAD_KILLS` sets how often (5; `make toxics`: 100),
`KVOBJ_CRASH_SEED` what the writers do; the instant of each kill is random on purpose.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from shared_load import SharedLoad, seen_from_remote
from toxics import Operation, Toxic

KILLS = int(os.environ.get("KVOBJ_UPLOAD_KILLS", "5"))
SEED = int(os.environ.get("KVOBJ_CRASH_SEED", "20240229"))
RECORD = os.environ.get("KVOBJ_TOXIC_RECORD")
BUCKET = "kept"
# Uploads take a while, so that a kill meets them: every third request with a body stops in its middle.
SLOW = Plan(
    (Toxic.STALL_BODY,),
    rate=0.33,
    seed=SEED,
    operations=frozenset({Operation.PUT, Operation.PUT_PART}),
    stall_seconds=0.2,
)


@dataclass(slots=True)
class Record:
    """What the loop did: the figures that a run is judged by."""

    seed: int
    kills: int = 0
    shared: int = 0
    refused: int = 0
    operations: int = 0
    queued_after_kills: int = 0
    uploads_left_by_kills: int = 0
    blobs_left_by_kills: int = 0
    objects_read: int = 0
    objects_after_the_loss: int = 0
    slowest_start_seconds: float = 0.0


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


def node_settings(store: RemoteStore) -> ServerSettings:
    return ServerSettings(
        dram_bytes=128 * MIB,
        nvme_bytes=512 * MIB,
        buckets=(BucketSetting(BUCKET, "ordinary", "local"),),
        remote=store.tier(part_size='"5 MiB"', stall_timeout='"2 s"'),
        sections={"log": {"requests": "false"}, "gc": {"sweep_interval": '"500 ms"', "reconcile_interval": '"1 s"'}},
        workers=1,
    )


def queued(server: ServerProcess) -> int:
    return int(server.status()["remote"]["queue"]["queued_objects"])


def test_what_was_acknowledged_as_shared_outlives_kills_in_mid_upload_and_the_loss_of_the_node(
    kvobj_remote: RemoteStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    record = Record(SEED)
    with ServerProcess(tmp_path / "node", node_settings(kvobj_remote.behind(proxy.port))) as server:
        load = SharedLoad(server, BUCKET, seed=SEED, writers=12, large_share=0.12)
        for _ in range(KILLS):
            kill_in_mid_upload(server, load, proxy, chance)
            load.check_remote(seen_from_remote(kvobj_remote, BUCKET))  # nobody is there but the remote
            assert load.violations == []
            record.uploads_left_by_kills += len(kvobj_remote.uploads())
            before = len(kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/"))
            server.start()
            record.queued_after_kills += queued(server)
            record.slowest_start_seconds = max(record.slowest_start_seconds, round(server.start_seconds, 3))
            load.read_everything()
            load.check_listing()
            assert load.violations == []
            record.objects_read += len(load.holdings)
            settle(server, load, kvobj_remote)
            load.now_shared()
            record.blobs_left_by_kills += max(before - len(kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/")), 0)
            record.kills += 1
        kill_in_mid_upload(server, load, proxy, chance)
        lose_and_rebuild(server)
        load.lose_what_was_local()
        server.start()
        record.objects_after_the_loss = len(seen_from_remote(kvobj_remote, BUCKET, with_bytes=False))
        load.read_everything()
        load.check_listing()
        assert load.violations == []
        settle(server, load, kvobj_remote)
        counts = load.counts
        record.shared, record.operations = counts.shared, counts.operations
        record.refused = sum(counts.refused.values())
        tell(record)
        assert counts.shared > 5 * KILLS
        assert record.uploads_left_by_kills + record.queued_after_kills > 0, "no kill met an upload"


def kill_in_mid_upload(server: ServerProcess, load: SharedLoad, proxy: FaultProxy, chance: random.Random) -> None:
    proxy.plan = SLOW
    uploads = proxy.requests[Operation.PUT] + proxy.requests[Operation.PUT_PART]
    load.start()
    wait_until(
        lambda: proxy.requests[Operation.PUT] + proxy.requests[Operation.PUT_PART] > uploads + 10,
        timeout_seconds=60,
        what="uploads",
        pause_seconds=0.01,
    )
    # Not a wait for anything: the kill comes at a random instant.
    threading.Event().wait(chance.uniform(0.0, 1.0))
    server.kill()
    load.join()
    proxy.plan = NOTHING


def lose_and_rebuild(server: ServerProcess) -> None:
    """The machine is gone with its disk and its memory; a new one with the same configuration asks the remote what there was."""
    shutil.rmtree(server.data)
    for leftover in server.shared_memory.parent.glob(server.shared_memory.name + "*"):
        shutil.rmtree(leftover)
    command = [
        sys.executable,
        "-m",
        "kvobj.admin",
        "--json",
        "rebuild",
        "--remote",
        "--config",
        str(server.configuration),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def settle(server: ServerProcess, load: SharedLoad, store: RemoteStore) -> None:
    """Wait until the queue is empty and the sweep has taken away what no row names; then all of it is as it should be."""
    wait_until(lambda: queued(server) == 0, timeout_seconds=60, what="the queue to drain")

    def is_clean() -> bool:
        return not store.uploads() and not load.compared_with(seen_from_remote(store, BUCKET, with_bytes=False))

    try:
        wait_until(is_clean, timeout_seconds=30, what="the sweep", pause_seconds=0.2)
    except TimeoutError:
        assert store.uploads() == []
        assert load.compared_with(seen_from_remote(store, BUCKET, with_bytes=False)) == ""


def tell(record: Record) -> None:
    told = json.dumps(asdict(record))
    print(told)  # noqa: T201 - the run's record, shown by pytest -s
    if RECORD is not None:
        Path(RECORD).mkdir(parents=True, exist_ok=True)
        (Path(RECORD) / "kills.json").write_text(told)
