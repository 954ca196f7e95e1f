"""What every catalog driver must do. A driver's tests subclass `CatalogContract` and give the `catalog` fixture."""

from __future__ import annotations

import msgspec
import pytest

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    BucketUsage,
    Checksum,
    CommitMode,
    Durability,
    LossyCopy,
    ObjectRow,
    PartInfo,
    PartRow,
    QueueEntry,
    UploadRow,
    UserRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, Grant, GranteeGroup, LifecycleRule, ObjectUpdate, Permission
from kvobj.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    FencedError,
    ImmutableChunkError,
    KvobjError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    NoSuchUserError,
    PreconditionFailedError,
    UserExistsError,
)
from kvobj.ids import make_blob_id, sequence_of

EPOCH = 0xA1B2C3D4E5F60718
BUCKET = "first"
CLASSES = [Durability.MEMORY, Durability.LOCAL]
LONG_KEYS = [
    "a" * 479, "a" * 480, "a" * 481, "a" * 482, "a" * 480 + "b", "a" * 960, "a" * 961, "a" * 1024,
    "a" * 959 + "\x00", "a" * 480 + "\x00", "a" * 479 + "b", "b" * 1023, "é" * 512, "a" * 478 + "é", "a" * 479 + "é",
]  # fmt: skip
UNICODE_KEYS = ["z", "a", "é", "ÿ", "€", "\uffff", "\U0001f600", "\ue000", "a\x00", "a\x00b", "a!", "A"]


def blob(sequence: int, size_bytes: int = 10, *, epoch: int = EPOCH) -> BlobRef:
    return BlobRef(make_blob_id(epoch, sequence), size_bytes, size_bytes + 512, None)


def row(
    key: str,
    *blobs: int,
    bucket: str = BUCKET,
    size_bytes: int = 10,
    durability: Durability = Durability.LOCAL,
    etag: str = "e",
    epoch: int = EPOCH,
) -> ObjectRow:
    return ObjectRow(
        bucket=bucket,
        key=key,
        blobs=tuple(blob(number, size_bytes, epoch=epoch) for number in blobs),
        size_bytes=size_bytes,
        etag=etag,
        modified_ms=1,
        owner="main",
        durability=durability,
    )


def part(upload_id: str, number: int, *blobs: int, size_bytes: int = 10, epoch: int = EPOCH) -> PartRow:
    refs = tuple(blob(sequence, size_bytes, epoch=epoch) for sequence in blobs)
    return PartRow(upload_id, number, refs, size_bytes, f"part-{number}", 1)


def upload(upload_id: str, key: str = "k", durability: Durability = Durability.LOCAL) -> UploadRow:
    return UploadRow(BUCKET, key, upload_id, 1, "main", durability)


def numbers(entries: list[QueueEntry]) -> list[int]:
    return sorted(sequence_of(entry.blob_id) for entry in entries)


async def prepared(catalog: Catalog) -> Catalog:
    """Epoch open, one bucket there."""
    await catalog.open_epoch(EPOCH)
    await catalog.create_bucket(BucketRow(BUCKET, BucketKind.ORDINARY, "main", 1, Durability.LOCAL))
    return catalog


async def put(catalog: Catalog, given: ObjectRow, mode: CommitMode = CommitMode.REPLACE) -> ObjectRow:
    return (await catalog.commit(given, mode=mode, now_ms=5)).row


async def found(catalog: Catalog, key: str, bucket: str = BUCKET) -> ObjectRow | None:
    return (await catalog.lookup(bucket, [key]))[0]


async def queued(catalog: Catalog) -> list[int]:
    return numbers(await catalog.due(now_ms=1_000_000))


async def listed(catalog: Catalog, *, limit: int = 1000, **arguments: str) -> tuple[list[str], list[str]]:
    """Keys and common prefixes of all pages."""
    keys: list[str] = []
    prefixes: list[str] = []
    after: str | None = arguments.pop("after", "")
    while after is not None:
        page = await catalog.list_objects(BUCKET, after=after, limit=limit, **arguments)
        assert len(page.rows) + len(page.common_prefixes) <= limit
        keys += [found_row.key for found_row in page.rows]
        prefixes += page.common_prefixes
        after = page.next_after
    return keys, prefixes


