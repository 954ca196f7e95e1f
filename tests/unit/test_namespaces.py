"""The book of namespaces: keys made, wrapped and kept; rights; settings; the namespace that needs no declaration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest
from blake3 import blake3
from fakes import ManualClock

from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.namespace_protocol import NamespaceUsage
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.errors import (
    AccessDeniedError,
    BusyError,
    CorruptionError,
    InvalidRequestError,
    NamespaceConflictError,
    NoSuchNamespaceError,
)
from kvobj.ids.chunk_ids import namespace_root
from kvobj.store.chunk_values import Caller
from kvobj.store.key_wrapping import KeyWrapper, derived_wrapping_key
from kvobj.store.namespaces import NamespaceBook

OWNER = Caller("main", is_owner=True)
READER = Caller("reader", is_owner=False)
WRITER = Caller("writer", is_owner=False)
STRANGER = Caller("stranger", is_owner=False)
BUCKET = BucketRow("cache", BucketKind.KV, "main", 1, Durability.MEMORY)
ORDINARY = BucketRow("files", BucketKind.ORDINARY, "main", 1, Durability.LOCAL)
DOCUMENT: dict[str, object] = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "kvobj"}
ACCESS: dict[str, object] = {"access": {"reader": "read", "writer": "write"}}
WRAPPING_KEY = b"k" * 32


def counting_bytes() -> Callable[[int], bytes]:
    numbers = count(1)
    return lambda size: next(numbers).to_bytes(size, "big")


class Setting:
    def __init__(self) -> None:
        self.usage = NamespaceUsage(0, 0)
        self.rows = MemoryNamespaces(lambda *_: None, lambda *_: self.usage)

    def book(self, wrapping_key: bytes = WRAPPING_KEY) -> NamespaceBook:
        return NamespaceBook(
            self.rows, wrapper=KeyWrapper(wrapping_key), clock=ManualClock(now_ms=77), random_bytes=counting_bytes()
        )


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.fixture
def book(setting: Setting) -> NamespaceBook:
    return setting.book()


async def test_a_declared_namespace_has_a_fresh_key_and_the_root_that_follows(book: NamespaceBook) -> None:
    opened, is_new = await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    other, _ = await book.declare(BUCKET, "b", DOCUMENT, caller=OWNER)
    assert is_new
    assert len(opened.key) == 32
    assert opened.key != other.key
    assert opened.row.fingerprint == other.row.fingerprint == blake3(opened.row.declaration).digest()
    assert opened.row.root == namespace_root(opened.key, opened.row.fingerprint) != other.row.root
    assert (opened.row.owner, opened.row.created_ms, opened.may_write) == ("main", 77, True)


async def test_a_key_at_rest_is_wrapped(book: NamespaceBook) -> None:
    opened, _ = await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    assert len(opened.row.wrapped_key) == 40
    assert opened.key not in opened.row.wrapped_key
    assert repr(opened.key) not in repr(opened)


async def test_another_process_opens_it_with_the_same_key(setting: Setting) -> None:
    declared, _ = await setting.book().declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    opened = await setting.book().open(BUCKET, "a", caller=OWNER)
    assert opened == declared


async def test_another_wrapping_key_is_told_with_the_namespace_and_the_setting(setting: Setting) -> None:
    await setting.book().declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    with pytest.raises(CorruptionError, match=r"wrapping_key_env.*namespace=a"):
        await setting.book(b"K" * 32).open(BUCKET, "a", caller=OWNER)


async def test_a_damaged_key_is_told(setting: Setting) -> None:
    opened, _ = await setting.book().declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    with pytest.raises(CorruptionError):
        KeyWrapper(WRAPPING_KEY).unwrap(b"\1" + opened.row.wrapped_key[1:], bucket="cache", namespace="a")
    with pytest.raises(CorruptionError):
        KeyWrapper(WRAPPING_KEY).unwrap(b"short", bucket="cache", namespace="a")


def test_the_wrapping_is_rfc_3394s() -> None:
    # RFC 3394, 4.6: 256 bits of key data with a 256-bit key.
    key = bytes.fromhex("000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F")
    data = bytes.fromhex("00112233445566778899AABBCCDDEEFF000102030405060708090A0B0C0D0E0F")
    wrapped = "28C9F404C4B810F4CBCCB35CFB87F8263F5786E2D80ED326CBC7F0E71A99F43BFB988B9B7A02DD21"
    assert KeyWrapper(key).wrap(data) == bytes.fromhex(wrapped)
    assert KeyWrapper(key).unwrap(bytes.fromhex(wrapped), bucket="b", namespace="n") == data


def test_a_stores_own_wrapping_key_is_not_its_store_key() -> None:
    key = derived_wrapping_key(b"s" * 32)
    assert len(key) == 32
    assert key not in (b"s" * 32, derived_wrapping_key(b"t" * 32))
    with pytest.raises(ValueError):
        KeyWrapper(b"short")


async def test_the_same_declaration_again_keeps_the_key_and_changes_the_settings_that_it_names(
    book: NamespaceBook,
) -> None:
    first, _ = await book.declare(BUCKET, "a", DOCUMENT | ACCESS, caller=OWNER)
    again, is_new = await book.declare(BUCKET, "a", DOCUMENT | {"quota": {"chunks": 3}}, caller=OWNER)
    assert not is_new
    assert (again.key, again.row.root) == (first.key, first.row.root)
    assert again.row.access == {"reader": "read", "writer": "write"}
    assert again.row.quota.chunks == 3
    assert await book.open(BUCKET, "a", caller=OWNER) == again


async def test_another_declaration_is_a_conflict_that_names_the_fields(book: NamespaceBook) -> None:
    first, _ = await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    with pytest.raises(NamespaceConflictError) as caught:
        await book.declare(BUCKET, "a", DOCUMENT | ACCESS | {"salt": "s", "rank": {"tensor": [0, 2]}}, caller=OWNER)
    assert caught.value.data["differs"] == ("rank.tensor", "salt")
    assert "existing" not in caught.value.data
    assert await book.open(BUCKET, "a", caller=OWNER) == first


async def test_of_two_first_declarations_at_once_one_makes_the_key(setting: Setting) -> None:
    one, other = setting.book(), setting.book()
    results = await asyncio.gather(*(each.declare(BUCKET, "a", DOCUMENT, caller=OWNER) for each in (one, other)))
    assert sorted(is_new for _, is_new in results) == [False, True]
    assert results[0][0].key == results[1][0].key


async def test_of_settings_changed_at_once_none_is_lost(book: NamespaceBook) -> None:
    await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    changes: list[dict[str, object]] = [{"lossy": True}, {"quota": {"chunks": 3}}, ACCESS]
    await asyncio.gather(*(book.declare(BUCKET, "a", DOCUMENT | change, caller=OWNER) for change in changes))
    row = (await book.open(BUCKET, "a", caller=OWNER)).row
    assert (row.lossy, row.quota.chunks, len(row.access)) == (True, 3, 2)


async def test_who_is_granted_nothing_sees_nothing(book: NamespaceBook) -> None:
    await book.declare(BUCKET, "a", DOCUMENT | ACCESS, caller=OWNER)
    refusals = []
    for caller, name in ((STRANGER, "a"), (READER, "absent"), (OWNER, "absent"), (OWNER, "not/a/name"), (OWNER, "a\0")):
        with pytest.raises(NoSuchNamespaceError) as caught:
            await book.open(BUCKET, name, caller=caller)
        refusals.append(caught.value.message)
    assert len(set(refusals)) == 1


async def test_a_grant_says_whether_to_write(book: NamespaceBook) -> None:
    opened, _ = await book.declare(BUCKET, "a", DOCUMENT | ACCESS, caller=OWNER)
    reads = await book.open(BUCKET, "a", caller=READER)
    writes = await book.open(BUCKET, "a", caller=WRITER)
    assert reads.key == writes.key == opened.key
    assert (reads.may_write, writes.may_write) == (False, True)


async def test_a_grant_that_is_taken_back_is_gone(book: NamespaceBook) -> None:
    await book.declare(BUCKET, "a", DOCUMENT | ACCESS, caller=OWNER)
    await book.declare(BUCKET, "a", DOCUMENT | {"access": {}}, caller=OWNER)
    with pytest.raises(NoSuchNamespaceError):
        await book.open(BUCKET, "a", caller=READER)


@pytest.mark.parametrize("name", ["", "default"])
async def test_every_bucket_has_a_default_namespace_for_its_owner(book: NamespaceBook, name: str) -> None:
    opened = await book.open(BUCKET, name, caller=OWNER)
    assert (opened.row.name, opened.row.ids, opened.row.chunk_bytes) == ("default", "foreign", None)
    assert (opened.key, opened.may_write) == (b"", True)
    with pytest.raises(NoSuchNamespaceError):
        await book.open(BUCKET, name, caller=READER)


async def test_the_default_namespace_is_neither_declared_nor_removed(book: NamespaceBook) -> None:
    with pytest.raises(InvalidRequestError):
        await book.declare(BUCKET, "default", DOCUMENT, caller=OWNER)
    with pytest.raises(InvalidRequestError):
        await book.remove(BUCKET, "default", caller=OWNER)


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".a", "-a", "ä", "a" * 129, "a\n", "a\0"])
async def test_a_name_that_cannot_stand_before_a_slash_is_refused(book: NamespaceBook, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await book.declare(BUCKET, name, DOCUMENT, caller=OWNER)
    assert caught.value.data["field"] == "namespace"


async def test_only_owners_declare_and_remove(book: NamespaceBook) -> None:
    await book.declare(BUCKET, "a", DOCUMENT | ACCESS, caller=OWNER)
    for caller in (WRITER, STRANGER):
        with pytest.raises(AccessDeniedError):
            await book.declare(BUCKET, "a", DOCUMENT, caller=caller)
        with pytest.raises(AccessDeniedError):
            await book.remove(BUCKET, "a", caller=caller)


async def test_ordinary_buckets_have_none(book: NamespaceBook) -> None:
    with pytest.raises(InvalidRequestError):
        await book.declare(ORDINARY, "a", DOCUMENT, caller=OWNER)


async def test_a_declaration_that_is_wrong_leaves_nothing(book: NamespaceBook) -> None:
    with pytest.raises(InvalidRequestError):
        await book.declare(BUCKET, "a", DOCUMENT | {"codecs": {"nvme": "xa"}}, caller=OWNER)
    with pytest.raises(NoSuchNamespaceError):
        await book.open(BUCKET, "a", caller=OWNER)


async def test_a_removed_namespace_is_gone_and_a_new_one_of_its_name_has_another_key(
    setting: Setting, book: NamespaceBook
) -> None:
    old, _ = await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    setting.usage = NamespaceUsage(1, 1)
    with pytest.raises(BusyError):
        await book.remove(BUCKET, "a", caller=OWNER)
    setting.usage = NamespaceUsage(0, 0)
    await book.remove(BUCKET, "a", caller=OWNER)
    with pytest.raises(NoSuchNamespaceError):
        await book.open(BUCKET, "a", caller=OWNER)
    new, is_new = await book.declare(BUCKET, "a", DOCUMENT, caller=OWNER)
    assert is_new
    assert new.key != old.key


async def test_pages_show_what_the_caller_may_use_in_name_order(
    book: NamespaceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvobj.store.namespaces._PAGE", 2)
    names = ["zeta", "alpha", "beta", "epsilon", "Delta"]
    for name in names:
        await book.declare(BUCKET, name, DOCUMENT | (ACCESS if name in ("zeta", "beta") else {}), caller=OWNER)

    async def collected(caller: Caller, limit: int) -> list[str]:
        found: list[str] = []
        while page := await book.page(BUCKET, caller=caller, after=found[-1] if found else "", limit=limit):
            assert len(page) <= limit
            found += [opened.row.name for opened in page]
        return found

    for limit in (1, 2, 3, 100):
        assert await collected(OWNER, limit) == sorted([*names, "default"])
        assert await collected(READER, limit) == ["beta", "zeta"]
        assert await collected(STRANGER, limit) == []
