"""Manifests and the store's identity as every released version wrote them stay readable for ever. A golden file is added, never
changed. zstd's output may differ between its versions, so that today's writer is held to what is read, not to the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvobj.catalog.log_entries import BucketRemoved, NamespaceRemoved, RowRemoved, UserRemoved, encode_entry
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, Durability, ObjectRow, UserRow
from kvobj.manifests.format import (
    ManifestEntry,
    ManifestHead,
    ManifestKind,
    digest_and_tag,
    encode_manifest,
    read_manifest,
)
from kvobj.manifests.names import ManifestName
from kvobj.manifests.sealing import opened_content, sealed_content
from kvobj.manifests.signing import Signing
from kvobj.store.key_wrapping import KeyWrapper

MANIFESTS = Path(__file__).parent / "manifests"
STORE = bytes(range(16))
WRAPPER = KeyWrapper(bytes(range(32)))
OBJECT = ObjectRow(
    bucket="golden",
    key="a key/with ümlaut",
    blobs=(BlobRef(bytes(range(16)), 3, 300, bytes(range(32))),),
    size_bytes=3,
    etag="900150983cd24fb0d6963f7d28e17f72",
    modified_ms=1_700_000_000_000,
    owner="ann",
    durability=Durability.SHARED,
    headers={"content-type": "text/plain"},
    metadata={"of": "gold"},
    digest=bytes(range(32)),
    sequence=(1 << 40) + 5,
    tags={"a": "b"},
)
ENTRIES = (
    UserRow("ann", "Ann", "ann-access", "ann-secret"),
    BucketRow("golden", BucketKind.ORDINARY, "ann", 1_600_000_000_000, Durability.SHARED, tags={"x": "y"}),
    NamespaceRow("cache", "default2", b"{}", bytes(32), bytes(40), bytes(32), "foreign", 16, None, None, 1, "ann"),
    OBJECT,
    *(OBJECT,) * 40,
    RowRemoved("golden", "gone"),
    NamespaceRemoved("cache", "gone"),
    BucketRemoved("gone"),
    UserRemoved("bob"),
)
"""What `journal-1` holds, at positions from 101 on, and `part-1`, at position 500."""


def journal() -> tuple[ManifestHead, list[ManifestEntry]]:
    entries = [ManifestEntry(101 + number, sealed(number)) for number in range(len(ENTRIES))]
    return ManifestHead(ManifestKind.JOURNAL, STORE, 2, 0xFEEDFACE, 100, 100 + len(ENTRIES), len(entries)), entries


def signed_journal() -> tuple[ManifestHead, list[ManifestEntry]]:
    head, entries = journal()
    return replace(head, is_signed=True), entries


def part() -> tuple[ManifestHead, list[ManifestEntry]]:
    entries = [ManifestEntry(500, sealed(number)) for number in range(len(ENTRIES))]
    return ManifestHead(ManifestKind.PART, STORE, 2, 0xFEEDFACE, 0, 500, len(entries)), entries


def sealed(number: int) -> bytes:
    content = sealed_content(encode_entry(ENTRIES[number]), WRAPPER)
    assert content is not None
    return content


GOLDEN = {"journal-1": journal, "part-1": part, "journal-2": signed_journal}
SIGNING = Signing.under(bytes(range(32)))
SIGNED_NAME = ManifestName(2, 100 + len(ENTRIES), 0xFEEDFACE, 100, 1, ManifestKind.JOURNAL).key


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_golden_manifest_reads_as_it_was_written(name: str) -> None:
    head, entries = read_manifest((MANIFESTS / f"{name}.manifest").read_bytes(), store_id=STORE)
    found = list(entries)
    assert head == GOLDEN[name]()[0]
    assert [opened_content(content, WRAPPER) for _, content in found] == list(ENTRIES)
    assert [position for position, _ in found] == [position for position, _ in GOLDEN[name]()[1]]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_manifest_written_today_says_the_same(name: str) -> None:
    said, written = GOLDEN[name]()
    content = encode_manifest(said, written)
    head, entries = read_manifest(content + bytes(32) if said.is_signed else content)
    golden_head, golden = read_manifest((MANIFESTS / f"{name}.manifest").read_bytes())
    assert head == golden_head
    # Rows gain fields at their end, so that their bytes may differ; what they say does not.
    assert [opened_content(content, WRAPPER) for _, content in entries] == [
        opened_content(content, WRAPPER) for _, content in golden
    ]


def test_a_golden_signature_is_believed_and_the_same_today() -> None:
    digest, tag = digest_and_tag((MANIFESTS / "journal-2.manifest").read_bytes())
    SIGNING.check(digest, tag, SIGNED_NAME)
    assert tag == SIGNING.tag(digest, SIGNED_NAME)
    assert digest_and_tag((MANIFESTS / "journal-1.manifest").read_bytes())[1] is None


def test_every_golden_manifest_is_read_by_this_test() -> None:
    assert {path.name for path in MANIFESTS.iterdir()} == {f"{name}.manifest" for name in GOLDEN}
