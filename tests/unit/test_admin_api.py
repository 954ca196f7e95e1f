"""The server side of the admin port."""

from __future__ import annotations

import asyncio
import hashlib
import json
from time import gmtime, strftime
from typing import cast

import pytest
from admin_server import BytesBody, FakeCatalog, FakeStore, admin_service

from kvobj.api.admin_api import AdminService
from kvobj.api.admin_authentication import AdminAuthentication
from kvobj.api.message import Reply, RequestHead
from kvobj.api.sigv4 import SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, Durability, ObjectRow, UserRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.client.credentials import Credentials
from kvobj.client.sigv4 import signed_headers
from kvobj.clock import SystemClock
from kvobj.errors import UnavailableError
from kvobj.gc.recall import RecallQuery

ROOT = UserRow(id="root", display_name="root", access_key="root-key", secret_key="root-secret", is_root=True)
MAIN = UserRow(id="main", display_name="main", access_key="main-key", secret_key="main-secret")


def object_row(key: str, *, bucket: str = "cache", size_bytes: int = 10) -> ObjectRow:
    blob = BlobRef(blob_id=b"\1" * 16, plain_bytes=size_bytes, frame_bytes=size_bytes + 256, digest=b"\2" * 32)
    return ObjectRow(
        bucket=bucket,
        key=key,
        blobs=(blob,),
        size_bytes=size_bytes,
        etag="e-0",
        modified_ms=1_700_000_000_000,
        owner="root",
        durability=Durability.LOCAL,
    )


@pytest.fixture
def store() -> FakeStore:
    catalog = FakeCatalog()
    catalog.users_by_id = {ROOT.id: ROOT, MAIN.id: MAIN}
    catalog.buckets_by_name["cache"] = BucketRow("cache", BucketKind.KV, "root", 0, Durability.MEMORY)
    catalog.rows = {("cache", key): object_row(key) for key in ("a/1", "a/2", "b")}
    return FakeStore(catalog)


async def as_root(_head: RequestHead) -> UserRow:
    return ROOT


@pytest.fixture
def service(store: FakeStore) -> AdminService:
    return admin_service(store, as_root)


async def call(service: AdminService, method: str, target: str, body: bytes = b"", digest: str | None = None) -> Reply:
    headers = (("x-amz-content-sha256", digest or hashlib.sha256(body).hexdigest()),)
    return await service.handle(RequestHead(method, target, headers, "ID", "127.0.0.1"), BytesBody(body))


def document(reply: Reply) -> dict[str, object]:
    assert isinstance(reply.body, bytes)
    parsed = json.loads(reply.body)
    assert isinstance(parsed, dict)
    return parsed


def error_code(reply: Reply) -> str:
    error = document(reply)["error"]
    assert isinstance(error, dict)
    assert set(error) == {"code", "message", "resource", "request_id", "detail"}
    return str(error["code"])


async def test_status_is_the_stores(service: AdminService) -> None:
    status = document(await call(service, "GET", "/api/v1/status"))
    assert status["receive_mode"] == "body hand-over"
    assert [(tier["name"], tier["is_home"]) for tier in cast("list[dict[str, object]]", status["tiers"])] == [
        ("dram", False),
        ("nvme", True),
    ]


async def test_health_and_metrics_ask_for_no_signature(store: FakeStore) -> None:
    async def nobody(_head: RequestHead) -> UserRow:
        raise AssertionError("authentication was asked for")

    service = admin_service(store, nobody)
    assert (await call(service, "GET", "/health/live")).status == 200
    assert (await call(service, "GET", "/health/ready")).status == 200
    assert (await call(service, "GET", "/metrics")).status == 200
    store.ready = False
    assert (await call(service, "GET", "/health/ready")).status == 503
    assert (await call(service, "GET", "/health/live")).status == 200
    head = await call(service, "HEAD", "/health/live")
    assert (head.body, head.content_length) == (b"", len(b"live\n"))


async def test_only_the_root_user_may_administer(store: FakeStore) -> None:
    async def as_main(_head: RequestHead) -> UserRow:
        return MAIN

    reply = await call(admin_service(store, as_main), "GET", "/api/v1/users")
    assert (reply.status, error_code(reply)) == (403, "AccessDenied")


