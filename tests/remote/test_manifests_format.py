"""Manifests as bytes: what is written is read, damage is seen, and what stands behind a whole digest is checked all the same."""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from manifest_world import STORE, WRAPPER

from kvobj.catalog.log_entries import RowRemoved, encode_entry
from kvobj.catalog.rows import UserRow
from kvobj.codec.checksums import crc32c
from kvobj.errors import ConfigurationError, CorruptionError, UntrustedError
from kvobj.manifests import format as manifest_format
from kvobj.manifests.format import (
    HEAD_BYTES,
    MAX_ENTRIES,
    MAX_OBJECT_BYTES,
    MAX_PLAIN_BYTES,
    ManifestEntry,
    ManifestHead,
    ManifestKind,
    cut,
    digest_and_tag,
    encode_manifest,
    entry_bytes,
    read_head,
    read_manifest,
)
from kvobj.manifests.names import ManifestName, lineage_folder
from kvobj.manifests.sealing import SealedUser, opened_content, sealed_content
from kvobj.manifests.signing import Signing, reading_under
from kvobj.store.key_wrapping import KeyWrapper

contents = st.lists(st.binary(max_size=200) | st.just(b"the same again" * 40), max_size=40)


def journal(entries: list[bytes], *, after: int = 10) -> tuple[ManifestHead, list[ManifestEntry]]:
    found = [ManifestEntry(after + 1 + number, content) for number, content in enumerate(entries)]
    return ManifestHead(ManifestKind.JOURNAL, STORE, 3, 99, after, after + len(entries)), found


def whole(content: bytes) -> list[ManifestEntry]:
    return list(read_manifest(content)[1])


@given(contents, st.integers(0, 2**62))
def test_what_is_written_is_read(entries: list[bytes], after: int) -> None:
    head, written = journal(entries, after=after)
    content = encode_manifest(head, written)
    found, read = read_manifest(content, store_id=STORE)
    assert list(read) == written
    assert (found.kind, found.lineage, found.epoch, found.after, found.last) == (
        ManifestKind.JOURNAL, 3, 99, after, after + len(entries),
    )  # fmt: skip
    assert found.entries == len(written)
    assert read_head(content[:HEAD_BYTES]) == found
    assert encode_manifest(head, written) == content


def test_many_groups_come_back_in_order_and_pack_well() -> None:
    head, entries = journal([b"%040d" % number for number in range(20_000)])
    content = encode_manifest(head, entries)
    assert whole(content) == entries
    assert len(content) < 20_000 * 20


@given(st.data())
def test_damage_anywhere_is_seen(data: st.DataObject) -> None:
    content = encode_manifest(*journal([b"abc" * 30, b"", b"x" * 300]))
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    damaged = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    with pytest.raises((CorruptionError, ConfigurationError)):
        whole(damaged)
    with pytest.raises(CorruptionError):
        whole(content[:at])
    with pytest.raises(CorruptionError):
        whole(content + content[: at + 1])


@pytest.mark.parametrize("seed", range(400))
def test_damage_under_a_digest_that_fits_is_a_typed_error_or_another_manifest(seed: int) -> None:
    """Who can write a digest can write anything: a reader answers with a typed error, in little memory, or believes it."""
    random = Random(seed)
    content = bytearray(
        encode_manifest(*journal([random.randbytes(random.randrange(90)) for _ in range(9)] + [b"a" * 999]))
    )
    for _ in range(random.randrange(1, 4)):
        content[random.randrange(8, len(content) - 32)] = random.randrange(256)
    resealed = reseal(bytes(content), groups=random.random() < 0.7)
    try:
        head, entries = read_manifest(resealed)
        found = list(entries)
    except (CorruptionError, ConfigurationError):
        return
    assert len(found) == head.entries
    assert all(head.after < entry.position <= head.last for entry in found)


def reseal(content: bytes, *, groups: bool) -> bytes:
    """The content with checksums that fit: of the head, of the whole, and of the groups as far as they can be found."""
    body = bytearray(content[:-32])
    struct.pack_into("<I", body, HEAD_BYTES - 4, crc32c(memoryview(bytes(body[: HEAD_BYTES - 4]))))
    at, number = HEAD_BYTES, 0
    while groups and at + 20 <= len(body):
        head = bytes(body[at : at + 16])
        end = at + 20 + struct.unpack_from("<I", head)[0]
        if end > len(body):
            break
        crc = crc32c(memoryview(bytes(body[at + 20 : end])), crc32c(memoryview(struct.pack("<I", number) + head)))
        struct.pack_into("<I", body, at + 16, crc)
        at, number = end, number + 1
    return bytes(body) + blake3(bytes(body)).digest()


def test_another_store_and_a_newer_version_are_refused_by_name() -> None:
    content = encode_manifest(*journal([b"abc"]))
    with pytest.raises(ConfigurationError, match="of store 0001"):
        read_manifest(content, store_id=b"x" * 16)
    newer = bytearray(content)
    struct.pack_into("<H", newer, 8, 3)
    with pytest.raises(ConfigurationError, match="format 3 is newer"):
        read_manifest(reseal(bytes(newer), groups=False))


