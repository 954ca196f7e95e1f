"""Failures that were published of other servers, each tried here by its name.

Those of the HTTP layer's own (framing, limits, smuggling) are tried in tests/http over real sockets too. Cases about features that
are not built here (POST forms, service accounts, replication) try that the feature is refused and does nothing.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from time import gmtime, strftime
from typing import cast
from urllib.parse import quote

import pytest
from admin_server import BytesBody, FakeCatalog, FakeStore, admin_service
from module_paths import ModulePaths
from raw_http import Credentials, RawConnection, sign_head
from s3_driver import (
    ALICE,
    BOB,
    HOST,
    Driver,
    FakeBody,
    presign,
    seed_of,
    sign,
    signed_chunks,
    unsigned_chunks,
)
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.api.admin_authentication import AdminAuthentication
from kvobj.api.errors import S3Error
from kvobj.api.message import RequestHead
from kvobj.api.request import parse_fields
from kvobj.api.sigv4 import PayloadMode, SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import UserRow
from kvobj.catalog.setting_rows import BucketUpdate, Grant, GranteeGroup, Permission
from kvobj.client.credentials import Credentials as ClientCredentials
from kvobj.client.sigv4 import signed_headers
from kvobj.clock import SystemClock

DATA = b"0123456789" * 2000
CHUNKS_UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
MODES = [*(mode.value for mode in PayloadMode if mode is not PayloadMode.HASHED), hashlib.sha256(DATA).hexdigest()]
MALLORY = UserRow("alice", "Alice", ALICE.access_key, "guessed")
SOMEBODY = UserRow("nobody", "Nobody", "AKUNKNOWN", "guessed")
DECODED = {"x-amz-decoded-content-length": str(len(DATA))}
Fields = list[tuple[str, str]]


@pytest.fixture
async def driver() -> Driver:
    made = Driver()
    for bucket in ("bucket", "bucket-b"):
        await made.put(f"/{bucket}", b"")
    await made.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return made


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        buckets=(BucketSetting("bucket"), BucketSetting("chunks", "kv", "memory")),
        sections={"limits": {"header_timeout": '"300 ms"'}},
    )
    with ServerProcess(module_paths.mktemp("published"), settings) as running:
        yield running


def framed(mode: str) -> bytes:
    """The body as the mode frames it; signatures are anybody's."""
    if not mode.startswith("STREAMING"):
        return DATA
    if mode == CHUNKS_UNSIGNED:
        return unsigned_chunks([DATA])
    return signed_chunks([DATA], user=MALLORY, seed="0" * 64, stamp="20260101T000000Z")


def is_empty(driver: Driver) -> bool:
    catalog = driver.fake.catalog
    return not catalog.objects and not catalog.part_rows and not catalog.uploads


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [MALLORY, SOMEBODY])
async def test_minio_cve_2025_31489_unsigned_trailer_needs_the_signature(
    driver: Driver, mode: str, user: UserRow
) -> None:
    body = FakeBody(framed(mode))
    headers = {**DECODED, "content-encoding": "aws-chunked", "x-amz-trailer": "x-amz-checksum-crc32"}
    answer = await driver.request("PUT", "/bucket/key", body=body, headers=headers, user=user, payload=mode)
    assert (answer.status, answer.code) == (
        403,
        "SignatureDoesNotMatch" if user is MALLORY else "InvalidAccessKeyId",
    )
    assert not body.accepted
    assert is_empty(driver)


