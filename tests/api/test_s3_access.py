"""Who may do what in ordinary buckets: every kind of caller, of request and of sharing, against what should come of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from s3_driver import ALICE, BOB, ROOT, Driver
from s3_sharing import (
    CAROL,
    NOBODY,
    TAGS,
    acl_of,
    allow,
    deny,
    expect,
    send,
    set_policy,
    shared_bucket,
)
from s3_stores import STORES, driver_over

from kvobj.catalog.rows import UserRow

DELETE = b"<Delete><Object><Key>absent</Key></Object></Delete>"

# What a request is called here → method, target, body, headers. None of them changes what the others meet.
REQUESTS: dict[str, tuple[str, str, bytes, dict[str, str]]] = {
    "list": ("GET", "/data", b"", {}),
    "list2": ("GET", "/data?list-type=2&prefix=al", b"", {}),
    "versions": ("GET", "/data?versions", b"", {}),
    "uploads": ("GET", "/data?uploads", b"", {}),
    "head bucket": ("HEAD", "/data", b"", {}),
    "location": ("GET", "/data?location", b"", {}),
    "get": ("GET", "/data/alices", b"", {}),
    "head": ("HEAD", "/data/alices", b"", {}),
    "get bobs": ("GET", "/data/bobs", b"", {}),
    "get absent": ("GET", "/data/absent", b"", {}),
    "attributes": ("GET", "/data/alices?attributes", b"", {"x-amz-object-attributes": "ETag"}),
    "put": ("PUT", "/data/written", b"x", {}),
    "copy": ("PUT", "/data/copied", b"", {"x-amz-copy-source": "data/alices"}),
    "delete": ("DELETE", "/data/absent", b"", {}),
    "delete many": ("POST", "/data?delete", DELETE, {}),
    "upload": ("POST", "/data/large?uploads", b"", {}),
    "acl": ("GET", "/data?acl", b"", {}),
    "put acl": ("PUT", "/data?acl", b"", {"x-amz-acl": "private"}),
    "object acl": ("GET", "/data/alices?acl", b"", {}),
    "bobs acl": ("GET", "/data/bobs?acl", b"", {}),
    "put object acl": ("PUT", "/data/alices?acl", b"", {"x-amz-acl": "private"}),
    "tags": ("GET", "/data/alices?tagging", b"", {}),
    "put tags": ("PUT", "/data/alices?tagging", TAGS, {}),
    "policy": ("GET", "/data?policy", b"", {}),
    "policy status": ("GET", "/data?policyStatus", b"", {}),
    "lifecycle": ("GET", "/data?lifecycle", b"", {}),
    "bucket tags": ("GET", "/data?tagging", b"", {}),
}
CHANGES_ACL = ("put acl", "put object acl")  # and what they change is put back
EVERYTHING = frozenset(REQUESTS)
LISTS = frozenset({"list", "list2", "versions", "uploads", "head bucket", "get absent"})
WRITES = frozenset({"put", "delete", "delete many", "upload"})
# What needs a read of Alice's object.
READS = frozenset({"get", "head", "attributes"})
# Bob wrote `bobs`, and may do this with it whatever the bucket says.
OWN = frozenset({"get bobs", "bobs acl"})
# What S3 lets nobody do who does not sign.
SIGNED_ONLY = frozenset({"copy", "upload"})


@pytest.fixture(params=STORES)
async def shared(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as driver:
        yield await shared_bucket(driver)


@pytest.fixture
async def quick() -> Driver:
    """The shared bucket over the fake store alone: for what no store can change."""
    return await shared_bucket(Driver())


async def allowed(driver: Driver, user: UserRow) -> set[str]:
    """Which of the requests the user may make. What is denied is a 403, and tells nothing else."""
    found = set()
    for name, (method, target, body, headers) in REQUESTS.items():
        before = await acl_of(driver, target) if name in CHANGES_ACL else b""
        answer = await send(driver, user, method, target, body, headers=headers)
        assert answer.status in (200, 204, 403, 404), (user.id, name, answer.body)
        if answer.status == 403:
            assert method == "HEAD" or answer.code == "AccessDenied"
        elif name != "delete many" or not answer.texts("Error/Code"):
            found.add(name)
        if before:
            await expect(driver, ROOT, "PUT", target, before)
    return found


async def test_a_private_bucket_is_its_owners_and_roots(shared: Driver) -> None:
    assert await allowed(shared, ALICE) == EVERYTHING
    assert await allowed(shared, ROOT) == EVERYTHING
    assert await allowed(shared, CAROL) == set()
    assert await allowed(shared, NOBODY) == set()
    assert await allowed(shared, BOB) == OWN


async def test_nobody_lists_or_makes_buckets(shared: Driver) -> None:
    for method, target in (("GET", "/"), ("PUT", "/other")):
        assert (await expect(shared, NOBODY, method, target, status=403)).code == "AccessDenied"
    assert (await expect(shared, NOBODY, "GET", "/absent-bucket", status=404)).code == "NoSuchBucket"


BUCKET_ACLS: dict[str, dict[str, frozenset[str]]] = {
    "public-read": {user.id: LISTS for user in (BOB, CAROL, NOBODY)},
    "public-read-write": {user.id: LISTS | WRITES for user in (BOB, CAROL, NOBODY)},
    "authenticated-read": {"bob": LISTS, "carol": LISTS, "": frozenset()},  # Ceph CVE-2016-7031
    "bucket-owner-full-control": {user.id: frozenset() for user in (BOB, CAROL, NOBODY)},
    "aws-exec-read": {user.id: frozenset() for user in (BOB, CAROL, NOBODY)},
}


@pytest.mark.parametrize("acl", BUCKET_ACLS)
async def test_a_canned_acl_of_a_bucket_lets_in_whom_it_says(shared: Driver, acl: str) -> None:
    await expect(shared, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": acl})
    for user in (BOB, CAROL, NOBODY):
        expected = BUCKET_ACLS[acl][user.id] | (OWN if user is BOB else set())
        assert await allowed(shared, user) == expected - (SIGNED_ONLY if user is NOBODY else set()), user.id
    assert await allowed(shared, ALICE) == EVERYTHING


@pytest.mark.parametrize(
    ("acl", "readers"),
    [
        ("public-read", {"bob", "carol", ""}),
        ("public-read-write", {"bob", "carol", ""}),
        ("authenticated-read", {"bob", "carol"}),
        ("private", set()),
    ],
)
async def test_a_canned_acl_of_an_object_lets_in_whom_it_says(shared: Driver, acl: str, readers: set[str]) -> None:
    await expect(shared, ALICE, "PUT", "/data/alices?acl", headers={"x-amz-acl": acl})
    for user in (BOB, CAROL, NOBODY):
        expected = (READS if user.id in readers else set()) | (OWN if user is BOB else set())
        assert await allowed(shared, user) == expected, user.id


@pytest.mark.parametrize(
    ("header", "of_bucket", "of_object"),
    [
        ("read", LISTS, READS),
        ("write", WRITES, frozenset[str]()),
        ("read-acp", {"acl"}, {"object acl"}),
        ("write-acp", {"put acl"}, {"put object acl"}),
        ("full-control", LISTS | WRITES | {"acl", "put acl"}, READS | {"object acl", "put object acl"}),
    ],
)
async def test_a_grant_gives_its_permission_and_no_other(
    shared: Driver, header: str, of_bucket: set[str], of_object: set[str]
) -> None:
    await expect(shared, ALICE, "PUT", "/data?acl", headers={f"x-amz-grant-{header}": "id=carol"})
    assert await allowed(shared, CAROL) == of_bucket
    await expect(shared, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "private"})
    await expect(shared, ALICE, "PUT", "/data/alices?acl", headers={f"x-amz-grant-{header}": 'id="carol"'})
    assert await allowed(shared, CAROL) == of_object
    assert await allowed(shared, NOBODY) == set()


POLICIES: dict[str, tuple[list[dict[str, object]], dict[str, frozenset[str]]]] = {
    "everybody reads": (
        [allow("s3:GetObject", on="arn:aws:s3:::data/*")],
        dict.fromkeys(("bob", "carol", ""), frozenset({"get", "head", "get bobs"})),
    ),
    "one user reads and lists": (
        [allow("s3:GetObject", "s3:ListBucket", to={"AWS": "arn:aws:iam:::user/carol"})],
        {"carol": frozenset({"get", "head", "get bobs", "list", "list2", "head bucket", "get absent"})},
    ),
    "a part of the keys": (
        [allow("s3:GetObject", on="arn:aws:s3:::data/ali*", to={"AWS": ["carol"]})],
        {"carol": frozenset({"get", "head"})},
    ),
    "lists under a prefix": (
        [allow("s3:ListBucket", on="arn:aws:s3:::data", Condition={"StringLike": {"s3:prefix": "al*"}})],
        dict.fromkeys(("bob", "carol", ""), frozenset({"list2"})),
    ),
    "writes": (
        [allow("s3:PutObject", "s3:DeleteObject", to={"AWS": "carol"})],
        {"carol": frozenset({"put", "upload", "delete", "delete many"})},
    ),
    "settings": (
        [allow("s3:GetBucket*", "s3:GetLifecycleConfiguration", "s3:*Tagging", to={"AWS": "carol"})],
        {
            "carol": frozenset(
                {"location", "acl", "policy", "policy status", "bucket tags", "lifecycle", "tags", "put tags"}
            )
        },
    ),
    "all but": (
        [{**allow(to={"AWS": "carol"}), "Action": None, "NotAction": ["s3:Get*", "s3:Put*"]}],
        {
            "carol": frozenset(
                {"list", "list2", "versions", "uploads", "head bucket", "get absent", "delete", "delete many"}
            )
        },
    ),
}


@pytest.mark.parametrize("name", POLICIES)
async def test_a_policy_lets_in_whom_it_says(shared: Driver, name: str) -> None:
    statements, expected = POLICIES[name]
    await set_policy(shared, *statements)
    for user in (BOB, CAROL, NOBODY):
        rights = expected.get(user.id, frozenset()) | (OWN if user is BOB else frozenset())
        assert await allowed(shared, user) == rights, user.id
    assert await allowed(shared, ALICE) == EVERYTHING
    await expect(shared, ALICE, "DELETE", "/data?policy", status=204)
    assert await allowed(shared, NOBODY) == set()


async def test_an_explicit_deny_binds_everybody_but_root_and_leaves_the_owner_the_policy(shared: Driver) -> None:
    await expect(shared, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "public-read-write"})
    await set_policy(shared, allow("s3:*", to={"AWS": ["alice", "carol"]}), deny("s3:*"))
    for user in (BOB, CAROL, NOBODY):
        assert await allowed(shared, user) == set(), user.id
    assert await allowed(shared, ALICE) == {"policy", "policy status"}
    assert await allowed(shared, ROOT) == EVERYTHING
    await set_policy(shared, deny("s3:DeleteObject", Resource="arn:aws:s3:::data/alices", Principal={"AWS": "alice"}))
    await expect(shared, ALICE, "DELETE", "/data/alices", status=403)
    await expect(shared, ALICE, "DELETE", "/data/bobs", status=204)
    await expect(shared, ALICE, "DELETE", "/data?policy", status=204)
    await expect(shared, ALICE, "DELETE", "/data/alices", status=204)


async def test_who_is_left_out_of_a_deny_is_not_bound(shared: Driver) -> None:
    await expect(shared, ALICE, "PUT", "/data/alices?acl", headers={"x-amz-acl": "public-read"})
    statement = deny("s3:GetObject", NotPrincipal={"AWS": ["bob", "alice"]})
    del statement["Principal"]
    await set_policy(shared, statement)
    await expect(shared, BOB, "GET", "/data/alices")
    await expect(shared, ALICE, "GET", "/data/alices")
    await expect(shared, CAROL, "GET", "/data/alices", status=403)
    await expect(shared, NOBODY, "GET", "/data/alices", status=403)


async def test_every_operation_denies_whom_nothing_was_given(quick: Driver) -> None:
    """RustFS CVE-2026-40937: a route that checked who asks, and not what they may."""
    begun = await expect(quick, ALICE, "POST", "/data/large?uploads")
    upload_id = begun.xml.findtext("UploadId")
    routes = [
        *(f"{method} /data{query}" for method in ("GET", "PUT", "DELETE")
          for query in ("?acl", "?policy", "?tagging", "?lifecycle", "?cors")),
        *(f"{method} /data/alices{query}" for method in ("GET", "PUT", "DELETE") for query in ("", "?acl", "?tagging")),
        "GET /data", "HEAD /data", "DELETE /data", "POST /data?delete", "GET /data?location", "GET /data?versioning",
        "GET /data?versions", "GET /data?uploads", "GET /data?policyStatus", "HEAD /data/alices", "POST /data/alices?uploads",
        f"PUT /data/large?partNumber=1&uploadId={upload_id}", f"GET /data/large?uploadId={upload_id}",
        f"POST /data/large?uploadId={upload_id}", f"DELETE /data/large?uploadId={upload_id}",
    ]  # fmt: skip
    for route in routes:
        method, target = route.split(" ")
        for user in (CAROL, NOBODY):
            answer = await send(quick, user, method, target)
            assert answer.status in (403, 405), (user.id, route, answer.body)