class UsersAndBuckets:
    async def test_users_are_listed_by_id(self, catalog: Catalog) -> None:
        zoe, adam = UserRow("zoe", "Zoe", "AKZ", "s"), UserRow("adam", "Adam", "AKA", "s", is_root=True)
        await catalog.add_user(zoe)
        await catalog.add_user(adam)
        assert await catalog.users() == (adam, zoe)

    async def test_a_second_user_of_an_id_is_refused(self, catalog: Catalog) -> None:
        await catalog.add_user(UserRow("u", "U", "AK1", "s"))
        with pytest.raises(UserExistsError):
            await catalog.add_user(UserRow("u", "U", "AK2", "s"))

    async def test_an_access_key_belongs_to_one_user(self, catalog: Catalog) -> None:
        await catalog.add_user(UserRow("u", "U", "AK1", "s"))
        with pytest.raises(UserExistsError):
            await catalog.add_user(UserRow("v", "V", "AK1", "s"))
        with pytest.raises(UserExistsError):
            await catalog.put_user(UserRow("v", "V", "AK1", "s"))

    async def test_put_user_replaces(self, catalog: Catalog) -> None:
        await catalog.put_user(UserRow("u", "U", "AK1", "s"))
        await catalog.put_user(UserRow("u", "New", "AK2", "t"))
        assert await catalog.users() == (UserRow("u", "New", "AK2", "t"),)

    async def test_a_removed_user_is_gone(self, catalog: Catalog) -> None:
        await catalog.add_user(UserRow("u", "U", "AK1", "s"))
        await catalog.remove_user("u")
        assert await catalog.users() == ()
        with pytest.raises(NoSuchUserError):
            await catalog.remove_user("u")

    async def test_buckets_are_listed_by_name(self, catalog: Catalog) -> None:
        other = BucketRow("another", BucketKind.KV, "main", 2, Durability.MEMORY)
        await catalog.create_bucket(other)
        assert [bucket.name for bucket in await catalog.buckets()] == ["another", BUCKET]
        assert await catalog.bucket("another") == other
        assert await catalog.bucket("none") is None

    async def test_a_taken_name_is_refused_with_the_existing_bucket(self, catalog: Catalog) -> None:
        existing = await catalog.bucket(BUCKET)
        with pytest.raises(BucketExistsError) as caught:
            await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, "other", 2, Durability.MEMORY))
        assert caught.value.data["existing"] == existing

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_bucket_with_an_object_is_not_deleted(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, row("k" * 700, 1, durability=durability))
        with pytest.raises(BucketNotEmptyError):
            await catalog.delete_bucket(BUCKET)
        await catalog.delete(BUCKET, ["k" * 700], now_ms=5)
        await catalog.delete_bucket(BUCKET)
        assert await catalog.bucket(BUCKET) is None
        with pytest.raises(NoSuchBucketError):
            await catalog.delete_bucket(BUCKET)

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_uploads_in_progress_end_with_their_bucket(self, catalog: Catalog, durability: Durability) -> None:
        await catalog.create_upload(upload("u1", durability=durability))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        await catalog.delete_bucket(BUCKET)
        assert await catalog.upload(BUCKET, "k", "u1") is None
        assert [part async for part in catalog.scan_parts()] == []
        assert await queued(catalog) == [1]

    async def test_a_bucket_with_more_parts_than_one_step_removes_is_not_deleted(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("bucket_changes", "memory"):
            monkeypatch.setattr(f"kvobj.catalog.{module}._PARTS_MAX", 3)
        for upload_id in ("u1", "u2"):
            await catalog.create_upload(upload(upload_id))
            for number in (1, 2):
                sequence = 2 * int(upload_id[1]) + number
                await catalog.put_part(BUCKET, "k", part(upload_id, number, sequence), now_ms=5)
        with pytest.raises(BucketNotEmptyError):
            await catalog.delete_bucket(BUCKET)
        assert len(await catalog.parts(BUCKET, "k", "u2")) == 2
        await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
        await catalog.delete_bucket(BUCKET)

    async def test_a_bucket_made_again_is_empty(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1))
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, "main", 9, Durability.MEMORY))
        assert await found(catalog, "k") is None
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(0, 0)

    async def test_an_update_changes_what_it_names_of_a_bucket(self, catalog: Catalog) -> None:
        before = await catalog.bucket(BUCKET)
        assert before is not None
        grant = Grant("", GranteeGroup.ALL_USERS, Permission.READ)
        rule = LifecycleRule("r", enabled=True, key_prefix="logs/", expire_days=3)
        await catalog.update_bucket(BUCKET, BucketUpdate(acl=(grant,), lifecycle=(rule,)))
        after = await catalog.update_bucket(BUCKET, BucketUpdate(tags={"team": "a"}, policy=b"{}"))
        expected = msgspec.structs.replace(before, acl=(grant,), lifecycle=(rule,), tags={"team": "a"}, policy=b"{}")
        assert after == expected == await catalog.bucket(BUCKET)
        assert expected in await catalog.buckets()
        private = await catalog.update_bucket(BUCKET, BucketUpdate(acl=None, lifecycle=(), tags={}, policy=b""))
        assert private == before

    async def test_an_update_of_a_bucket_of_before_changes_nothing_of_its_successor(self, catalog: Catalog) -> None:
        made = BucketRow(BUCKET, BucketKind.KV, "main", 9, Durability.MEMORY)
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(made)
        with pytest.raises(NoSuchBucketError):
            await catalog.update_bucket(BUCKET, BucketUpdate(policy=b"{}", tags={"a": "b"}), made_ms=8)
        assert await catalog.bucket(BUCKET) == made
        assert (await catalog.update_bucket(BUCKET, BucketUpdate(tags={"a": "b"}), made_ms=9)).tags == {"a": "b"}

    async def test_a_removal_of_a_bucket_of_before_leaves_its_successor(self, catalog: Catalog) -> None:
        made = BucketRow(BUCKET, BucketKind.KV, "main", 9, Durability.MEMORY)
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(made)
        with pytest.raises(NoSuchBucketError):
            await catalog.delete_bucket(BUCKET, made_ms=8)
        assert await catalog.bucket(BUCKET) == made
        await catalog.delete_bucket(BUCKET, made_ms=9)
        assert await catalog.bucket(BUCKET) is None

    @pytest.mark.parametrize("clock_ms", [1, 0])
    async def test_a_bucket_is_told_from_one_before_it_also_where_the_clock_stood_or_was_put_back(
        self, catalog: Catalog, clock_ms: int
    ) -> None:
        before = await catalog.bucket(BUCKET)
        assert before is not None
        for number in range(3):
            await catalog.delete_bucket(BUCKET)
            await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, f"owner-{number}", clock_ms, Durability.LOCAL))
            anew = await catalog.bucket(BUCKET)
            assert anew is not None
            assert anew.created_ms > before.created_ms
            assert not before.is_still(anew)
            await self.refused(catalog, before.created_ms)
            before = anew
        await catalog.commit(row("k", 1), mode=CommitMode.REPLACE, made_ms=before.created_ms, now_ms=5)
        assert await found(catalog, "k") is not None

    async def refused(self, catalog: Catalog, made_ms: int) -> None:
        """What was let into the bucket that was made then does nothing to the one that there is."""
        there = await catalog.bucket(BUCKET)
        for verb in (
            catalog.commit(row("k", 1), mode=CommitMode.REPLACE, made_ms=made_ms, now_ms=5),
            catalog.delete(BUCKET, ["k"], made_ms=made_ms, now_ms=5),
            catalog.update_bucket(BUCKET, BucketUpdate(policy=b"{}"), made_ms=made_ms),
            catalog.create_upload(upload("u1"), made_ms=made_ms),
            catalog.put_part(BUCKET, "k", part("u1", 1, 1), made_ms=made_ms, now_ms=5),
            catalog.recall(BUCKET, made_ms=made_ms, now_ms=5),
            catalog.delete_bucket(BUCKET, made_ms=made_ms),
        ):
            with pytest.raises(NoSuchBucketError):
                await verb
        assert await catalog.bucket(BUCKET) == there

    async def test_a_bucket_that_is_younger_than_all_before_keeps_its_time(self, catalog: Catalog) -> None:
        await catalog.delete_bucket(BUCKET)
        made = BucketRow(BUCKET, BucketKind.KV, "main", 2, Durability.MEMORY)
        await catalog.create_bucket(made)
        assert await catalog.bucket(BUCKET) == made

    @pytest.mark.parametrize("durability", CLASSES)
    @pytest.mark.parametrize("kind", list(BucketKind))
    async def test_a_removal_from_a_bucket_of_before_leaves_what_its_successor_has(
        self, catalog: Catalog, kind: BucketKind, durability: Durability
    ) -> None:
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(BucketRow(BUCKET, kind, "main", 9, durability))
        await put(catalog, row("k", 1, durability=durability))
        with pytest.raises(NoSuchBucketError):
            await catalog.delete(BUCKET, ["k"], made_ms=8, now_ms=5)
        assert await found(catalog, "k") is not None
        assert await queued(catalog) == []
        (outcome,) = await catalog.delete(BUCKET, ["k"], made_ms=9, now_ms=5)
        assert outcome.removed is not None
        assert await found(catalog, "k") is None

    async def test_an_update_of_no_bucket_is_refused(self, catalog: Catalog) -> None:
        with pytest.raises(NoSuchBucketError):
            await catalog.update_bucket("missing", BucketUpdate(tags={"a": "b"}))
        with pytest.raises(NoSuchBucketError):
            await catalog.update_object("missing", "k", ObjectUpdate(tags={"a": "b"}))

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_an_update_of_an_object_keeps_its_bytes_and_its_number(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        before = await put(catalog, row("k", 1, durability=durability))
        grant = Grant("other", None, Permission.READ)
        await catalog.update_object(BUCKET, "k", ObjectUpdate(tags={"a": "b"}))
        after = await catalog.update_object(BUCKET, "k", ObjectUpdate(acl=(grant,)))
        assert after == msgspec.structs.replace(before, acl=(grant,), tags={"a": "b"}) == await found(catalog, "k")
        assert await queued(catalog) == []
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 10)
        assert await catalog.update_object(BUCKET, "absent", ObjectUpdate(tags={"a": "b"})) is None

    async def test_an_update_can_name_the_very_row_that_was_read(self, catalog: Catalog) -> None:
        read = await put(catalog, row("k", 1))
        replaced = await put(catalog, row("k", 2))
        assert await catalog.update_object(BUCKET, "k", ObjectUpdate(acl=()), sequence=read.sequence) is None
        assert await found(catalog, "k") == replaced
        assert await catalog.update_object(BUCKET, "k", ObjectUpdate(acl=()), sequence=replaced.sequence) is not None

    async def test_what_was_said_of_an_object_outlives_its_write_behind(self, catalog: Catalog) -> None:
        before = await put(catalog, row("k", 1, durability=Durability.MEMORY))
        await catalog.update_object(BUCKET, "k", ObjectUpdate(tags={"a": "b"}))
        raised = msgspec.structs.replace(before, durability=Durability.LOCAL)
        assert await catalog.raise_durability([raised]) == [True]
        assert await found(catalog, "k") == msgspec.structs.replace(raised, tags={"a": "b"})

    async def test_a_delete_can_name_the_very_row_that_was_read(self, catalog: Catalog) -> None:
        first = await put(catalog, row("k", 1))
        second = await put(catalog, row("k", 2))
        (refused,) = await catalog.delete(BUCKET, ["k"], conditions=[WriteCondition(sequence=first.sequence)], now_ms=5)
        assert refused.precondition_failed
        (outcome,) = await catalog.delete(
            BUCKET, ["k"], conditions=[WriteCondition(sequence=second.sequence)], now_ms=5
        )
        assert outcome.removed == second

    async def test_verbs_name_a_missing_bucket(self, catalog: Catalog) -> None:
        with pytest.raises(NoSuchBucketError):
            await catalog.bucket_usage("none")
        with pytest.raises(NoSuchBucketError):
            await catalog.list_objects("none")
        with pytest.raises(NoSuchBucketError):
            await catalog.list_uploads("none")
        with pytest.raises(NoSuchBucketError):
            await catalog.delete("none", ["k"], now_ms=5)
        with pytest.raises(NoSuchBucketError):
            await catalog.create_upload(UploadRow("none", "k", "u", 1, "main", Durability.LOCAL))
        assert await catalog.lookup("none", ["k", "l"]) == [None, None]