@pytest.mark.parametrize("mode", MODES)
def test_minio_cve_2025_31489_over_a_socket(server: ServerProcess, mode: str) -> None:
    mallory = Credentials(server.credentials().access_key, "guessed-secret")
    body = framed(mode)
    headers = {**DECODED, "content-length": str(len(body))}
    for path in ("/bucket/forged", "/chunks/forged"):
        with closing(RawConnection(server.host, server.port)) as connection:
            head = sign_head(mallory, "PUT", f"{server.host}:{server.port}", path, headers=headers, payload=mode)
            connection.send(head.head + body)
            assert connection.read_reply().code == "SignatureDoesNotMatch"
        with server.raw() as raw:
            assert raw.request("HEAD", path).status == 404


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_signed", [False, True])
async def test_minio_cve_2026_41145_credentials_in_the_query_prove_nothing(
    driver: Driver, mode: str, *, is_signed: bool
) -> None:
    for user in (MALLORY, SOMEBODY):
        target = presign("PUT", "/bucket/key", user=user)
        if is_signed:
            target = target.replace("SignedHeaders=host", "SignedHeaders=host%3Bx-amz-content-sha256")
        for changed in (target, f"{target}&X-Amz-Content-Sha256={mode}", target.rpartition("&X-Amz-Signature")[0]):
            body = FakeBody(framed(mode))
            fields = [("host", HOST), ("x-amz-content-sha256", mode), *DECODED.items()]
            answer = await driver.send("PUT", changed, fields, body)
            assert answer.status in (400, 403)
            assert not body.accepted
    assert is_empty(driver)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("PUT", "/bucket/archive.tar", {"x-amz-meta-snowball-auto-extract": "true"}),
        ("PUT", "/bucket/archive.tar", {"x-amz-decoded-content-length": "-1"}),
        ("PUT", "/bucket/key?partNumber=1&uploadId=x", {}),
        ("PUT", "/bucket/key", {"x-amz-copy-source": "/bucket/other"}),
        ("PUT", "/bucket/key", {"x-amz-rdma-token": "0:1:2:3:4:5:6"}),
        ("POST", "/bucket/key?uploads", {}),
        ("POST", "/bucket?delete", {}),
        ("POST", "/bucket", {"content-type": "multipart/form-data; boundary=b"}),
        ("PUT", "/bucket?acl", {}),
        ("PUT", "/bucket?policy", {}),
        ("PUT", "/bucket/key?tagging", {}),
        ("PUT", "/chunks/key", {}),
        ("POST", "/chunks?mput", {}),
        ("PUT", "/chunks?namespace=n", {}),
        ("DELETE", "/bucket/key", {}),
    ],
)
async def test_minio_cve_2026_40344_no_route_lacks_a_mode(
    driver: Driver, method: str, target: str, headers: dict[str, str], mode: str
) -> None:
    """Where a route learns of a new mode, every route does: there is one verifier, and what it does not know it refuses."""
    body = FakeBody(framed(mode))
    answer = await driver.request(method, target, body=body, headers={**DECODED, **headers}, user=MALLORY, payload=mode)
    assert answer.status == 403
    assert b"SignatureDoesNotMatch" in answer.body
    assert not body.accepted
    answer = await driver.request(method, target, body=FakeBody(DATA), headers=headers, payload=f"{mode}-NEW")
    assert answer.status == 400
    assert is_empty(driver)


@pytest.mark.parametrize(
    "name",
    [
        "x-minio-source-replication-request",
        "x-minio-replication-server-side-encryption-sealed-key",
        "x-minio-internal-compression",
        "x-amz-meta-x-minio-internal-server-side-encryption-iv",
        "x-amz-replication-status",
        "x-rustfs-internal-tier",
        "x-kvobj-digest",
        "x-kvobj-tier",
        "x-kvobj-codec",
        "x-amz-meta-x-kvobj-tier",
        "etag",
        "x-amz-version-id",
        "x-amz-expiration",
    ],
)
async def test_minio_cve_2026_34204_replication_headers_set_nothing_internal(driver: Driver, name: str) -> None:
    """A client's header is stored under x-amz-meta- or not at all, and comes back as no other header."""
    plain = (await driver.put("/bucket/plain", DATA)).headers
    stored = await driver.request("PUT", "/bucket/key", body=DATA, headers={name: "injected"})
    assert stored.status == 200
    assert set(stored.headers) == set(plain)
    for method in ("HEAD", "GET"):
        headers = (await driver.request(method, "/bucket/key")).headers
        told = {header for header, value in headers.items() if "injected" in value}
        assert told == ({name} if name.startswith("x-amz-meta-") else set())
    assert (await driver.get("/bucket/key")).body == DATA


