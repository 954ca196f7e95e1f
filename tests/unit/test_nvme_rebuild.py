import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_nvme import KIB, MIB, RECORD_KEY, NvmeNode, blob

from kvobj.ids import BlobId
from kvobj.tiers.nvme import RebuiltBlob, live_inline_entries, rebuild_directory, restore_inline
from kvobj.tiers.nvme.record import RECORD_BYTES, Record, encode_record
from kvobj.tiers.protocol import BlobNames

SIZES = {n: n * 40 * KIB for n in range(1, 20)} | {50: 5 * MIB + 3, 51: 9 * MIB}


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    node = NvmeNode(tmp_path, shm_path)
    yield node
    await node.stop()


def names_of(sequence: int) -> BlobNames:
    return BlobNames(bucket="bücket", key=f"key/{sequence}")


async def fill(node: NvmeNode) -> dict[int, bytes]:
    return {n: await node.put(n, size_bytes, names=names_of(n)) for n, size_bytes in SIZES.items()}


async def rebuild(node: NvmeNode, removed: set[BlobId] | None = None) -> list[RebuiltBlob]:
    """Lose both environments, and make the directory anew from segments and record log."""
    await node.stop()
    shutil.rmtree(node.path / "durable")
    await node.start(rebuild=True, open_tier=False)
    log = node.open_log()
    logged = await restore_inline(node.database, log.replay())
    log.close()
    found = [
        each
        async for each in rebuild_directory(
            node.directory, database=node.database, record_key=RECORD_KEY, removed=logged | (removed or set())
        )
    ]
    await node.open_tier()
    return found


async def test_a_rebuilt_directory_has_what_was_held_and_not_what_was_removed(node: NvmeNode) -> None:
    await node.start()
    held = await fill(node)
    gone = [1, 2, 7, 50]
    await node.tier.delete([blob(n) for n in gone])
    before = await node.tier.usage()
    found = await rebuild(node)
    assert await node.tier.usage() == before
    for sequence, encoded in held.items():
        assert await node.read(sequence) == (None if sequence in gone else encoded)
    in_segments = {n for n in held if n not in gone and len(held[n]) > 64 * KIB}
    assert {each.blob_id: (each.names, each.frame_bytes) for each in found} == {
        blob(n): (names_of(n), len(held[n])) for n in in_segments
    }


async def test_of_blobs_that_claim_the_same_room_the_whole_one_is_kept(node: NvmeNode) -> None:
    await node.start()
    await node.put(1, 3 * MIB)
    await node.put(2, MIB)
    await node.tier.delete([blob(1), blob(2)])
    held = {n: await node.put(n, 700 * KIB + n) for n in range(3, 8)}
    await node.stop()
    # The log that says what was removed is lost too: only the frames themselves can tell.
    shutil.rmtree(node.path / "durable")
    shutil.rmtree(node.path / "log")
    await node.start(open_tier=False)
    found = [
        each
        async for each in rebuild_directory(
            node.directory, database=node.database, record_key=RECORD_KEY, removed=frozenset()
        )
    ]
    await node.open_tier()
    assert {each.blob_id for each in found} == {blob(n) for n in held}
    for sequence, encoded in held.items():
        assert await node.read(sequence) == encoded


async def test_of_two_copies_of_one_id_the_whole_one_is_kept(node: NvmeNode) -> None:
    await node.start()
    encoded = await node.put(1, MIB)
    place = node.place(1)
    assert place is not None
    forged = Record(0, 16 * MIB, blob(1), place.frame_bytes, names_of(1))
    page = bytearray(RECORD_BYTES)
    encode_record(forged, RECORD_KEY, memoryview(page))
    with (node.directory / "segment-000000").open("r+b") as file:
        file.seek(forged.offset)
        file.write(page)
    assert [each.blob_id for each in await rebuild(node)] == [blob(1)]
    assert await node.read(1) == encoded


async def test_a_record_page_that_lies_elsewhere_or_is_damaged_is_no_record(node: NvmeNode) -> None:
    await node.start()
    await node.put(1, MIB)
    await node.put(2, MIB)
    with (node.directory / "segment-000000").open("r+b") as file:
        page = file.read(RECORD_BYTES)
        file.seek(20 * MIB)
        file.write(page)
    node.flip(2, -RECORD_BYTES + 40)
    assert [each.blob_id for each in await rebuild(node)] == [blob(1)]


async def test_a_payload_full_of_record_pages_is_only_payload(node: NvmeNode) -> None:
    await node.start()
    await node.put(1, MIB)
    dump = (node.directory / "segment-000000").read_bytes()[:MIB]
    frame = await node.make_frame(dump)
    await node.tier.put(blob(2), frame, names_of(2))
    encoded = bytes(frame.view)
    frame.release()
    assert [each.blob_id for each in await rebuild(node)] == [blob(1), blob(2)]
    assert await node.read(2) == encoded


async def test_a_rebuild_can_be_repeated_and_counts_what_it_reads(node: NvmeNode) -> None:
    await node.start()
    await fill(node)
    await rebuild(node)
    await node.tier.aclose()
    counts: list[tuple[int, int]] = []
    found = [
        each.blob_id
        async for each in rebuild_directory(
            node.directory,
            database=node.database,
            record_key=RECORD_KEY,
            removed={blob(51)},
            on_progress=lambda done, total: counts.append((done, total)),
        )
    ]
    assert blob(50) in found
    assert blob(51) not in found
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)
    assert counts[-1][0] == counts[-1][1] == 32 * MIB
    await node.open_tier()
    assert await node.tier.missing([blob(50), blob(51)]) == [blob(51)]


async def test_the_entries_of_live_small_frames_rebuild_them(node: NvmeNode) -> None:
    await node.start()
    held = {n: await node.put(n, 1000 * n, names=names_of(n)) for n in range(1, 6)}
    await node.tier.delete([blob(3)])
    with node.database.read() as view:
        entries = list(live_inline_entries(view))
    await node.tier.delete([blob(n) for n in held])
    await node.tier.aclose()
    assert await restore_inline(node.database, entries) == set()
    await node.open_tier()
    for sequence, encoded in held.items():
        assert await node.read(sequence) == (None if sequence == 3 else encoded)


async def test_a_small_frame_removed_and_logged_stays_removed_in_any_batch(node: NvmeNode) -> None:
    await node.start()
    await node.put(1, 100)
    await node.tier.delete([blob(1)])
    await node.put(2, 100)
    await rebuild(node)
    assert await node.tier.missing([blob(1), blob(2)]) == [blob(1)]


async def test_a_small_frame_that_was_put_again_after_its_removal_is_there(node: NvmeNode) -> None:
    await node.start()
    await node.put(1, 100)
    await node.tier.delete([blob(1)])
    again = await node.put(1, 100)
    await node.put(2, 100)
    await node.tier.delete([blob(2)])
    await rebuild(node)
    assert await node.read(1) == again
    assert await node.tier.missing([blob(2)]) == [blob(2)]