@pytest.mark.parametrize("target", ["/", "/api", "/api/v2/status", "/api/v1/", "/api/v1/nothing", "/metrics/x"])
async def test_an_unknown_page_is_404(service: AdminService, target: str) -> None:
    assert (await call(service, "GET", target)).status == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
@pytest.mark.parametrize("target", ["/cache/0001", "/cache?match", "/cache/0001?X-Amz-Signature=00"])
async def test_an_s3_client_at_the_admin_port_is_told_so_and_not_of_a_miss(
    service: AdminService, method: str, target: str
) -> None:
    headers = () if "Signature" in target else (("authorization", "AWS4-HMAC-SHA256 Credential=…"),)
    reply = await service.handle(RequestHead(method, target, headers, "ID", "127.0.0.1"), BytesBody(b""))
    assert (reply.status, error_code(reply)) == (403, "AccessDenied")
    assert "this is the admin port: S3 is at another" in str(document(reply))


async def test_a_body_whose_digest_was_not_signed_is_refused(service: AdminService, store: FakeStore) -> None:
    for digest in ("UNSIGNED-PAYLOAD", "00" * 32):
        reply = await call(service, "POST", "/api/v1/users", b'{"id":"evil"}', digest)
        assert (reply.status, reply.close) == (400, True)
    assert "evil" not in store.catalog.users_by_id


@pytest.mark.parametrize(
    "body", [b"[", b"[]", b'{"name":1}', b'{"name":"abc","colour":"green"}', b'{"name":"NO"}', b'{"kind":"kv"}']
)
async def test_a_wrong_body_changes_nothing(service: AdminService, store: FakeStore, body: bytes) -> None:
    reply = await call(service, "POST", "/api/v1/buckets", body)
    assert (reply.status, error_code(reply)) == (400, "InvalidRequest")
    assert list(store.catalog.buckets_by_name) == ["cache"]


async def test_a_body_over_the_bound_is_refused(service: AdminService) -> None:
    assert (await call(service, "POST", "/api/v1/flush", b" " * 70_000)).status == 400


async def test_a_kv_bucket_is_created_with_its_kinds_defaults(service: AdminService, store: FakeStore) -> None:
    reply = await call(service, "POST", "/api/v1/buckets", b'{"name":"chunks","kind":"kv"}')
    assert document(reply)["durability"] == "memory"
    row = store.catalog.buckets_by_name["chunks"]
    assert (row.kind, row.owner, row.durability) == (BucketKind.KV, "root", Durability.MEMORY)
    again = await call(service, "POST", "/api/v1/buckets", b'{"name":"chunks"}')
    assert again.status == 409
    told = cast("dict[str, dict[str, object]]", document(again)["error"])["detail"]
    assert told == {"bucket": "chunks", "owner": "root", "kind": "kv"}


async def test_a_remote_makes_class_shared_and_rules_for_it_things_to_ask_for(store: FakeStore) -> None:
    asked = b'{"name":"far","durability":"shared","remote":"evicted"}'
    refused = await call(admin_service(store, as_root), "POST", "/api/v1/buckets", asked)
    assert (refused.status, "far" in store.catalog.buckets_by_name) == (400, False)
    rule_alone = await call(
        admin_service(store, as_root), "POST", "/api/v1/buckets", b'{"name":"far","remote":"always"}'
    )
    assert (rule_alone.status, error_code(rule_alone)) == (400, "InvalidRequest")
    made = document(await call(admin_service(store, as_root, has_remote=True), "POST", "/api/v1/buckets", asked))
    assert (made["durability"], made["remote"]) == ("shared", "evicted")


