"""ListObjects in both versions: prefixes, delimiters, markers, limits, encodings, owners; and ListObjectVersions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import pytest
from botocore.exceptions import ParamValidationError
from s3_worlds import MAIN, S3Client, World, body_of, put_keys, refused, status_of

VERSIONS = (1, 2)

Lister = Callable[..., dict[str, Any]]
Rows = tuple[list[str], list[str]]
"""Keys and common prefixes of a page."""


@pytest.fixture(params=VERSIONS)
def listing(request: pytest.FixtureRequest, world: World) -> Lister:
    call: Lister = world.main.list_objects if request.param == 1 else world.main.list_objects_v2
    return call


def keys(page: dict[str, Any]) -> list[str]:
    return [row["Key"] for row in page.get("Contents", [])]


def prefixes(page: dict[str, Any]) -> list[str]:
    return [row["Prefix"] for row in page.get("CommonPrefixes", [])]


def filled(world: World, *names: str) -> str:
    bucket = world.bucket()
    put_keys(world.main, bucket, names)
    return bucket


def test_a_new_bucket_lists_nothing(listing: Lister, bucket: str) -> None:
    page = listing(Bucket=bucket)
    assert (keys(page), page["IsTruncated"], page["Name"]) == ([], False, bucket)


def test_buckets_do_not_see_each_others_objects(listing: Lister, world: World) -> None:
    one, other = filled(world, "a"), filled(world, "b")
    assert (keys(listing(Bucket=one)), keys(listing(Bucket=other))) == (["a"], ["b"])


def test_a_missing_bucket_is_named(listing: Lister) -> None:
    with refused(404, "NoSuchBucket"):
        listing(Bucket="conform-missing")


def test_keys_come_in_byte_order_whatever_the_order_of_puts(listing: Lister, world: World) -> None:
    names = ["é", "Z", "a", "z", "€", "\U0001f600", "\ue000", "a0", "a-", "a/"]
    bucket = filled(world, *names)
    assert keys(listing(Bucket=bucket)) == sorted(names, key=str.encode)


def test_pages_continue_where_they_ended(world: World) -> None:
    names = ("bar", "baz", "foo", "quxx")
    bucket = filled(world, *names)
    first = world.main.list_objects(Bucket=bucket, MaxKeys=2)
    assert (keys(first), first["IsTruncated"], first["MaxKeys"]) == (["bar", "baz"], True, 2)
    second = world.main.list_objects(Bucket=bucket, MaxKeys=2, Marker="baz")
    assert (keys(second), second["IsTruncated"], second["Marker"]) == (["foo", "quxx"], False, "baz")
    page = world.main.list_objects_v2(Bucket=bucket, MaxKeys=3)
    assert (keys(page), page["KeyCount"], page["IsTruncated"]) == (["bar", "baz", "foo"], 3, True)
    rest = world.main.list_objects_v2(Bucket=bucket, MaxKeys=3, ContinuationToken=page["NextContinuationToken"])
    assert (keys(rest), rest["KeyCount"], rest["IsTruncated"]) == (["quxx"], 1, False)
    assert rest["ContinuationToken"] == page["NextContinuationToken"]
    assert "NextContinuationToken" not in rest


@pytest.mark.parametrize(
    ("delimiter", "names", "rows"),
    [
        ("/", ("foo/bar", "foo/bar/xyzzy", "quux/thud", "asdf"), (["asdf"], ["foo/", "quux/"])),
        ("a", ("bar", "baz", "cab", "foo"), (["foo"], ["ba", "ca"])),
        (" ", ("b ar", "b az", "c ab", "foo"), (["foo"], ["b ", "c "])),
        (".", ("b.ar", "b.az", "c.ab", "foo"), (["foo"], ["b.", "c."])),
        ("%", ("b%ar", "b%az", "c%ab", "foo"), (["foo"], ["b%", "c%"])),
        ("_obj1_", ("_obj1_", "_under1/bar", "x_obj1_y"), (["_under1/bar"], ["_obj1_", "x_obj1_"])),
        ("", ("bar", "baz", "cab"), (["bar", "baz", "cab"], [])),
        ("\x0a", ("bar", "baz"), (["bar", "baz"], [])),
        ("~", ("bar/", "cab"), (["bar/", "cab"], [])),
        ("ü", ("aüb", "aüc", "b"), (["b"], ["aü"])),
    ],
)
def test_a_delimiter_rolls_keys_up(
    listing: Lister, world: World, delimiter: str, names: tuple[str, ...], rows: Rows
) -> None:
    bucket = filled(world, *names)
    page = listing(Bucket=bucket, Delimiter=delimiter)
    assert (keys(page), prefixes(page)) == rows
    assert page.get("Delimiter", "") == delimiter


@pytest.mark.parametrize(
    ("prefix", "delimiter", "rows"),
    [
        ("foo/", "", (["foo/bar", "foo/baz"], [])),
        ("ba", "", (["bar", "baz"], [])),
        ("", "", (["bar", "baz", "foo/bar", "foo/baz", "quux"], [])),
        ("d", "", ([], [])),
        ("\x01", "", ([], [])),
        ("foo/", "/", (["foo/bar", "foo/baz"], [])),
        ("ba", "a", (["bar", "baz"], [])),
        ("b", "a", ([], ["ba"])),
        ("y", "d", ([], [])),
        ("foo", "/", ([], ["foo/"])),
        ("", "/", (["bar", "baz", "quux"], ["foo/"])),
        ("/", "/", ([], [])),
    ],
)
def test_a_key_prefix_selects_and_a_delimiter_counts_behind_it(
    listing: Lister, world: World, prefix: str, delimiter: str, rows: Rows
) -> None:
    bucket = filled(world, "foo/bar", "foo/baz", "bar", "baz", "quux")
    page = listing(Bucket=bucket, Prefix=prefix, Delimiter=delimiter)
    assert (keys(page), prefixes(page), unquote(page.get("Prefix", ""))) == (*rows, prefix)


def test_a_key_that_is_its_own_prefix_stays_a_key(listing: Lister, world: World) -> None:
    bucket = filled(world, "asdf/")
    page = listing(Bucket=bucket, Prefix="asdf/", Delimiter="/")
    assert (keys(page), prefixes(page)) == (["asdf/"], [])


@pytest.mark.parametrize(
    ("prefix", "delimiter", "names", "rows"),
    [
        ("foo/", "/", ("foo/bar", "foo/baz/xyzzy", "quux/thud", "asdf"), (["foo/bar"], ["foo/baz/"])),
        ("ba", "a", ("bar", "bazar", "cab", "foo"), (["bar"], ["baza"])),
        ("/", "d", ("b/a/c", "b/a/g", "b/a/r", "g"), ([], [])),
        ("b", "z", ("b/a/c", "b/a/g", "b/a/r", "g"), (["b/a/c", "b/a/g", "b/a/r"], [])),
        ("y", "z", ("b/a/c", "b/a/g", "b/a/r", "g"), ([], [])),
        ("_under1/", "/", ("_obj1_", "_under1/bar", "_under1/baz/xyzzy"), (["_under1/bar"], ["_under1/baz/"])),
        (
            "",
            "/",
            ("0/", "0/1000", "0/1998", "1999", "1999#", "1999+", "2000"),
            (["1999", "1999#", "1999+", "2000"], ["0/"]),
        ),
    ],
)
def test_a_delimiter_behind_a_key_prefix_rolls_up_what_follows(
    listing: Lister, world: World, *, prefix: str, delimiter: str, names: tuple[str, ...], rows: Rows
) -> None:
    bucket = filled(world, *names)
    page = listing(Bucket=bucket, Prefix=prefix, Delimiter=delimiter)
    assert (keys(page), prefixes(page), page["IsTruncated"]) == (*rows, False)


def test_pages_of_rolled_up_keys_continue(world: World) -> None:
    bucket = filled(world, "asdf", "boo/bar", "boo/baz/xyzzy", "cquux/thud", "cquux/bla")
    seen: list[tuple[list[str], list[str], bool]] = []
    more: dict[str, str] = {}
    for _ in range(4):
        page = world.main.list_objects_v2(Bucket=bucket, Delimiter="/", MaxKeys=1, **more)
        seen.append((keys(page), prefixes(page), page["IsTruncated"]))
        if not page["IsTruncated"]:
            break
        more = {"ContinuationToken": page["NextContinuationToken"]}
    assert seen == [(["asdf"], [], True), ([], ["boo/"], True), ([], ["cquux/"], False)]
    first = world.main.list_objects(Bucket=bucket, Delimiter="/", MaxKeys=2)
    assert (keys(first), prefixes(first), first["NextMarker"]) == (["asdf"], ["boo/"], "boo/")
    second = world.main.list_objects(Bucket=bucket, Delimiter="/", MaxKeys=2, Marker=first["NextMarker"])
    assert (keys(second), prefixes(second), "NextMarker" in second) == ([], ["cquux/"], False)
    inner = world.main.list_objects(Bucket=bucket, Prefix="boo/", Delimiter="/", MaxKeys=1)
    assert (keys(inner), inner["NextMarker"]) == (["boo/bar"], "boo/bar")
    last = world.main.list_objects(Bucket=bucket, Prefix="boo/", Delimiter="/", Marker="boo/bar")
    assert (keys(last), prefixes(last)) == ([], ["boo/baz/"])


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("", ["bar", "baz", "foo", "quxx"]),
        ("bar", ["baz", "foo", "quxx"]),
        ("blah", ["foo", "quxx"]),
        ("\x0a", ["bar", "baz", "foo", "quxx"]),
        ("zzz", []),
    ],
)
def test_a_marker_or_start_after_need_not_exist(world: World, marker: str, expected: list[str]) -> None:
    bucket = filled(world, "bar", "baz", "foo", "quxx")
    page = world.main.list_objects(Bucket=bucket, Marker=marker)
    assert (keys(page), page["Marker"], page["IsTruncated"]) == (expected, marker, False)
    page = world.main.list_objects_v2(Bucket=bucket, StartAfter=marker)
    assert (keys(page), page.get("StartAfter", "")) == (expected, marker)


def test_a_continuation_token_beats_start_after(world: World) -> None:
    bucket = filled(world, "bar", "baz", "foo", "quxx")
    page = world.main.list_objects_v2(Bucket=bucket, StartAfter="bar", MaxKeys=1)
    token = page["NextContinuationToken"]
    rest = world.main.list_objects_v2(Bucket=bucket, StartAfter="bar", ContinuationToken=token)
    assert (keys(page), keys(rest), rest["StartAfter"]) == (["baz"], ["foo", "quxx"], "bar")


def test_a_token_that_was_made_up_is_refused(world: World, bucket: str) -> None:
    for token in ("", "blah", "!", "AAAA"):
        with refused(400, "InvalidArgument"):
            world.main.list_objects_v2(Bucket=bucket, ContinuationToken=token)


def test_limits(listing: Lister, world: World) -> None:
    bucket = filled(world, "bar", "baz", "foo")
    one = listing(Bucket=bucket, MaxKeys=1)
    assert (keys(one), one["IsTruncated"]) == (["bar"], True)
    none = listing(Bucket=bucket, MaxKeys=0)
    assert (keys(none), none["IsTruncated"], none["MaxKeys"]) == ([], False, 0)
    default = listing(Bucket=bucket)
    assert (keys(default), default["MaxKeys"]) == (["bar", "baz", "foo"], 1000)
    many = listing(Bucket=bucket, MaxKeys=5000)
    assert (keys(many), many["MaxKeys"]) == (["bar", "baz", "foo"], 1000)
    with refused(400, "InvalidArgument"):
        listing(Bucket=bucket, MaxKeys=-1)
    with pytest.raises(ParamValidationError):
        listing(Bucket=bucket, MaxKeys="blah")


@pytest.mark.parametrize("query", [{"max-keys": "blah"}, {"list-type": "2", "max-keys": "blah"}, {"max-keys": "-1"}])
def test_a_limit_that_is_no_number_is_refused(world: World, bucket: str, query: dict[str, str]) -> None:
    reply = world.raw("GET", f"/{bucket}", query=query)
    assert (reply.status, reply.code) == (400, "InvalidArgument")


def test_everybody_lists_what_is_public_and_nobody_else_what_is_not(listing: Lister, world: World) -> None:
    public, private = world.bucket(ACL="public-read"), world.bucket()
    nobodys = getattr(world.nobody, listing.__name__)
    assert keys(nobodys(Bucket=public)) == []
    with refused(403, "AccessDenied"):
        nobodys(Bucket=private)


def test_no_page_is_longer_than_a_thousand(world: World) -> None:
    bucket = world.bucket()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda number: put_keys(world.main, bucket, [f"k{number:04}"]), range(1001)))
    page = world.main.list_objects_v2(Bucket=bucket, MaxKeys=2000)
    assert (len(keys(page)), page["IsTruncated"], page["KeyCount"]) == (1000, True, 1000)
    rest = world.main.list_objects_v2(Bucket=bucket, ContinuationToken=page["NextContinuationToken"])
    assert keys(rest) == ["k1000"]


def test_listed_objects_are_as_head_tells_them(world: World) -> None:
    bucket = filled(world, "bar", "baz", "foo")
    page = world.main.list_objects(Bucket=bucket)
    for row in page["Contents"]:
        head = world.main.head_object(Bucket=bucket, Key=row["Key"])
        assert (row["ETag"], row["Size"]) == (head["ETag"], head["ContentLength"])
        assert row["LastModified"].replace(microsecond=0) == head["LastModified"]
        assert row["Owner"] == {"ID": MAIN.id, "DisplayName": MAIN.display_name}
        assert row["StorageClass"] == "STANDARD"


def test_owners_are_told_in_version_2_only_where_asked_for(world: World) -> None:
    bucket = filled(world, "a")
    assert "Owner" not in world.main.list_objects_v2(Bucket=bucket)["Contents"][0]
    told = world.main.list_objects_v2(Bucket=bucket, FetchOwner=True)["Contents"][0]["Owner"]
    assert told["ID"] == MAIN.id


def test_encoding_type_url_encodes_names(world: World) -> None:
    names = ("foo+1/bar", "foo/bar/xyzzy", "quux ab/thud", "asdf+b")
    bucket = filled(world, *names)
    for call in (world.main.list_objects, world.main.list_objects_v2):
        # boto3 decodes where it asked by itself, and leaves to the caller what the caller asked for.
        assert (keys(call(Bucket=bucket)), prefixes(call(Bucket=bucket))) == (sorted(names), [])
        page = call(Bucket=bucket, Delimiter="/", EncodingType="url")
        assert (keys(page), prefixes(page)) == (["asdf%2Bb"], ["foo%2B1/", "foo/", "quux%20ab/"])
        assert page["EncodingType"] == "url"


def test_an_unknown_encoding_is_refused(listing: Lister, bucket: str) -> None:
    with refused(400, "InvalidArgument"):
        listing(Bucket=bucket, EncodingType="base64")


@pytest.mark.parametrize("delimiter", ["/", "abc"])
def test_pages_of_any_size_tell_the_same_names(world: World, delimiter: str) -> None:
    names = [f"{top}/{middle}/{leaf}" for top in "ab" for middle in ("abc", "b") for leaf in range(3)] + ["top"]
    bucket = filled(world, *names)
    whole = world.main.list_objects_v2(Bucket=bucket, Delimiter=delimiter)
    for size in (1, 2, 3, 5):
        found_keys: list[str] = []
        found_prefixes: list[str] = []
        pages = world.main.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Delimiter=delimiter, PaginationConfig={"PageSize": size}
        )
        for page in pages:
            found_keys += keys(page)
            found_prefixes += prefixes(page)
        assert (found_keys, found_prefixes) == (keys(whole), prefixes(whole))


def test_versions_of_a_bucket_without_versions_are_null(world: World) -> None:
    bucket = filled(world, "a", "b/c")
    page = world.main.list_object_versions(Bucket=bucket)
    assert [(row["Key"], row["VersionId"], row["IsLatest"]) for row in page["Versions"]] == [
        ("a", "null", True),
        ("b/c", "null", True),
    ]
    assert "DeleteMarkers" not in page
    rolled = world.main.list_object_versions(Bucket=bucket, Delimiter="/")
    assert ([row["Key"] for row in rolled["Versions"]], prefixes(rolled)) == (["a"], ["b/"])
    first = world.main.list_object_versions(Bucket=bucket, MaxKeys=1)
    assert (first["IsTruncated"], first["NextKeyMarker"], first["NextVersionIdMarker"]) == (True, "a", "null")
    rest = world.main.list_object_versions(Bucket=bucket, KeyMarker="a", VersionIdMarker="null")
    assert [row["Key"] for row in rest["Versions"]] == ["b/c"]


def test_a_version_can_be_named_null_and_no_other(world: World) -> None:
    bucket = filled(world, "a")
    client: S3Client = world.main
    assert body_of(client, bucket, "a", VersionId="null") == b"a"
    for call in (client.get_object, client.head_object):
        with refused(404):
            call(Bucket=bucket, Key="a", VersionId="3sL4kqtJlcpXroDTDmJ")
    assert status_of(client.delete_object(Bucket=bucket, Key="a", VersionId="null")) == 204
    assert keys(client.list_objects_v2(Bucket=bucket)) == []
