"""What every catalog driver must do for a node with a remote tier: `remote_protocol` inside the catalog's own steps.

A driver's tests subclass `RemoteContract` and give the `catalog` fixture, with a remote, prepared, and with `chunks`, a KV bucket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
from catalog_contract import BUCKET, EPOCH, found, part, put, row, upload
from chain_contract import KV as CHUNKS
from chain_contract import pin, unpin

from kvobj.catalog.log_entries import (
    BucketRemoved,
    GoneBuckets,
    LogEntry,
    NamespaceRemoved,
    RowRemoved,
    UserRemoved,
    decode_entry,
)
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, LossyCopy, ObjectRow, ObjectState, UserRow
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate, RemoteRule
from kvobj.errors import BucketExistsError, BusyError
from kvobj.ids import make_blob_id


def shared(given: ObjectRow) -> ObjectRow:
    return msgspec.structs.replace(given, durability=Durability.SHARED)


def told(catalog: Catalog, after: int = 0) -> list[LogEntry]:
    """What the outbox says."""
    entries = [decode_entry(entry.content) for entry in catalog.outbox.entries(after, limit=10**6)]
    return [entry for entry in entries if entry is not None]


def told_of(catalog: Catalog, key: str, after: int = 0) -> list[LogEntry]:
    """What it says of one key."""
    return [entry for entry in told(catalog, after) if isinstance(entry, ObjectRow | RowRemoved) and entry.key == key]


def waiting(catalog: Catalog) -> list[tuple[str, QueueReason]]:
    return [(entry.key, entry.reason) for entry in catalog.remote_queue.entries()]


async def make_bucket(
    catalog: Catalog, name: str, *, rule: RemoteRule, durability: Durability = Durability.LOCAL
) -> None:
    await catalog.create_bucket(BucketRow(name, BucketKind.ORDINARY, "main", 1, durability, remote=rule))


class Queueing:
    async def test_a_row_goes_into_the_queue_with_its_commit_if_it_is_asked_for(self, catalog: Catalog) -> None:
        outcome = await catalog.commit(row("k", 1, size_bytes=7), mode=CommitMode.REPLACE, now_ms=5, to_remote=True)
        (entry,) = catalog.remote_queue.entries()
        assert (entry.bucket, entry.key, entry.blob_id, entry.size_bytes) == (BUCKET, "k", make_blob_id(EPOCH, 1), 7)
        assert (entry.since_ms, entry.reason, entry.sequence) == (5, QueueReason.SHARED, outcome.row.sequence)
        assert entry.is_of(outcome.row)
        assert catalog.remote_queue.find(outcome.row) == entry
        totals = catalog.remote_queue.totals
        assert (totals.objects, totals.size_bytes, totals.oldest_ms) == (1, 7, 5)

    @pytest.mark.parametrize(
        ("rule", "durability", "reason"),
        [
            (RemoteRule.ALWAYS, Durability.LOCAL, QueueReason.ALWAYS),
            (RemoteRule.NEVER, Durability.SHARED, QueueReason.SHARED),
            (RemoteRule.ALWAYS, Durability.SHARED, QueueReason.SHARED),
            (RemoteRule.NEVER, Durability.LOCAL, None),
            (RemoteRule.REUSED, Durability.LOCAL, None),
            (RemoteRule.EVICTED, Durability.LOCAL, None),
        ],
    )
    async def test_the_buckets_rule_and_class_queue_what_is_written(
        self, catalog: Catalog, rule: RemoteRule, durability: Durability, reason: QueueReason | None
    ) -> None:
        await make_bucket(catalog, "ruled", rule=rule, durability=durability)
        await put(catalog, row("k", 1, bucket="ruled"))
        assert waiting(catalog) == ([] if reason is None else [("k", reason)])

    async def test_a_row_of_class_memory_is_queued_when_it_is_written_down(self, catalog: Catalog) -> None:
        await make_bucket(catalog, "ruled", rule=RemoteRule.ALWAYS)
        in_memory = await put(catalog, row("k", 1, bucket="ruled", durability=Durability.MEMORY))
        assert waiting(catalog) == []
        assert await catalog.raise_durability([msgspec.structs.replace(in_memory, durability=Durability.LOCAL)]) == [
            True
        ]
        assert waiting(catalog) == [("k", QueueReason.ALWAYS)]
        assert catalog.remote_queue.totals.oldest_ms == in_memory.modified_ms

    async def test_a_refused_commit_queues_nothing(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1))
        outcome = await catalog.commit(row("k", 2), mode=CommitMode.FIRST_WRITER_WINS, now_ms=5, to_remote=True)
        assert outcome.existed
        assert waiting(catalog) == []

    async def test_chains_are_queued_parents_first(self, catalog: Catalog) -> None:
        rows = [
            msgspec.structs.replace(row(f"c{at}", at + 1, bucket=CHUNKS), parent="" if at == 0 else f"c{at - 1}")
            for at in range(3)
        ]
        await catalog.commit_chain(rows, now_ms=5, to_remote=True)
        assert waiting(catalog) == [(f"c{at}", QueueReason.SHARED) for at in range(3)]

    async def test_an_upload_of_class_shared_is_as_durable_as_a_local_one_and_its_object_is_queued(
        self, catalog: Catalog
    ) -> None:
        await catalog.create_upload(upload("u", durability=Durability.SHARED))
        await catalog.put_part(BUCKET, "k", part("u", 1, 7), now_ms=5)
        assert (await catalog.list_uploads(BUCKET)).rows[0].durability is Durability.SHARED
        outcome = await catalog.commit(row("k", 7), mode=CommitMode.REPLACE, upload_id="u", now_ms=5, to_remote=True)
        assert waiting(catalog) == [("k", QueueReason.SHARED)]
        assert await catalog.raise_durability([shared(outcome.row)]) == [True]

    async def test_rows_are_added_once_and_keep_their_place(self, catalog: Catalog) -> None:
        first, second = await put(catalog, row("a", 1)), await put(catalog, row("b", 2))
        assert await catalog.remote_queue.add([first, second], QueueReason.REUSED, now_ms=9) == [True, True]
        before = catalog.remote_queue.entries()
        assert await catalog.remote_queue.add([second, first], QueueReason.EVICTED, now_ms=11) == [True, True]
        assert catalog.remote_queue.entries() == before
        assert [entry.since_ms for entry in before] == [9, 9]

    async def test_only_live_rows_of_class_local_are_added(self, catalog: Catalog) -> None:
        in_memory = await put(catalog, row("m", 1, durability=Durability.MEMORY))
        gone = await put(catalog, row("g", 2))
        await catalog.delete(BUCKET, ["g"], now_ms=5)
        replaced = await put(catalog, row("r", 3))
        await put(catalog, row("r", 4))
        there = await put(catalog, shared(row("s", 5)))
        nowhere = row("k", 6, bucket="absent")
        rows = [in_memory, gone, replaced, there, nowhere]
        assert await catalog.remote_queue.add(rows, QueueReason.REUSED) == [False] * 5
        assert waiting(catalog) == []

    async def test_an_object_without_bytes_is_known_by_its_commit(self, catalog: Catalog) -> None:
        one = await put(catalog, row("empty", size_bytes=0))
        assert await catalog.remote_queue.add([one], QueueReason.SHARED) == [True]
        other = await put(catalog, row("empty", size_bytes=0))
        assert await catalog.remote_queue.add([one], QueueReason.SHARED) == [False]
        assert await catalog.remote_queue.add([other], QueueReason.SHARED) == [True]
        assert [entry.is_of(other) for entry in catalog.remote_queue.entries()] == [True]
        assert await catalog.raise_durability([shared(other)]) == [True]
        assert catalog.remote_queue.entries() == []

    async def test_entries_can_be_removed(self, catalog: Catalog) -> None:
        for number, key in enumerate("abc", 1):
            await catalog.commit(row(key, number, size_bytes=number), mode=CommitMode.REPLACE, now_ms=5, to_remote=True)
        entries = catalog.remote_queue.entries()
        await catalog.remote_queue.remove([entries[0].position, entries[2].position, 12345])
        assert waiting(catalog) == [("b", QueueReason.SHARED)]
        assert catalog.remote_queue.totals.size_bytes == 2
        await catalog.remote_queue.remove([entries[0].position])
        assert catalog.remote_queue.totals.objects == 1

    async def test_an_entry_goes_with_what_removes_or_replaces_its_row_and_who_waits_is_called(
        self, catalog: Catalog
    ) -> None:
        ends = ("deleted", "dropped", "replaced", "memory", "tagged")
        for number, key in enumerate(ends, 1):
            given = row(key, number, size_bytes=number)
            await catalog.commit(given, mode=CommitMode.REPLACE, now_ms=5, to_remote=True)
        chunk = row("chunk", 6, bucket=CHUNKS, size_bytes=6)
        await catalog.commit(chunk, mode=CommitMode.FIRST_WRITER_WINS, now_ms=5, to_remote=True)
        calls: list[int] = []
        catalog.remote_queue.on_shorter = lambda: calls.append(catalog.remote_queue.totals.objects)
        await catalog.delete(BUCKET, ["deleted"], now_ms=5)
        await catalog.drop_rows([row("dropped", 2)])
        await put(catalog, row("replaced", 7))
        await catalog.delete(CHUNKS, ["chunk"], now_ms=5)
        over = await put(catalog, row("memory", 8, durability=Durability.MEMORY))
        await catalog.update_object(BUCKET, "tagged", ObjectUpdate(tags={"a": "b"}))
        assert calls == [5, 4, 3, 2]
        assert [key for key, _ in waiting(catalog)] == ["memory", "tagged"]
        await catalog.raise_durability([msgspec.structs.replace(over, durability=Durability.LOCAL)])
        assert (calls[4:], waiting(catalog)) == ([1], [("tagged", QueueReason.SHARED)])
        assert (catalog.remote_queue.totals.objects, catalog.remote_queue.totals.size_bytes) == (1, 5)

    async def test_the_queue_is_read_page_by_page(self, catalog: Catalog) -> None:
        keys = [f"k{number}" for number in range(7)]
        rows = [await put(catalog, row(key, number)) for number, key in enumerate(keys, 1)]
        await catalog.remote_queue.add(rows, QueueReason.REUSED, now_ms=1)
        seen, after = [], 0
        while page := catalog.remote_queue.entries(after, limit=3):
            seen += [entry.key for entry in page]
            after = page[-1].position
        assert seen == keys

    async def test_who_waits_for_entries_is_called(self, catalog: Catalog) -> None:
        calls: list[int] = []
        catalog.remote_queue.on_queued = lambda: calls.append(catalog.remote_queue.totals.objects)
        await put(catalog, row("quiet", 1))
        assert calls == []
        await catalog.commit(row("k", 2), mode=CommitMode.REPLACE, now_ms=5, to_remote=True)
        assert calls == [1]

    async def test_the_rule_of_a_bucket_can_be_changed(self, catalog: Catalog) -> None:
        changed = await catalog.update_bucket(BUCKET, BucketUpdate(remote=RemoteRule.ALWAYS))
        assert changed.remote is RemoteRule.ALWAYS
        stored = await catalog.bucket(BUCKET)
        assert stored is not None
        assert (stored.remote, stored.owner) == (RemoteRule.ALWAYS, "main")
        await put(catalog, row("k", 1))
        assert waiting(catalog) == [("k", QueueReason.ALWAYS)]


class Raising:
    async def test_a_local_row_becomes_shared_and_leaves_the_queue(self, catalog: Catalog) -> None:
        stored = (await catalog.commit(row("k", 1), mode=CommitMode.REPLACE, now_ms=5, to_remote=True)).row
        assert told_of(catalog, "k") == []
        assert await catalog.raise_durability([shared(stored)]) == [True]
        assert await found(catalog, "k") == shared(stored)
        assert waiting(catalog) == []
        assert catalog.remote_queue.totals.size_bytes == 0
        assert told_of(catalog, "k") == [shared(stored)]

    async def test_an_upload_brings_nothing_but_the_class(self, catalog: Catalog) -> None:
        read_before = await put(catalog, row("k", 1))
        await catalog.update_object(BUCKET, "k", ObjectUpdate(tags={"a": "b"}))
        known = msgspec.structs.replace(read_before, digest=b"d" * 32)
        assert await catalog.raise_durability([known]) == [True]
        assert await catalog.raise_durability([shared(read_before)]) == [True]
        after = await found(catalog, "k")
        assert after is not None
        assert (after.durability, after.tags, after.digest) == (Durability.SHARED, {"a": "b"}, b"d" * 32)

    async def test_a_row_of_class_memory_may_become_shared_at_once(self, catalog: Catalog) -> None:
        stored = await put(catalog, row("k", 1, durability=Durability.MEMORY))
        given = msgspec.structs.replace(shared(stored), digest=b"d" * 32)
        assert await catalog.raise_durability([given]) == [True]
        assert await found(catalog, "k") == given
        assert told_of(catalog, "k") == [given]

    async def test_a_replaced_or_removed_row_is_not_raised(self, catalog: Catalog) -> None:
        replaced, gone = await put(catalog, row("r", 1)), await put(catalog, row("g", 2))
        live = await put(catalog, row("r", 3))
        await catalog.delete(BUCKET, ["g"], now_ms=5)
        assert await catalog.raise_durability([shared(replaced), shared(gone)]) == [False, False]
        assert await found(catalog, "r") == live
        assert told_of(catalog, "r") + told_of(catalog, "g") == []

    async def test_a_shared_row_is_never_lowered(self, catalog: Catalog) -> None:
        stored = await put(catalog, row("k", 1))
        await catalog.raise_durability([shared(stored)])
        assert await catalog.raise_durability([msgspec.structs.replace(stored, digest=b"d" * 32)]) == [True]
        after = await found(catalog, "k")
        assert after is not None
        assert (after.durability, after.digest) == (Durability.SHARED, b"d" * 32)

    async def test_what_was_uploaded_must_be_what_the_row_names(self, catalog: Catalog) -> None:
        stored = await put(catalog, row("k", 1, bucket=CHUNKS))
        copy = LossyCopy(make_blob_id(EPOCH, 2), 10, 20, b"d" * 32, "eq:83/1", 0.5)
        with_copy = msgspec.structs.replace(stored, lossy=copy)
        assert await catalog.raise_durability([with_copy]) == [True]
        assert await catalog.raise_durability([shared(stored)]) == [False]
        assert await catalog.raise_durability([shared(with_copy)]) == [True]
        assert await catalog.raise_durability([with_copy]) == [True]
        coarser = msgspec.structs.replace(
            with_copy, lossy=msgspec.structs.replace(copy, blob_id=make_blob_id(EPOCH, 3))
        )
        assert await catalog.raise_durability([coarser]) == [False]
        live = await found(catalog, "k", CHUNKS)
        assert live is not None
        assert (live.lossy, live.durability) == (copy, Durability.SHARED)

    async def test_shared_rows_count_are_listed_and_may_be_committed(self, catalog: Catalog) -> None:
        stored = await put(catalog, shared(row("k", 1, size_bytes=6)))
        assert told_of(catalog, "k") == [stored]
        assert waiting(catalog) == []
        usage = await catalog.bucket_usage(BUCKET)
        assert (usage.objects, usage.size_bytes) == (1, 6)
        assert (await catalog.list_objects(BUCKET)).rows == (stored,)
        assert [each async for each in catalog.scan_objects(volatile_only=True)] == []


class Publishing:
    async def test_positions_ascend_also_when_the_outbox_was_emptied(self, catalog: Catalog) -> None:
        before = catalog.outbox.position
        await put(catalog, shared(row("a", 1)))
        await put(catalog, shared(row("b", 2)))
        positions = [entry.position for entry in catalog.outbox.entries(before)]
        assert positions == [before + 1, before + 2]
        assert catalog.outbox.position == before + 2
        await catalog.outbox.discard(catalog.outbox.position)
        assert (catalog.outbox.pending, catalog.outbox.entries(), catalog.outbox.oldest_ms) == (0, [], None)
        await put(catalog, shared(row("c", 3)))
        assert [entry.position for entry in catalog.outbox.entries()] == [before + 3]

    async def test_entries_are_discarded_up_to_a_position_and_read_in_pages(self, catalog: Catalog) -> None:
        await catalog.outbox.discard(catalog.outbox.position)
        for number in range(1, 6):
            await put(catalog, shared(row(f"k{number}", number)))
        first, second = catalog.outbox.entries(limit=2)
        assert catalog.outbox.oldest_ms == first.since_ms > 0
        await catalog.outbox.discard(second.position)
        assert [entry.position - second.position for entry in catalog.outbox.entries()] == [1, 2, 3]
        assert catalog.outbox.pending == 3
        assert [entry.position - second.position for entry in catalog.outbox.entries(second.position + 2)] == [3]

    async def test_what_is_not_shared_is_not_told(self, catalog: Catalog) -> None:
        before = catalog.outbox.position
        await put(catalog, row("l", 1))
        await put(catalog, row("m", 2, durability=Durability.MEMORY))
        await catalog.update_object(BUCKET, "l", ObjectUpdate(tags={"a": "b"}))
        await catalog.delete(BUCKET, ["l", "m"], now_ms=5)
        await catalog.create_upload(upload("u"))
        await catalog.abort_upload(BUCKET, "k", "u", now_ms=5)
        assert catalog.outbox.position == before

    async def test_a_change_of_a_shared_rows_settings_tells_it_again(self, catalog: Catalog) -> None:
        await put(catalog, shared(row("k", 1)))
        changed = await catalog.update_object(BUCKET, "k", ObjectUpdate(tags={"a": "b"}))
        assert changed is not None
        assert told_of(catalog, "k")[1:] == [changed]

    async def test_the_end_of_a_shared_row_is_told(self, catalog: Catalog) -> None:
        for number, key in enumerate(["deleted", "dropped", "replaced", "hidden", "claimed"], 1):
            await put(catalog, shared(row(key, number, bucket=BUCKET)))
        after = catalog.outbox.position
        await catalog.delete(BUCKET, ["deleted"], now_ms=5)
        await catalog.drop_rows([row("dropped", 2)])
        await put(catalog, row("replaced", 8))
        for key in ("deleted", "dropped", "replaced"):
            assert told_of(catalog, key, after) == [RowRemoved(BUCKET, key)]
        await put(catalog, row("replaced", 9))
        await catalog.delete(BUCKET, ["replaced"], now_ms=5)
        assert len(told_of(catalog, "replaced", after)) == 1

    async def test_a_row_of_class_memory_over_a_shared_one_tells_nothing_until_it_is_written_down(
        self, catalog: Catalog
    ) -> None:
        await put(catalog, shared(row("k", 1)))
        after = catalog.outbox.position
        over = await put(catalog, row("k", 2, durability=Durability.MEMORY))
        assert told_of(catalog, "k", after) == []
        await catalog.raise_durability([msgspec.structs.replace(over, durability=Durability.LOCAL)])
        assert told_of(catalog, "k", after) == [RowRemoved(BUCKET, "k")]

    async def test_chunks_that_go_with_their_ancestors_are_told(self, catalog: Catalog) -> None:
        for at in range(3):
            parent = "" if at == 0 else f"c{at - 1}"
            await put(catalog, msgspec.structs.replace(shared(row(f"c{at}", at + 1, bucket=CHUNKS)), parent=parent))
        after = catalog.outbox.position
        await catalog.delete(CHUNKS, ["c0"], now_ms=5)
        assert {entry.key for entry in told(catalog, after) if isinstance(entry, RowRemoved)} == {"c0", "c1", "c2"}

    async def test_a_deleted_row_that_a_pin_holds_is_told_as_hidden_and_then_as_gone(self, catalog: Catalog) -> None:
        stored = await put(catalog, shared(row("k", 1, bucket=CHUNKS)))
        session_id, _ = await pin(catalog, "k")
        after = catalog.outbox.position
        await catalog.delete(CHUNKS, ["k"], now_ms=5)
        hidden = msgspec.structs.replace(stored, state=ObjectState.CONDEMNED)
        assert told_of(catalog, "k", after) == [hidden]
        await unpin(catalog, session_id)
        assert len(await catalog.claim(now_boot_ms=2, now_ms=6)) == 1
        assert told_of(catalog, "k", after) == [hidden, RowRemoved(CHUNKS, "k")]

    async def test_users_buckets_and_namespaces_are_told_always(self, catalog: Catalog) -> None:
        after = catalog.outbox.position
        user = UserRow("u", "U", "AKU", "secret")
        await catalog.add_user(user)
        await catalog.put_user(user)
        renamed = msgspec.structs.replace(user, display_name="V")
        await catalog.put_user(renamed)
        await catalog.remove_user("u")
        made = BucketRow("b", BucketKind.KV, "main", 3, Durability.MEMORY)
        await catalog.create_bucket(made)
        changed = await catalog.update_bucket("b", BucketUpdate(tags={"x": "y"}))
        declared, _ = await catalog.namespaces.declare(namespace("b", "n"))
        other, _ = await catalog.namespaces.declare(namespace("b", "o"))
        await catalog.namespaces.remove("b", "o")
        await catalog.delete_bucket("b")
        assert told(catalog, after) == [
            user, renamed, UserRemoved("u"), made, changed, declared, other, NamespaceRemoved("b", "o"),
            NamespaceRemoved("b", "n"), GoneBuckets(3), BucketRemoved("b"),
        ]  # fmt: skip

    async def test_removals_are_known_by_their_bucket(self, catalog: Catalog) -> None:
        await catalog.outbox.discard(catalog.outbox.position)
        await put(catalog, shared(row("k", 1)))
        stored = await put(catalog, shared(row("c", 2, bucket=CHUNKS)))
        before = catalog.outbox.removals_of(BUCKET), catalog.outbox.removals_of(CHUNKS)
        await put(catalog, shared(row("other", 3)))
        await put(catalog, row("local", 4))
        await catalog.delete(BUCKET, ["local"], now_ms=5)
        assert (catalog.outbox.removals_of(BUCKET), catalog.outbox.removals_of(CHUNKS)) == before
        await put(catalog, row("k", 5, durability=Durability.MEMORY))
        assert catalog.outbox.removals_of(BUCKET) == before[0]
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        assert catalog.outbox.removals_of(BUCKET) == catalog.outbox.position > before[0]
        session_id, _ = await pin(catalog, "c")
        await catalog.delete(CHUNKS, ["c"], now_ms=5)
        assert catalog.outbox.removals_of(CHUNKS) == catalog.outbox.position
        await unpin(catalog, session_id)
        await catalog.namespaces.declare(namespace(CHUNKS, "n"))
        await catalog.namespaces.remove(CHUNKS, "n")
        assert catalog.outbox.removals_of(CHUNKS) == catalog.outbox.position
        await make_bucket(catalog, "gone", rule=RemoteRule.NEVER)
        await catalog.delete_bucket("gone")
        assert catalog.outbox.removals_of("gone") == catalog.outbox.position
        assert stored.key == "c"

    async def test_a_full_outbox_refuses_what_could_come_again_and_again_and_never_a_removal(
        self, catalog: Catalog
    ) -> None:
        await catalog.outbox.discard(catalog.outbox.position)
        assert (catalog.outbox.size_bytes, catalog.outbox.is_full) == (0, False)
        user = UserRow("u", "U", "AKU", "secret")
        await catalog.add_user(user)
        await make_bucket(catalog, "made", rule=RemoteRule.NEVER)
        declared, _ = await catalog.namespaces.declare(namespace(CHUNKS, "n"))
        await put(catalog, shared(row("k", 1)))
        await put(catalog, row("local", 2))
        size_bytes = catalog.outbox.size_bytes
        assert size_bytes > sum(len(entry.content) for entry in catalog.outbox.entries()) > 0
        catalog.outbox.bound(size_bytes)
        position = catalog.outbox.position
        refused: list[Callable[[], Awaitable[object]]] = [
            lambda: catalog.add_user(msgspec.structs.replace(user, id="v", access_key="AKV")),
            lambda: make_bucket(catalog, "another", rule=RemoteRule.NEVER),
            lambda: catalog.update_bucket(BUCKET, BucketUpdate(tags={"a": "b"})),
            lambda: catalog.namespaces.declare(namespace(CHUNKS, "o")),
            lambda: catalog.namespaces.change_settings(declared),
            lambda: catalog.update_object(BUCKET, "k", ObjectUpdate(tags={"a": "b"})),
        ]
        for verb in refused:
            with pytest.raises(BusyError):
                await verb()
        assert catalog.outbox.position == position
        assert (await catalog.namespaces.declare(declared))[1] is False
        with pytest.raises(BucketExistsError):
            await make_bucket(catalog, "made", rule=RemoteRule.NEVER)
        await put(catalog, row("another", 3))
        assert await catalog.update_object(BUCKET, "local", ObjectUpdate(tags={"a": "b"})) is not None
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        await catalog.namespaces.remove(CHUNKS, "n")
        await catalog.delete_bucket("made")
        await catalog.remove_user("u")
        assert catalog.outbox.position == position + 5  # a bucket and its time are told of
        await catalog.outbox.discard(position + 1)
        await catalog.outbox.discard(catalog.outbox.position)
        assert catalog.outbox.size_bytes == 0
        assert (await catalog.update_bucket(BUCKET, BucketUpdate(tags={"a": "b"}))).tags == {"a": "b"}

    async def test_who_waits_for_publications_is_called(self, catalog: Catalog) -> None:
        calls: list[int] = []
        catalog.outbox.on_published = lambda: calls.append(catalog.outbox.position)
        await put(catalog, row("quiet", 1))
        assert calls == []
        await put(catalog, shared(row("k", 2)))
        assert calls == [catalog.outbox.position]

    async def test_a_snapshot_tells_what_is_there(self, catalog: Catalog) -> None:
        await catalog.add_user(UserRow("u", "U", "AKU", "secret"))
        declared, _ = await catalog.namespaces.declare(namespace(CHUNKS, "n"))
        kept = await put(catalog, shared(row("k", 1)))
        below = await put(catalog, shared(row("below", 2)))
        await put(catalog, row("below", 3, durability=Durability.MEMORY))
        await put(catalog, row("local", 4))
        await put(catalog, shared(row("gone", 5)))
        await catalog.delete(BUCKET, ["gone"], now_ms=5)
        entries = [decode_entry(content) async for content in catalog.outbox.snapshot()]
        rows = [entry for entry in entries if isinstance(entry, ObjectRow)]
        assert sorted(rows, key=lambda each: each.key) == [below, kept]
        assert {entry.name for entry in entries if isinstance(entry, BucketRow)} == {BUCKET, CHUNKS}
        assert [entry for entry in entries if isinstance(entry, NamespaceRow)] == [declared]
        assert [entry.id for entry in entries if isinstance(entry, UserRow)] == ["u"]

    async def test_a_snapshot_is_due_until_one_was_told(self, catalog: Catalog) -> None:
        assert catalog.outbox.snapshot_due
        await catalog.outbox.snapshot_told()
        assert not catalog.outbox.snapshot_due


def namespace(bucket: str, name: str) -> NamespaceRow:
    return NamespaceRow(
        bucket=bucket,
        name=name,
        declaration=b"{}",
        fingerprint=b"f" * 32,
        wrapped_key=b"w" * 40,
        root=b"r" * 32,
        ids="foreign",
        chunk_tokens=16,
        chunk_bytes=None,
        part_axis=None,
        created_ms=1,
        owner="main",
    )


class RemoteContract(Queueing, Raising, Publishing):
    """All of it."""
