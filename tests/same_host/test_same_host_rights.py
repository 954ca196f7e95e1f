"""Who is granted what, and for how long: pure of sockets."""

from __future__ import annotations

import msgspec
import pytest
from fakes import ManualClock

from kvobj.api.same_host.rights import PENDING_MAX, TOKEN_SECONDS, Grants, Levels, Rights
from kvobj.arena import Lane
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.errors import AccessDeniedError, BusyError, NoSuchSessionError

BUCKET = BucketRow("cache", BucketKind.KV, "owner", 0, Durability.MEMORY)
LEVELS = Levels({"all": "all", "trusted": "trusted", "no": "no"}, frozenset({"cache"}))


def rights_of(user_id: str, *, is_root: bool = False, is_owner: bool = False) -> Rights:
    return LEVELS.rights(BUCKET, user_id=user_id, is_root=is_root, is_owner=is_owner, may_write=True)


def grants(clock: ManualClock) -> Grants:
    return Grants(socket="/s", lease_ms=30_000, margin_seconds=1.0, clock=clock)


def test_root_and_trusted_users_write_into_the_arena_and_others_do_not() -> None:
    assert rights_of("root", is_root=True, is_owner=True).is_trusted
    assert rights_of("trusted").is_trusted
    readers = [rights_of("all"), rights_of("anybody", is_owner=True)]
    assert [each.is_trusted for each in readers] == [False, False]
    assert [each.lane for each in readers] == [None, Lane.of(BUCKET)]


@pytest.mark.parametrize(("user_id", "is_owner"), [("no", False), ("anybody", False)])
def test_who_may_map_nothing_is_refused(user_id: str, *, is_owner: bool) -> None:
    with pytest.raises(AccessDeniedError):
        rights_of(user_id, is_owner=is_owner)


def test_an_owner_is_refused_where_the_bucket_shares_its_regions() -> None:
    with pytest.raises(AccessDeniedError):
        Levels().rights(BUCKET, user_id="owner", is_root=False, is_owner=True, may_write=True)


async def test_a_token_is_good_once_and_for_ten_seconds() -> None:
    clock = ManualClock()
    made = grants(clock)
    first, second = [await made.grant(rights_of("all")) for _ in range(2)]
    clock.advance(TOKEN_SECONDS - 0.1)
    assert made.claim(first.token) is not None
    assert made.claim(first.token) is None
    clock.advance(0.1)
    assert made.claim(second.token) is None


async def test_a_connection_is_over_a_margin_after_its_lease_unless_it_is_renewed() -> None:
    clock = ManualClock()
    made = grants(clock)
    granted = await made.grant(rights_of("all"))
    grant = made.claim(granted.token)
    assert grant is not None
    clock.advance(30.9)
    assert not made.is_over(grant)
    assert await made.renew(granted.id, rights_of("all")) == 30_000
    clock.advance(30.9)
    assert not made.is_over(grant)
    clock.advance(0.2)
    assert made.is_over(grant)
    made.end(grant)
    with pytest.raises(NoSuchSessionError):
        await made.renew(granted.id, rights_of("all"))


async def test_a_grant_is_renewed_by_its_user_with_its_rights_alone() -> None:
    made = grants(ManualClock())
    granted = await made.grant(rights_of("all"))
    assert made.claim(granted.token) is not None
    for other in (rights_of("trusted"), rights_of("all2", is_owner=True)):
        with pytest.raises(NoSuchSessionError):
            await made.renew(granted.id, other)


async def test_a_grant_for_a_buckets_own_regions_is_of_no_use_for_another_bucket_that_gets_its_name() -> None:
    made = grants(ManualClock())
    granted = await made.grant(rights_of("owner", is_owner=True))
    assert made.claim(granted.token) is not None
    anew = msgspec.structs.replace(BUCKET, created_ms=1)
    rights = LEVELS.rights(anew, user_id="owner", is_root=False, is_owner=True, may_write=True)
    with pytest.raises(NoSuchSessionError):
        await made.renew(granted.id, rights)


async def test_tokens_that_nobody_uses_are_bounded_and_make_room_when_they_expire() -> None:
    clock = ManualClock()
    made = grants(clock)
    for _ in range(PENDING_MAX):
        await made.grant(rights_of("all"))
    with pytest.raises(BusyError):
        await made.grant(rights_of("all"))
    clock.advance(TOKEN_SECONDS)
    assert (await made.grant(rights_of("all"))).lease_ms == 30_000