@given(st.data())
def test_damage_anywhere_of_a_signed_manifest_is_seen_and_so_is_another_name(data: st.DataObject) -> None:
    signing = Signing.under(b"k" * 32)
    head, entries = journal([b"abc" * 30, b"", b"x" * 300])
    content = encode_manifest(replace(head, is_signed=True), entries)
    content += signing.tag(content[-32:], "the name")

    def check(read: bytes, name: str = "the name", by: Signing = signing) -> None:
        assert list(read_manifest(read)[1]) == entries
        by.check(*digest_and_tag(read), name)

    check(content)
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    with pytest.raises((CorruptionError, ConfigurationError)):
        check(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
    with pytest.raises(CorruptionError):
        check(content[:at])
    for name, by in (("another", signing), ("the name", Signing.under(b"l" * 32)), ("the name", Signing())):
        with pytest.raises(UntrustedError):
            check(content, name, by)
    with pytest.raises(UntrustedError):
        check(encode_manifest(head, entries))
    check(content, by=reading_under(None))


def test_what_does_not_belong_is_not_written() -> None:
    head, entries = journal([b"a", b"b"])
    with pytest.raises(ValueError, match="position 11 after 12"):
        encode_manifest(head, entries[::-1])
    with pytest.raises(ValueError, match="position 13"):
        encode_manifest(head, [ManifestEntry(13, b"")])
    part = ManifestHead(ManifestKind.PART, STORE, 1, 1, 0, 5)
    with pytest.raises(ValueError, match="position 4"):
        encode_manifest(part, [ManifestEntry(4, b"")])
    assert whole(encode_manifest(part, [ManifestEntry(5, b"x"), ManifestEntry(5, b"y")])) == [(5, b"x"), (5, b"y")]


def test_entries_are_cut_into_what_one_manifest_holds() -> None:
    many = [ManifestEntry(number, b"") for number in range(1, MAX_ENTRIES + 3)]
    assert [len(batch) for batch in cut(many)] == [MAX_ENTRIES, 2]
    large = [ManifestEntry(number, bytes(MAX_PLAIN_BYTES // 2)) for number in range(1, 4)]
    assert [len(batch) for batch in cut(large)] == [1, 1, 1]
    with pytest.raises(ValueError, match="longer than a manifest"):
        list(cut([ManifestEntry(1, bytes(MAX_PLAIN_BYTES))]))


def test_the_largest_manifest_is_no_longer_than_a_reader_takes() -> None:
    noise = Random(1).randbytes(MAX_PLAIN_BYTES // 64 - entry_bytes(b""))
    head, entries = journal([noise] * 64)
    content = encode_manifest(head, entries)
    assert MAX_PLAIN_BYTES < len(content) <= MAX_OBJECT_BYTES


@given(
    st.builds(
        ManifestName,
        lineage=st.integers(0, 2**32 - 1),
        last=st.integers(0, 2**64 - 1),
        after=st.integers(0, 2**64 - 1),
        epoch=st.integers(0, 2**64 - 1),
        number=st.integers(0, 2**32 - 1),
        kind=st.sampled_from(ManifestKind),
    ),
    st.integers(0, 2**64 - 1),
)
def test_a_name_is_read_from_its_key_and_keys_lie_in_the_order_of_last_positions(name: ManifestName, last: int) -> None:
    assert ManifestName.parse(name.key) == name
    assert name.key.startswith(lineage_folder(name.lineage))
    other = ManifestName(name.lineage, last, name.epoch, name.after, name.number, name.kind)
    assert (other.key < name.key) == (other.last < name.last)


@pytest.mark.parametrize(
    "key", ["manifests/", "manifests/00000001/x", "blobs/00000001/0-0-0-0.part", "manifests/00000001/0-0-0-0.head"]
)
def test_a_stranger_among_the_manifests_is_no_name(key: str) -> None:
    assert ManifestName.parse(key) is None


@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=1, max_size=128))
def test_a_users_secret_leaves_the_node_sealed(user_id: str, access_key: str, secret: str) -> None:
    user = UserRow(user_id, "A name", access_key, "secret-" + secret)
    content = sealed_content(encode_entry(user), WRAPPER)
    assert content is not None
    assert user.secret_key.encode() not in content
    assert opened_content(content, WRAPPER) == user
    closed = opened_content(content, KeyWrapper(b"o" * 32))
    assert isinstance(closed, SealedUser)
    assert (closed.id, closed.access_key) == (user_id, access_key)


def test_a_sealed_secret_does_not_open_under_another_users_name() -> None:
    content = sealed_content(encode_entry(UserRow("ann", "", "key-ann", "secret")), WRAPPER)
    assert content is not None
    with pytest.raises(CorruptionError, match="another user's"):
        opened_content(content.replace(b"key-ann", b"key-bob"), WRAPPER)


def test_the_root_user_is_in_no_manifest_and_all_else_is_as_it_was() -> None:
    assert sealed_content(encode_entry(UserRow("root", "", "a", "b", is_root=True)), WRAPPER) is None
    removed = encode_entry(RowRemoved("bucket", "key"))
    assert sealed_content(removed, WRAPPER) == removed
    assert opened_content(removed, WRAPPER) == RowRemoved("bucket", "key")


@pytest.mark.parametrize("content", [b"", b"\xc1abc", b"\xc0abc", b"\x80abc", b"\x3fabc", b"\x50abc"])
def test_an_entry_that_no_manifest_holds_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptionError):
        opened_content(content, WRAPPER)


def test_the_digest_is_over_everything_before_it() -> None:
    content = encode_manifest(*journal([b"abc"]))
    assert content[-32:] == blake3(content[:-32]).digest()
    assert content.startswith(manifest_format._MAGIC)
