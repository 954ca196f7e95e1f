"""Directory rows that go with the next commit: found until then, lost with nothing that was acknowledged, and in nobody's way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_nvme import MIB, NAMES, Gate, NvmeNode, blob, plain_of

from kvobj.database import WriteView
from kvobj.errors import ConflictError, KvobjError, StoreFullError
from kvobj.tiers.nvme.directory import BLOBS

SIZES = (MIB, 100 * 1024)


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    (tmp_path / "node").mkdir()
    node = NvmeNode(tmp_path / "node", shm_path)
    yield node
    await node.stop()


async def put_riding(node: NvmeNode, sequence: int, size_bytes: int) -> bytes:
    with node.tier.riding(blob(sequence)):
        return await node.put(sequence, size_bytes)


async def used(node: NvmeNode) -> int:
    return (await node.tier.usage()).used_bytes


async def fill(node: NvmeNode) -> int:
    """Put blobs until one is refused; how many there are then."""
    for count in range(200):
        try:
            await put_riding(node, count, 40 * 1024)
        except StoreFullError:
            return count
        await node.database.write(nothing)
    pytest.fail("never full")


def nothing(_view: WriteView) -> None:
    """A change of somebody else, such as the catalog's that names the blob."""


async def test_a_riding_blob_is_held_before_its_row_is_committed(node: NvmeNode) -> None:
    await node.start()
    held = {n: await put_riding(node, n, size_bytes) for n, size_bytes in enumerate(SIZES)}
    assert [node.place(n) for n in held] == [None, None]
    assert {n: await node.read(n) for n in held} == held
    assert await node.tier.missing([blob(n) for n in range(3)]) == [blob(2)]
    assert [node.tier.frame_bytes(blob(n)) for n in held] == [len(encoded) for encoded in held.values()]
    assert (await node.tier.usage()).blobs == 2
    assert [blob_id async for blob_id in node.tier.scan()] == [blob(0), blob(1)]


async def test_the_next_commit_takes_the_row_along(node: NvmeNode) -> None:
    await node.start()
    held = {n: await put_riding(node, n, size_bytes) for n, size_bytes in enumerate(SIZES)}
    rows: list[bytes | None] = []
    await node.database.write(lambda view: rows.extend(view.get_many(BLOBS, [blob(n) for n in held])))
    places = [node.place(n) for n in held]
    assert rows == [None if place is None else place.encode() for place in places]
    assert None not in places
    assert (await node.tier.usage()).blobs == 2
    await node.stop()
    await node.start()
    assert {n: await node.read(n) for n in held} == held


async def test_what_a_kill_leaves_has_the_row_if_it_has_the_commit_behind_it(
    node: NvmeNode, tmp_path: Path, shm_path: Path
) -> None:
    await node.start()
    acknowledged = [await put_riding(node, n, SIZES[n]) for n in (0, 1)]
    await node.database.write(nothing)
    for n in (2, 3):
        await put_riding(node, n, SIZES[n - 2])
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "node", killed, ignore=shutil.ignore_patterns("lock.mdb"))
    await node.stop()
    after = NvmeNode(killed, shm_path)
    await after.start()
    assert [await after.read(n) for n in range(4)] == [*acknowledged, None, None]
    # The room of the blobs that were lost is free again, and nothing else.
    before = await used(after)
    await after.tier.delete([blob(0), blob(1)])
    assert (before > 0, await used(after)) == (True, 0)
    await after.stop()


async def test_a_clean_stop_commits_rows_that_still_ride(node: NvmeNode) -> None:
    await node.start()
    held = {n: await put_riding(node, n, SIZES[n % 2]) for n in range(4)}
    await node.stop()
    await node.start()
    assert {n: await node.read(n) for n in held} == held


async def test_a_riding_blob_that_is_deleted_was_never_there(node: NvmeNode) -> None:
    await node.start()
    for n, size_bytes in enumerate(SIZES):
        await put_riding(node, n, size_bytes)
    await node.tier.delete([blob(0), blob(0), blob(1), blob(2)])
    assert (await node.read(0), await node.read(1), await used(node)) == (None, None, 0)
    await node.database.write(nothing)
    with node.database.read() as view:
        assert view.count(BLOBS) == 0


async def test_a_blob_whose_row_is_being_committed_is_deleted_behind_it(node: NvmeNode) -> None:
    await node.start()
    await put_riding(node, 1, MIB)
    gate = Gate()
    committing = asyncio.ensure_future(node.database.write(lambda view: gate()))  # noqa: ARG005 - holds the writer thread
    await asyncio.to_thread(gate.reached.wait, 10)
    deleting = asyncio.create_task(node.tier.delete([blob(1)]))
    await asyncio.sleep(0)
    assert await used(node) > 0
    gate.open()
    await asyncio.gather(committing, deleting)
    assert (node.place(1), await used(node)) == (None, 0)


async def test_one_of_several_riding_blobs_is_deleted_and_the_others_are_committed(node: NvmeNode) -> None:
    await node.start()
    held = {n: await put_riding(node, n, MIB) for n in range(3)}
    full = await used(node)
    await node.tier.delete([blob(1)])
    assert await used(node) == full * 2 // 3
    held[3] = await put_riding(node, 3, MIB)
    await node.database.write(nothing)
    with node.database.read() as view:
        assert view.count(BLOBS) == 3
    assert {n: await node.read(n) for n in range(4)} == {**held, 1: None}
    await node.tier.delete([blob(0), blob(2), blob(3)])
    assert await used(node) == 0


