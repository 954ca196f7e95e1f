"""Manifests that the store did not write, or cannot prove to have written: a rebuild does not believe them unless it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import ManualClock
from manifest_world import WRAPPER, DictBucket, OutboxCatalog, bucket_row, folder_of, put_shared, told_by
from rebuild_world import ENVIRONMENT, World, admin, lose, node_settings, settle
from remote_servers import RemoteStore
from server_process import ServerProcess

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import RowRemoved, encode_entry
from kvobj.errors import CorruptionError, UntrustedError
from kvobj.manifests.compaction import Compaction
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import ManifestEntry, ManifestHead, ManifestKind, encode_manifest, read_head, read_manifest
from kvobj.manifests.names import ManifestName
from kvobj.manifests.reading import find_state
from kvobj.manifests.signing import Signing, reading_under

KEY = b"k" * 32
SIGNING = Signing.under(KEY)


def names_in(store: RemoteStore, lineage: int) -> list[ManifestName]:
    found = [ManifestName.parse(key.removeprefix(store.prefix)) for key in store.keys(f"{store.prefix}manifests/")]
    return [name for name in found if name is not None and name.lineage == lineage]


def content_of(store: RemoteStore, name: ManifestName) -> bytes:
    content = store.read(store.prefix + name.key)
    assert content is not None
    return content


def test_a_forged_manifest_is_left_out_and_stripped_ones_are_refused_unless_they_are_to_be_believed(
    kvobj_remote: RemoteStore, tmp_path: Path
) -> None:
    store = kvobj_remote
    with ServerProcess(tmp_path / "node", node_settings(store)) as node:
        with node.raw() as raw:
            assert raw.request("PUT", "/one", payload=None).status == 200
            for key in ("a", "b"):
                World(node, store).put(raw, f"/one/{key}", b"bytes")
        settle(node)
        lose(node)
        written = names_in(store, 1)
        assert all(read_head(content_of(store, name)).is_signed for name in written)

        # Somebody who can write to the bucket, and has not the key, tells of a removal.
        last = max(name.last for name in written)
        forged = ManifestName(1, last + 1, 77, last, 1, ManifestKind.JOURNAL)
        store_id = read_head(content_of(store, written[0])).store_id
        head = ManifestHead(ManifestKind.JOURNAL, store_id, 1, 77, last, last + 1)
        content = encode_manifest(head, [ManifestEntry(last + 1, encode_entry(RowRemoved("one", "a")))])
        store.write(store.prefix + forged.key, content)
        status, report = admin(node, "rebuild", "--remote")
        assert (status, "--accept-gaps" in report["complaint"]) == (1, True), report
        status, report = admin(node, "rebuild", "--remote", "--accept-gaps")
        assert (status, report["objects"], report["left_out_manifests"], report["missing_spans"]) == (1, 2, 1, 1)
        kinds = [(finding["kind"], finding.get("name")) for finding in report["findings"]]
        assert ("untrusted-manifest", forged.key) in kinds

        # Signatures that are taken away are missed, and so is the key that they were made with.
        for name in names_in(store, 2):
            head, entries = read_manifest(content_of(store, name))
            bare = ManifestHead(head.kind, head.store_id, head.lineage, head.epoch, head.after, head.last)
            store.write(store.prefix + name.key, encode_manifest(bare, list(entries)))
        for environment in (ENVIRONMENT, dict.fromkeys(ENVIRONMENT, "6b" * 32)):
            status, report = admin(node, "rebuild", "--remote", "--replace", environment=environment)
            assert (status, "--accept-unsigned" in report["complaint"]) == (2, True), report
        assert admin(node, "fsck", "--remote")[1]["unreadable_manifests"] == 1
        status, report = admin(node, "rebuild", "--remote", "--replace", "--accept-unsigned")
        assert (status, report["objects"], report["lineage"]) == (0, 2, 3), report
        assert all(read_head(content_of(store, name)).is_signed for name in names_in(store, 3))
        assert admin(node, "fsck", "--remote")[0] == 0


# -- without processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[LmdbCatalog]:
    async with OutboxCatalog(tmp_path, ManualClock()) as opened:
        await opened.create_bucket(bucket_row("b"))
        yield opened


def compaction_of(folder: ManifestFolder, catalog: LmdbCatalog) -> Compaction:
    return Compaction(folder, catalog.outbox, WRAPPER)


async def test_a_store_that_begins_to_sign_begins_with_a_snapshot_and_drops_what_was_not_signed(
    catalog: LmdbCatalog,
) -> None:
    bucket = DictBucket()
    await put_shared(catalog, "b", "k", 1)
    old = await compaction_of(folder_of(bucket), catalog).take_snapshot()
    assert await compaction_of(folder_of(bucket), catalog).has_snapshot()
    signing = compaction_of(folder_of(bucket, epoch=8, signing=SIGNING), catalog)
    assert not await signing.has_snapshot()
    with pytest.raises(UntrustedError):
        await find_state(folder_of(bucket, signing=reading_under(KEY)), newest=1)
    await signing.take_snapshot()
    await signing.run()
    assert not {f"store/{name.key}" for name in (old.name, *old.part_names)} & set(bucket.objects)
    assert ("object", "b", "k") in await told_by(folder_of(bucket, signing=reading_under(KEY)))
    # And back: whoever takes the key out of the configuration begins with one that is not signed.
    assert not await compaction_of(folder_of(bucket), catalog).has_snapshot()
    assert ("object", "b", "k") in await told_by(folder_of(bucket, signing=reading_under(None)))


async def test_a_part_under_another_parts_name_is_not_believed(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    await put_shared(catalog, "b", "k", 1)
    folder = folder_of(bucket, signing=SIGNING)
    snapshot = await compaction_of(folder, catalog).take_snapshot()
    (part,) = snapshot.part_names
    moved = ManifestName(part.lineage, part.last, part.epoch, part.after, part.number + 1, part.kind)
    bucket.objects[f"store/{moved.key}"] = bucket.objects[f"store/{part.key}"]
    await folder.read(part)
    with pytest.raises(UntrustedError):
        await folder.read(moved)


async def test_a_journal_that_is_left_out_has_to_be_covered_by_others(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    folder = folder_of(bucket, signing=SIGNING)
    snapshot = await compaction_of(folder, catalog).take_snapshot()
    at = snapshot.position
    names = []
    for after, last in ((at, at + 1), (at + 1, at + 3), (at + 1, at + 3)):
        name, content = await folder.encode(ManifestKind.JOURNAL, [], after=after, last=last)
        await folder.write(name, content)
        names.append(name)
    assert (await find_state(folder, newest=1, without={names[1]})).journals == (names[0], names[2])
    with pytest.raises(CorruptionError, match="journals are missing"):
        await find_state(folder, newest=1, without=set(names[1:]))
    state = await find_state(folder, newest=1, without=set(names[1:]), may_lack_journals=True)
    assert (state.journals, state.gaps, state.position) == ((names[0],), ((at + 1, at + 3),), at + 1)