class Objects:
    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_commit_is_found_whole(self, catalog: Catalog, durability: Durability) -> None:
        given = ObjectRow(
            bucket=BUCKET, key="k", blobs=(blob(1), blob(2)), size_bytes=20, etag="tag", modified_ms=7, owner="main",
            durability=durability, headers={"content-type": "text/plain"}, metadata={"a": "b"},
            checksums=(Checksum("CRC32", "AAAA"),), parts=(PartInfo(1, 10, None), PartInfo(2, 10)), digest=b"d" * 32,
        )  # fmt: skip
        stored = await put(catalog, given)
        live = await found(catalog, "k")
        assert live == stored
        assert live is not None
        assert live.sequence > 0
        assert (live.blobs, live.headers, live.metadata, live.checksums, live.parts, live.digest) == (
            given.blobs, given.headers, given.metadata, given.checksums, given.parts, given.digest,
        )  # fmt: skip

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_sequences_ascend(self, catalog: Catalog, durability: Durability) -> None:
        stored = [await put(catalog, row("k", number, durability=durability)) for number in range(1, 5)]
        sequences = [each.sequence for each in stored]
        assert sequences == sorted(set(sequences))

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_replaced_row_queues_its_blobs(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, row("k", 1, 2, durability=durability))
        await put(catalog, row("k", 2, 3, durability=durability, size_bytes=30))
        assert await queued(catalog) == [1]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 30)

    async def test_a_durable_row_replaces_a_memory_one(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1, durability=Durability.MEMORY))
        await put(catalog, row("k", 2, durability=Durability.LOCAL, size_bytes=20))
        live = await found(catalog, "k")
        assert live is not None
        assert live.durability is Durability.LOCAL
        assert await queued(catalog) == [1]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 20)

    async def test_a_memory_row_shadows_a_durable_one_until_it_is_raised(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1, durability=Durability.LOCAL))
        stored = await put(catalog, row("k", 2, durability=Durability.MEMORY, size_bytes=25))
        assert await found(catalog, "k") == stored
        assert await queued(catalog) == []
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 25)
        raised = row("k", 2, durability=Durability.LOCAL, size_bytes=25)
        assert await catalog.raise_durability([raised]) == [True]
        live = await found(catalog, "k")
        assert live is not None
        assert (live.durability, live.sequence) == (Durability.LOCAL, stored.sequence)
        assert await queued(catalog) == [1]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 25)

    async def test_a_row_names_its_lossy_copy_from_its_raise_to_its_delete(self, catalog: Catalog) -> None:
        stored = await put(catalog, row("k", 1, durability=Durability.MEMORY))
        copy = LossyCopy(blob(2).blob_id, 10, 5, bytes(32), "eq:83/1", 0.5)
        raised = msgspec.structs.replace(stored, durability=Durability.LOCAL, lossy=copy)
        assert await catalog.raise_durability([raised]) == [True]
        live = await found(catalog, "k")
        assert live is not None
        assert live.lossy == copy
        assert {blob_id async for blob_id in catalog.scan_named_blobs()} == set(raised.blob_ids)
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        assert await queued(catalog) == [1, 2]

    async def test_the_same_chunk_put_again_takes_the_place_of_one_that_lasts_in_a_lossy_copy(
        self, catalog: Catalog
    ) -> None:
        bucket = "chunks"
        await catalog.create_bucket(BucketRow(bucket, BucketKind.KV, "main", 1, Durability.MEMORY))

        def chunk(key: str, number: int, durability: Durability, *, parent: str = "", tokens: int = 4) -> ObjectRow:
            given = row(key, number, bucket=bucket, durability=durability)
            return msgspec.structs.replace(given, parent=parent, namespace="n", tokens=tokens)

        async def again(given: ObjectRow) -> bool:
            return not (await catalog.commit(given, mode=CommitMode.FIRST_WRITER_WINS, now_ms=5)).existed

        memory = Durability.MEMORY
        assert await again(chunk("k", 1, memory))
        assert await again(chunk("child", 2, memory, parent="k"))
        live = await found(catalog, "k", bucket)
        assert live is not None
        copy = LossyCopy(blob(3).blob_id, 10, 5, bytes(32), "eq:83/1", 0.5)
        assert await catalog.raise_durability(
            [msgspec.structs.replace(live, durability=Durability.LOCAL, lossy=copy)]
        ) == [True]
        for other in (chunk("k", 4, memory, tokens=3), chunk("k", 5, memory, parent="child")):
            assert not await again(other)
        assert await queued(catalog) == [4, 5]
        assert await again(chunk("k", 6, memory))
        assert await queued(catalog) == [4, 5]  # power loss would bring back the older row, which needs its copy
        assert await catalog.bucket_usage(bucket) == BucketUsage(2, 20)
        assert not await again(chunk("k", 7, memory))  # its bytes are there now: first writer wins
        live = await found(catalog, "k", bucket)
        assert live is not None
        assert (live.blobs[0].blob_id, live.lossy, live.durability) == (blob(6).blob_id, None, memory)
        copy = LossyCopy(blob(8).blob_id, 10, 5, bytes(32), "eq:83/1", 0.5)
        assert await catalog.raise_durability(
            [msgspec.structs.replace(live, durability=Durability.LOCAL, lossy=copy)]
        ) == [True]
        assert await queued(catalog) == [1, 3, 4, 5, 7]
        assert await again(chunk("k", 9, Durability.LOCAL))
        assert await queued(catalog) == [1, 3, 4, 5, 6, 7, 8]
        assert await catalog.bucket_usage(bucket) == BucketUsage(2, 20)
        outcomes = await catalog.delete(bucket, ["k"], now_ms=5)
        assert [each.key for each in outcomes[0].descendants] == ["child"]
        assert await catalog.bucket_usage(bucket) == BucketUsage(0, 0)
        assert await queued(catalog) == [1, 2, 3, 4, 5, 6, 7, 8, 9]

    async def test_a_row_that_was_replaced_is_not_raised(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1, durability=Durability.MEMORY))
        await put(catalog, row("k", 2, durability=Durability.MEMORY))
        raised = [row("k", 1), row("gone", 3), row("k", 4, bucket="none")]
        assert await catalog.raise_durability(raised) == [False, False, False]
        live = await found(catalog, "k")
        assert live is not None
        assert live.durability is Durability.MEMORY

    async def test_an_empty_object_that_was_replaced_is_not_raised(self, catalog: Catalog) -> None:
        first = await put(catalog, row("k", size_bytes=0, durability=Durability.MEMORY))
        await put(catalog, row("k", size_bytes=0, durability=Durability.MEMORY, etag="newer"))
        assert await catalog.raise_durability([first]) == [False]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_first_writer_wins(self, catalog: Catalog, durability: Durability) -> None:
        first = await put(catalog, row("k", 1, durability=durability), CommitMode.FIRST_WRITER_WINS)
        outcome = await catalog.commit(row("k", 2, durability=durability), mode=CommitMode.FIRST_WRITER_WINS, now_ms=5)
        assert (outcome.existed, outcome.row) == (True, first)
        assert await found(catalog, "k") == first
        assert await queued(catalog) == [2]

    @pytest.mark.parametrize("second", CLASSES)
    @pytest.mark.parametrize("first", CLASSES)
    async def test_first_writer_wins_across_classes(
        self, catalog: Catalog, first: Durability, second: Durability
    ) -> None:
        stored = await put(catalog, row("k", 1, durability=first), CommitMode.FIRST_WRITER_WINS)
        assert await put(catalog, row("k", 2, durability=second), CommitMode.FIRST_WRITER_WINS) == stored
        assert await queued(catalog) == [2]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_another_size_under_a_live_chunk_is_refused(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, row("k", 1, durability=durability), CommitMode.FIRST_WRITER_WINS)
        with pytest.raises(ImmutableChunkError):
            await put(catalog, row("k", 2, durability=durability, size_bytes=11), CommitMode.FIRST_WRITER_WINS)
        assert await queued(catalog) == [2]

    @pytest.mark.parametrize("durability", CLASSES)
    @pytest.mark.parametrize(
        ("condition", "is_there", "error"),
        [
            (WriteCondition(if_none_match="*"), False, None),
            (WriteCondition(if_none_match="*"), True, PreconditionFailedError),
            (WriteCondition(if_none_match="e"), True, PreconditionFailedError),
            (WriteCondition(if_none_match="x"), True, None),
            (WriteCondition(if_match="e"), True, None),
            (WriteCondition(if_match="*"), True, None),
            (WriteCondition(if_match="x"), True, PreconditionFailedError),
            (WriteCondition(if_match="e"), False, NoSuchKeyError),
            (WriteCondition(if_match="*"), False, NoSuchKeyError),
        ],
    )
    async def test_conditions_are_checked_in_the_commit(
        self,
        catalog: Catalog,
        durability: Durability,
        condition: WriteCondition,
        is_there: bool,  # noqa: FBT001 - a parameter of the cases
        error: type[KvobjError] | None,
    ) -> None:
        if is_there:
            await put(catalog, row("k", 1, durability=durability))
        commit = catalog.commit(
            row("k", 2, durability=durability), mode=CommitMode.REPLACE, condition=condition, now_ms=5
        )
        if error is None:
            await commit
            assert await queued(catalog) == ([1] if is_there else [])
        else:
            with pytest.raises(error):
                await commit
            assert await queued(catalog) == [2]

    async def test_if_none_match_any_beats_first_writer_wins(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1))
        with pytest.raises(PreconditionFailedError):
            await catalog.commit(
                row("k", 2),
                mode=CommitMode.FIRST_WRITER_WINS,
                condition=WriteCondition(if_none_match="*"),
                now_ms=5,
            )

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_another_epoch_is_fenced(self, catalog: Catalog, durability: Durability) -> None:
        with pytest.raises(FencedError):
            await put(catalog, row("k", 1, durability=durability, epoch=EPOCH + 1))
        assert await found(catalog, "k") is None
        assert await queued(catalog) == [1]
        await catalog.open_epoch(EPOCH + 1)
        with pytest.raises(FencedError):
            await put(catalog, row("k", 1, durability=durability))
        await put(catalog, row("k", 1, durability=durability, epoch=EPOCH + 1))

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_commit_into_no_bucket_queues_its_blobs(self, catalog: Catalog, durability: Durability) -> None:
        with pytest.raises(NoSuchBucketError):
            await put(catalog, row("k", 1, bucket="none", durability=durability))
        assert await queued(catalog) == [1]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_commit_that_was_meant_for_a_bucket_of_before_is_refused(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await catalog.commit(row("k", 1, durability=durability), mode=CommitMode.REPLACE, made_ms=1, now_ms=5)
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(BucketRow(BUCKET, BucketKind.ORDINARY, "other", 2, Durability.LOCAL))
        with pytest.raises(NoSuchBucketError):
            await catalog.commit(row("k", 2, durability=durability), mode=CommitMode.REPLACE, made_ms=1, now_ms=5)
        assert await found(catalog, "k") is None
        assert await queued(catalog) == [1, 2]
        await catalog.commit(row("k", 3, durability=durability), mode=CommitMode.REPLACE, made_ms=2, now_ms=5)
        assert await found(catalog, "k") is not None

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_complete_that_was_meant_for_a_bucket_of_before_keeps_the_next_ones_upload(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        group = msgspec.structs.replace(upload("u1", durability=durability), group_parts=2)
        for owner in ("main", "other"):
            if owner == "other":
                await catalog.delete_bucket(BUCKET)
                await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, owner, 2, Durability.LOCAL))
            await catalog.create_upload(group)
        for number in (1, 2):
            await catalog.put_part(BUCKET, "k", part("u1", number, number), now_ms=5)
        whole = row("k", 1, 2, size_bytes=20, durability=durability)
        for given in (whole, row("k", 3, size_bytes=20, durability=durability)):
            with pytest.raises(NoSuchBucketError):
                await catalog.commit(given, mode=CommitMode.FIRST_WRITER_WINS, upload_id="u1", made_ms=1, now_ms=5)
        assert await queued(catalog) == [3], "what joined the parts goes, the parts stay"
        assert len(await catalog.parts(BUCKET, "k", "u1")) == 2
        await catalog.commit(whole, mode=CommitMode.FIRST_WRITER_WINS, upload_id="u1", made_ms=2, now_ms=5)
        with pytest.raises(NoSuchBucketError):
            await catalog.commit(whole, mode=CommitMode.FIRST_WRITER_WINS, upload_id="u1", made_ms=1, now_ms=5)
        live = await found(catalog, "k")
        assert live is not None
        assert live.blobs == whole.blobs
        assert await queued(catalog) == [3], "blobs of the next owner's row stay too"

    async def test_a_commit_sent_twice_keeps_its_blobs(self, catalog: Catalog) -> None:
        for mode in CommitMode:
            await put(catalog, row("k", 1), mode)
            await put(catalog, row("k", 1), mode)
        assert await queued(catalog) == []

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_delete_hides_and_queues(self, catalog: Catalog, durability: Durability) -> None:
        stored = await put(catalog, row("k", 1, 2, durability=durability))
        outcomes = await catalog.delete(BUCKET, ["k", "absent", "k"], now_ms=5)
        assert [(outcome.key, outcome.removed) for outcome in outcomes] == [
            ("k", stored), ("absent", None), ("k", None),
        ]  # fmt: skip
        assert await found(catalog, "k") is None
        assert await queued(catalog) == [1, 2]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(0, 0)

    async def test_delete_hides_both_rows_of_a_key(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1, durability=Durability.LOCAL))
        await put(catalog, row("k", 2, durability=Durability.MEMORY))
        await catalog.delete(BUCKET, ["k"], now_ms=5)
        assert await found(catalog, "k") is None
        assert await queued(catalog) == [1, 2]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(0, 0)

    async def test_delete_checks_conditions_key_by_key(self, catalog: Catalog) -> None:
        await put(catalog, row("a", 1))
        await put(catalog, row("b", 2))
        wrong, right = WriteCondition(if_match="x"), WriteCondition(if_match="e")
        outcomes = await catalog.delete(BUCKET, ["a", "b", "c"], conditions=[wrong, right, right], now_ms=5)
        assert [outcome.precondition_failed for outcome in outcomes] == [True, False, False]
        assert await found(catalog, "a") is not None
        assert await found(catalog, "b") is None

    async def test_every_named_blob_is_found_hidden_ones_too(self, catalog: Catalog) -> None:
        await put(catalog, row("shadowed", 1))
        await put(catalog, row("shadowed", 2, durability=Durability.MEMORY))
        await put(catalog, row("long" * 250, 3))
        await put(catalog, row("deleted", 4))
        await catalog.delete(BUCKET, ["deleted"], now_ms=5)
        await catalog.create_upload(upload("open"))
        await catalog.put_part(BUCKET, "k", part("open", 3, 5), now_ms=5)
        named = {blob_id async for blob_id in catalog.scan_named_blobs()}
        assert named == {blob(number).blob_id for number in range(1, 6)}

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_dropped_rows_are_gone_and_queued(self, catalog: Catalog, durability: Durability) -> None:
        stored = await put(catalog, row("k", 1, durability=durability))
        newer = await put(catalog, row("l", 3, durability=durability))
        await catalog.drop_rows([stored, row("l", 2), row("gone", 4)])
        assert await found(catalog, "k") is None
        assert await found(catalog, "l") == newer
        assert await queued(catalog) == [1]
        assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 10)

    async def test_scan_gives_every_live_row_in_order(self, catalog: Catalog) -> None:
        await catalog.create_bucket(BucketRow("another", BucketKind.KV, "main", 1, Durability.MEMORY))
        await put(catalog, row("b", 1))
        await put(catalog, row("a", 2, durability=Durability.MEMORY))
        await put(catalog, row("b", 3, durability=Durability.MEMORY))
        await put(catalog, row("z", 4, bucket="another"))
        scanned = [(each.bucket, each.key, each.durability) async for each in catalog.scan_objects()]
        assert scanned == [
            ("another", "z", Durability.LOCAL), (BUCKET, "a", Durability.MEMORY), (BUCKET, "b", Durability.MEMORY),
        ]  # fmt: skip
        volatile = [each.key async for each in catalog.scan_objects(volatile_only=True)]
        assert volatile == ["a", "b"]

    async def test_a_long_scan_misses_nothing(self, catalog: Catalog) -> None:
        keys = [f"{number:05}" for number in range(2001)]
        for number, key in enumerate(keys, 1):
            await put(catalog, row(key, number, durability=Durability.MEMORY))
        assert [each.key async for each in catalog.scan_objects()] == keys
        many = await catalog.lookup(BUCKET, ["none", *keys])
        assert [each and each.key for each in many] == [None, *keys]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_keys_of_every_length_and_script_are_kept_apart(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        keys = LONG_KEYS + UNICODE_KEYS
        for number, key in enumerate(keys, 1):
            await put(catalog, row(key, number, durability=durability))
        for number, key in enumerate(keys, 1):
            live = await found(catalog, key)
            assert live is not None
            assert (live.key, live.blobs) == (key, (blob(number),))
        assert await found(catalog, "a" * 483) is None
        assert await found(catalog, "c" * 900) is None
        in_order = sorted(keys, key=str.encode)
        assert (await listed(catalog, limit=3))[0] == in_order
        for after in (*in_order, "a" * 500, "a" * 970):
            expected = [key for key in in_order if key.encode() > after.encode()]
            assert (await listed(catalog, after=after))[0] == expected
        for key in keys[::2]:
            await catalog.delete(BUCKET, [key], now_ms=5)
        remaining = [key for key in in_order if key in set(keys[1::2])]
        assert (await listed(catalog))[0] == remaining
        await catalog.delete(BUCKET, remaining, now_ms=5)
        await catalog.delete_bucket(BUCKET)


class Listings:
    async def fill(self, catalog: Catalog, keys: list[str]) -> None:
        for number, key in enumerate(keys, 1):
            await put(catalog, row(key, number, durability=CLASSES[number % 2]))

    async def test_an_empty_bucket_lists_nothing(self, catalog: Catalog) -> None:
        page = await catalog.list_objects(BUCKET)
        assert (page.rows, page.common_prefixes, page.next_after) == ((), (), None)

    async def test_limit_zero_is_an_empty_last_page(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["a"])
        page = await catalog.list_objects(BUCKET, limit=0)
        assert (page.rows, page.common_prefixes, page.next_after) == ((), (), None)

    async def test_a_page_that_just_fits_is_the_last(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["a", "b"])
        assert (await catalog.list_objects(BUCKET, limit=2)).next_after is None
        assert (await catalog.list_objects(BUCKET, limit=1)).next_after == "a"

    @pytest.mark.parametrize("limit", [1, 2, 3, 1000])
    async def test_delimiters_fold_keys(self, catalog: Catalog, limit: int) -> None:
        keys = ["a", "b/1", "b/2", "b/c/d", "b0", "c/", "c/x", "d", "é/1", "é/2"]
        await self.fill(catalog, keys)
        assert await listed(catalog, limit=limit, delimiter="/") == (["a", "b0", "d"], ["b/", "c/", "é/"])
        assert await listed(catalog, limit=limit, delimiter="/", key_prefix="b/") == (["b/1", "b/2"], ["b/c/"])
        assert await listed(catalog, limit=limit, delimiter="/", key_prefix="b") == (["b0"], ["b/"])
        assert await listed(catalog, limit=limit, key_prefix="b/") == (["b/1", "b/2", "b/c/d"], [])
        assert await listed(catalog, limit=limit, delimiter="x") == (
            [key for key in sorted(keys) if "x" not in key],
            ["c/x"],
        )

    @pytest.mark.parametrize("limit", [1, 2, 1000])
    async def test_delimiters_of_several_characters(self, catalog: Catalog, limit: int) -> None:
        await self.fill(catalog, ["aXY1", "aXY2", "aX", "aXZ", "bXYc", "XY", "XYXY"])
        assert await listed(catalog, limit=limit, delimiter="XY") == (["aX", "aXZ"], ["XY", "aXY", "bXY"])
        assert await listed(catalog, limit=limit, delimiter="XY", key_prefix="XY") == (["XY"], ["XYXY"])

    async def test_after_equal_to_a_common_prefix_skips_it(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["a", "b/1", "b/2", "c"])
        assert await listed(catalog, delimiter="/", after="b/") == (["c"], [])

    async def test_after_inside_a_common_prefix_still_gives_it(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["a", "b/1", "b/2", "c"])
        assert await listed(catalog, delimiter="/", after="b/1") == (["c"], ["b/"])
        assert await listed(catalog, delimiter="/", after="b/2") == (["c"], [])

    async def test_a_key_equal_to_the_prefix_is_listed_itself(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["b/", "b/1", "b/c/1"])
        assert await listed(catalog, delimiter="/", key_prefix="b/") == (["b/", "b/1"], ["b/c/"])

    async def test_after_below_the_prefix_starts_at_the_prefix(self, catalog: Catalog) -> None:
        await self.fill(catalog, ["a", "b1", "b2", "c"])
        assert await listed(catalog, key_prefix="b", after="a") == (["b1", "b2"], [])
        assert await listed(catalog, key_prefix="b", after="b1") == (["b2"], [])
        assert await listed(catalog, key_prefix="b", after="c") == ([], [])

    async def test_common_prefixes_longer_than_a_stride(self, catalog: Catalog) -> None:
        long = "p" * 600
        await self.fill(catalog, [f"{long}/1", f"{long}/2", f"{long}0", f"{'p' * 479}/x", "q"])
        assert await listed(catalog, limit=1, delimiter="/") == ([f"{long}0", "q"], [f"{'p' * 479}/", f"{long}/"])

    async def test_a_key_is_listed_once_with_its_live_row(self, catalog: Catalog) -> None:
        await put(catalog, row("k", 1, durability=Durability.LOCAL))
        newer = await put(catalog, row("k", 2, durability=Durability.MEMORY))
        assert (await catalog.list_objects(BUCKET)).rows == (newer,)


class Uploads:
    @pytest.mark.parametrize("durability", CLASSES)
    async def test_an_upload_is_found_by_its_whole_name(self, catalog: Catalog, durability: Durability) -> None:
        given = upload("u1", "k" * 800, durability)
        await catalog.create_upload(given)
        assert await catalog.upload(BUCKET, given.key, "u1") == given
        assert await catalog.upload(BUCKET, given.key, "u2") is None
        assert await catalog.upload(BUCKET, "k", "u1") is None
        assert await catalog.upload("none", given.key, "u1") is None

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_parts_are_listed_by_number_and_replaced_ones_queued(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await catalog.create_upload(upload("u1", durability=durability))
        for number, sequence in ((10_000, 1), (2, 2), (1, 3), (2, 4)):
            await catalog.put_part(BUCKET, "k", part("u1", number, sequence), now_ms=5)
        parts = await catalog.parts(BUCKET, "k", "u1")
        assert [(each.number, each.blobs) for each in parts] == [
            (1, (blob(3),)), (2, (blob(4),)), (10_000, (blob(1),)),
        ]  # fmt: skip
        assert await queued(catalog) == [2]
        assert sorted([each.number async for each in catalog.scan_parts()]) == [1, 2, 10_000]

    async def test_a_part_of_no_upload_is_queued(self, catalog: Catalog) -> None:
        with pytest.raises(NoSuchUploadError):
            await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        with pytest.raises(NoSuchUploadError):
            await catalog.parts(BUCKET, "k", "u1")
        assert await queued(catalog) == [1]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_neither_an_upload_nor_a_part_that_was_meant_for_a_bucket_of_before_is_taken(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, "other", 2, Durability.LOCAL))
        group = msgspec.structs.replace(upload("u1", durability=durability), group_parts=2)
        with pytest.raises(NoSuchBucketError):
            await catalog.create_upload(group, made_ms=1)
        assert await catalog.upload(BUCKET, "k", "u1") is None
        await catalog.create_upload(group, made_ms=2)
        with pytest.raises(NoSuchBucketError):
            await catalog.put_part(BUCKET, "k", part("u1", 1, 1), made_ms=1, now_ms=5)
        assert await queued(catalog) == [1]
        assert await catalog.parts(BUCKET, "k", "u1") == ()
        own = part("u1", 1, 2)
        assert await catalog.put_part(BUCKET, "k", own, made_ms=2, now_ms=5) == own
        assert await catalog.parts(BUCKET, "k", "u1") == (own,)

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_an_upload_that_has_a_part_is_not_aborted_for_being_empty(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await catalog.create_upload(upload("u1", durability=durability))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        await catalog.abort_upload(BUCKET, "k", "u1", if_empty=True, now_ms=5)
        assert len(await catalog.parts(BUCKET, "k", "u1")) == 1
        assert catalog.unfinished.of_users == {"main": 10}
        await catalog.create_upload(upload("u2", durability=durability))
        await catalog.abort_upload(BUCKET, "k", "u2", if_empty=True, now_ms=5)
        assert await catalog.upload(BUCKET, "k", "u2") is None
        assert await queued(catalog) == []

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_an_upload_that_took_the_id_of_the_one_meant_is_not_aborted(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        bucket = await catalog.bucket(BUCKET)
        assert bucket is not None
        await catalog.create_upload(upload("u1", durability=durability))
        for meant in ({"made_ms": bucket.created_ms + 1}, {"namespace_root": b"f" * 32}):
            with pytest.raises(NoSuchUploadError):
                await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5, **meant)
        assert await catalog.upload(BUCKET, "k", "u1") is not None
        await catalog.abort_upload(BUCKET, "k", "u1", made_ms=bucket.created_ms, now_ms=5)
        assert await catalog.upload(BUCKET, "k", "u1") is None

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_part_of_another_epoch_is_fenced(self, catalog: Catalog, durability: Durability) -> None:
        await catalog.create_upload(upload("u1", durability=durability))
        with pytest.raises(FencedError):
            await catalog.put_part(BUCKET, "k", part("u1", 1, 1, epoch=EPOCH + 1), now_ms=5)
        assert await queued(catalog) == [1]

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_abort_queues_the_parts(self, catalog: Catalog, durability: Durability) -> None:
        await catalog.create_upload(upload("u1", durability=durability))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1, 2), now_ms=5)
        await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
        assert await queued(catalog) == [1, 2]
        assert await catalog.upload(BUCKET, "k", "u1") is None
        with pytest.raises(NoSuchUploadError):
            await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
        await catalog.delete_bucket(BUCKET)

    @pytest.mark.parametrize("of_row", CLASSES)
    @pytest.mark.parametrize("of_upload", CLASSES)
    async def test_a_commit_consumes_its_upload(
        self, catalog: Catalog, of_upload: Durability, of_row: Durability
    ) -> None:
        await catalog.create_upload(upload("u1", durability=of_upload))
        for number in (1, 2, 3):
            await catalog.put_part(BUCKET, "k", part("u1", number, number), now_ms=5)
        given = row("k", 1, 3, durability=of_row, size_bytes=20)
        await catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)
        live = await found(catalog, "k")
        assert live is not None
        assert live.blobs == given.blobs
        assert await queued(catalog) == [2]
        assert await catalog.upload(BUCKET, "k", "u1") is None
        assert [each async for each in catalog.scan_parts()] == []
        with pytest.raises(NoSuchUploadError):
            await catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)
        assert await queued(catalog) == [2], "blobs of the live row are not queued by a Complete sent twice"

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_refused_complete_leaves_its_upload(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, row("k", 9, durability=durability))
        await catalog.create_upload(upload("u1", durability=durability))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        with pytest.raises(PreconditionFailedError):
            await catalog.commit(
                row("k", 1, 2, durability=durability),
                mode=CommitMode.REPLACE,
                condition=WriteCondition(if_none_match="*"),
                upload_id="u1",
                now_ms=5,
            )
        assert await queued(catalog) == [2]
        assert len(await catalog.parts(BUCKET, "k", "u1")) == 1

    @pytest.mark.parametrize("durability", CLASSES)
    async def test_a_complete_that_came_second_drains_its_parts(self, catalog: Catalog, durability: Durability) -> None:
        first = await put(catalog, row("k", 9, durability=durability), CommitMode.FIRST_WRITER_WINS)
        await catalog.create_upload(upload("u1", durability=durability))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        outcome = await catalog.commit(
            row("k", 1, durability=durability), mode=CommitMode.FIRST_WRITER_WINS, upload_id="u1", now_ms=5
        )
        assert (outcome.existed, outcome.row) == (True, first)
        assert await queued(catalog) == [1]
        assert await catalog.upload(BUCKET, "k", "u1") is None

    async def test_parts_of_an_earlier_epoch_may_be_completed(self, catalog: Catalog) -> None:
        await catalog.create_upload(upload("u1"))
        await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
        await catalog.open_epoch(EPOCH + 1)
        await catalog.commit(row("k", 1), mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)
        assert await found(catalog, "k") is not None

    @pytest.mark.parametrize("limit", [1, 2, 1000])
    async def test_uploads_are_listed_by_key_and_id(self, catalog: Catalog, limit: int) -> None:
        names = [("a", "2"), ("a", "1"), ("a\x00", "1"), ("b/x", "1"), ("b/y", "1"), ("c" * 700, "1"), ("é", "1")]
        for number, (key, upload_id) in enumerate(names):
            await catalog.create_upload(upload(upload_id, key, CLASSES[number % 2]))

        async def pages(delimiter: str = "", key_prefix: str = "") -> tuple[list[tuple[str, str]], list[str]]:
            rows: list[tuple[str, str]] = []
            prefixes: list[str] = []
            after: tuple[str, str] | None = ("", "")
            while after is not None:
                page = await catalog.list_uploads(
                    BUCKET, key_prefix=key_prefix, delimiter=delimiter, after=after, limit=limit
                )
                rows += [(each.key, each.upload_id) for each in page.rows]
                prefixes += page.common_prefixes
                after = page.next_after
            return rows, prefixes

        in_order = sorted(names, key=lambda name: (name[0].encode(), name[1]))
        assert await pages() == (in_order, [])
        assert await pages("/") == ([name for name in in_order if "/" not in name[0]], ["b/"])
        assert await pages("/", "b/") == ([("b/x", "1"), ("b/y", "1")], [])
        assert await pages(key_prefix="a") == ([("a", "1"), ("a", "2"), ("a\x00", "1")], [])