async def test_rows_put_while_others_are_being_committed_go_with_the_next_commit(node: NvmeNode) -> None:
    await node.start()
    await put_riding(node, 1, MIB)
    gate = Gate()
    committing = asyncio.ensure_future(node.database.write(lambda view: gate()))  # noqa: ARG005 - holds the writer thread
    await asyncio.to_thread(gate.reached.wait, 10)
    for n in (2, 3):
        await put_riding(node, n, MIB)
    await node.tier.delete([blob(3)])
    gate.open()
    await committing
    assert [node.place(n) is not None for n in (1, 2, 3)] == [True, False, False]
    await node.database.write(nothing)
    assert [node.place(n) is not None for n in (1, 2, 3)] == [True, True, False]


async def test_a_put_that_may_not_ride_waits_for_the_row_of_one_that_did(node: NvmeNode) -> None:
    await node.start()
    await put_riding(node, 1, MIB)
    assert node.place(1) is None
    await node.put(1, MIB)
    assert node.place(1) is not None


async def test_rows_go_with_a_group_one_of_whose_changes_fails(node: NvmeNode) -> None:
    await node.start()

    def fail(_view: WriteView) -> None:
        raise ConflictError("no")

    def break_group(_view: WriteView) -> None:
        raise ZeroDivisionError

    for n, (change, expected) in enumerate([(fail, KvobjError), (break_group, ZeroDivisionError)]):
        await put_riding(node, n, MIB)
        outcomes = await asyncio.gather(
            node.database.write(change), node.database.write(nothing), return_exceptions=True
        )
        assert isinstance(outcomes[0], expected)
        assert (outcomes[1], node.place(n) is None) == (None, False)


async def test_nothing_is_committed_without_a_row_that_rides(node: NvmeNode) -> None:
    """A row that the database has no room for takes down those behind it, until it is taken back."""
    await node.start()
    room = {"is": False}

    def change(view: WriteView) -> None:
        if not room["is"]:
            raise StoreFullError("no room")
        view.put(BLOBS, b"ridden", b"row", headroom=True)

    settled: list[str] = []
    rider = node.database.ride(change, settled=lambda: settled.append("a"))
    other = node.database.ride(change, settled=lambda: settled.append("b"))
    for _ in range(2):
        with pytest.raises(StoreFullError):
            await node.database.write(lambda view: view.put(BLOBS, b"named", b"row"))
        with node.database.read() as view:
            assert view.count(BLOBS) == 0
    assert (node.database.withdraw(other), node.database.withdraw(other)) == (True, False)
    room["is"] = True
    await node.database.write(lambda view: view.put(BLOBS, b"named", b"row"))
    assert (settled, node.database.withdraw(rider)) == (["a"], False)
    await node.database.write(lambda view: view.delete_many(BLOBS, [b"ridden", b"named"]))


async def test_a_full_database_refuses_riding_puts_takes_deletes_and_recovers(node: NvmeNode) -> None:
    await node.start(map_bytes=2 * MIB)
    count = await fill(node)
    held = await used(node)
    for sequence, size_bytes in ((1000, MIB), (1001, 40 * 1024)):
        with pytest.raises(StoreFullError, match="database"):
            await put_riding(node, sequence, size_bytes)
    assert await used(node) == held
    await node.tier.delete([blob(n) for n in range(count)])
    assert await used(node) == 0
    for sequence, size_bytes in ((1000, MIB), (1001, 40 * 1024)):
        assert await put_riding(node, sequence, size_bytes) == await node.read(sequence)


async def test_with_many_rows_waiting_a_put_commits_them(node: NvmeNode) -> None:
    await node.start()
    frame = await node.make_frame(plain_of(1, 100 * 1024))
    for n in range(257):
        with node.tier.riding(blob(n)):
            await node.tier.put(blob(n), frame, NAMES)
    frame.release()
    with node.database.read() as view:
        assert view.count(BLOBS) == 257


async def test_what_rides_never_keeps_a_nearly_full_database_from_removals(node: NvmeNode) -> None:
    await node.start(map_bytes=2 * MIB)
    count = await fill(node)
    await node.tier.delete([blob(count - 1), blob(count - 2)])
    await node.database.write(nothing)
    frame = await node.make_frame(plain_of(1, 100 * 1024))
    for n in range(1000, 1256):
        with node.tier.riding(blob(n)):
            await node.tier.put(blob(n), frame, NAMES)
    frame.release()
    with node.database.read() as view:
        assert view.get(BLOBS, blob(1255)) is None
    await node.tier.delete([blob(n) for n in range(count)])
    assert (await node.tier.usage()).blobs == 256


async def test_a_blob_that_lies_in_the_database_itself_never_rides(node: NvmeNode) -> None:
    await node.start()
    await put_riding(node, 1, 40 * 1024)
    assert node.place(1) is not None


async def test_outside_its_permission_a_put_commits_its_row(node: NvmeNode) -> None:
    await node.start()
    with node.tier.riding(blob(1)):
        await node.put(2, MIB)
    await node.put(1, MIB)
    assert None not in (node.place(1), node.place(2))
