"""What every catalog driver must do about chains: parents, hiding, condemning, claiming. Run like `catalog_contract`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from blake3 import blake3
from catalog_contract import CLASSES, EPOCH, blob, numbers
from namespace_contract import namespace

from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BucketKind,
    BucketRow,
    BucketUsage,
    ChunkName,
    CommitMode,
    CommitOutcome,
    Durability,
    NamespaceQuota,
    ObjectRow,
    ObjectState,
    PartRow,
    RecallPage,
    UploadRow,
    WriteCondition,
)
from kvobj.errors import (
    BatchTooLargeError,
    BucketNotEmptyError,
    FencedError,
    ImmutableChunkError,
    InvalidRequestError,
    LayoutMismatchError,
    NoSuchBucketError,
    NoSuchNamespaceError,
    ParentNotFoundError,
    PreconditionFailedError,
    QuotaExceededError,
)

KV = "chunks"
USER = "main"
FIRST = CommitMode.FIRST_WRITER_WINS
BOTH = pytest.mark.parametrize("durability", CLASSES)
MIXES = pytest.mark.parametrize(
    "mix",
    [
        (Durability.MEMORY, Durability.MEMORY, Durability.MEMORY),
        (Durability.LOCAL, Durability.LOCAL, Durability.LOCAL),
        (Durability.LOCAL, Durability.MEMORY, Durability.LOCAL),
        (Durability.MEMORY, Durability.LOCAL, Durability.MEMORY),
    ],
)


def chunk(
    key: str,
    number: int,
    parent: str | None = "",
    *,
    durability: Durability = Durability.MEMORY,
    size_bytes: int = 10,
    namespace: str = "ns",
    owner: str = USER,
    epoch: int = EPOCH,
    modified_ms: int = 1,
) -> ObjectRow:
    return ObjectRow(
        bucket=KV,
        key=key,
        blobs=(blob(number, size_bytes, epoch=epoch),),
        size_bytes=size_bytes,
        etag=f"kv-{number}",
        modified_ms=modified_ms,
        owner=owner,
        durability=durability,
        parent=parent,
        namespace=namespace,
        tokens=16,
    )


async def with_chunks(catalog: Catalog) -> Catalog:
    await catalog.create_bucket(BucketRow(KV, BucketKind.KV, USER, 1, Durability.MEMORY))
    return catalog


async def put(catalog: Catalog, row: ObjectRow, condition: WriteCondition | None = None) -> ObjectRow:
    return (await catalog.commit(row, mode=FIRST, condition=condition, now_ms=5)).row


async def put_chain(catalog: Catalog, keys: str, durabilities: Sequence[Durability] = (Durability.MEMORY,)) -> None:
    """Chunks a, b, c … with blobs 1, 2, 3 …, each the parent of the next."""
    for at, key in enumerate(keys):
        parent = keys[at - 1] if at else ""
        await put(catalog, chunk(key, at + 1, parent, durability=durabilities[at % len(durabilities)]))


async def live_keys(catalog: Catalog, keys: str) -> str:
    rows = await catalog.lookup(KV, list(keys))
    return "".join(key for key, row in zip(keys, rows, strict=True) if row is not None)


async def hidden_keys(catalog: Catalog, keys: str) -> str:
    return "".join([key for key in keys if await catalog.lookup_hidden(KV, key) is not None])


async def pin(catalog: Catalog, *keys: str) -> tuple[bytes, list[bytes]]:
    session = await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
    result = await catalog.leases.pin_tails(session.id, keys, user=USER, bucket=KV, now_boot_ms=0)
    return session.id, [each.pin for each in result.pins if each.pin is not None]


async def unpin(catalog: Catalog, session_id: bytes) -> None:
    await catalog.leases.close_session(session_id, user=USER, bucket=KV)


async def queued(catalog: Catalog) -> list[int]:
    return numbers(await catalog.due(now_ms=1_000_000))


async def named(catalog: Catalog) -> list[int]:
    return sorted(
        {int.from_bytes(blob_id[8:], "big") for blob_id in [each async for each in catalog.scan_named_blobs()]}
    )


def name(key: str, number: int) -> ChunkName:
    return ChunkName(KV, key, bytes(blob(number).blob_id))


async def condemn(catalog: Catalog, *chunks: ChunkName, not_before: int = 100) -> list[bool]:
    return await catalog.condemn(chunks, not_before_boot_ms=not_before)


async def claim(catalog: Catalog, now: int = 100, limit: int = 1000) -> list[str]:
    claimed = await catalog.claim(now_boot_ms=now, limit=limit, now_ms=9)
    return [*(chunk.key for chunk in claimed.chunks), *(row.key for row in claimed.hidden)]


def lanes_of(key: str) -> tuple[int, int]:
    """Written down once more from the definition."""
    is_id = len(key) == 64 and set(key) <= set("0123456789abcdef")
    digest = bytes.fromhex(key)[:16] if is_id else blake3(key.encode()).digest()[:16]
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def expected_sum(keys: Sequence[str]) -> bytes:
    totals = [sum((at + 1) * lanes_of(key)[lane] for at, key in enumerate(keys)) % 2**64 for lane in (0, 1)]
    return b"".join(total.to_bytes(8, "little") for total in totals)


class Commits:
    @MIXES
    async def test_a_chunk_knows_its_place_in_its_chain(self, catalog: Catalog, mix: tuple[Durability, ...]) -> None:
        keys = ["ab" * 32, "second", "cd" * 32]
        for at, key in enumerate(keys):
            parent = keys[at - 1] if at else ""
            await put(catalog, chunk(key, at + 1, parent, durability=mix[at], size_bytes=10 * (at + 1)))
        rows = await catalog.lookup(KV, keys)
        for at, row in enumerate(rows):
            assert row is not None
            assert (row.depth, row.chain_tokens) == (at, 16 * (at + 1))
            assert row.chain_bytes == sum(10 * (each + 1) for each in range(at + 1))
            assert row.chain_sum == expected_sum(keys[: at + 1])

    async def test_a_key_without_a_parent_has_no_sum(self, catalog: Catalog) -> None:
        row = await put(catalog, chunk("a", 1, None))
        assert (row.depth, row.chain_sum, row.chain_bytes, row.chain_tokens) == (0, b"", 10, 16)

    async def test_a_child_of_a_key_without_a_parent_counts_it_as_first(self, catalog: Catalog) -> None:
        await put(catalog, chunk("a", 1, None))
        row = await put(catalog, chunk("b", 2, "a"))
        assert (row.depth, row.chain_sum, row.chain_bytes) == (1, expected_sum(["a", "b"]), 20)

    async def test_the_place_is_not_the_writers_to_say(self, catalog: Catalog) -> None:
        given = msgspec.structs.replace(
            chunk("a", 1), depth=9, chain_sum=b"x" * 16, chain_bytes=7, chain_tokens=7, state=ObjectState.CONDEMNED
        )
        row = await put(catalog, given)
        assert (row.depth, row.chain_sum, row.chain_bytes) == (0, expected_sum(["a"]), 10)
        assert row.state is ObjectState.LIVE

    @BOTH
    async def test_a_chunk_needs_its_parent(self, catalog: Catalog, durability: Durability) -> None:
        with pytest.raises(ParentNotFoundError) as refused:
            await put(catalog, chunk("b", 2, "a", durability=durability))
        assert refused.value.data["parent"] == "a"
        assert await queued(catalog) == [2]
        assert await live_keys(catalog, "ab") == ""

    async def test_no_chunk_is_its_own_parent(self, catalog: Catalog) -> None:
        with pytest.raises(ParentNotFoundError):
            await put(catalog, chunk("a", 1, "a"))

    @BOTH
    async def test_the_first_writer_wins_whatever_the_second_says_of_the_place(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await put_chain(catalog, "ab", [durability])
        for number, other in ((8, chunk("b", 8, "a")), (9, chunk("b", 9, "gone", namespace="other"))):
            outcome = await catalog.commit(other, mode=FIRST, now_ms=5)
            assert (outcome.existed, outcome.row.etag, number in await queued(catalog)) == (True, "kv-2", True)
        with pytest.raises(ImmutableChunkError):
            await put(catalog, chunk("b", 10, "a", size_bytes=11))
        assert await queued(catalog) == [8, 9, 10]

    async def test_a_fenced_writer_gets_nothing(self, catalog: Catalog) -> None:
        with pytest.raises(FencedError):
            await put(catalog, chunk("a", 1, epoch=7))
        assert await live_keys(catalog, "a") == ""

    @BOTH
    async def test_a_clients_own_key_is_replaced_on_its_condition(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await put(catalog, chunk("a", 1, None, namespace="default", durability=durability))
        with pytest.raises(PreconditionFailedError):
            await put(catalog, chunk("a", 2, None, namespace="default"), WriteCondition(if_match="kv-9"))
        replacing = chunk("a", 3, None, namespace="default", size_bytes=11, durability=durability)
        row = await put(catalog, replacing, WriteCondition(if_match="kv-1"))
        assert row.etag == "kv-3"
        assert await queued(catalog) == [1, 2]
        assert await catalog.bucket_usage(KV) == BucketUsage(1, 11)
        assert (await catalog.namespaces.usage(KV, "default")).size_bytes == 11

    async def test_chunks_are_not_replaced_on_any_condition(self, catalog: Catalog) -> None:
        await put_chain(catalog, "a")
        outcome = await catalog.commit(chunk("a", 2), mode=FIRST, condition=WriteCondition(if_match="*"), now_ms=5)
        assert outcome.existed
        await put(catalog, chunk("k", 3, None, namespace="default"))
        await put(catalog, chunk("l", 4, "k", namespace="default"))
        with pytest.raises(ImmutableChunkError):
            await put(catalog, chunk("k", 5, None, namespace="default"), WriteCondition(if_match="*"))

    async def test_a_pinned_key_that_is_replaced_leaves_its_bytes_to_the_pin(self, catalog: Catalog) -> None:
        await put(catalog, chunk("a", 1, None, namespace="default"))
        session, _ = await pin(catalog, "a")
        await put(catalog, chunk("a", 2, None, namespace="default"), WriteCondition(if_match="*"))
        assert await queued(catalog) == []
        await unpin(catalog, session)
        assert await queued(catalog) == [1]

    @BOTH
    async def test_a_namespace_is_full_at_its_quota(self, catalog: Catalog, durability: Durability) -> None:
        async def attempt(number: int, quota: NamespaceQuota, namespace: str = "ns") -> CommitOutcome:
            row = chunk(f"k{number}", number, durability=durability, namespace=namespace)
            return await catalog.commit(row, mode=FIRST, quota=quota, now_ms=5)

        await attempt(1, NamespaceQuota(chunks=1))
        with pytest.raises(QuotaExceededError):
            await attempt(2, NamespaceQuota(chunks=1))
        await attempt(3, NamespaceQuota(chunks=1), "other")
        with pytest.raises(QuotaExceededError):
            await attempt(4, NamespaceQuota(size_bytes=19))
        await attempt(5, NamespaceQuota(chunks=2, size_bytes=20))
        assert (await attempt(5, NamespaceQuota(chunks=2, size_bytes=20))).existed
        assert await queued(catalog) == [2, 4]
        await catalog.delete(KV, ["k1"], now_ms=5)
        await attempt(6, NamespaceQuota(chunks=2))
        assert (await catalog.namespaces.usage(KV, "ns")).chunks == 2

    @MIXES
    async def test_counts_follow_rows_through_all_changes(self, catalog: Catalog, mix: tuple[Durability, ...]) -> None:
        await put_chain(catalog, "abc", mix)
        assert (await catalog.namespaces.usage(KV, "ns")).chunks == 3
        for key in "abc":
            (row,) = await catalog.lookup(KV, [key])
            assert row is not None
            await catalog.raise_durability([msgspec.structs.replace(row, durability=Durability.LOCAL)])
        assert await catalog.bucket_usage(KV) == BucketUsage(3, 30)
        assert (await catalog.namespaces.usage(KV, "ns")).size_bytes == 30
        session, _ = await pin(catalog, "b")
        await catalog.delete(KV, ["a"], now_ms=5)
        assert await catalog.bucket_usage(KV) == BucketUsage(0, 0)
        assert (await catalog.namespaces.usage(KV, "ns")).chunks == 0
        await unpin(catalog, session)
        await claim(catalog)
        assert await catalog.bucket_usage(KV) == BucketUsage(0, 0)


class Chains:
    @BOTH
    async def test_a_chain_is_committed_in_one_step(self, catalog: Catalog, durability: Durability) -> None:
        rows = [
            chunk(key, at + 1, "" if not at else "abc"[at - 1], durability=durability) for at, key in enumerate("abc")
        ]
        outcomes = await catalog.commit_chain(rows, now_ms=5)
        assert [isinstance(each, CommitOutcome) and not each.existed for each in outcomes] == [True] * 3
        (tail,) = await catalog.lookup(KV, ["c"])
        assert tail is not None
        assert (tail.depth, tail.chain_sum, tail.chain_bytes) == (2, expected_sum("abc"), 30)
        again = await catalog.commit_chain(
            [msgspec.structs.replace(row, blobs=(blob(at + 11),)) for at, row in enumerate(rows)], now_ms=5
        )
        assert [isinstance(each, CommitOutcome) and each.existed for each in again] == [True] * 3
        assert await queued(catalog) == [11, 12, 13]

    @MIXES
    async def test_what_needs_a_refused_chunk_is_refused_and_the_rest_stands(
        self, catalog: Catalog, mix: tuple[Durability, ...]
    ) -> None:
        rows = [
            chunk("a", 1, durability=mix[0]),
            chunk("b", 2, "a", epoch=7, durability=mix[1]),
            chunk("c", 3, "b", durability=mix[2]),
            chunk("d", 4, "a", durability=mix[0]),
            chunk("x", 5, "nowhere", durability=mix[1]),
        ]
        outcomes = await catalog.commit_chain(rows, now_ms=5)
        assert [type(each) for each in outcomes] == [
            CommitOutcome, FencedError, ParentNotFoundError, CommitOutcome, ParentNotFoundError,
        ]  # fmt: skip
        assert await live_keys(catalog, "abcdx") == "ad"
        assert await queued(catalog) == [2, 3, 5]

    async def test_a_chain_is_told_of_as_one(self, catalog: Catalog) -> None:
        rows = [chunk(key, at + 1, "" if not at else "abc"[at - 1]) for at, key in enumerate("abc")]
        await catalog.commit_chain(rows, now_ms=5)
        (event,) = (await catalog.history.read(KV, after=0)).events
        assert (event.keys, event.parent, event.tokens) == (("a", "b", "c"), "", 48)

    async def test_a_long_chain_and_its_bounds(self, catalog: Catalog) -> None:
        keys = [f"k{at}" for at in range(1000)]
        rows = [chunk(key, at + 1, keys[at - 1] if at else "") for at, key in enumerate(keys)]
        outcomes = await catalog.commit_chain(rows, quota=NamespaceQuota(chunks=900), now_ms=5)
        assert [isinstance(each, CommitOutcome) for each in outcomes] == [True] * 900 + [False] * 100
        assert isinstance(outcomes[900], QuotaExceededError)
        assert isinstance(outcomes[901], ParentNotFoundError)
        with pytest.raises(BatchTooLargeError):
            await catalog.commit_chain([chunk("x", 1)] * 1001, now_ms=5)
        assert await catalog.commit_chain([], now_ms=5) == []

    async def test_a_chain_in_no_bucket_is_refused_chunk_by_chunk(self, catalog: Catalog) -> None:
        rows = [msgspec.structs.replace(chunk(key, at + 1), bucket="none") for at, key in enumerate("ab")]
        outcomes = await catalog.commit_chain(rows, now_ms=5)
        assert [type(each) for each in outcomes] == [NoSuchBucketError] * 2
        assert await queued(catalog) == [1, 2]

    @MIXES
    async def test_a_chain_that_was_meant_for_a_bucket_of_before_is_refused(
        self, catalog: Catalog, mix: tuple[Durability, ...]
    ) -> None:
        rows = [chunk("a", 1, durability=mix[0]), chunk("b", 2, "a", durability=mix[1])]
        assert [type(each) for each in await catalog.commit_chain(rows, made_ms=0, now_ms=5)] == [
            NoSuchBucketError,
            NoSuchBucketError,
        ]
        assert await live_keys(catalog, "ab") == ""
        assert await queued(catalog) == [1, 2]

    @pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.LOCAL])
    async def test_chunks_that_were_meant_for_a_bucket_of_before_are_refused(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        rows = [chunk("a", 1, durability=durability), chunk("b", 2, durability=durability)]
        assert [type(each) for each in await catalog.commit_chain(rows, made_ms=0, now_ms=5)] == [
            NoSuchBucketError,
            NoSuchBucketError,
        ]
        assert await queued(catalog) == [1, 2]


class Deletes:
    @MIXES
    async def test_a_key_goes_with_all_below_it(self, catalog: Catalog, mix: tuple[Durability, ...]) -> None:
        await put_chain(catalog, "abc", mix)
        await put(catalog, chunk("x", 8, "a"))
        await put(catalog, chunk("y", 9))
        (outcome,) = await catalog.delete(KV, ["b"], now_ms=7)
        assert outcome.removed is not None
        assert outcome.removed.key == "b"
        assert [row.key for row in outcome.descendants] == ["c"]
        assert await live_keys(catalog, "abcxy") == "axy"
        assert await queued(catalog) == [2, 3]
        await catalog.delete(KV, ["a"], now_ms=7)
        assert await live_keys(catalog, "abcxy") == "y"
        assert await queued(catalog) == [1, 2, 3, 8]
        assert await named(catalog) == [1, 2, 3, 8, 9]

    async def test_many_keys_of_one_tree_are_deleted_in_order(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abcd")
        outcomes = await catalog.delete(KV, ["c", "a", "b", "none"], now_ms=7)
        assert [None if each.removed is None else each.removed.key for each in outcomes] == ["c", "a", None, None]
        assert [sorted(row.key for row in each.descendants) for each in outcomes] == [["d"], ["b"], [], []]

    @BOTH
    async def test_a_condition_that_fails_keeps_the_whole_tree(self, catalog: Catalog, durability: Durability) -> None:
        await put_chain(catalog, "abc", [durability])
        conditions = [WriteCondition(if_match="kv-9"), WriteCondition(if_match="kv-3")]
        outcomes = await catalog.delete(KV, ["a", "c"], conditions=conditions, now_ms=7)
        assert [each.precondition_failed for each in outcomes] == [True, False]
        assert await live_keys(catalog, "abc") == "ab"

    @BOTH
    async def test_a_wide_and_deep_tree_goes_in_steps(self, catalog: Catalog, durability: Durability) -> None:
        keys = [f"k{at}" for at in range(2500)]
        rows = [
            chunk(key, at + 1, keys[(at - 1) // 2] if at else "", durability=durability) for at, key in enumerate(keys)
        ]
        for start in range(0, len(rows), 1000):
            await catalog.commit_chain(rows[start : start + 1000], now_ms=5)
        (outcome,) = await catalog.delete(KV, ["k0"], now_ms=7)
        assert outcome.removed is not None
        assert len({row.key for row in outcome.descendants}) == 2499
        assert await catalog.bucket_usage(KV) == BucketUsage(0, 0)
        assert len(await catalog.due(now_ms=1_000_000, limit=10_000)) == 2500

    async def test_a_path_longer_than_a_step_is_deleted_whole(self, catalog: Catalog) -> None:
        keys = [f"k{at}" for at in range(2100)]
        rows = [chunk(key, at + 1, keys[at - 1] if at else "") for at, key in enumerate(keys)]
        for start in range(0, len(rows), 1000):
            await catalog.commit_chain(rows[start : start + 1000], now_ms=5)
        session, _ = await pin(catalog, keys[1500])
        await catalog.delete(KV, ["k0"], now_ms=7)
        assert await catalog.bucket_usage(KV) == BucketUsage(0, 0)
        assert catalog.condemned() == (0, 1501)
        await unpin(catalog, session)
        claimed = []
        while batch := await claim(catalog):
            claimed += batch
        assert claimed == keys[1500::-1]

    @MIXES
    async def test_what_is_pinned_stays_hidden_with_all_above_it(
        self, catalog: Catalog, mix: tuple[Durability, ...]
    ) -> None:
        await put_chain(catalog, "abc", mix)
        await put(catalog, chunk("d", 4, "c"))
        session, _ = await pin(catalog, "c")
        (outcome,) = await catalog.delete(KV, ["a"], now_ms=7)
        assert outcome.removed is not None
        assert sorted(row.key for row in outcome.descendants) == ["b", "c", "d"]
        assert await live_keys(catalog, "abcd") == ""
        assert await hidden_keys(catalog, "abcd") == "abc"
        assert catalog.condemned() == (0, 3)
        assert await queued(catalog) == [4]
        assert await catalog.list_objects(KV) == msgspec.structs.replace(await catalog.list_objects(KV), rows=())
        assert [row async for row in catalog.scan_objects()] == []
        assert await named(catalog) == [1, 2, 3, 4]
        # Hidden is as absent as gone, to everybody.
        with pytest.raises(ParentNotFoundError):
            await put(catalog, chunk("e", 5, "c"))
        assert await catalog.lookup(KV, ["a", "c"], rescue=True) == [None, None]
        again = await catalog.delete(KV, ["a"], now_ms=7)
        assert again[0].removed is None
        assert await condemn(catalog, name("c", 3)) == [False]
        # A claim takes them as soon as nothing holds them, and not before.
        assert await claim(catalog) == []
        await unpin(catalog, session)
        assert await claim(catalog) == ["c", "b", "a"]
        assert await queued(catalog) == [1, 2, 3, 4, 5]
        assert catalog.condemned() == (0, 0)

    @MIXES
    async def test_a_hidden_chunk_is_replaced_by_a_put(self, catalog: Catalog, mix: tuple[Durability, ...]) -> None:
        await put_chain(catalog, "ab", mix[:2])
        session, _ = await pin(catalog, "b")
        await catalog.delete(KV, ["a"], now_ms=7)
        outcome = await catalog.commit(chunk("a", 11, durability=mix[2]), mode=FIRST, now_ms=8)
        assert not outcome.existed
        # The pin names b: a's old bytes are the same as the new ones, b's must stay as they are.
        assert await queued(catalog) == [1]
        await put(catalog, chunk("b", 12, "a", durability=mix[1]))
        assert await queued(catalog) == [1]
        assert await live_keys(catalog, "ab") == "ab"
        assert catalog.condemned() == (0, 0)
        # A second DELETE still meets the pin, which holds the key.
        await catalog.delete(KV, ["a"], now_ms=9)
        assert await hidden_keys(catalog, "ab") == "ab"
        await unpin(catalog, session)
        assert await queued(catalog) == [1, 2]
        assert await claim(catalog) == ["b", "a"]
        assert await queued(catalog) == [1, 2, 11, 12]

    async def test_a_leftover_that_is_pinned_waits(self, catalog: Catalog) -> None:
        await put_chain(catalog, "a")
        session, _ = await pin(catalog, "a")
        await catalog.queue_blobs([blob(1).blob_id, blob(2).blob_id], now_ms=8)
        assert await queued(catalog) == [2]
        await unpin(catalog, session)
        assert await queued(catalog) == [1, 2]

    async def test_every_blob_of_a_pinned_chunk_waits(self, catalog: Catalog) -> None:
        many = msgspec.structs.replace(chunk("a", 1), blobs=(blob(1, 5), blob(2, 5)))
        await put(catalog, many)
        session, _ = await pin(catalog, "a")
        await catalog.delete(KV, ["a"], now_ms=7)
        await put(catalog, chunk("a", 3))
        assert await queued(catalog) == []
        await unpin(catalog, session)
        assert await queued(catalog) == [1, 2]

    @BOTH
    async def test_write_behind_may_finish_what_was_hidden_meanwhile(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        del durability
        await put_chain(catalog, "ab")
        rows = await catalog.lookup(KV, ["a", "b"])
        session, _ = await pin(catalog, "b")
        await catalog.delete(KV, ["a"], now_ms=7)
        raised = [msgspec.structs.replace(row, durability=Durability.LOCAL) for row in rows if row is not None]
        assert await catalog.raise_durability(raised) == [True, True]
        assert await live_keys(catalog, "ab") == ""
        assert await hidden_keys(catalog, "ab") == "ab"
        assert await queued(catalog) == []
        await unpin(catalog, session)
        assert await claim(catalog) == ["b", "a"]
        assert await catalog.raise_durability(raised) == [False, False]

    async def test_events_tell_why(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abcd", CLASSES)
        session, _ = await pin(catalog, "b")
        await catalog.delete(KV, ["b"], now_ms=7)
        assert await condemn(catalog, name("a", 1)) == [False]
        await unpin(catalog, session)
        await claim(catalog)
        await condemn(catalog, name("a", 1))
        await claim(catalog)
        reasons = {}
        for key in "abcd":
            removal = await catalog.history.why_removed(KV, key)
            assert removal is not None
            reasons[key] = removal.reason
        deleted = dict.fromkeys("bcd", RemovalReason.DELETED)
        assert reasons == {"a": RemovalReason.EVICTED, **deleted}
        events = (await catalog.history.read(KV, after=0)).events
        stored = [key for event in events if event.type == "stored" for key in event.keys]
        removed = sorted(key for event in events if event.type == "removed" for key in event.keys)
        assert (stored, removed) == (list("abcd"), list("abcd"))

    async def test_a_bucket_of_hidden_chunks_is_empty(self, catalog: Catalog) -> None:
        await put_chain(catalog, "ab", CLASSES)
        session, _ = await pin(catalog, "b")
        with pytest.raises(BucketNotEmptyError):
            await catalog.delete_bucket(KV)
        await catalog.delete(KV, ["a"], now_ms=7)
        await catalog.delete_bucket(KV)
        assert await queued(catalog) == [1]
        assert catalog.condemned() == (0, 0)
        await with_chunks(catalog)
        assert await live_keys(catalog, "ab") == ""
        await unpin(catalog, session)
        assert await queued(catalog) == [1, 2]

    async def test_an_ordinary_bucket_knows_no_chains(self, catalog: Catalog) -> None:
        with pytest.raises(InvalidRequestError):
            await put(catalog, msgspec.structs.replace(chunk("a", 7), bucket="first"))
        row = msgspec.structs.replace(chunk("a", 1, None, namespace=""), bucket="first")
        await catalog.commit(row, mode=CommitMode.REPLACE, now_ms=5)
        (outcome,) = await catalog.delete("first", ["a"], now_ms=5)
        assert outcome.descendants == ()
        assert await catalog.history.why_removed("first", "a") is None


class Claims:
    @MIXES
    async def test_policy_condemns_leaf_first_and_the_claim_removes(
        self, catalog: Catalog, mix: tuple[Durability, ...]
    ) -> None:
        await put_chain(catalog, "abc", mix)
        assert await condemn(catalog, name("b", 2)) == [False]
        assert await condemn(catalog, name("c", 3), name("b", 2)) == [True, True]
        assert await condemn(catalog, name("a", 1), not_before=200) == [True]
        assert catalog.condemned() == (3, 0)
        assert await live_keys(catalog, "abc") == "abc"
        assert (await catalog.bucket_usage(KV)).objects == 3
        assert await claim(catalog, now=99) == []
        assert await claim(catalog, now=100) == ["c", "b"]
        assert await live_keys(catalog, "abc") == "a"
        assert await queued(catalog) == [2, 3]
        assert await claim(catalog, now=200) == ["a"]
        assert catalog.condemned() == (0, 0)

    async def test_only_what_is_there_and_named_aright_is_condemned(self, catalog: Catalog) -> None:
        await put_chain(catalog, "a")
        other = ChunkName("none", "a", b"")
        assert await condemn(catalog, name("a", 2), name("x", 1), other) == [False] * 3
        await catalog.delete(KV, ["a"], now_ms=5)
        assert await condemn(catalog, name("a", 1)) == [False]
        with pytest.raises(BatchTooLargeError):
            await condemn(catalog, *[name("a", 1)] * 1001)

    async def test_the_pinned_and_what_is_above_it_is_not_condemned(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abc")
        session, _ = await pin(catalog, "b")
        assert await condemn(catalog, name("c", 3), name("b", 2), name("a", 1)) == [True, False, False]
        assert await claim(catalog) == ["c"]
        await unpin(catalog, session)
        assert await condemn(catalog, name("b", 2), name("a", 1)) == [True, True]
        assert await claim(catalog) == ["b", "a"]

    async def test_a_look_up_that_wants_it_rescues(self, catalog: Catalog) -> None:
        await put_chain(catalog, "ab")
        await condemn(catalog, name("b", 2), name("a", 1))
        await catalog.lookup(KV, ["b"])
        assert catalog.condemned() == (2, 0)
        await catalog.lookup(KV, ["b"], rescue=True)
        assert catalog.condemned() == (1, 0)
        # a keeps its mark but not its chance: b is below it. It lost the mark by that.
        assert await claim(catalog) == []
        assert await claim(catalog) == []
        assert await live_keys(catalog, "ab") == "ab"
        assert catalog.condemned() == (0, 0)

    @BOTH
    async def test_a_put_of_the_key_or_below_it_rescues(self, catalog: Catalog, durability: Durability) -> None:
        await put_chain(catalog, "ab", [durability])
        await condemn(catalog, name("b", 2))
        assert (await catalog.commit(chunk("b", 9, "a"), mode=FIRST, now_ms=5)).existed
        assert await claim(catalog) == []
        await condemn(catalog, name("b", 2))
        await put(catalog, chunk("c", 3, "b", durability=durability))
        assert await claim(catalog) == []
        await condemn(catalog, name("c", 3), name("b", 2))
        await catalog.commit_chain([chunk("d", 4, "c", durability=durability)], now_ms=5)
        assert await claim(catalog) == []
        assert await live_keys(catalog, "abcd") == "abcd"

    async def test_a_pin_rescues(self, catalog: Catalog) -> None:
        await put_chain(catalog, "ab")
        await condemn(catalog, name("b", 2), name("a", 1))
        session, pins = await pin(catalog, "b")
        assert len(pins) == 1
        assert await claim(catalog) == []
        assert await live_keys(catalog, "ab") == "ab"
        await unpin(catalog, session)
        assert await claim(catalog) == []

    @BOTH
    async def test_blobs_that_go_together_are_reaped_in_any_portions(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        keys = [f"k{at}" for at in range(350)]
        rows = [chunk(key, at + 1, keys[at - 1] if at else "", durability=durability) for at, key in enumerate(keys)]
        await catalog.commit_chain(rows, now_ms=5)
        await catalog.queue_blobs([blob(1000).blob_id], now_ms=6)
        chunks = [name(key, at + 1) for at, key in enumerate(keys)]
        assert all(await catalog.condemn(chunks[::-1], not_before_boot_ms=0))
        assert len(await claim(catalog)) == 350
        entries = await catalog.due(now_ms=1_000_000, limit=10_000)
        left = {1000, *range(1, 351)}
        assert sorted(numbers(entries)) == sorted(left)
        for start in range(0, len(entries), 60):
            portion = entries[start : start + 60][:: 1 if start % 120 else -1]
            for _ in range(2):
                await catalog.reap(portion)
            left.difference_update(numbers(portion))
            assert sorted(numbers(await catalog.due(now_ms=1_000_000, limit=10_000))) == sorted(left)
            assert await named(catalog) == sorted(left)
            some = numbers(await catalog.due(now_ms=1_000_000, limit=7))
            assert len(some) >= min(7, len(left))
            assert left.issuperset(some)

    async def test_who_goes_on_behind_the_entries_that_he_was_given_misses_none(self, catalog: Catalog) -> None:
        keys = [f"k{at}" for at in range(450)]
        rows = [chunk(key, at + 1, durability=CLASSES[at % 2]) for at, key in enumerate(keys)]
        await catalog.commit_chain(rows, now_ms=5)
        assert all(await catalog.condemn([name(key, at + 1) for at, key in enumerate(keys)], not_before_boot_ms=0))
        await claim(catalog)
        found: list[int] = []
        after = 0
        while page := await catalog.due(now_ms=1_000_000, limit=120, after=after):
            assert len(page) < 120 + 100
            found += numbers(page)
            after = page[-1].position
        assert sorted(found) == list(range(1, 451))

    async def test_a_claim_takes_no_more_than_asked_for(self, catalog: Catalog) -> None:
        for at, key in enumerate("abcdef"):
            await put(catalog, chunk(key, at + 1))
        session, _ = await pin(catalog, "d", "e", "f")
        await catalog.delete(KV, list("def"), now_ms=7)
        await unpin(catalog, session)
        await condemn(catalog, name("a", 1), name("b", 2), name("c", 3))
        assert len(await claim(catalog, limit=4)) == 4
        assert catalog.condemned() == (1, 1)
        assert len(await claim(catalog, limit=4)) == 2
        assert await claim(catalog, limit=0) == []

    async def test_a_chunk_condemned_again_keeps_its_time(self, catalog: Catalog) -> None:
        await put_chain(catalog, "a")
        assert await condemn(catalog, name("a", 1), not_before=100) == [True]
        assert await condemn(catalog, name("a", 1), not_before=900) == [True]
        assert await claim(catalog, now=100) == ["a"]

    async def test_a_chunk_that_was_stored_anew_is_another(self, catalog: Catalog) -> None:
        await put_chain(catalog, "a")
        await condemn(catalog, name("a", 1))
        await catalog.delete(KV, ["a"], now_ms=5)
        await put(catalog, chunk("a", 2))
        assert await claim(catalog) == []
        assert await live_keys(catalog, "a") == "a"

    async def test_hidden_chunks_that_are_held_do_not_stop_the_others(self, catalog: Catalog) -> None:
        for at in range(40):
            await put(catalog, chunk(f"k{at}", at + 1))
        held, _ = await pin(catalog, *[f"k{at}" for at in range(0, 40, 2)])
        free, _ = await pin(catalog, *[f"k{at}" for at in range(1, 40, 2)])
        await catalog.delete(KV, [f"k{at}" for at in range(40)], now_ms=7)
        await unpin(catalog, free)
        claimed: list[str] = []
        for _ in range(20):
            claimed += await claim(catalog, limit=8)
        assert sorted(claimed) == sorted(f"k{at}" for at in range(1, 40, 2))
        await unpin(catalog, held)


class Losses:
    @MIXES
    async def test_a_lost_chunk_goes_with_all_below_it(self, catalog: Catalog, mix: tuple[Durability, ...]) -> None:
        await put_chain(catalog, "abc", mix)
        (row,) = await catalog.lookup(KV, ["b"])
        assert row is not None
        await catalog.drop_rows([msgspec.structs.replace(row, blobs=(blob(9),))], now_ms=8)
        assert await live_keys(catalog, "abc") == "abc"
        await catalog.drop_rows([row], now_ms=8)
        assert await live_keys(catalog, "abc") == "a"
        assert await queued(catalog) == [2, 3]
        removal = await catalog.history.why_removed(KV, "c")
        assert removal is not None
        assert removal.reason is RemovalReason.LOST

    async def test_no_pin_keeps_what_is_lost_but_what_is_below(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abc")
        session, _ = await pin(catalog, "a", "c")
        rows = await catalog.lookup(KV, ["a", "b"])
        await catalog.drop_rows([row for row in rows if row is not None])
        assert await live_keys(catalog, "abc") == ""
        assert await hidden_keys(catalog, "abc") == "abc"
        await unpin(catalog, session)
        assert await claim(catalog) == ["c", "b", "a"]
        await put(catalog, chunk("z", 26))
        session, _ = await pin(catalog, "z")
        rows = await catalog.lookup(KV, ["z"])
        await catalog.drop_rows([row for row in rows if row is not None])
        assert await hidden_keys(catalog, "z") == ""

    async def test_without_losses_there_are_no_orphans(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abc", CLASSES)
        assert await catalog.drop_orphans(now_ms=8) == 0
        assert await live_keys(catalog, "abc") == "abc"


class Recalls:
    async def recalled(self, catalog: Catalog, **arguments: object) -> list[str]:
        keys: list[str] = []
        after: str | None = ""
        while after is not None:
            page: RecallPage = await catalog.recall(KV, after=after, now_ms=8, **arguments)  # type: ignore[arg-type]
            keys += [row.key for row in page.recalled]
            after = page.next_after
        return sorted(keys)

    async def test_what_fits_goes_with_all_below_it(self, catalog: Catalog) -> None:
        await put(catalog, chunk("a", 1, modified_ms=10))
        await put(catalog, chunk("b", 2, "a", owner="bad", modified_ms=20))
        await put(catalog, chunk("c", 3, "b", modified_ms=30))
        await put(catalog, chunk("d", 4, namespace="other", owner="bad", modified_ms=40))
        await put(catalog, chunk("e", 5, None, namespace="", modified_ms=50))
        assert await self.recalled(catalog, writer="nobody") == []
        assert await self.recalled(catalog, writer="bad", namespace="ns", from_ms=21) == []
        assert await self.recalled(catalog, writer="bad", namespace="ns", from_ms=20, to_ms=21) == ["b", "c"]
        assert await live_keys(catalog, "abcde") == "ade"
        assert await self.recalled(catalog, writer="bad") == ["d"]
        assert await self.recalled(catalog, namespace="default") == ["e"]
        removal = await catalog.history.why_removed(KV, "c")
        assert removal is not None
        assert removal.reason is RemovalReason.RECALLED

    async def test_what_is_pinned_is_hidden(self, catalog: Catalog) -> None:
        await put_chain(catalog, "ab")
        session, _ = await pin(catalog, "b")
        assert await self.recalled(catalog) == ["a", "b"]
        assert await hidden_keys(catalog, "ab") == "ab"
        await unpin(catalog, session)

    async def test_nothing_goes_of_a_bucket_or_a_namespace_that_took_the_name_of_the_one_meant(
        self, catalog: Catalog
    ) -> None:
        bucket = await catalog.bucket(KV)
        assert bucket is not None
        standing = namespace("ns", KV)
        await catalog.namespaces.declare(standing)
        await put_chain(catalog, "abc", CLASSES)
        with pytest.raises(NoSuchBucketError):
            await self.recalled(catalog, made_ms=bucket.created_ms + 1)
        with pytest.raises(NoSuchNamespaceError):
            await self.recalled(catalog, namespace="ns", namespace_root=b"f" * 32)
        assert await live_keys(catalog, "abc") == "abc"
        meant = {"made_ms": bucket.created_ms, "namespace": "ns", "namespace_root": standing.root}
        assert await self.recalled(catalog, **meant) == ["a", "b", "c"]

    @pytest.mark.parametrize("kind", list(BucketKind))
    async def test_a_recall_that_finds_nothing_is_refused_there_too(self, catalog: Catalog, kind: BucketKind) -> None:
        await catalog.create_bucket(BucketRow("other", kind, USER, 9, Durability.MEMORY))
        with pytest.raises(NoSuchBucketError):
            await catalog.recall("other", made_ms=8, now_ms=8)
        with pytest.raises(NoSuchNamespaceError):
            await catalog.recall("other", namespace="gone", namespace_root=b"f" * 32, now_ms=8)

    async def test_everything_goes_in_steps(self, catalog: Catalog) -> None:
        for start in range(0, 6000, 1000):
            rows = [chunk(f"k{start + at:04}", start + at + 1) for at in range(1000)]
            await catalog.commit_chain(rows, now_ms=5)
        assert len(await self.recalled(catalog)) == 6000
        assert (await catalog.bucket_usage(KV)).objects == 0

    async def test_a_bucket_that_is_none(self, catalog: Catalog) -> None:
        with pytest.raises(NoSuchBucketError):
            await catalog.recall("none", now_ms=8)


class Groups:
    async def test_the_first_part_of_a_number_stands(self, catalog: Catalog) -> None:
        upload = UploadRow(KV, "a", "u1", 1, USER, Durability.MEMORY, group_parts=2, parent="", namespace="ns")
        await catalog.create_upload(upload)
        first = PartRow("u1", 1, (blob(1),), 10, "e", 1)
        assert await catalog.put_part(KV, "a", first, now_ms=5) == first
        second = PartRow("u1", 1, (blob(2),), 10, "e", 1)
        assert await catalog.put_part(KV, "a", second, now_ms=5) == first
        assert await queued(catalog) == [2]
        assert await catalog.parts(KV, "a", "u1") == (first,)

    async def test_such_uploads_are_in_no_listing_of_s3(self, catalog: Catalog) -> None:
        group = UploadRow(KV, "a", "u1", 1, USER, Durability.MEMORY, group_parts=2)
        plain = UploadRow(KV, "b", "u2", 1, USER, Durability.LOCAL)
        await catalog.create_upload(group)
        await catalog.create_upload(plain)
        assert (await catalog.list_uploads(KV)).rows == (plain,)
        assert (await catalog.list_uploads(KV, groups=True)).rows == (group, plain)

    async def test_writers_of_parts_meet_in_the_upload_that_the_first_began(self, catalog: Catalog) -> None:
        first = UploadRow(KV, "a", "u1", 1, USER, Durability.MEMORY, group_parts=2)
        await catalog.create_upload(first)
        await catalog.create_upload(UploadRow(KV, "a", "u1", 2, USER, Durability.LOCAL, group_parts=4))
        assert await catalog.upload(KV, "a", "u1") == first

    @BOTH
    async def test_a_bucket_of_parts_that_never_became_whole_is_empty(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await catalog.create_upload(UploadRow(KV, "a", "u1", 1, USER, durability, group_parts=2))
        await catalog.put_part(KV, "a", PartRow("u1", 1, (blob(1),), 10, "e", 1), now_ms=5)
        await catalog.delete_bucket(KV)
        assert await queued(catalog) == [1]
        await with_chunks(catalog)
        assert (await catalog.list_uploads(KV, groups=True)).rows == ()
        assert [part async for part in catalog.scan_parts()] == []


class Parents:
    """What may be a parent."""

    @BOTH
    async def test_a_partial_chunk_has_no_children(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, chunk("a", 1, durability=durability))
        partial = msgspec.structs.replace(chunk("b", 2, "a", durability=durability), tokens=15)
        assert not (await catalog.commit(partial, mode=FIRST, parent_tokens=16, now_ms=5)).existed
        below = chunk("c", 3, "b", durability=durability)
        with pytest.raises(LayoutMismatchError) as refused:
            await catalog.commit(below, mode=FIRST, parent_tokens=16, now_ms=5)
        assert refused.value.data["differs"] == ("parent",)
        assert await live_keys(catalog, "abc") == "ab"
        assert await queued(catalog) == [3]
        # Who says nothing of it may (keys of `default` have no length).
        await put(catalog, chunk("c", 4, "b", durability=durability))

    @BOTH
    async def test_in_a_batch_neither(self, catalog: Catalog, durability: Durability) -> None:
        first = msgspec.structs.replace(chunk("a", 1, durability=durability), tokens=4)
        rows = [first, chunk("b", 2, "a", durability=durability), chunk("c", 3, "b", durability=durability)]
        done = await catalog.commit_chain(rows, parent_tokens=16, now_ms=5)
        assert [type(each) for each in done] == [CommitOutcome, LayoutMismatchError, ParentNotFoundError]
        assert await live_keys(catalog, "abc") == "a"

    @BOTH
    async def test_a_chunk_of_another_namespace_is_none(self, catalog: Catalog, durability: Durability) -> None:
        await put(catalog, chunk("a", 1, durability=durability))
        stranger = chunk("b", 2, "a", durability=durability, namespace="other")
        with pytest.raises(ParentNotFoundError):
            await put(catalog, stranger)
        (refused,) = await catalog.commit_chain([chunk("b", 3, "a", durability=durability, namespace="x")], now_ms=5)
        assert isinstance(refused, ParentNotFoundError)
        await put(catalog, chunk("d", 4, durability=durability, namespace=""))
        await put(catalog, chunk("e", 5, "d", durability=durability, namespace="default"))
        assert await live_keys(catalog, "abde") == "ade"


class Hidden:
    """What DELETE has hidden, as a start and write-behind see it."""

    @BOTH
    async def test_a_scan_gives_hidden_rows_where_it_is_asked_to(
        self, catalog: Catalog, durability: Durability
    ) -> None:
        await put_chain(catalog, "abc", (durability,))
        await pin(catalog, "b")
        await catalog.delete(KV, ["b"], now_ms=7)
        is_memory = durability is Durability.MEMORY
        assert [row.key async for row in catalog.scan_objects(volatile_only=is_memory)] == ["a"]
        every = [row async for row in catalog.scan_objects(volatile_only=is_memory, with_hidden=True)]
        assert [(row.key, row.state) for row in every] == [("a", ObjectState.LIVE), ("b", ObjectState.CONDEMNED)]

    async def test_all_blobs_of_a_row_wait_for_a_pin_of_its_first(self, catalog: Catalog) -> None:
        await put(catalog, chunk("a", 1))
        session, _ = await pin(catalog, "a")
        await catalog.queue_blobs([blob(1).blob_id, blob(2).blob_id], now_ms=8, pinned_by=blob(1).blob_id)
        assert await queued(catalog) == []
        await unpin(catalog, session)
        assert await queued(catalog) == [1, 2]


class SmallRecalls:
    async def test_a_recall_goes_on_where_its_limit_stopped_it(self, catalog: Catalog) -> None:
        await put_chain(catalog, "abcdefgh")
        gone: list[str] = []
        after: str | None = ""
        for _ in range(20):
            page = await catalog.recall(KV, after=after or "", limit=2, now_ms=7)
            gone += [row.key for row in page.recalled]
            after = page.next_after
            if after is None:
                break
        assert after is None
        assert sorted(gone) == list("abcdefgh")
        assert await live_keys(catalog, "abcdefgh") == ""

    async def test_a_recall_of_loose_chunks_hides_no_more_than_its_limit(self, catalog: Catalog) -> None:
        for number, key in enumerate("abcde"):
            await put(catalog, chunk(key, number + 1, None))
        page = await catalog.recall(KV, limit=2, now_ms=7)
        assert [row.key for row in page.recalled] == ["a", "b"]
        page = await catalog.recall(KV, after=page.next_after or "", limit=2, now_ms=7)
        assert [row.key for row in page.recalled] == ["c", "d"]
        assert page.next_after is not None


class ChainContract(Commits, Chains, Deletes, Claims, Losses, Recalls, Groups, Parents, Hidden, SmallRecalls):
    """All of it."""
