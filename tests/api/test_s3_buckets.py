"""Buckets as clients use them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from s3_driver import ALICE, BOB, HOST, ROOT, Driver, MeanwhileBody, unsigned_chunks
from s3_stores import STORES, driver_over

from kvobj.api.exchange import S3Settings
from kvobj.api.request import HostRules
from kvobj.catalog.rows import BucketKind, BucketRow, DeleteOutcome, Durability, WriteCondition
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        yield empty


@pytest.fixture
def fake_driver() -> Driver:
    return Driver()


async def test_a_bucket_is_created_listed_found_and_removed(driver: Driver) -> None:
    created = await driver.put("/bucket", b"")
    assert (created.status, created.headers["location"]) == (200, "/bucket")
    listed = await driver.get("/")
    assert listed.texts("Buckets/Bucket/Name") == ["bucket"]
    assert listed.xml.findtext("Owner/ID") == "alice"
    head = await driver.request("HEAD", "/bucket")
    assert (head.status, head.body, head.headers["x-amz-bucket-region"]) == (200, b"", "us-east-1")
    assert (await driver.request("DELETE", "/bucket")).status == 204
    gone = await driver.request("HEAD", "/bucket")
    assert (gone.status, gone.body) == (404, b"")
    assert (await driver.get("/bucket?location")).code == "NoSuchBucket"


async def test_ones_own_bucket_again_is_fine_and_anothers_is_not(driver: Driver) -> None:
    await driver.put("/bucket", b"")
    assert (await driver.put("/bucket", b"")).status == 200
    other = await driver.request("PUT", "/bucket", user=BOB)
    assert (other.status, other.code) == (409, "BucketAlreadyExists")
    differs = await driver.put("/bucket", b"", x_kvobj_bucket_kind="kv")
    assert (differs.status, differs.code) == (409, "BucketAlreadyOwnedByYou")


async def test_a_kv_bucket_is_made_by_its_header_and_defaults_to_memory(fake_driver: Driver) -> None:
    assert (await fake_driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")).status == 200
    row = fake_driver.fake.catalog.bucket_rows["chunks"]
    assert (row.kind, row.durability, row.owner) == (BucketKind.KV, Durability.MEMORY, "alice")
    await fake_driver.put("/objects", b"")
    assert fake_driver.fake.catalog.bucket_rows["objects"].durability is Durability.LOCAL
    assert (await fake_driver.put("/wrong", b"", x_kvobj_bucket_kind="other")).code == "InvalidArgument"


async def test_a_bucket_says_what_of_it_goes_to_the_remote() -> None:
    driver = Driver(settings=S3Settings(has_remote=True))
    made = await driver.put("/far", b"", x_kvobj_remote="Evicted", x_kvobj_durability="shared")
    assert made.status == 200
    row = driver.fake.catalog.bucket_rows["far"]
    assert (row.remote, row.durability) == (RemoteRule.EVICTED, Durability.SHARED)
    assert (await driver.request("HEAD", "/far")).headers["x-kvobj-remote"] == "evicted"
    again = await driver.put("/far", b"", x_kvobj_remote="evicted", x_kvobj_durability="shared")
    other = await driver.put("/far", b"", x_kvobj_remote="always", x_kvobj_durability="shared")
    assert (again.status, other.code) == (200, "BucketAlreadyOwnedByYou")
    assert (await driver.put("/odd", b"", x_kvobj_remote="sometimes")).code == "InvalidArgument"


async def test_without_a_remote_no_bucket_is_made_for_one(fake_driver: Driver) -> None:
    assert (await fake_driver.put("/far", b"", x_kvobj_remote="always")).code == "InvalidRequest"
    assert (await fake_driver.put("/far", b"", x_kvobj_durability="shared")).code == "InvalidRequest"
    assert (await fake_driver.put("/near", b"", x_kvobj_remote="never")).status == 200
    assert "x-kvobj-remote" not in (await fake_driver.request("HEAD", "/near")).headers
    assert list(fake_driver.fake.catalog.bucket_rows) == ["near"]


async def test_the_location_is_the_configured_one_or_empty() -> None:
    driver = Driver(settings=S3Settings(region="eu-west-1"))
    await driver.put("/bucket", b"")
    located = await driver.get("/bucket?location")
    assert located.xml.text == "eu-west-1"
    document = (
        b"<CreateBucketConfiguration><LocationConstraint>us-east-1</LocationConstraint></CreateBucketConfiguration>"
    )
    assert (await driver.put("/other-bucket", document)).status == 200
    assert (await driver.get("/other-bucket/?location")).xml.text is None
    bad = document.replace(b"us-east-1", b"mars-1")
    assert (await driver.put("/bad-bucket", bad)).code == "InvalidLocationConstraint"
    assert (await driver.put("/bad-bucket", b"<nonsense")).code == "MalformedXML"


@pytest.mark.parametrize("name", ["ab", "Upper", "-dash", "a..b", "192.168.1.1", "name--x-s3", "a_b", "x" * 64])
async def test_a_bucket_id_is_validated(driver: Driver, name: str) -> None:
    answer = await driver.put(f"/{name}", b"")
    assert (answer.status, answer.code) == (400, "InvalidBucketName")


async def test_a_bucket_with_objects_stays_and_takes_its_uploads_with_it(driver: Driver) -> None:
    await driver.put("/bucket", b"")
    await driver.put("/bucket/key", b"data")
    (upload_id,) = (await driver.request("POST", "/bucket/other?uploads")).texts("UploadId")
    await driver.put(f"/bucket/other?partNumber=1&uploadId={upload_id}", b"part")
    answer = await driver.request("DELETE", "/bucket")
    assert (answer.status, answer.code) == (409, "BucketNotEmpty")
    assert (await driver.get(f"/bucket/other?uploadId={upload_id}")).texts("Part/PartNumber") == ["1"]
    await driver.request("DELETE", "/bucket/key")
    assert (await driver.request("DELETE", "/bucket")).status == 204
    await driver.put("/bucket", b"")
    assert (await driver.get("/bucket?uploads")).texts("Upload/UploadId") == []
    late = await driver.put(f"/bucket/other?partNumber=2&uploadId={upload_id}", b"part")
    assert (late.status, late.code) == (404, "NoSuchUpload")


@pytest.mark.parametrize("kind", ["ordinary", "kv"])
@pytest.mark.parametrize("size_bytes", [10, 2_000_000])
async def test_what_was_on_its_way_to_a_bucket_does_not_land_in_one_made_anew_under_its_name(
    tmp_path: Path, shm_path: Path, kind: str, size_bytes: int
) -> None:
    async with driver_over("node", data=tmp_path / "data", memory=shm_path) as driver:
        await driver.put("/bucket", b"", x_kvobj_bucket_kind=kind)

        async def replaced() -> None:
            assert (await driver.request("DELETE", "/bucket")).status == 204
            driver.clock.offset_ms -= 5000
            made = await driver.request("PUT", "/bucket", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
            assert made.status == 200
            assert (await driver.request("PUT", "/bucket/key", user=BOB, body=b"of Bob's")).status == 200

        body = MeanwhileBody(bytes(size_bytes), replaced)
        late = await driver.request("PUT", "/bucket/key", body=body, payload="UNSIGNED-PAYLOAD")
        assert (late.status, late.code) == (404, "NoSuchBucket")
        stands = await driver.request("GET", "/bucket/key", user=BOB)
        assert (stands.status, stands.body) == (200, b"of Bob's")


async def test_other_users_are_refused_and_root_is_not(driver: Driver) -> None:
    await driver.put("/bucket", b"")
    await driver.put("/bucket/key", b"data")
    for method, target in (
        ("GET", "/bucket"),
        ("GET", "/bucket/key"),
        ("PUT", "/bucket/key"),
        ("DELETE", "/bucket/key"),
        ("DELETE", "/bucket"),
        ("POST", "/bucket?delete"),
        ("GET", "/bucket/key?acl"),
    ):
        answer = await driver.request(method, target, user=BOB)
        assert (answer.status, answer.code) == (403, "AccessDenied"), (method, target)
    assert (await driver.get("/")).texts("Buckets/Bucket/Name") == ["bucket"]
    assert (await driver.request("GET", "/", user=BOB)).texts("Buckets/Bucket/Name") == []
    assert (await driver.request("GET", "/bucket/key", user=ROOT)).body == b"data"


async def test_versioning_and_acl_answer_for_an_unversioned_private_bucket(driver: Driver) -> None:
    await driver.put("/bucket", b"")
    await driver.put("/bucket/key", b"data")
    assert len(list((await driver.get("/bucket?versioning")).xml)) == 0
    for target in ("/bucket?acl", "/bucket/key?acl"):
        acl = await driver.get(target)
        assert acl.xml.findtext("AccessControlList/Grant/Permission") == "FULL_CONTROL"
        assert acl.xml.findtext("Owner/DisplayName") == "Alice"


async def test_a_feature_that_is_not_built_says_its_name(driver: Driver) -> None:
    await driver.put("/bucket", b"")
    for feature in ("encryption", "website", "session", "replication", "accelerate"):
        answer = await driver.get(f"/bucket?{feature}")
        assert (answer.status, answer.code) == (501, "NotImplemented")
        assert feature in (answer.xml.findtext("Message") or "")


async def test_virtual_hosted_style_signs_and_finds_the_bucket() -> None:
    fake_driver = Driver(settings=S3Settings(host_rules=HostRules(domains=("localhost",), default_bucket="fallback")))
    host = "bucket.localhost:9000"
    assert (await fake_driver.request("PUT", "/", host=host)).status == 200
    assert (await fake_driver.request("PUT", "/dir/key", body=b"data", host=host)).status == 200
    assert (await fake_driver.request("GET", "/bucket/dir/key", host=HOST)).body == b"data"
    assert (await fake_driver.request("PUT", "/", host="elsewhere.example")).status == 200
    assert "fallback" in fake_driver.fake.catalog.bucket_rows


async def test_a_removed_user_is_refused_and_a_new_one_is_found(fake_driver: Driver) -> None:
    await fake_driver.put("/bucket", b"")
    await fake_driver.fake.catalog.remove_user("alice")
    fake_driver.clock.offset_ms += 1500
    assert (await fake_driver.get("/")).code == "InvalidAccessKeyId"
    await fake_driver.fake.catalog.put_user(ALICE)
    fake_driver.clock.offset_ms += 100
    assert (await fake_driver.get("/")).status == 200


# -- bodies that take their time ---------------------------------------------------------------------------------------
POLICY = (
    b'{"Version":"2012-10-17","Statement":'
    b'[{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::bucket"}]}'
)
LIFECYCLE = (
    b"<LifecycleConfiguration><Rule><ID>all</ID><Filter><Prefix></Prefix></Filter><Status>Enabled</Status>"
    b"<Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"
)
ACL = (
    b"<AccessControlPolicy><Owner><ID>alice</ID></Owner><AccessControlList><Grant>"
    b'<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser"><ID>alice</ID></Grantee>'
    b"<Permission>FULL_CONTROL</Permission></Grant></AccessControlList></AccessControlPolicy>"
)
CORS = (
    b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule>"
    b"</CORSConfiguration>"
)
TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
DELETION = b"<Delete><Object><Key>key</Key></Object></Delete>"


@pytest.mark.parametrize(
    ("method", "target", "document"),
    [
        ("PUT", "/bucket?policy", POLICY),
        ("PUT", "/bucket?acl", ACL),
        ("PUT", "/bucket?lifecycle", LIFECYCLE),
        ("PUT", "/bucket?cors", CORS),
        ("PUT", "/bucket?tagging", TAGS),
        ("POST", "/bucket?delete", DELETION),
    ],
)
async def test_who_owned_a_bucket_when_he_began_to_ask_may_do_nothing_with_its_next_owners(
    tmp_path: Path, shm_path: Path, method: str, target: str, document: bytes
) -> None:
    async with driver_over("node", data=tmp_path / "data", memory=shm_path) as driver:
        await driver.put("/bucket", b"")

        async def handed_on() -> None:
            assert (await driver.request("DELETE", "/bucket")).status == 204
            made = await driver.request("PUT", "/bucket", user=BOB)
            assert made.status == 200
            assert (await driver.request("PUT", "/bucket/key", user=BOB, body=b"of Bob's")).status == 200

        body = MeanwhileBody(document, handed_on)
        late = await driver.request(method, target, body=body, payload="UNSIGNED-PAYLOAD")
        assert (late.status, late.code) == (404, "NoSuchBucket")
        assert (await driver.request("GET", "/bucket/key", user=BOB)).status == 200
        assert (await driver.get("/bucket/key")).status == 403
        assert (await driver.get("/bucket")).status == 403
        if target not in {"/bucket?acl", "/bucket?delete"}:
            assert (await driver.request("GET", target, user=BOB)).status == 404


@pytest.mark.parametrize(
    ("method", "target", "document"),
    [
        ("PUT", "/bucket?policy", POLICY),
        ("DELETE", "/bucket?policy", b""),
        ("PUT", "/bucket?acl", ACL),
        ("PUT", "/bucket?lifecycle", LIFECYCLE),
        ("DELETE", "/bucket?lifecycle", b""),
        ("PUT", "/bucket?cors", CORS),
        ("DELETE", "/bucket?cors", b""),
        ("PUT", "/bucket?tagging", TAGS),
        ("DELETE", "/bucket?tagging", b""),
    ],
)
async def test_a_setting_that_is_being_written_down_is_none_of_the_next_owners_bucket(
    fake_driver: Driver, method: str, target: str, document: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, catalog = fake_driver, fake_driver.fake.catalog
    await driver.put("/bucket", b"")
    for name, value in (("policy", POLICY), ("lifecycle", LIFECYCLE), ("cors", CORS), ("tagging", TAGS)):
        assert (await driver.request("PUT", f"/bucket?{name}", body=value)).status in {200, 204}
    before = catalog.bucket_rows["bucket"]
    anew = msgspec.structs.replace(before, owner=BOB.id, created_ms=before.created_ms + 1, tags={"of": "Bob"})
    update = catalog.update_bucket

    async def update_late(name: str, change: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        catalog.bucket_rows[name] = anew  # deleted and made anew since the handler looked
        return await update(name, change, made_ms=made_ms)

    monkeypatch.setattr(catalog, "update_bucket", update_late)
    late = await driver.request(method, target, body=document)
    assert (late.status, late.code) == (404, "NoSuchBucket")
    assert catalog.bucket_rows["bucket"] == anew


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("DELETE", "/bucket", {}),
        ("PUT", "/bucket?acl", {"x-amz-acl": "public-read-write"}),
        ("DELETE", "/bucket?tagging", {}),
        ("POST", "/bucket/key?uploads", {}),
        ("PUT", "/bucket/key", {}),
    ],
)
async def test_what_is_asked_of_a_bucket_as_it_goes_does_nothing_to_the_next_owners(
    tmp_path: Path, shm_path: Path, method: str, target: str, headers: dict[str, str]
) -> None:
    async with driver_over("node", data=tmp_path / "data", memory=shm_path) as driver:
        await driver.put("/bucket", b"")
        # The second and the third are begun while the first is being written down.
        gone, made, late = await asyncio.gather(
            driver.request("DELETE", "/bucket"),
            driver.request("PUT", "/bucket", user=BOB),
            driver.request(method, target, headers=headers),
        )
        assert (gone.status, made.status) == (204, 200)
        assert (late.status, late.code) == (404, "NoSuchBucket")
        assert (await driver.request("HEAD", "/bucket", user=BOB)).status == 200
        assert (await driver.get("/bucket")).status == 403
        assert b"AllUsers" not in (await driver.request("GET", "/bucket?acl", user=BOB)).body


@pytest.mark.parametrize(("method", "target"), [("DELETE", "/bucket/key"), ("POST", "/bucket?delete")])
async def test_a_removal_that_is_being_written_down_is_none_of_the_next_owners_bucket(
    fake_driver: Driver, method: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, catalog = fake_driver, fake_driver.fake.catalog
    await driver.put("/bucket", b"")
    await driver.put("/bucket/key", b"stays")
    before = catalog.bucket_rows["bucket"]
    anew = msgspec.structs.replace(before, owner=BOB.id, created_ms=before.created_ms + 1)
    delete = driver.fake.delete

    async def delete_late(
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        catalog.bucket_rows[bucket] = anew  # deleted and made anew since the handler looked
        return await delete(bucket, keys, conditions, made_ms=made_ms)

    monkeypatch.setattr(driver.fake, "delete", delete_late)
    late = await driver.request(method, target, body=DELETION if method == "POST" else b"")
    assert (late.status, late.code) == (404, "NoSuchBucket")
    assert ("bucket", "key") in catalog.objects


async def test_who_owned_a_bucket_sets_nothing_in_the_next_owners_by_a_body_of_framing_alone(
    tmp_path: Path, shm_path: Path
) -> None:
    async with driver_over("node", data=tmp_path / "data", memory=shm_path) as driver:
        await driver.put("/bucket", b"")

        async def handed_on() -> None:
            assert (await driver.request("DELETE", "/bucket")).status == 204
            assert (await driver.request("PUT", "/bucket", user=BOB)).status == 200

        framed = unsigned_chunks([], [("x-amz-checksum-crc32", "AAAAAA==")])
        headers = {
            "x-amz-acl": "public-read-write",
            "x-amz-decoded-content-length": "0",
            "content-encoding": "aws-chunked",
            "x-amz-trailer": "x-amz-checksum-crc32",
        }
        late = await driver.request(
            "PUT",
            "/bucket?acl",
            body=MeanwhileBody(framed, handed_on),
            headers=headers,
            payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        )
        assert (late.status, late.code) == (404, "NoSuchBucket")
        acl = await driver.request("GET", "/bucket?acl", user=BOB)
        assert acl.status == 200
        assert b"AllUsers" not in acl.body
