"""The remote tier over a real kvobj server and over radosgw, and over the first as the node composes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from fakes import ManualClock
from fakes_remote import on_thread, open_database, opened_bucket
from radosgw_server import Radosgw
from remote_servers import RemoteStore, drop_bucket, make_bucket
from server_process import ServerProcess
from tier_contract import RawRead, TierContract

from kvobj.arena import Arena
from kvobj.database import Database
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.coded import Coded
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.metered import Metered
from kvobj.tiers.protocol import Tier
from kvobj.tiers.remote.directory import RemoteCodings, RemoteDirectory
from kvobj.tiers.remote.located import Located
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.single_flight import SingleFlight
from kvobj.tiers.verified import Verified

_NUMBERS: Final = count()


@pytest.fixture(scope="module", params=["kvobj", "radosgw"])
def server_bucket(request: pytest.FixtureRequest) -> Iterator[RemoteStore]:
    """One bucket for all these tests, each of which has a prefix of its own: buckets cost more than the tests do."""
    server = request.getfixturevalue("kvobj_remote_server" if request.param == "kvobj" else "radosgw_gateway")
    assert isinstance(server, ServerProcess | Radosgw)
    store = RemoteStore(request.param, server.host, server.port, server.credentials(), f"tier-contract-{request.param}")
    make_bucket(store)
    yield store
    drop_bucket(store)


class RemoteContract(TierContract):
    @pytest.fixture
    def store(self, server_bucket: RemoteStore) -> RemoteStore:
        return replace(server_bucket, prefix=f"{server_bucket.prefix}{next(_NUMBERS)}/")

    @pytest.fixture
    async def database(self, tmp_path: Path, shm_path: Path) -> AsyncIterator[Database]:
        database = open_database(tmp_path, shm_path)
        yield database
        await database.aclose()

    @pytest.fixture
    async def remote(self, store: RemoteStore, arena: Arena, database: Database) -> AsyncIterator[RemoteTier]:
        async with opened_bucket(store.settings()) as bucket:
            names = RemoteNames(store.prefix)
            tier = RemoteTier(bucket, RemoteDirectory(database), arena=arena, names=names)
            yield tier
            await tier.aclose()

    @pytest.fixture
    def raw_read(self, store: RemoteStore) -> RawRead:
        async def read(blob_id: BlobId) -> bytes | None:
            keys = store.keys(f"{store.prefix}blobs/{blob_id.hex()}/")
            assert len(keys) <= 1
            return store.read(keys[0]) if keys else None

        return read


class TestRemoteTier(RemoteContract):
    @pytest.fixture
    def tier(self, remote: RemoteTier) -> Tier:
        return remote


# What is composed asks the bare tier alone, which is tested over both servers.
@pytest.mark.parametrize("server_bucket", ["kvobj"], indirect=True)
class TestRemoteTierComposed(RemoteContract):
    """Metered, verified, one flight for all who want it, decoded where that is said."""

    @pytest.fixture
    def tier(self, remote: RemoteTier, arena: Arena) -> Tier:
        instruments = TierInstruments(Metrics())

        def fail(blob_id: BlobId) -> None:
            raise AssertionError(f"nothing was spoiled: {blob_id.hex()}")

        metered = Metered(remote, instruments=instruments, clock=ManualClock())
        checked = SingleFlight(
            Verified(metered, run=on_thread, instruments=instruments, on_corrupt=fail), instruments=instruments
        )
        index = RemoteCodings(remote.directory)
        coded = Coded(checked, index=index, arena=arena, run=on_thread, instruments=instruments)
        return Located(coded, remote=remote)