@pytest.mark.parametrize(
    "condition",
    [
        ("if-modified-since", "Sat, 01 Jan 2000 00:00:00 GMT"),
        ("if-modified-since", "Sat, 01 Jan 2050 00:00:00 GMT"),
        ("if-unmodified-since", "Sat, 01 Jan 2000 00:00:00 GMT"),
        ("if-none-match", "*"),
        ("if-match", '"0"'),
        ("if-match", "*"),
        ("range", "bytes=99999999-"),
    ],
)
async def test_minio_cve_2024_36107_conditions_answer_nobody_before_the_access_check(
    driver: Driver, condition: tuple[str, str]
) -> None:
    await driver.put("/bucket/key", DATA)
    for method in ("GET", "HEAD", "PUT"):
        answers = [
            await driver.send(method, f"/bucket/{key}", fields, b"")
            for key in ("key", "absent")
            for fields in (
                [("host", HOST), condition],
                sign(method, f"/bucket/{key}", user=BOB, headers=dict([condition])),
                sign(method, f"/bucket/{key}", user=MALLORY, headers=dict([condition])),
            )
        ]
        assert [answer.status for answer in answers] == [403] * 6
        # What is there is told from what is not by nothing: neither by the code nor by a header.
        for there, absent in zip(answers[:3], answers[3:], strict=True):
            assert set(there.headers) == set(absent.headers)
            assert "etag" not in there.headers
            assert method == "HEAD" or there.code == absent.code


@pytest.mark.parametrize(
    "target", ["/bucket", "/bucket/", "/bucket-b", "/.minio.sys", "/.minio.sys/config", "/", "/bucket/key"]
)
async def test_minio_cve_2023_28434_and_ceph_cve_2023_43040_a_form_names_no_bucket(driver: Driver, target: str) -> None:
    """POST forms are not built: none of them, to whatever bucket the URL or the form name, stores anything."""
    parts = {"bucket": "bucket-b", "key": "stolen", "policy": "e30=", "x-amz-signature": "0" * 64, "file": "data"}
    form = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in parts.items()
    )
    fields = [("host", HOST), ("content-type", "multipart/form-data; boundary=b")]
    answer = await driver.send("POST", target, fields, form + b"--b--\r\n")
    assert answer.status in (400, 403, 405, 501)
    assert is_empty(driver)


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("PUT", "/minio/admin/v3/add-service-account", b"{}"),
        ("POST", "/minio/admin/v3/idp/ldap/add-service-account", b"{}"),
        ("GET", "/minio/admin/v3/info", b""),
        ("POST", "/?Action=AssumeRole&Version=2011-06-15", b""),
        ("POST", "/?Action=AssumeRoleWithLDAPIdentity&LDAPUsername=alice&LDAPPassword=x&Version=2011-06-15", b""),
        ("POST", "/", b"Action=AssumeRoleWithLDAPIdentity&LDAPUsername=alice&LDAPPassword=x&Version=2011-06-15"),
        ("POST", "/", b"Action=CreateAccessKey&UserName=root&Version=2010-05-08"),
    ],
)
async def test_minio_cve_2025_62506_and_cve_2026_33419_there_are_no_accounts_to_make_and_no_logins(
    driver: Driver, method: str, target: str, body: bytes
) -> None:
    users = dict(driver.fake.catalog.user_rows)
    answers = [await driver.request(method, target, body=body)]
    answers += [
        await driver.send(method, other, [("host", HOST)], body)
        for other in (target, target.replace("alice", "nobody"))
    ]
    for answer in answers:
        assert answer.status in (400, 403, 404, 405, 501)
        assert b"ecret" not in answer.body
    assert (answers[1].status, answers[1].code) == (answers[2].status, answers[2].code)
    assert driver.fake.catalog.user_rows == users


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_minio_cve_2023_28432_no_answer_holds_the_environment(server: ServerProcess, method: str) -> None:
    secret = server.credentials().secret_key
    paths = ("/minio/bootstrap/v1/verify", "/minio/health/live", "/debug/vars", "/?env", "/%2e%2e/environ")
    for port in (server.port, server.admin_port):
        for path in paths:
            with closing(RawConnection(server.host, port)) as connection:
                connection.send(
                    f"{method} {path} HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: 0\r\n\r\n".encode()
                )
                reply = connection.read_reply()
            assert 400 <= reply.status < 600
            assert reply.status != 500
            for word in (secret, "PATH=", "MINIO", "environ\n"):
                assert word.encode() not in reply.body