class DeleteQueue:
    async def test_entries_fall_due_oldest_first(self, catalog: Catalog) -> None:
        await catalog.queue_blobs([blob(1).blob_id, blob(2).blob_id], now_ms=10)
        await catalog.queue_blobs([blob(3).blob_id], now_ms=20)
        assert await catalog.due(now_ms=9) == []
        assert numbers(await catalog.due(now_ms=10)) == [1, 2]
        entries = await catalog.due(now_ms=20)
        assert [sequence_of(entry.blob_id) for entry in entries] == [1, 2, 3]
        assert [entry.position for entry in entries] == sorted({entry.position for entry in entries})
        assert numbers(await catalog.due(now_ms=20, limit=1)) == [1]

    async def test_reaped_entries_are_forgotten_exactly(self, catalog: Catalog) -> None:
        for durability, number in ((Durability.MEMORY, 1), (Durability.LOCAL, 2)):
            await put(catalog, row(f"k{number}", number, durability=durability))
            await put(catalog, row(f"l{number}", number + 2, durability=durability))
        await catalog.delete(BUCKET, ["k1", "k2", "l1", "l2"], now_ms=5)
        entries = await catalog.due(now_ms=5)
        assert numbers(entries) == [1, 2, 3, 4]
        assert {(entry.bucket, entry.key) for entry in entries} == {(BUCKET, key) for key in ("k1", "k2", "l1", "l2")}
        await catalog.reap(entries[:3])
        await catalog.reap(entries[:3])
        assert await catalog.due(now_ms=5) == entries[3:]


class CatalogContract(UsersAndBuckets, Objects, Listings, Uploads, DeleteQueue):
    """All of it."""