async def test_the_rule_of_a_bucket_is_changed(store: FakeStore) -> None:
    service = admin_service(store, as_root, has_remote=True)
    changed = document(await call(service, "PUT", "/api/v1/buckets", b'{"name":"cache","remote":"reused"}'))
    assert (changed["name"], changed["remote"]) == ("cache", "reused")
    assert store.catalog.buckets_by_name["cache"].remote is RemoteRule.REUSED
    without = admin_service(store, as_root)
    assert (await call(without, "PUT", "/api/v1/buckets", b'{"name":"cache","remote":"always"}')).status == 400
    assert (
        document(await call(without, "PUT", "/api/v1/buckets", b'{"name":"cache","remote":"never"}'))["remote"]
        == "never"
    )
    assert (await call(service, "PUT", "/api/v1/buckets", b'{"name":"absent","remote":"never"}')).status == 404
    assert (await call(service, "PUT", "/api/v1/buckets", b'{"name":"cache","remote":"odd"}')).status == 400


async def test_buckets_are_listed_with_their_usage(service: AdminService) -> None:
    (bucket,) = cast("list[dict[str, object]]", document(await call(service, "GET", "/api/v1/buckets"))["buckets"])
    assert (bucket["name"], bucket["objects"], bucket["size_bytes"]) == ("cache", 3, 30)


class CatalogThatLosesABucket(FakeCatalog):
    """The bucket `gone` is deleted by somebody else as soon as all are listed."""

    async def buckets(self) -> tuple[BucketRow, ...]:
        listed = await super().buckets()
        self.buckets_by_name.pop("gone", None)
        return listed


@pytest.mark.parametrize(("method", "name"), [("GET", "buckets"), ("POST", "verify")])
async def test_a_bucket_that_goes_between_the_listing_and_the_look_at_it_is_passed_over(
    store: FakeStore, method: str, name: str
) -> None:
    catalog = CatalogThatLosesABucket()
    catalog.buckets_by_name = {
        **store.catalog.buckets_by_name,
        "gone": BucketRow("gone", BucketKind.KV, "root", 0, Durability.MEMORY),
    }
    catalog.rows = store.catalog.rows
    service = admin_service(FakeStore(catalog), as_root)
    told = document(await call(service, method, f"/api/v1/{name}"))
    if name == "buckets":
        assert [bucket["name"] for bucket in cast("list[dict[str, object]]", told["buckets"])] == ["cache"]
    else:
        assert (told["state"], told["total_objects"]) == ("running", 3)
    await call(service, "DELETE", "/api/v1/verify")


async def test_a_verification_of_a_bucket_that_is_not_there_says_so(service: AdminService) -> None:
    refused = await call(service, "POST", "/api/v1/verify", b'{"bucket":"gone"}')
    assert (refused.status, error_code(refused)) == (404, "NoSuchBucket")


async def test_a_user_that_is_not_there_has_a_code_of_its_own(service: AdminService) -> None:
    asked = b'{"name":"chunks","owner":"nobody"}'
    for refused in (
        await call(service, "POST", "/api/v1/buckets", asked),
        await call(service, "DELETE", "/api/v1/users?id=nobody"),
    ):
        assert (refused.status, error_code(refused)) == (404, "NoSuchEntity")


async def test_objects_are_listed_page_by_page(service: AdminService) -> None:
    first = document(await call(service, "GET", "/api/v1/objects?bucket=cache&limit=2"))
    assert [row["key"] for row in cast("list[dict[str, object]]", first["objects"])] == ["a/1", "a/2"]
    rest = document(await call(service, "GET", f"/api/v1/objects?bucket=cache&after={first['next_after']}"))
    assert [row["key"] for row in cast("list[dict[str, object]]", rest["objects"])] == ["b"]
    assert rest["next_after"] is None


@pytest.mark.parametrize("query", ["", "?bucket=cache&limit=0", "?bucket=cache&limit=1001", "?bucket=cache&limit=x"])
async def test_a_wrong_listing_is_refused(service: AdminService, query: str) -> None:
    assert (await call(service, "GET", "/api/v1/objects" + query)).status == 400


async def test_inspect_shows_row_blobs_and_tiers(service: AdminService) -> None:
    inspection = document(await call(service, "GET", "/api/v1/inspect?bucket=cache&key=a%2F1"))
    (blob,) = cast("list[dict[str, object]]", inspection["blobs"])
    assert (inspection["key"], blob["blob_id"], blob["tiers"]) == ("a/1", "01" * 16, ["dram", "nvme"])
    absent = await call(service, "GET", "/api/v1/inspect?bucket=cache&key=absent")
    assert (absent.status, error_code(absent)) == (404, "NoSuchKey")
    nowhere = await call(service, "GET", "/api/v1/inspect?bucket=nowhere&key=absent")
    assert (nowhere.status, error_code(nowhere)) == (404, "NoSuchBucket")