def test_minio_cve_2022_31028_a_silent_connection_is_closed(server: ServerProcess) -> None:
    for opening in (b"", b"GET /bucket/key HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        with closing(socket.create_connection((server.host, server.port), timeout=15)) as connection:
            connection.sendall(opening)
            while connection.recv(4096):
                pass  # a refusal may come first; what counts is that the end comes, or the socket's time-out fails the test


ODD_TARGETS = (
    "/%00",
    "/%",
    "/%zz",
    "//",
    "//bucket",
    "/bucket/%ff%fe",
    "/bucket/%C0%AE%C0%AE/key",
    "/bucket/" + "a" * 1025,
    "/bucket/%E0%80%80",
    "/?",
    "/?&&&",
    "/?%",
    "/?" + "a&" * 70,
    "/bucket?prefix=%00&marker=%FF",
    "/bucket?uploadId=..%2F..",
    "/bucket/key?versionId=%00",
    "*",
    "http://",
    "bucket/key",
)


@pytest.mark.parametrize("target", ODD_TARGETS)
async def test_ceph_cve_2022_3854_an_odd_url_is_refused_and_no_defect(driver: Driver, target: str) -> None:
    for method in ("GET", "PUT", "DELETE", "POST", "HEAD"):
        for fields in ([("host", HOST)], [("host", "")], [], [("host", "%00..")]):
            assert (await driver.send(method, target, fields)).status in (*range(400, 500), 501)


def test_ceph_cve_2022_3854_over_a_socket(server: ServerProcess) -> None:
    for target in ODD_TARGETS:
        with closing(RawConnection(server.host, server.port)) as connection:
            connection.send(f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            assert 400 <= connection.read_reply().status < 500
    with server.raw() as raw:
        assert raw.request("GET", "/bucket").status == 200


async def test_ceph_cve_2016_7031_authenticated_read_lets_no_stranger_list(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    grant = Grant("", GranteeGroup.AUTHENTICATED_USERS, Permission.READ)
    own = Grant(ALICE.id, None, Permission.FULL_CONTROL)
    await driver.fake.catalog.update_bucket("bucket", BucketUpdate(acl=(own, grant)))
    for target in ("/bucket", "/bucket?list-type=2", "/bucket?versions", "/bucket?uploads"):
        stranger = await driver.send("GET", target, [("host", HOST)])
        assert (stranger.status, stranger.code) == (403, "AccessDenied")
        assert (await driver.request("GET", target, user=BOB)).status == 200
        assert (await driver.request("GET", target, user=SOMEBODY)).status == 403


async def test_seaweedfs_issue_2180_streaming_puts_are_written_with_valid_chunk_signatures_only(driver: Driver) -> None:
    mode = PayloadMode.CHUNKS_SIGNED.value
    signed = sign("PUT", "/bucket/key", headers=DECODED, payload=mode)
    for body in (
        framed(mode),
        unsigned_chunks([DATA]),
        DATA,
        b"",
        framed(mode).replace(b";chunk-signature=" + b"0" * 64, b""),
    ):
        signed = sign("PUT", "/bucket/key", headers=DECODED, payload=mode)
        answer = await driver.send("PUT", "/bucket/key", signed, body)
        assert answer.status in (400, 403)
        assert is_empty(driver)
    seed, stamp = seed_of(signed)
    assert (
        await driver.send("PUT", "/bucket/key", signed, signed_chunks([DATA], user=ALICE, seed=seed, stamp=stamp))
    ).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../bucket-b/key",
        "/%2e%2e/bucket-b/key",
        "/%2E%2E%2Fbucket-b%2Fkey",
        "/a/../../bucket-b/key",
        "/./../bucket-b/key",
        "/..%2fbucket-b/key",
    ],
)
async def test_seaweedfs_cve_2026_54917_and_cve_2026_55874_dots_cross_no_bucket(driver: Driver, path: str) -> None:
    await driver.put("/bucket-b/key", DATA)
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        assert (await driver.request(method, f"/bucket{path}", user=ALICE)).status == 400
    copied = await driver.request("PUT", "/bucket/mine", headers={"x-amz-copy-source": f"/bucket{path}"})
    assert copied.status == 400
    uploading = await driver.request("POST", "/bucket/mine?uploads")
    upload_id = uploading.xml.findtext("UploadId")
    part = await driver.request(
        "PUT",
        f"/bucket/mine?partNumber=1&uploadId={upload_id}",
        headers={"x-amz-copy-source": f"bucket{path}"},
    )
    assert part.status == 400
    assert (await driver.get("/bucket-b/key")).body == DATA
    assert [key for _, key in driver.fake.catalog.objects] == ["key"]


def test_seaweedfs_cve_2026_54917_over_a_socket(server: ServerProcess) -> None:
    """Nothing on the way from the socket to the key normalises: what is signed is what was sent."""
    authority = f"{server.host}:{server.port}"
    with server.raw() as raw:
        assert raw.request("PUT", "/bucket/own", DATA).status == 200
    for path in (
        "/chunks/../bucket/own",
        "/chunks/%2E%2E/bucket/own",
        "/chunks/a/../../bucket/own",
        "/chunks//../bucket/own",
    ):
        canonical = path.replace("%2E", ".")
        for method in ("GET", "PUT", "DELETE"):
            head = sign_head(server.credentials(), method, authority, canonical, headers={"content-length": "0"}).head
            with closing(RawConnection(server.host, server.port)) as connection:
                connection.send(head.replace(f" {canonical} ".encode(), f" {path} ".encode(), 1))
                reply = connection.read_reply()
            assert reply.code != "SignatureDoesNotMatch"
            assert reply.status in ((400,) if "//" not in path else (200, 204, 400, 404))
            assert reply.body != DATA
    with server.raw() as raw:
        assert raw.request("GET", "/bucket/own").body == DATA


@pytest.mark.parametrize("service", ["sts", "iam", "s3express", "s3tables", "execute-api", "kvobj", "admin", "", "S3"])
async def test_seaweedfs_cve_2026_55873_the_scopes_service_leads_nowhere(driver: Driver, service: str) -> None:
    signed = sign("GET", "/")
    fields = [
        (name, value.replace("/s3/", f"/{service}/") if name == "authorization" else value) for name, value in signed
    ]
    for method, target in (("GET", "/"), ("POST", "/"), ("GET", "/api/v1/users"), ("GET", "/bucket/key")):
        answer = await driver.send(method, target, fields)
        assert (answer.status, answer.code) == (400, "AuthorizationHeaderMalformed")
    target = presign("GET", "/").replace("%2Fs3%2F", f"%2F{quote(service)}%2F")
    assert (await driver.send("GET", target, [("host", HOST)])).code == "AuthorizationQueryParametersError"


async def test_rustfs_cve_2026_39360_a_part_is_copied_from_what_may_be_read_only(driver: Driver) -> None:
    await driver.put("/bucket/secret", DATA)
    await driver.request("PUT", "/bobs", user=BOB)
    upload_id = (await driver.request("POST", "/bobs/key?uploads", user=BOB)).xml.findtext("UploadId")
    target = f"/bobs/key?partNumber=1&uploadId={upload_id}"
    for source in ("/bucket/secret", "bucket/secret?versionId=null", "/bucket/absent", "%2Fbucket%2Fsecret"):
        for headers in ({}, {"x-amz-copy-source-range": "bytes=0-9"}, {"x-amz-copy-source-if-match": "*"}):
            for route in (target, "/bobs/key"):
                answer = await driver.request("PUT", route, user=BOB, headers={"x-amz-copy-source": source, **headers})
                assert (answer.status, answer.code) == (403, "AccessDenied")
    assert not any(driver.fake.catalog.part_rows.values())
    # Who may read it may copy it, and who may not write the destination may not, whatever may be read.
    await driver.request("PUT", "/bobs/own", body=DATA, user=BOB)
    assert (await driver.request("PUT", target, user=BOB, headers={"x-amz-copy-source": "/bobs/own"})).status == 200
    refused = await driver.request("PUT", target, user=ALICE, headers={"x-amz-copy-source": "/bucket/secret"})
    assert refused.status == 403


def allow(action: str, resource: str, condition: dict[str, object] | None = None) -> bytes:
    """A policy that lets everybody do one thing."""
    statement = {"Effect": "Allow", "Principal": "*", "Action": action, "Resource": f"arn:aws:s3:::{resource}"}
    if condition is not None:
        statement["Condition"] = condition  # type: ignore[assignment]
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode()


async def test_rustfs_cve_2026_21862_a_forwarded_address_is_not_the_source(driver: Driver) -> None:
    """aws:SourceIp is the socket's address (the driver's is 127.0.0.1), whatever a header says."""
    await driver.put("/bucket/key", DATA)
    claims = ("x-forwarded-for", "x-real-ip", "forwarded", "x-client-ip", "true-client-ip", "x-amz-source-ip")
    for addresses, address, status in (("10.0.0.0/8", "10.0.0.1", 403), ("127.0.0.1/32", "10.0.0.1", 200)):
        policy = allow("s3:GetObject", "bucket/*", {"IpAddress": {"aws:SourceIp": addresses}})
        await driver.fake.catalog.update_bucket("bucket", BucketUpdate(policy=policy))
        assert (await driver.send("GET", "/bucket/key", [("host", HOST)])).status == status
        for name in claims[:-1]:
            fields = [("host", HOST), (name, f"for={address}" if name == "forwarded" else address)]
            assert (await driver.send("GET", "/bucket/key", fields)).status == status
            assert (await driver.request("GET", "/bucket/key", user=BOB, headers=dict(fields[1:]))).status == status
        both = [("host", HOST), *((name, address) for name in claims)]
        assert (await driver.send("GET", "/bucket/key", both)).status == status


async def test_rustfs_cve_2026_40937_every_admin_call_asks_for_the_right_and_not_only_for_a_signature() -> None:
    store = FakeStore(FakeCatalog())
    store.catalog.users_by_id["alice"] = UserRow("alice", "Alice", "alice-key", "alice-secret")
    clock = SystemClock()
    users = UserDirectory(cast("Catalog", store.catalog), clock)
    authenticate = AdminAuthentication(users, SignatureVerifier(clock), regions=frozenset({"us-east-1"}))
    service = admin_service(store, authenticate)
    calls = [*service._calls, ("GET", "no-such-call"), ("PATCH", "users")]
    assert len(calls) > 15
    for method, name in calls:
        headers = signed_headers(
            ClientCredentials("alice-key", "alice-secret"),
            method=method,
            path=f"/api/v1/{name}",
            query=(),
            headers={"host": "127.0.0.1:9001"},
            payload_sha256=hashlib.sha256(b"{}").hexdigest(),
            region="us-east-1",
            timestamp=strftime("%Y%m%dT%H%M%SZ", gmtime()),
        )
        head = RequestHead(method, f"/api/v1/{name}", tuple(headers.items()), "ID", "127.0.0.1")
        assert (await service.handle(head, BytesBody(b"{}"))).status == 403


async def test_s3_proxy_cve_2026_42882_what_is_judged_is_the_key_that_is_used(driver: Driver) -> None:
    """A key is what was sent, decoded once: neither the check nor the look-up ever sees another form of it."""
    await driver.put("/bucket/private/key", DATA)
    for path in ("public/../private/key", "public//../private/key", "./private/key", "/private/key"):
        target = f"/bucket/{path}"
        sent = target.replace("..", "%2e%2E")  # what is signed is the canonical form of it
        assert (await driver.send("GET", sent, sign("GET", target))).code == "NoSuchKey"
        assert (await driver.put(target, b"other")).status == 200
        assert (await driver.send("GET", sent, sign("GET", target))).body == b"other"
    assert (await driver.get("/bucket/private/key")).body == DATA
    assert (await driver.get("/bucket/private%2Fkey")).body == DATA
    policy = allow("s3:GetObject", "bucket/public/*")
    await driver.fake.catalog.update_bucket("bucket", BucketUpdate(policy=policy))
    for path in (
        "private/key",
        "private%2Fkey",
        "%70rivate/key",
        "./private/key",
        "/private/key",
        "Public/../private/key",
    ):
        assert (await driver.send("GET", f"/bucket/{path}", [("host", HOST)])).status == 403
    # What the policy lets in is another object, whatever a proxy would make of its name.
    for path in ("public/../private/key", "public/%2e%2e/private/key", "public%2F..%2Fprivate%2Fkey"):
        assert (await driver.send("GET", f"/bucket/{path}", [("host", HOST)])).body == b"other"


@pytest.mark.parametrize("is_signed", [False, True])
async def test_aiohttp_cve_2025_69229_tiny_chunks_end_at_the_second(driver: Driver, *, is_signed: bool) -> None:
    pieces = [b"a"] * 5000
    headers = {"x-amz-decoded-content-length": "5000"}
    mode = PayloadMode.CHUNKS_SIGNED.value if is_signed else CHUNKS_UNSIGNED
    signed = sign("PUT", "/bucket/key", headers=headers, payload=mode)
    seed, stamp = seed_of(signed)
    data = signed_chunks(pieces, user=ALICE, seed=seed, stamp=stamp) if is_signed else unsigned_chunks(pieces)
    body = FakeBody(data, chunked=True, step=512)
    answer = await driver.send("PUT", "/bucket/key", signed, body)
    assert answer.code == "InvalidChunkSizeError"
    assert body.unread_bytes >= len(data) - 1024


async def test_aiohttp_cve_2026_22815_trailers_are_bounded(driver: Driver) -> None:
    for trailers in ([("a", "1" * 17_000)], [(f"a{index}", "1") for index in range(17)], [("a", "1" * 1000)] * 1000):
        signed = sign("PUT", "/bucket/key", headers=DECODED, payload=CHUNKS_UNSIGNED)
        data = unsigned_chunks([DATA], trailers)
        body = FakeBody(data, chunked=True, step=512)
        assert (await driver.send("PUT", "/bucket/key", signed, body)).status == 400
        assert body.unread_bytes >= len(data) - len(DATA) - 20_000
    assert is_empty(driver)


@pytest.mark.parametrize("name", ["host", "authorization", "content-length", "x-amz-date", "x-amz-content-sha256"])
def test_aiohttp_cve_2026_34525_a_header_that_must_be_single_is_not_sent_twice(
    server: ServerProcess, name: str
) -> None:
    with server.raw() as raw:
        lines = raw.head("PUT", "/bucket/key", headers={"content-length": "0"}).head.decode("latin-1").split("\r\n")
    line = next(line for line in lines if line.lower().startswith(f"{name}:"))
    for position in (1, len(lines) - 2):
        doubled = [*lines[:position], line, *lines[position:]]
        with closing(RawConnection(server.host, server.port)) as connection:
            connection.send("\r\n".join(doubled).encode("latin-1"))
            assert connection.read_reply().status == 400
    fields = [tuple(line.lower().split(": ", 1)) for line in lines[1:] if line]
    with pytest.raises(S3Error):
        parse_fields(RequestHead("PUT", "/", (*fields, (name, "x")), "ID", ""))  # type: ignore[arg-type]
