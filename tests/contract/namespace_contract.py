"""What every driver of `Namespaces` must do. A driver's tests subclass `NamespaceContract` and give the `place` fixture."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
import pytest

from kvobj.catalog.namespace_protocol import NamespaceRow, Namespaces, NamespaceUsage
from kvobj.catalog.rows import NamespaceQuota
from kvobj.errors import BusyError, NamespaceConflictError, NoSuchBucketError, NoSuchNamespaceError, QuotaExceededError

BUCKET = "cache"
OTHER = "other"
MADE_MS = 3
"""When the two were made."""


class NamespacePlace(Protocol):
    """A driver with the buckets `BUCKET` and `OTHER`, and a hand on what it takes from the catalog."""

    namespaces: Namespaces

    async def create_bucket(self, bucket: str) -> None: ...

    async def delete_bucket(self, bucket: str) -> None: ...

    async def store(self, bucket: str, name: str, *, chunks: int, size_bytes: int) -> None: ...


def namespace(name: str = "llama", bucket: str = BUCKET, declaration: bytes = b'{"model":"m"}') -> NamespaceRow:
    return NamespaceRow(
        bucket=bucket,
        name=name,
        declaration=declaration,
        fingerprint=b"f" * 32,
        wrapped_key=b"w" * 40,
        root=b"r" * 32,
        ids="kvobj",
        chunk_tokens=256,
        chunk_bytes=1 << 20,
        part_axis="layer",
        created_ms=7,
        owner="main",
        codecs={"nvme": "raw"},
        lossy=False,
        access={"reader": "read"},
        quota=NamespaceQuota(chunks=5),
    )


class NamespaceContract:
    async def test_a_declared_namespace_is_found_as_it_was_given(self, place: NamespacePlace) -> None:
        row = namespace()
        assert await place.namespaces.declare(row) == (row, True)
        assert await place.namespaces.namespace(BUCKET, "llama") == row

    async def test_what_is_not_declared_is_absent_and_then_found(self, place: NamespacePlace) -> None:
        assert await place.namespaces.namespace(BUCKET, "llama") is None
        assert await place.namespaces.namespace("no-bucket", "llama") is None
        await place.namespaces.declare(namespace())
        assert await place.namespaces.namespace(BUCKET, "llama") == namespace()
        assert await place.namespaces.namespace(OTHER, "llama") is None

    async def test_the_same_declaration_again_is_answered_with_what_stands(self, place: NamespacePlace) -> None:
        row = namespace()
        await place.namespaces.declare(row)
        again = msgspec.structs.replace(row, wrapped_key=b"x" * 40, owner="another", access={}, created_ms=9)
        assert await place.namespaces.declare(again) == (row, False)
        assert await place.namespaces.namespace(BUCKET, "llama") == row

    async def test_another_declaration_is_a_conflict_that_shows_what_stands(self, place: NamespacePlace) -> None:
        row = namespace()
        await place.namespaces.declare(row)
        with pytest.raises(NamespaceConflictError) as caught:
            await place.namespaces.declare(namespace(declaration=b'{"model":"n"}'))
        assert caught.value.data["existing"] == row
        assert await place.namespaces.namespace(BUCKET, "llama") == row

    async def test_of_two_declarations_at_once_one_stands(self, place: NamespacePlace) -> None:
        rows = [namespace(declaration=b'{"model":"%d"}' % number) for number in range(4)]
        outcomes = await asyncio.gather(*map(place.namespaces.declare, rows), return_exceptions=True)
        assert [isinstance(outcome, NamespaceConflictError) for outcome in outcomes].count(True) == 3
        standing = await place.namespaces.namespace(BUCKET, "llama")
        assert (standing, True) in outcomes

    async def test_a_bucket_that_is_not_there_is_told(self, place: NamespacePlace) -> None:
        with pytest.raises(NoSuchBucketError):
            await place.namespaces.declare(namespace(bucket="no-bucket"))
        with pytest.raises(NoSuchBucketError):
            await place.namespaces.change_settings(namespace(bucket="no-bucket"))
        with pytest.raises(NoSuchBucketError):
            await place.namespaces.page("no-bucket")
        with pytest.raises(NoSuchBucketError):
            await place.namespaces.usage("no-bucket", "llama")
        with pytest.raises(NoSuchBucketError):
            await place.namespaces.remove("no-bucket", "llama")

    async def test_settings_change_and_identity_does_not(self, place: NamespacePlace) -> None:
        row = namespace()
        await place.namespaces.declare(row)
        await place.namespaces.namespace(BUCKET, "llama")
        wished = msgspec.structs.replace(
            row,
            declaration=b"{}",
            fingerprint=b"",
            wrapped_key=b"",
            root=b"",
            ids="foreign",
            owner="another",
            codecs={},
            lossy=True,
            access={"writer": "write"},
            quota=NamespaceQuota(size_bytes=10),
            profile=b"p" * 32,
        )
        changed = msgspec.structs.replace(
            row,
            codecs={},
            lossy=True,
            access={"writer": "write"},
            quota=NamespaceQuota(size_bytes=10),
            profile=b"p" * 32,
        )
        assert await place.namespaces.change_settings(wished) == changed
        assert await place.namespaces.namespace(BUCKET, "llama") == changed

    async def test_what_was_let_into_a_bucket_of_before_declares_and_changes_nothing_in_the_next(
        self, place: NamespacePlace
    ) -> None:
        row, other = namespace(), msgspec.structs.replace(namespace("other"), root=b"o" * 32)
        assert await place.namespaces.declare(row, made_ms=MADE_MS) == (row, True)
        changed = msgspec.structs.replace(row, access={"writer": "write"})
        for verb in (
            place.namespaces.declare(other, made_ms=MADE_MS - 1),
            place.namespaces.declare(row, made_ms=MADE_MS - 1),
            place.namespaces.change_settings(changed, made_ms=MADE_MS - 1),
            place.namespaces.remove(BUCKET, row.name, made_ms=MADE_MS - 1, namespace_root=row.root),
        ):
            with pytest.raises(NoSuchBucketError):
                await verb
        assert await place.namespaces.page(BUCKET) == (row,)
        assert await place.namespaces.change_settings(changed, made_ms=MADE_MS) == changed
        await place.namespaces.remove(BUCKET, row.name, made_ms=MADE_MS)

    async def test_settings_that_were_meant_for_a_namespace_of_before_change_nothing_of_its_successor(
        self, place: NamespacePlace
    ) -> None:
        before, anew = namespace(), msgspec.structs.replace(namespace(), root=b"n" * 32)
        await place.namespaces.declare(before)
        await place.namespaces.remove(BUCKET, before.name)
        await place.namespaces.declare(anew)
        with pytest.raises(NoSuchNamespaceError):
            await place.namespaces.change_settings(msgspec.structs.replace(before, access={"writer": "write"}))
        assert await place.namespaces.namespace(BUCKET, before.name) == anew

    async def test_settings_of_what_is_not_declared_are_refused(self, place: NamespacePlace) -> None:
        with pytest.raises(NoSuchNamespaceError):
            await place.namespaces.change_settings(namespace())
        assert await place.namespaces.namespace(BUCKET, "llama") is None

    async def test_pages_are_in_name_order_and_of_one_bucket(self, place: NamespacePlace) -> None:
        names = ["b", "a", "B", "a.1", "a-1", "aa", "c" * 128]
        for name in names:
            await place.namespaces.declare(namespace(name))
        await place.namespaces.declare(namespace("a0", bucket=OTHER))
        ordered = sorted(names)
        assert [row.name for row in await place.namespaces.page(BUCKET)] == ordered
        collected: list[str] = []
        while page := await place.namespaces.page(BUCKET, after=collected[-1] if collected else "", limit=2):
            assert len(page) <= 2
            collected += [row.name for row in page]
        assert collected == ordered
        assert [row.name for row in await place.namespaces.page(OTHER)] == ["a0"]

    async def test_a_removed_namespace_is_gone_and_may_be_declared_otherwise(self, place: NamespacePlace) -> None:
        await place.namespaces.declare(namespace())
        assert await place.namespaces.namespace(BUCKET, "llama") is not None
        await place.namespaces.remove(BUCKET, "llama")
        assert await place.namespaces.namespace(BUCKET, "llama") is None
        assert await place.namespaces.page(BUCKET) == ()
        with pytest.raises(NoSuchNamespaceError):
            await place.namespaces.remove(BUCKET, "llama")
        other = namespace(declaration=b'{"model":"n"}')
        assert await place.namespaces.declare(other) == (other, True)

    async def test_a_namespace_with_live_chunks_is_not_forgotten(self, place: NamespacePlace) -> None:
        await place.namespaces.declare(namespace())
        await place.store(BUCKET, "llama", chunks=2, size_bytes=10)
        assert await place.namespaces.usage(BUCKET, "llama") == NamespaceUsage(2, 10)
        with pytest.raises(BusyError):
            await place.namespaces.remove(BUCKET, "llama")
        assert await place.namespaces.namespace(BUCKET, "llama") == namespace()
        await place.store(BUCKET, "llama", chunks=-2, size_bytes=-10)
        await place.namespaces.remove(BUCKET, "llama")

    async def test_usage_is_told_by_namespace(self, place: NamespacePlace) -> None:
        await place.store(BUCKET, "a", chunks=1, size_bytes=3)
        await place.store(OTHER, "a", chunks=5, size_bytes=50)
        assert await place.namespaces.usage(BUCKET, "a") == NamespaceUsage(1, 3)
        assert await place.namespaces.usage(BUCKET, "b") == NamespaceUsage(0, 0)
        assert await place.namespaces.usage(OTHER, "a") == NamespaceUsage(5, 50)

    async def test_a_bucket_made_anew_has_none_of_the_old_ones(self, place: NamespacePlace) -> None:
        await place.namespaces.declare(namespace())
        await place.namespaces.declare(namespace(bucket=OTHER))
        assert await place.namespaces.namespace(BUCKET, "llama") is not None
        await place.delete_bucket(BUCKET)
        assert await place.namespaces.namespace(BUCKET, "llama") is None
        await place.create_bucket(BUCKET)
        assert await place.namespaces.namespace(BUCKET, "llama") is None
        assert await place.namespaces.page(BUCKET) == ()
        assert await place.namespaces.namespace(OTHER, "llama") is not None

    async def test_a_bucket_has_a_bound_on_its_namespaces(
        self, place: NamespacePlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvobj.catalog.namespace_changes.NAMESPACES_PER_BUCKET", 2)
        monkeypatch.setattr("kvobj.catalog.memory_namespaces.NAMESPACES_PER_BUCKET", 2)
        await place.namespaces.declare(namespace("a"))
        await place.namespaces.declare(namespace("b"))
        with pytest.raises(QuotaExceededError):
            await place.namespaces.declare(namespace("c"))
        assert (await place.namespaces.declare(namespace("b")))[1] is False
        await place.namespaces.declare(namespace("c", bucket=OTHER))
