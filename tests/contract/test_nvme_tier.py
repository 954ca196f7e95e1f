import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_nvme import RECORD_KEY, FaultyDisk
from tier_contract import MakeFrame, RawRead, TierContract, blob, plain_of, put_plain

from kvobj.arena import Arena
from kvobj.database import Database
from kvobj.ids import BlobId
from kvobj.tiers.nvme import NVME_TABLES, NvmeTier
from kvobj.tiers.nvme.directory import BLOBS, INLINE, Place
from kvobj.tiers.nvme.io import Disk, SystemDisk
from kvobj.tiers.nvme.log_entries import InlinePut, decode_entry
from kvobj.tiers.nvme.record import RECORD_BYTES

MIB = 1 << 20


@pytest.fixture
async def database(tmp_path: Path, shm_path: Path) -> AsyncIterator[Database]:
    database = Database.open(
        durable=tmp_path / "durable",
        volatile=shm_path / "volatile",
        tables=NVME_TABLES,
        map_bytes=64 * MIB,
        volatile_map_bytes=8 * MIB,
    )
    yield database
    await database.aclose()


class TestNvmeTier(TierContract):
    @pytest.fixture
    def disk(self) -> Disk:
        return SystemDisk()

    @pytest.fixture
    async def tier(self, arena: Arena, database: Database, tmp_path: Path, disk: Disk) -> AsyncIterator[NvmeTier]:
        tier = await NvmeTier.open(
            tmp_path / "nvme",
            database=database,
            arena=arena,
            record_key=RECORD_KEY,
            capacity_bytes=96 * MIB,
            segment_bytes=32 * MIB,
            disk=disk,
        )
        assert (await tier.usage()).mode == "O_DIRECT"
        yield tier
        await tier.aclose()

    @pytest.fixture
    def raw_read(self, database: Database, tmp_path: Path) -> RawRead:
        async def read(blob_id: BlobId) -> bytes | None:
            with database.read() as view:
                row = view.get(BLOBS, blob_id)
                if row is None:
                    return None
                place = Place.decode(row)
                if place.inline:
                    entry = view.get(INLINE, blob_id)
                    assert entry is not None
                    put = decode_entry(entry)
                    assert isinstance(put, InlinePut)
                    return bytes(put.frame)
            with (tmp_path / "nvme" / f"segment-{place.segment:06d}").open("rb") as file:
                file.seek(place.offset + RECORD_BYTES)
                return file.read(place.frame_bytes)

        return read

    async def test_others_run_while_a_scan_goes_on(self, tier: NvmeTier, make_frame: MakeFrame) -> None:
        await put_plain(tier, make_frame, blob(1), plain_of(1, 100_000))
        ran: list[BlobId] = []
        asyncio.get_running_loop().call_soon(ran.append, blob(1))
        assert [each async for each in tier.scan()] == ran == [blob(1)]


class TestNvmeTierOnThreads(TestNvmeTier):
    """Where the kernel takes no transfers."""

    @pytest.fixture
    def disk(self) -> Disk:
        return FaultyDisk()
