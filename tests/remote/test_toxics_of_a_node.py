"""A whole node behind the fault proxy, one toxic after the other: writers of class `shared`, and a model of what they may find.

Under each toxic: no acknowledgement that the remote does not bear out, no wrong byte, no object lost or seen twice, no 500, reads
of what is here as ever, no operation that outlasts its deadline. When it is off, everything written goes up by itself, and every
write succeeds. At the end the remote has each object once and nothing else. `KVOBJ_TOXIC_OPERATIONS` as in `test_toxics.py`: a
twentieth of it is done here under each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from shared_load import Counts, SharedLoad, seen_from_remote
from toxic_load import RATES
from toxics import Toxic

OPERATIONS = int(os.environ.get("KVOBJ_TOXIC_OPERATIONS", "1000")) // 20
SEED = int(os.environ.get("KVOBJ_TOXIC_SEED", "20240229"))
RECORD = os.environ.get("KVOBJ_TOXIC_RECORD")
BUCKET = "kept"
DEADLINE_SECONDS = 5.0
SLACK_SECONDS = 5.0
# Reads here are of what is here, so that wrong bytes of a GET are no matter of theirs: test_remote_reads.py has those.
# An outage is met by whatever is under way; there are fewer requests here than in test_toxics.py.
NODE_RATES = RATES | {Toxic.REFUSED: 0.1}
TOXICS = [toxic for toxic in Toxic if toxic not in {Toxic.SKEWED, Toxic.WRONG_BYTE_DOWN}]


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
def node(kvobj_remote: RemoteStore, proxy: FaultProxy, tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=192 * MIB,
        nvme_bytes=1024 * MIB,
        buckets=(BucketSetting(BUCKET, "ordinary", "local"),),
        remote=kvobj_remote.behind(proxy.port).tier(
            part_size='"5 MiB"',
            connect_timeout='"1 s"',
            request_timeout='"1500 ms"',
            operation_timeout='"3 s"',
            stall_timeout='"150 ms"',
            share_timeout=f'"{DEADLINE_SECONDS} s"',
        ),
        sections={"log": {"requests": "false"}, "gc": {"sweep_interval": '"500 ms"', "reconcile_interval": '"2 s"'}},
        workers=1,
    )
    with ServerProcess(tmp_path / "node", settings) as running:
        yield running


def test_class_shared_keeps_its_word_under_every_toxic(
    kvobj_remote: RemoteStore, node: ServerProcess, proxy: FaultProxy
) -> None:
    load = SharedLoad(node, BUCKET, seed=SEED, writers=16, keys_each=6)
    for toxic in TOXICS:
        told = under(toxic, load, node, proxy)
        tell(toxic, told)
        assert load.violations == [], f"under {toxic.value}"
        assert told["hit_writes"] >= told["writes"] / 5, f"too few writes met {toxic.value}"
    load.read_everything()
    load.check_listing()
    load.now_shared()
    load.check_remote(seen_from_remote(kvobj_remote, BUCKET))
    assert load.violations == []
    try:
        wait_until(lambda: is_clean(load, kvobj_remote), timeout_seconds=30, what="the sweep")
    except TimeoutError:
        assert kvobj_remote.uploads() == []
        assert load.compared_with(seen_from_remote(kvobj_remote, BUCKET, with_bytes=False)) == "", node.log_tail()


def under(toxic: Toxic, load: SharedLoad, node: ServerProcess, proxy: FaultProxy) -> dict[str, float]:
    """The load under one toxic, then the time that it takes until all is well again. What was done, in figures."""
    load.counts = counts = Counts()
    load.windows.clear()
    since = len(proxy.injections)
    proxy.outages.clear()
    proxy.plan = Plan(
        (toxic,),
        rate=NODE_RATES[toxic],
        seed=SEED,
        stall_seconds=0.4,
        outage_seconds=0.15,
        trickle_bytes_per_second=6000.0,
        retry_after_seconds=0,
    )
    load.run(OPERATIONS)
    proxy.plan = NOTHING
    hits = load.hits(proxy, since)
    writes = len(load.windows)
    if counts.slowest_seconds > DEADLINE_SECONDS + SLACK_SECONDS:
        load.violations.append(f"an operation took {counts.slowest_seconds} s")
    began = time.monotonic()
    wait_until(lambda: is_drained(node), timeout_seconds=30, what=f"the queue to drain after {toxic.value}")
    drained_seconds = round(time.monotonic() - began, 3)
    before = (dict(counts.refused), counts.broken)
    load.run(16)
    if before != (counts.refused, counts.broken):
        load.violations.append(f"failed when all was well: {counts.refused}, {counts.broken} broken; before: {before}")
    return {
        "operations": counts.operations,
        "writes": writes,
        "hit_writes": hits,
        "injected": len(proxy.injections) - since,
        "shared": counts.shared,
        "refused": sum(counts.refused.values()),
        "not_tried": counts.not_tried,
        "drained_seconds": drained_seconds,
        "slowest_seconds": counts.slowest_seconds,
    }


def is_drained(node: ServerProcess) -> bool:
    remote = node.status()["remote"]
    return not remote["queue"]["queued_objects"] and not remote["manifests"]["untold_records"]


def is_clean(load: SharedLoad, store: RemoteStore) -> bool:
    lying = seen_from_remote(store, BUCKET, with_bytes=False)
    return load.compared_with(lying) == "" and not store.uploads()


def tell(toxic: Toxic, told: dict[str, float]) -> None:
    whole = {"toxic": toxic.value, "seed": SEED, "rate": NODE_RATES[toxic], **told}
    print(json.dumps(whole))  # noqa: T201 - shown by pytest -s
    if RECORD is not None:
        Path(RECORD).mkdir(parents=True, exist_ok=True)
        (Path(RECORD) / f"node-{toxic.name.lower()}.json").write_text(json.dumps(whole))
