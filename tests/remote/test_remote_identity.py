"""Whose a prefix is: the first claim, other stores, take-overs, answers that got lost, and many who claim at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ManualClock
from fakes_remote import DictBucket, down, opened_bucket
from hypothesis import given
from hypothesis import strategies as st
from odd_server import Right, error, odd_world, saying
from remote_servers import RemoteStore

from kvobj import __version__
from kvobj.errors import ConfigurationError, CorruptionError, KvobjError, TierUnavailableError, UnavailableError
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.capabilities import Capabilities
from kvobj.tiers.remote.identity import (
    IdentityState,
    IdentityWatch,
    LocalClaim,
    StoreIdentity,
    StoreRecord,
)
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.object_bucket import ObjectBucket

STORE = bytes(range(16))
OTHER_STORE = bytes(16)
KEY = "store/store.json"


async def at_once(seconds: float) -> None:
    """In place of waiting: others have their turn."""
    del seconds
    await asyncio.sleep(0)


class Places:
    """Data directories of several machines, and identities in them."""

    def __init__(
        self, path: Path, bucket: ObjectBucket, *, prefix: str = "store/", settle_seconds: float = 0.0
    ) -> None:
        self._path = path
        self._bucket = bucket
        self._prefix = prefix
        self._settle_seconds = settle_seconds

    def file(self, name: str) -> Path:
        (self._path / name).mkdir(exist_ok=True)
        return self._path / name / "remote"

    def start(self, name: str = "a", *, bucket: ObjectBucket | None = None) -> StoreIdentity:
        """As a process of this machine has it when it begins."""
        return StoreIdentity(
            bucket or self._bucket,
            RemoteNames(self._prefix),
            claim_file=self.file(name),
            clock=ManualClock(),
            where="s3/bucket/store.json",
            settle_seconds=self._settle_seconds or 5.0,
            sleep=asyncio.sleep if self._settle_seconds else at_once,
        )


@pytest.fixture
def bucket() -> DictBucket:
    return DictBucket()


@pytest.fixture
def places(tmp_path: Path, bucket: DictBucket) -> Places:
    return Places(tmp_path, bucket)


async def test_the_first_start_writes_down_whose_the_prefix_is(places: Places, bucket: DictBucket) -> None:
    identity = places.start()
    assert (identity.state, identity.lineage, identity.may_write()) == ("unclaimed", 0, False)
    assert await identity.claim(STORE) == "claimed"
    assert (identity.lineage, identity.is_fenced, identity.may_write(), identity.reason) == (1, False, True, "")
    document = json.loads(bucket.objects[KEY])
    assert (document["format"], document["store_id"], document["lineage"]) == (1, STORE.hex(), 1)
    assert (document["version"], document["made"]) == (__version__, "2023-11-14T22:13:20+00:00")


async def test_a_later_start_finds_its_claim(places: Places, bucket: DictBucket) -> None:
    await places.start().claim(STORE)
    again = places.start()
    assert await again.claim(STORE) == "claimed"
    assert again.lineage == 1
    assert await again.check()
    assert bucket.count("put_small") == 1


async def test_another_stores_prefix_is_refused(places: Places, bucket: DictBucket) -> None:
    await places.start("a").claim(STORE)
    other = places.start("b")
    with pytest.raises(ConfigurationError, match=f"belongs to another store .{STORE.hex()}"):
        await other.claim(OTHER_STORE)
    assert (other.state, other.is_fenced, other.may_write()) == ("refused", True, False)
    assert bucket.count("put_small") == 1
    elsewhere = Places(places.file("b").parent.parent, bucket, prefix="elsewhere/").start("b")
    assert await elsewhere.claim(OTHER_STORE) == "claimed"


async def test_a_data_directory_that_never_joined_is_sent_to_rebuild(places: Places) -> None:
    await places.start("a").claim(STORE)
    with pytest.raises(ConfigurationError, match="kvobj-admin rebuild"):
        await places.start("b").claim(STORE)


async def test_a_store_json_that_is_gone_is_not_written_anew(places: Places, bucket: DictBucket) -> None:
    identity = places.start()
    await identity.claim(STORE)
    del bucket.objects[KEY]
    assert not await identity.check()
    assert identity.state == "refused"
    with pytest.raises(ConfigurationError, match=r"store.json is gone.*remove .*remote"):
        await places.start().claim(STORE)
    assert KEY not in bucket.objects
    places.file("a").unlink()
    assert await places.start().claim(STORE) == "claimed"


async def test_a_take_over_fences_who_was_there(places: Places, bucket: DictBucket) -> None:
    old = places.start("a")
    await old.claim(STORE)
    rebuilt = places.start("b")
    record = await rebuilt.read()
    assert record is not None
    assert await rebuilt.take_over(record.store_id) == 2
    assert (rebuilt.state, rebuilt.lineage) == ("claimed", 2)
    assert old.may_write()
    assert not await old.check()
    assert (old.state, old.is_fenced, old.may_write(), old.lineage) == ("fenced", True, False, 1)
    assert "lineage 2" in old.reason
    assert await places.start("a").claim(STORE) == "fenced"
    assert await places.start("b").claim(STORE) == "claimed"
    assert json.loads(bucket.objects[KEY])["lineage"] == 2


async def test_a_repeated_take_over_takes_the_same_lineage(places: Places, bucket: DictBucket) -> None:
    await places.start("a").claim(STORE)
    bucket.errors["put_small answer"] = down()
    with pytest.raises(TierUnavailableError):
        await places.start("b").take_over(STORE)
    bucket.errors.clear()
    assert await places.start("b").take_over(STORE) == 2
    assert await places.start("b").take_over(STORE) == 2


async def test_a_take_over_needs_the_store_that_is_meant(places: Places) -> None:
    with pytest.raises(ConfigurationError, match="no store lies there"):
        await places.start("b").take_over(STORE)
    await places.start("a").claim(STORE)
    with pytest.raises(ConfigurationError, match="another store"):
        await places.start("b").take_over(OTHER_STORE)


async def test_a_claim_whose_answer_was_lost_is_known_again(places: Places, bucket: DictBucket) -> None:
    bucket.errors["put_small answer"] = down()
    identity = places.start()
    with pytest.raises(TierUnavailableError):
        await identity.claim(STORE)
    assert identity.state == "unclaimed"
    bucket.errors.clear()
    assert await places.start().claim(STORE) == "claimed"
    assert bucket.count("put_small") == 1


async def test_a_claim_that_never_arrived_is_made_again(places: Places, bucket: DictBucket) -> None:
    bucket.errors["put_small"] = down()
    with pytest.raises(TierUnavailableError):
        await places.start().claim(STORE)
    bucket.errors.clear()
    assert await places.start().claim(STORE) == "claimed"


async def test_a_server_that_is_down_changes_nothing(places: Places, bucket: DictBucket) -> None:
    identity = places.start()
    await identity.claim(STORE)
    bucket.errors["get_small"] = down()
    with pytest.raises(TierUnavailableError):
        await identity.check()
    assert identity.may_write()


@pytest.mark.parametrize(
    ("body", "kind", "state"),
    [
        (b"", TierUnavailableError, "unclaimed"),
        (b"[]", TierUnavailableError, "unclaimed"),
        (b"{}", TierUnavailableError, "unclaimed"),
        (b'{"format": 1, "store_id": "00", "lineage": 1, "claim": "c"}', TierUnavailableError, "unclaimed"),
        (
            b'{"format": 1, "store_id": "' + b"0" * 32 + b'", "lineage": 0, "claim": "c"}',
            TierUnavailableError,
            "unclaimed",
        ),
        (
            b'{"format": 1, "store_id": "' + b"0" * 32 + b'", "lineage": true, "claim": "c"}',
            TierUnavailableError,
            "unclaimed",
        ),
        (
            b'{"format": 0, "store_id": "' + b"0" * 32 + b'", "lineage": 1, "claim": "c"}',
            TierUnavailableError,
            "unclaimed",
        ),
        (b'{"format": 2, "store_id": "' + b"0" * 32 + b'", "lineage": 1, "claim": "c"}', ConfigurationError, "refused"),
    ],
)
async def test_what_cannot_be_read_is_left_alone(
    places: Places, bucket: DictBucket, body: bytes, kind: type[Exception], state: IdentityState
) -> None:
    bucket.objects[KEY] = body
    identity = places.start()
    with pytest.raises(kind):
        await identity.claim(STORE)
    assert bucket.objects[KEY] == body
    assert identity.state == state


PAGE = Right(200, {"content-type": "text/html", "etag": '"page"'}, b"<html>Maintenance</html>")


def another_claim(made: bytes) -> Right:
    """The record with another claim, as a flipped bit makes it."""
    return Right(200, {"etag": '"flipped"'}, made.replace(b'"claim": "', b'"claim": "f'))


async def test_a_page_in_place_of_store_json_is_no_answer_and_the_claim_is_made_once_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with odd_world() as world:
        identity = Places(tmp_path, world.bucket, prefix="t/").start()
        watch = IdentityWatch(identity, STORE, log=logging.getLogger("watch"))
        world.server.always = saying(PAGE)
        with pytest.raises(TierUnavailableError, match=r"store.json .*s3/bucket/store.json"):
            await identity.claim(STORE)
        assert (identity.state, identity.may_write()) == ("unclaimed", False)
        assert "s3/bucket/store.json" in identity.reason
        for _ in range(2):
            await watch.look()
        told = [record.getMessage() for record in caplog.records if record.name == "watch"]
        assert len(told) == 1
        assert "s3/bucket/store.json" in told[0]
        assert "t/store.json" not in world.server.objects
        world.server.always = None
        await watch.look()
        assert identity.may_write()


@pytest.mark.parametrize("oddity", ["a page", "nothing", "an empty body", "another claim"])
async def test_one_odd_answer_for_store_json_changes_nothing(tmp_path: Path, oddity: str) -> None:
    async with odd_world() as world:
        places = Places(tmp_path, world.bucket, prefix="t/")
        identity = places.start()
        await identity.claim(STORE)
        odd = {
            "a page": PAGE,
            "nothing": error(404, "NoSuchKey"),
            "an empty body": Right(200, {"etag": '"empty"'}),
            "another claim": another_claim(world.server.objects["t/store.json"]),
        }[oddity]
        world.server.scripts = [saying(odd)]
        assert await identity.check()
        assert not world.server.scripts
        world.server.scripts = [saying(odd)]
        again = places.start()
        assert await again.claim(STORE) == "claimed"
        assert not world.server.scripts


async def test_a_page_that_stays_in_place_of_store_json_changes_nothing_either(tmp_path: Path) -> None:
    async with odd_world() as world:
        places = Places(tmp_path, world.bucket, prefix="t/")
        identity = places.start()
        await identity.claim(STORE)
        world.server.always = saying(PAGE)
        with pytest.raises(TierUnavailableError):
            await identity.check()
        assert identity.may_write()
        again = places.start()
        with pytest.raises(TierUnavailableError):
            await again.claim(STORE)
        assert again.state == "unclaimed"


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_reading_a_record_fails_with_errors_of_ours_alone(body: bytes) -> None:
    with pytest.raises((CorruptionError, ConfigurationError)):
        StoreRecord.decode(body)


@given(st.binary(min_size=16, max_size=16), st.integers(1, 2**32 - 1), st.text(), st.text(), st.text())
def test_a_record_reads_back(store_id: bytes, lineage: int, claim: str, made: str, version: str) -> None:
    record = StoreRecord(store_id, lineage, claim, made, version)
    assert StoreRecord.decode(record.encode()) == record


@given(st.integers(1, 2**32 - 1), st.text(), st.booleans())
def test_a_local_claim_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    lineage: int,
    where: str,
    is_made: bool,  # noqa: FBT001 - Hypothesis's
) -> None:
    file = tmp_path_factory.getbasetemp() / "claim"
    claim = LocalClaim(STORE, lineage, "ab12", where, is_made)
    claim.write(file)
    assert LocalClaim.read(file) == claim


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"store_id": "xy", "lineage": 1, "claim": "", "where": "", "is_made": true}', "\0"]
)
def test_a_local_claim_that_is_none_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "remote").write_text(text)
    with pytest.raises(CorruptionError):
        LocalClaim.read(tmp_path / "remote")


async def test_the_watch_claims_when_the_server_comes_up_and_tells_of_changes_once(
    places: Places, bucket: DictBucket, caplog: pytest.LogCaptureFixture
) -> None:
    identity = places.start("a")
    states: list[IdentityState] = []
    watch = IdentityWatch(identity, STORE, log=logging.getLogger("watch"), on_changed=states.append)
    bucket.errors["get_small"] = down()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            await watch.look()
        assert states == []
        bucket.errors.clear()
        for _ in range(2):
            await watch.look()
        assert states == ["claimed"]
        await places.start("b").take_over(STORE)
        for _ in range(2):
            await watch.look()
    assert states == ["claimed", "fenced"]
    told = [record.getMessage() for record in caplog.records if record.name == "watch"]
    assert len(told) == 2
    assert "goes on with this store: lineage 2" in told[1]


async def test_the_watch_goes_on_looking_and_sooner_while_the_place_is_not_its_own(
    places: Places, bucket: DictBucket
) -> None:
    identity = places.start("a")
    turns, pauses = asyncio.Semaphore(0), list[float]()
    asleep = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        asleep.set()
        await turns.acquire()

    watch = IdentityWatch(identity, STORE, log=logging.getLogger("watch"), sleep=sleep)
    watch.start()

    async def look() -> None:
        asleep.clear()
        turns.release()
        await asleep.wait()

    async with asyncio.timeout(5):
        await asleep.wait()
        assert (identity.state, pauses) == ("claimed", [30.0])
        written = bucket.objects.pop(KEY)
        await look()
        assert (identity.state, pauses[-1]) == ("refused", 2.0)
        bucket.objects[KEY] = written
        await look()
        assert (identity.state, pauses[-1]) == ("claimed", 30.0)
        await places.start("b").take_over(STORE)
        await look()
    assert identity.is_fenced
    await watch.aclose()


class AsCapable:
    """A bucket that says of its server what it is told to: to go the way of one that knows no conditions."""

    def __init__(self, bucket: RemoteBucket, *, conditions: bool) -> None:
        self._bucket = bucket
        self._conditions = conditions

    def __getattr__(self, name: str) -> object:
        return getattr(self._bucket, name)

    @property
    def capabilities(self) -> Capabilities:
        found = self._bucket.capabilities
        assert found is not None
        return replace(found, if_absent=self._conditions, if_match=self._conditions)


@pytest.fixture
async def buckets(remote_store: RemoteStore) -> AsyncIterator[list[RemoteBucket]]:
    """One for each of four machines."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(opened_bucket(remote_store.settings())) for _ in range(4)]
        for bucket in opened:
            await bucket.probe()
        yield opened


