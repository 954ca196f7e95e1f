"""Keys on the remote: what they look like, that they read back, and that nothing else is taken for one of ours."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.ids import BlobId, epoch_of, make_blob_id
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.remote.names import (
    KEY_BYTES_MAX,
    PREFIX_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    CodedNames,
    RemoteName,
    RemoteNames,
    coded_by,
    parse_name,
)

ID = make_blob_id(0x0123456789ABCDEF, 7)
ID_TEXT = "0123456789abcdef0000000000000007"
NAMES = RemoteNames("store/")

buckets = st.text(min_size=1, max_size=63) | st.from_regex(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", fullmatch=True)
letters = st.characters(exclude_categories=["Cs"])
keys = st.text(letters | st.sampled_from("/.~%+ -"), min_size=1, max_size=400)
prefixes = st.sampled_from(["", "store/", "a/b-c/d_e/", "x" * (PREFIX_BYTES_MAX - 1) + "/"])
ids = st.builds(make_blob_id, st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))


@st.composite
def blob_names(draw: st.DrawFn) -> BlobNames:
    bucket = draw(st.text(letters, min_size=1, max_size=63) | buckets.filter(lambda text: text.isascii()))
    key = draw(keys)
    if draw(st.booleans()):
        return BlobNames(bucket, key)
    codec = draw(st.sampled_from(["x3", "xa", "zp", "eq:83/1", "ek:300/0"]))
    return CodedNames(bucket, key, codec, draw(st.integers(0, 2**40)))


@pytest.mark.parametrize(
    ("bucket", "key", "name"),
    [
        ("photos", "2024/summer.jpg", "photos/2024/summer.jpg"),
        ("b", "a b+c", "b/a%20b%2Bc"),
        ("b", "/", "b/%2F"),
        ("b", "/a", "b/%2Fa"),
        ("b", "a/", "b/a%2F"),
        ("b", "a//b", "b/a%2F%2Fb"),
        ("b", "..", "b/%2E%2E"),
        ("b", "../../etc/passwd", "b/%2E%2E/%2E%2E/etc/passwd"),
        ("b", ".", "b/%2E"),
        ("b", "a/./b", "b/a/%2E/b"),
        ("b", ".hidden", "b/.hidden"),
        ("b", "v1..2", "b/v1%2E%2E2"),
        ("b", "~", "b/%7E"),
        ("b", "ü", "b/%C3%BC"),
        ("b", "100%", "b/100%25"),
        ("b", "\0", "b/%00"),
        ("a/b", "k", "a%2Fb/k"),
    ],
)
def test_a_name_is_for_people_in_safe_characters(bucket: str, key: str, name: str) -> None:
    assert NAMES.name(BlobNames(bucket, key)) == name
    assert NAMES.key(ID, name) == f"store/blobs/{ID_TEXT}/{name}"


def test_a_name_says_in_which_codec_the_frame_lies() -> None:
    name = NAMES.name(CodedNames("cache", "ab12", "eq:83/1", 123456))
    assert name == "cache/ab12~eq%3A83%2F1-123456"
    assert coded_by(name) == ("eq:83/1", 123456)
    assert coded_by(NAMES.name(BlobNames("cache", "ab12~x3-1"))) is None


@pytest.mark.parametrize("names", [BlobNames("", "k"), BlobNames("b", "")])
def test_nothing_without_a_bucket_and_a_key_is_named(names: BlobNames) -> None:
    with pytest.raises(ValueError):
        NAMES.name(names)


@pytest.mark.parametrize("prefix", ["store", "/"[1:] + "x", "y" * PREFIX_BYTES_MAX + "/"])
def test_a_prefix_is_empty_or_ends_in_a_slash_and_leaves_room(prefix: str) -> None:
    with pytest.raises(ValueError):
        RemoteNames(prefix)


@given(prefixes, ids, blob_names())
def test_every_key_is_safe_bounded_and_reads_back(prefix: str, blob_id: BlobId, names: BlobNames) -> None:
    under = RemoteNames(prefix)
    key = under.key(blob_id, under.name(names))
    behind = key.removeprefix(prefix)
    assert re.fullmatch(r"[A-Za-z0-9._%~/-]+", behind)
    assert len(key.encode()) <= KEY_BYTES_MAX
    assert ".." not in behind
    assert all(segment and segment != "." and len(segment) <= 255 for segment in behind.split("/"))
    assert key.startswith(under.of_blob(blob_id))
    assert key.startswith(under.of_epoch(epoch_of(blob_id)))
    found = under.parse(key)
    assert found is not None
    assert found.blob_id == blob_id
    if found.is_cut:
        assert names.key.startswith(found.names.key)
        assert found.names.key
        assert found.names == replace(names, key=found.names.key)
    else:
        assert found.names == names


@given(st.text(letters, min_size=1, max_size=2000), st.integers(1, 40))
def test_a_long_key_is_cut_between_characters_and_says_so(text: str, times: int) -> None:
    key = text * times
    name = NAMES.name(BlobNames("bucket", key))
    parsed = parse_name(name)
    assert parsed is not None
    names, is_cut = parsed
    assert key.startswith(names.key)
    assert is_cut == (names.key != key) == name.endswith("~")
    if len(key.encode()) <= SEGMENT_BYTES_MAX // 3:  # escapes take three bytes for one
        assert not is_cut


def test_a_cut_is_where_the_room_ends() -> None:
    deep = "/".join(["segment"] * 200)
    key = NAMES.key(ID, NAMES.name(BlobNames("bucket", deep)))
    assert KEY_BYTES_MAX - len("/segment") <= len(key) <= KEY_BYTES_MAX
    long_name = NAMES.name(BlobNames("bucket", "x" * 300 + "/rest"))
    assert long_name == "bucket/" + "x" * SEGMENT_BYTES_MAX + "~"
    wide = NAMES.name(BlobNames("bucket", "a" * 199 + "€" * 100))
    assert wide == "bucket/" + "a" * 199 + "~"


@given(st.lists(ids, unique=True, max_size=20), st.lists(keys, min_size=20, max_size=20))
def test_keys_sort_as_their_ids(blob_ids: list[BlobId], key_list: list[str]) -> None:
    by_key = sorted(NAMES.key(i, NAMES.name(BlobNames("b", key))) for i, key in zip(blob_ids, key_list, strict=False))
    found = [NAMES.parse(key) for key in by_key]
    assert [each.blob_id for each in found if each is not None] == sorted(blob_ids)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "store/",
        "store/store.json",
        "store/manifests/00000001/x",
        "store/blobs/",
        f"store/blobs/{ID_TEXT}",
        f"store/blobs/{ID_TEXT}/",
        f"store/blobs/{ID_TEXT}/bucket",
        f"store/blobs/{ID_TEXT}/bucket/",
        f"store/blobs/{ID_TEXT}/bucket//key",
        f"store/blobs/{ID_TEXT}//key",
        f"store/blobs/{ID_TEXT}/bucket/key/",
        f"store/blobs/{ID_TEXT}/bucket/..",
        f"store/blobs/{ID_TEXT}/bucket/a b",
        f"store/blobs/{ID_TEXT}/bucket/a%2",
        f"store/blobs/{ID_TEXT}/bucket/a%2f",
        f"store/blobs/{ID_TEXT}/bucket/%FF",
        f"store/blobs/{ID_TEXT}/bucket/a~~~",
        f"store/blobs/{ID_TEXT}/bucket/a~x3",
        f"store/blobs/{ID_TEXT}/bucket/a~x3-",
        f"store/blobs/{ID_TEXT}/bucket/a~x3-01",
        f"store/blobs/{ID_TEXT}/bucket/a\n",
        f"store/blobs/{ID_TEXT.upper()}/bucket/key",
        f"store/blobs/{ID_TEXT[:-1]}/bucket/key",
        f"store/blobs/{ID_TEXT}0/bucket/key",
        f"other/blobs/{ID_TEXT}/bucket/key",
        f"blobs/{ID_TEXT}/bucket/key",
    ],
)
def test_what_is_no_key_of_ours_is_not_taken_for_one(key: str) -> None:
    assert NAMES.parse(key) is None


@given(st.text(max_size=60) | st.text(st.sampled_from("ab/.%~-0F"), max_size=30))
def test_parsing_whatever_is_there_never_fails(text: str) -> None:
    found = NAMES.parse(f"store/blobs/{ID_TEXT}/{text}")
    assert found is None or isinstance(found, RemoteName)
    if found is not None:
        assert found.name == text