async def test_a_users_secret_leaves_only_when_it_is_made(service: AdminService, store: FakeStore) -> None:
    made = document(await call(service, "POST", "/api/v1/users", b'{"id":"new"}'))
    assert store.catalog.users_by_id["new"].secret_key == made["secret_key"]
    listing = await call(service, "GET", "/api/v1/users")
    assert isinstance(listing.body, bytes)
    assert b"secret" not in listing.body
    assert (await call(service, "POST", "/api/v1/users", b'{"id":"new"}')).status == 409
    assert (await call(service, "DELETE", "/api/v1/users?id=new")).status == 200
    assert (await call(service, "DELETE", "/api/v1/users?id=new")).status == 404


async def test_the_root_user_cannot_be_removed(service: AdminService, store: FakeStore) -> None:
    assert (await call(service, "DELETE", "/api/v1/users?id=root")).status == 400
    assert "root" in store.catalog.users_by_id


@pytest.mark.parametrize("name", ["", "a\x1b[2Jb", "a\nb", "\u202eb", "a" * 129, "é" * 65])
async def test_a_name_that_cannot_be_shown_or_kept_is_refused_for_users(
    service: AdminService, store: FakeStore, name: str
) -> None:
    reply = await call(service, "POST", "/api/v1/users", json.dumps({"id": name}).encode())
    assert (reply.status, error_code(reply)) == (400, "InvalidRequest")
    if name:
        body = json.dumps({"id": "new", "display_name": name}).encode()
        assert (await call(service, "POST", "/api/v1/users", body)).status == 400
    assert set(store.catalog.users_by_id) == {ROOT.id, MAIN.id}
    longest = "é" * 64
    assert (await call(service, "POST", "/api/v1/users", json.dumps({"id": longest}).encode())).status == 200


async def test_published_keys_are_refused_for_users(service: AdminService) -> None:
    body = b'{"id":"x","access_key":"minioadmin","secret_key":"minioadmin"}'
    assert (await call(service, "POST", "/api/v1/users", body)).status == 400


async def until_finished(service: AdminService) -> dict[str, object]:
    while (report := document(await call(service, "GET", "/api/v1/verify")))["state"] == "running":  # noqa: ASYNC110 - polled, as clients do
        await asyncio.sleep(0)
    return report


async def test_a_verification_counts_and_names_what_is_wrong(service: AdminService, store: FakeStore) -> None:
    store.damaged["cache", "b"] = "digest mismatch in nvme"
    started = document(await call(service, "POST", "/api/v1/verify", b'{"bucket":"cache"}'))
    assert (started["state"], started["total_objects"]) == ("running", 3)
    report = await until_finished(service)
    assert (report["state"], report["checked_objects"], report["checked_bytes"], report["problem_count"]) == (
        "done",
        3,
        30,
        1,
    )
    assert [problem["key"] for problem in cast("list[dict[str, object]]", report["problems"])] == ["b"]


async def test_one_verification_runs_at_a_time_and_can_be_stopped(service: AdminService, store: FakeStore) -> None:
    store.gate = asyncio.Event()
    await call(service, "POST", "/api/v1/verify", b"{}")
    assert (await call(service, "POST", "/api/v1/verify", b"{}")).status == 409
    stopped = document(await call(service, "DELETE", "/api/v1/verify"))
    assert (stopped["state"], stopped["checked_objects"]) == ("cancelled", 0)
    store.gate.set()
    assert (await call(service, "POST", "/api/v1/verify", b"{}")).status == 200
    assert (await until_finished(service))["state"] == "done"


async def test_a_verification_that_cannot_go_on_says_why(service: AdminService, store: FakeStore) -> None:
    store.failure = UnavailableError("the catalog does not answer")
    await call(service, "POST", "/api/v1/verify", b"{}")
    report = await until_finished(service)
    assert (report["state"], report["failure"]) == ("failed", "the catalog does not answer")
    await service.aclose()