def machines(tmp_path: Path, buckets: list[RemoteBucket], *, conditions: bool, prefix: str) -> list[StoreIdentity]:
    places = Places(tmp_path, DictBucket(), prefix=prefix, settle_seconds=0.4)
    found: list[StoreIdentity] = []
    for number, bucket in enumerate(buckets):
        capable: ObjectBucket = AsCapable(bucket, conditions=conditions)  # type: ignore[assignment]  # passes all else on
        found.append(places.start(f"{prefix.strip('/')}{conditions}{number}", bucket=capable))
    return found


@pytest.mark.parametrize("conditions", [True, False])
async def test_of_stores_that_claim_at_once_one_wins(
    tmp_path: Path, buckets: list[RemoteBucket], remote_store: RemoteStore, *, conditions: bool
) -> None:
    capabilities = buckets[0].capabilities
    assert capabilities is not None
    assert not conditions or capabilities.if_absent
    for turn in range(3 if conditions else 1):
        identities = machines(tmp_path, buckets, conditions=conditions, prefix=f"race{turn}/")
        ids = [bytes([number] * 16) for number in range(len(identities))]
        outcomes = await asyncio.gather(
            *(identity.claim(store_id) for identity, store_id in zip(identities, ids, strict=True)),
            return_exceptions=True,
        )
        winners = [number for number, outcome in enumerate(outcomes) if outcome == "claimed"]
        assert len(winners) == 1
        assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes if outcome != "claimed")
        body = remote_store.read(f"race{turn}/store.json")
        assert body is not None
        assert StoreRecord.decode(body).store_id == ids[winners[0]]
        assert [await _checked(identity) for identity in identities].count(True) == 1


@pytest.mark.parametrize("conditions", [True, False])
async def test_of_rebuilds_at_once_one_goes_on_with_the_store(
    tmp_path: Path, buckets: list[RemoteBucket], *, conditions: bool
) -> None:
    owner, *rebuilds = machines(tmp_path, buckets, conditions=conditions, prefix="race/")
    await owner.claim(STORE)
    outcomes = await asyncio.gather(*(each.take_over(STORE) for each in rebuilds), return_exceptions=True)
    assert sorted(map(str, outcomes)).count("2") == 1
    assert all(outcome == 2 or isinstance(outcome, UnavailableError) for outcome in outcomes)
    assert not await owner.check()
    assert owner.is_fenced
    assert [await _checked(each) for each in rebuilds].count(True) == 1


async def _checked(identity: StoreIdentity) -> bool:
    try:
        return await identity.check()
    except KvobjError:
        return False
