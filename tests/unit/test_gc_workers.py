"""The workers beside the collector: expiry, recall, reconcile, sweep, kept states; over the catalog's drivers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fakes import ManualClock
from gc_world import CHUNK, LOG, GcWorld, open_catalog

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import Durability, ObjectRow, PartRow, UploadRow
from kvobj.clock import boot_ms
from kvobj.errors import (
    ConflictError,
    InvalidRequestError,
    NoSuchBucketError,
    NoSuchNamespaceError,
    TierUnavailableError,
)
from kvobj.gc.expiry import Expiry
from kvobj.gc.home_chunks import HomeChunks
from kvobj.gc.home_loading import HomeLoading
from kvobj.gc.lost import LostObjects
from kvobj.gc.pacing import Pace
from kvobj.gc.recall import Recall, RecallQuery, RecallReport
from kvobj.gc.reconcile import Reconcile
from kvobj.gc.state_files import StateFiles
from kvobj.gc.sweep import Sweep
from kvobj.policy.chunk_policy import CacheTier, chunk_name

USER = "root"


@pytest.fixture(params=["memory", "lmdb"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GcWorld]:
    clock = ManualClock()
    async with open_catalog(request.param, tmp_path, clock) as catalog:
        world = GcWorld(catalog, clock)
        await world.open()
        yield world


# -- expiry --------------------------------------------------------------------------------------------------------------


async def open_pin(world: GcWorld, key: str, *, ttl_ms: int) -> bytes:
    now_ms = boot_ms(world.clock)
    leases = world.catalog.leases
    session = await leases.open_session(user=USER, bucket="cache", holder="h", ttl_ms=ttl_ms, now_boot_ms=now_ms)
    await leases.pin_tails(session.id, [key], user=USER, bucket="cache", now_boot_ms=now_ms)
    return session.id


async def test_a_session_whose_holder_has_gone_ends_half_a_second_after_its_time(world: GcWorld) -> None:
    await world.chain("a", 2)
    await open_pin(world, "a1", ttl_ms=1000)
    freed: list[int] = []
    expiry = Expiry(catalog=world.catalog, clock=world.clock, on_freed=lambda: freed.append(1), log=LOG)
    world.clock.advance(1.4)
    assert await expiry.step() == 0
    assert freed == []
    world.clock.advance(0.2)
    assert await expiry.step() == 1
    assert freed == [1]
    assert world.catalog.leases.usage().pins == 0
    assert expiry.expired_sessions == 1


async def test_a_jump_of_the_wall_clock_ends_no_session(world: GcWorld) -> None:
    await world.chain("a", 2)
    await open_pin(world, "a1", ttl_ms=1000)
    expiry = Expiry(catalog=world.catalog, clock=world.clock, on_freed=lambda: None, log=LOG)
    world.clock.jump_wall(3600)
    assert await expiry.step() == 0
    assert world.catalog.leases.usage().pins == 1


# -- recall --------------------------------------------------------------------------------------------------------------


async def recalled(
    world: GcWorld, query: RecallQuery, *, dry_run: bool = False
) -> tuple[RecallReport, list[ObjectRow]]:
    removed: list[ObjectRow] = []
    recall = Recall(catalog=world.catalog, clock=world.clock, pace=world.pace, on_removed=removed.extend)
    assert (await recall.start(query, dry_run=dry_run)).state == "running"
    return await recall.finished(), removed


async def test_a_recall_by_writer_takes_descendants_of_others_too(world: GcWorld) -> None:
    await world.commit("good", parent="")
    await world.commit("bad", parent="", owner="mallory")
    await world.commit("child-of-bad", parent="bad")
    report, removed = await recalled(world, RecallQuery("cache", writer="mallory"))
    assert (report.state, report.chunks, report.size_bytes) == ("done", 2, 2 * CHUNK)
    assert {row.key for row in removed} == {"bad", "child-of-bad"}
    assert await world.live() == {"good"}


async def test_a_recall_by_time_is_half_open(world: GcWorld) -> None:
    start = world.clock.now_ms()
    for number in range(4):
        await world.commit(f"k{number}")
        world.clock.advance(1)
    report, _ = await recalled(world, RecallQuery("cache", from_ms=start + 1000, to_ms=start + 3000))
    assert report.chunks == 2
    assert await world.live() == {"k0", "k3"}


async def test_a_dry_run_of_a_recall_changes_nothing(world: GcWorld) -> None:
    await world.commit("mine/1", namespace="mine")
    await world.commit("other", namespace="")
    with pytest.raises(NoSuchNamespaceError):
        await recalled(world, RecallQuery("cache", namespace="mine"), dry_run=True)
    await world.catalog.namespaces.declare(
        NamespaceRow("cache", "mine", b"{}", b"f", b"", b"r", "foreign", 256, None, None, 0, "main")
    )
    report, removed = await recalled(world, RecallQuery("cache", namespace="mine"), dry_run=True)
    assert (report.state, report.dry_run, report.chunks, removed) == ("done", True, 1, [])
    assert len(await world.live()) == 2
    by_default, _ = await recalled(world, RecallQuery("cache", namespace="default"), dry_run=True)
    assert by_default.chunks == 1


async def test_a_recall_hides_a_pinned_chunk_and_keeps_its_bytes(world: GcWorld) -> None:
    await world.chain("a", 2)
    session = await open_pin(world, "a1", ttl_ms=60_000)
    await recalled(world, RecallQuery("cache"))
    assert await world.live() == set()
    while await world.reaper.reap_batch():
        pass
    assert len(world.home.sizes) == 2
    await world.catalog.leases.close_session(session, user=USER, bucket="cache")
    await world.collector.collect()
    while await world.reaper.reap_batch():
        pass
    assert world.home.sizes == {}


async def test_a_recall_beside_requests_keeps_to_a_rate_and_alone_to_none(world: GcWorld) -> None:
    for number in range(1000):
        await world.commit(f"k{number:03}")
    world.pace.note_request()
    report, removed = await recalled(world, RecallQuery("cache"))
    assert (report.state, report.chunks, len(removed)) == ("done", 1000, 1000)
    # 1,000 chunks at four times the collector's 1,000 a second.
    assert sum(world.slept) == pytest.approx(0.25)
    assert len([seconds for seconds in world.slept if seconds]) == 5
    for number in range(1000):
        await world.commit(f"l{number:03}")
    world.clock.advance(1)
    world.slept.clear()
    await recalled(world, RecallQuery("cache"))
    assert (sum(world.slept), await world.live()) == (0, set())


async def test_a_dry_run_beside_requests_keeps_to_a_rate_too(world: GcWorld) -> None:
    for number in range(1000):
        await world.commit(f"k{number:03}")
    world.pace.note_request()
    report, removed = await recalled(world, RecallQuery("cache"), dry_run=True)
    assert (report.state, report.chunks, removed) == ("done", 1000, [])
    # 1,000 rows looked at, twenty for each of the collector's 1,000 chunks a second.
    assert sum(world.slept) == pytest.approx(0.05)


@pytest.mark.parametrize("made_anew", ["bucket", "namespace"])
async def test_a_recall_leaves_alone_what_is_made_anew_under_the_names_that_it_began_with(
    world: GcWorld, made_anew: str
) -> None:
    def declared(root: bytes) -> NamespaceRow:
        return NamespaceRow("cache", "mine", b"{}", b"f", b"", root, "foreign", 256, None, None, 0, "main")

    keys = [f"mine/{number}" for number in range(10)]
    catalog = world.catalog
    await catalog.namespaces.declare(declared(b"r"))
    for key in keys:
        await world.commit(key, namespace="mine")
    redone: list[bool] = []

    async def passed(_seconds: float) -> None:
        """Between two pages: everything goes, and the last key is stored in what has its name next."""
        if redone:
            return
        redone.append(True)
        assert await world.live() == set(keys[4:])
        await catalog.delete("cache", keys, now_ms=0)
        if made_anew == "bucket":
            bucket = await catalog.bucket("cache")
            assert bucket is not None
            await catalog.delete_bucket("cache")
            await catalog.create_bucket(msgspec.structs.replace(bucket, created_ms=bucket.created_ms + 1))
        else:
            await catalog.namespaces.remove("cache", "mine")
            await catalog.namespaces.declare(declared(b"s"))
        await world.commit(keys[-1], namespace="mine")

    pace = Pace(world.clock, chunks_per_second=20, sleep=passed)  # four chunks a page
    pace.note_request()
    recall = Recall(catalog=catalog, clock=world.clock, pace=pace, on_removed=lambda _: None)
    await recall.start(RecallQuery("cache", namespace="mine" if made_anew == "namespace" else None), dry_run=False)
    report = await recall.finished()
    assert redone
    assert (report.state, report.chunks) == ("failed", 4)
    assert await world.live() == {keys[-1]}


async def test_only_one_recall_runs_and_only_over_chunks(world: GcWorld) -> None:
    for number in range(3):
        await world.commit(f"k{number}")
    recall = Recall(catalog=world.catalog, clock=world.clock, pace=world.pace, on_removed=lambda _: None)
    with pytest.raises(NoSuchBucketError):
        await recall.start(RecallQuery("none"), dry_run=False)
    with pytest.raises(InvalidRequestError):
        await recall.start(RecallQuery("objects"), dry_run=False)
    await recall.start(RecallQuery("cache"), dry_run=True)
    with pytest.raises(ConflictError):
        await recall.start(RecallQuery("cache"), dry_run=False)
    assert (await recall.cancel()).state in ("cancelled", "done")
    assert len(await world.live()) == 3


# -- reconcile -----------------------------------------------------------------------------------------------------------


async def test_a_chunk_without_bytes_goes_with_its_descendants_and_an_object_stays_to_be_seen(world: GcWorld) -> None:
    rows = await world.chain("a", 4)
    lost_object = await world.commit("o", bucket="objects")
    for row in (rows[1], lost_object):
        await world.home.delete([*[blob_id for blob_id in world.home.sizes if blob_id == row.blobs[0].blob_id]])
    lost = LostObjects(
        catalog=world.catalog, clock=world.clock, on_removed=world.collector.removed, log=logging.getLogger("quiet")
    )
    reconcile = Reconcile(catalog=world.catalog, tiers=world.home, lost=lost, clock=world.clock)
    assert await reconcile.run() == 2
    assert await world.live() == {"a0"}
    assert (lost.dropped_chunks, len(lost)) == (1, 1)
    assert (await world.catalog.lookup("objects", ["o"])) == [lost_object]
    assert await reconcile.run() == 1  # still there to be seen
    removal = await world.catalog.history.why_removed("cache", "a2")
    assert removal is not None
    assert (removal.reason, removal.when_ms) == ("lost", world.clock.now_ms())


async def test_a_tier_that_does_not_answer_loses_nothing(world: GcWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.chain("a", 2)

    async def fails(_: object) -> list[object]:
        raise TierUnavailableError("no answer")

    monkeypatch.setattr(world.home, "missing", fails)
    lost = LostObjects(catalog=world.catalog, clock=world.clock, on_removed=world.collector.removed, log=LOG)
    with pytest.raises(TierUnavailableError):
        await Reconcile(catalog=world.catalog, tiers=world.home, lost=lost, clock=world.clock).run()
    assert len(await world.live()) == 2


# -- sweep ---------------------------------------------------------------------------------------------------------------


async def test_a_chunk_whose_parts_never_came_together_is_ended_by_the_sweep(world: GcWorld) -> None:
    async def nothing() -> None:
        return

    upload = UploadRow("cache", "k", "u", world.clock.now_ms(), USER, Durability.LOCAL, group_parts=2)
    await world.catalog.create_upload(upload)
    row = await world.commit("source")
    part = PartRow("u", 1, row.blobs, CHUNK, "e", world.clock.now_ms())
    await world.catalog.put_part("cache", "k", part, now_ms=world.clock.now_ms())
    sweep = Sweep(
        catalog=world.catalog,
        tiers=(world.home,),
        reaper=world.reaper,
        being_written=lambda _: False,
        clock=world.clock,
        upload_ttl_seconds=600,
        interval_seconds=10,
        compact=nothing,
        log=LOG,
    )
    assert (await sweep.sweep(leftovers=False)).ended_uploads == 0
    world.clock.jump_wall(3600)
    assert (await sweep.sweep(leftovers=False)).ended_uploads == 0, "it is no older for a wall clock that jumped"
    world.clock.advance(601)
    assert (await sweep.sweep(leftovers=False)).ended_uploads == 1
    assert await world.catalog.upload("cache", "k", "u") is None


# -- what is kept over a stop --------------------------------------------------------------------------------------------


class Keeper:
    def __init__(self, state: bytes) -> None:
        self.state = state

    def save(self) -> bytes:
        return self.state

    def load(self, state: bytes) -> None:
        self.state = state


async def on_thread(work: object, /, *arguments: object) -> object:
    assert callable(work)
    return await asyncio.to_thread(work, *arguments)


async def test_states_come_back_after_a_stop_and_a_missing_file_is_no_error(tmp_path: Path) -> None:
    kept = Keeper(b"tables")
    files = StateFiles(tmp_path, {"policy": kept}, run=on_thread, log=LOG)  # type: ignore[arg-type]
    await files.load()
    assert kept.state == b"tables"
    files.start()
    await files.aclose()
    fresh = Keeper(b"")
    await StateFiles(tmp_path, {"policy": fresh, "scrub": Keeper(b"")}, run=on_thread, log=LOG).load()  # type: ignore[arg-type]
    assert fresh.state == b"tables"
    assert os.listdir(tmp_path) == ["policy"]  # noqa: PTH208 - names, without a file system's worth of paths


async def test_a_state_that_cannot_be_written_is_only_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = StateFiles(tmp_path / "nowhere", {"policy": Keeper(b"x")}, run=on_thread, log=LOG)  # type: ignore[arg-type]
    await files.save()
    assert "policy could not be written" in caplog.text


# -- what lies at home ---------------------------------------------------------------------------------------------------


async def test_after_a_start_chains_expire_from_their_ends_however_few_are_named_at_once(world: GcWorld) -> None:
    rows = await world.chain("a", 12)
    chunks = HomeChunks(world.policy, tracks_use=True)
    await HomeLoading(chunks, boot_ms=lambda: boot_ms(world.clock)).run(world.catalog)
    found = chunks.unused_since(boot_ms(world.clock) + 5000, eligible=lambda _: True, limit=3)
    assert [chunk.chunk.key for chunk in found] == [row.key for row in rows[:-4:-1]]


async def test_expired_chunks_are_named_children_first_whatever_their_order_of_use(world: GcWorld) -> None:
    rows = await world.chain("a", 3)
    chunks = HomeChunks(world.policy, tracks_use=True)
    for order, permuted in enumerate(itertools.permutations(rows)):
        for row in permuted:
            chunks.add(row, boot_ms=order * 1000)
        found = chunks.unused_since(1_000_000, eligible=lambda _: True, limit=10)
        assert [chunk.chunk.key for chunk in found] == ["a2", "a1", "a0"]


async def test_a_chunk_that_stays_after_all_gives_way_to_a_newer_one_under_its_key(world: GcWorld) -> None:
    chunks = HomeChunks(world.policy, tracks_use=False)
    old = await world.commit("a")
    chunks.add(old, boot_ms=0)
    taken = chunks.take(chunk_name("cache", "a"))
    assert taken is not None
    assert not world.policy.holds(taken.name, CacheTier.NVME)
    newer = msgspec.structs.replace(old, blobs=(msgspec.structs.replace(old.blobs[0], blob_id=b"n" * 16),))
    chunks.add(newer, boot_ms=0)
    chunks.put_back(taken, boot_ms=0)
    known = chunks.chunk(taken.name)
    assert known is not None
    assert known.chunk.blob_id == b"n" * 16