async def test_verifying_an_absent_bucket_is_404(service: AdminService) -> None:
    assert (await call(service, "POST", "/api/v1/verify", b'{"bucket":"absent"}')).status == 404


async def test_the_dry_run_of_gc_lists_victims_with_their_reasons(service: AdminService) -> None:
    plan = document(await call(service, "GET", "/api/v1/gc?limit=1"))
    (victim,) = cast("list[dict[str, object]]", plan["victims"])
    assert (victim["key"], victim["reason"], victim["unused_seconds"]) == ("a/[bold]2", "expired", 3725.0)
    assert (plan["chunks"], plan["size_bytes"], plan["quiet"]) == (2, 2**21, False)
    assert (await call(service, "GET", "/api/v1/gc?limit=0")).status == 400
    assert document(await call(service, "POST", "/api/v1/gc", b"{}"))["claimed"] == 2


async def test_a_recall_is_started_polled_and_stopped(service: AdminService, store: FakeStore) -> None:
    body = b'{"bucket":"cache","writer":"mallory","from_ms":5,"dry_run":true}'
    started = document(await call(service, "POST", "/api/v1/recall", body))
    assert (started["state"], started["total_chunks"]) == ("running", 3)
    assert store.recalled == [(RecallQuery("cache", writer="mallory", from_ms=5), True)]
    assert (await call(service, "POST", "/api/v1/recall", body)).status == 409
    assert document(await call(service, "GET", "/api/v1/recall"))["state"] == "running"
    assert document(await call(service, "DELETE", "/api/v1/recall"))["state"] == "cancelled"


@pytest.mark.parametrize(
    "body", [b"{}", b'{"bucket":1}', b'{"bucket":"cache","from_ms":"x"}', b'{"bucket":"cache","all":1}']
)
async def test_a_wrong_recall_is_refused(service: AdminService, store: FakeStore, body: bytes) -> None:
    assert (await call(service, "POST", "/api/v1/recall", body)).status == 400
    assert store.recalled == []


async def test_a_recall_in_an_absent_bucket_is_404(service: AdminService) -> None:
    assert (await call(service, "POST", "/api/v1/recall", b'{"bucket":"absent"}')).status == 404


async def test_a_defect_is_a_500_and_not_a_dead_connection(service: AdminService, store: FakeStore) -> None:
    store.failure = RuntimeError("bug")
    reply = await call(service, "GET", "/api/v1/status")
    assert (reply.status, error_code(reply)) == (500, "InternalError")
    assert b"bug" not in cast("bytes", reply.body)


@pytest.mark.parametrize(
    ("credentials", "code"),
    [
        (Credentials("root-key", "root-secret"), None),
        (Credentials("root-key", "wrong-secret"), "SignatureDoesNotMatch"),
        (Credentials("nobody", "root-secret"), "InvalidAccessKeyId"),
        (None, "AccessDenied"),
    ],
)
async def test_requests_are_authenticated_by_their_signature(
    store: FakeStore, credentials: Credentials | None, code: str | None
) -> None:
    clock = SystemClock()
    users = UserDirectory(cast("Catalog", store.catalog), clock)
    authenticate = AdminAuthentication(users, SignatureVerifier(clock), regions=frozenset({"us-east-1"}))
    service = admin_service(store, authenticate)
    headers = {"host": "127.0.0.1:9001"}
    if credentials is not None:
        headers = signed_headers(
            credentials,
            method="GET",
            path="/api/v1/inspect",
            query=(("bucket", "cache"), ("key", "a/1")),
            headers=headers,
            payload_sha256=hashlib.sha256(b"").hexdigest(),
            region="us-east-1",
            timestamp=strftime("%Y%m%dT%H%M%SZ", gmtime()),
        )
    head = RequestHead("GET", "/api/v1/inspect?bucket=cache&key=a%2F1", tuple(headers.items()), "ID", "127.0.0.1")
    reply = await service.handle(head, BytesBody(b""))
    assert (error_code(reply) if reply.status != 200 else None) == code
