"""Users who share by ACLs and by policy, as boto3 does it, against a real server, which is started again in between."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from client_suite import S3Client, boto3_client
from module_paths import ModulePaths
from server_process import MIB, ServerProcess, ServerSettings, UserSetting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALICE = UserSetting("alice", "alice-access", "alice-secret-key")
BOB = UserSetting("bob", "bob-access", "bob-secret-key")
ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
NETWORK = "10.99.0.0/16"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    sections = {"server": {"trusted_proxies": '["127.0.0.1"]'}}
    settings = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=256 * MIB, users=(ALICE, BOB), sections=sections)
    with ServerProcess(module_paths.mktemp("sharing"), settings) as running:
        yield running


def client_of(server: ServerProcess, user: UserSetting | None) -> S3Client:
    """A client that signs as the user, or does not sign."""
    addressing = {"addressing_style": "path"}
    retries = {"max_attempts": 1}
    if user is None:
        anonymous = Config(signature_version=UNSIGNED, s3=addressing, retries=retries)
        return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=anonymous)
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=user.access_key,
        aws_secret_access_key=user.secret_key,
        region_name="us-east-1",
        config=Config(signature_version="s3v4", s3=addressing, retries=retries),
    )


@pytest.fixture
def alice(server: ServerProcess) -> Iterator[S3Client]:
    made = client_of(server, ALICE)
    yield made
    made.close()


@pytest.fixture
def bob(server: ServerProcess) -> Iterator[S3Client]:
    made = client_of(server, BOB)
    yield made
    made.close()


@pytest.fixture
def nobody(server: ServerProcess) -> Iterator[S3Client]:
    made = client_of(server, None)
    yield made
    made.close()


def code_of(call: Callable[..., object], **arguments: object) -> str:
    """The code with which a call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return str(caught.value.response["Error"]["Code"])


def read(client: S3Client, bucket: str, key: str) -> bytes:
    return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def test_owners_and_grantees_are_told_by_id_and_name(alice: S3Client, bob: S3Client) -> None:
    alice.create_bucket(Bucket="by-grant")
    alice.put_object(Bucket="by-grant", Key="key", Body=b"data", GrantRead="id=bob")
    assert read(bob, "by-grant", "key") == b"data"
    acl = alice.get_object_acl(Bucket="by-grant", Key="key")
    assert acl["Owner"] == {"ID": "alice", "DisplayName": "The alice"}
    grantee = {"ID": "bob", "DisplayName": "The bob", "Type": "CanonicalUser"}
    assert acl["Grants"] == [{"Grantee": grantee, "Permission": "READ"}]
    acl["Grants"].append({"Grantee": grantee, "Permission": "WRITE_ACP"})
    alice.put_object_acl(
        Bucket="by-grant", Key="key", AccessControlPolicy={"Owner": acl["Owner"], "Grants": acl["Grants"]}
    )
    bob.put_object_acl(Bucket="by-grant", Key="key", ACL="public-read")
    grants = alice.get_object_acl(Bucket="by-grant", Key="key")["Grants"]
    assert {grant["Permission"]: grant["Grantee"].get("URI") for grant in grants} == {
        "READ": ALL_USERS,
        "FULL_CONTROL": None,
    }
    assert code_of(bob.get_object_acl, Bucket="by-grant", Key="key") == "AccessDenied"


def test_a_public_bucket_is_read_and_written_without_signing(alice: S3Client, nobody: S3Client) -> None:
    alice.create_bucket(Bucket="public", ACL="public-read-write")
    nobody.put_object(Bucket="public", Key="dir/from-nobody", Body=b"left")
    assert nobody.list_objects_v2(Bucket="public", Delimiter="/")["CommonPrefixes"] == [{"Prefix": "dir/"}]
    assert nobody.head_bucket(Bucket="public")["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert code_of(nobody.get_object, Bucket="public", Key="dir/from-nobody") == "AccessDenied"
    assert code_of(nobody.create_multipart_upload, Bucket="public", Key="x") == "AccessDenied"
    assert read(alice, "public", "dir/from-nobody") == b"left"
    alice.put_object_acl(Bucket="public", Key="dir/from-nobody", ACL="public-read")
    assert read(nobody, "public", "dir/from-nobody") == b"left"
    assert code_of(nobody.put_bucket_acl, Bucket="public", ACL="private") == "AccessDenied"
    nobody.delete_object(Bucket="public", Key="dir/from-nobody")
    alice.put_bucket_acl(Bucket="public", ACL="private")
    assert code_of(nobody.list_objects_v2, Bucket="public") == "AccessDenied"
    assert code_of(nobody.list_buckets) == "AccessDenied"


def test_a_policy_shares_a_part_of_a_bucket_over_a_restart(
    server: ServerProcess, alice: S3Client, bob: S3Client, nobody: S3Client
) -> None:
    alice.create_bucket(Bucket="by-policy")
    for key in ("home/bob/a", "home/alice/a", "open/a"):
        alice.put_object(Bucket="by-policy", Key=key, Body=key.encode())
    statements = [
        {
            "Effect": "Allow",
            "Principal": {"AWS": "arn:aws:iam:::user/bob"},
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
            "Resource": "arn:aws:s3:::by-policy/home/${aws:username}/*",
        },
        {
            "Effect": "Allow",
            "Principal": {"AWS": "bob"},
            "Action": "s3:ListBucket",
            "Resource": "arn:aws:s3:::by-policy",
            "Condition": {"StringLike": {"s3:prefix": "home/${aws:username}/*"}},
        },
        {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::by-policy/open/*"},
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    alice.put_bucket_policy(Bucket="by-policy", Policy=document)
    assert alice.get_bucket_policy_status(Bucket="by-policy")["PolicyStatus"] == {"IsPublic": True}
    for _ in range(2):
        assert alice.get_bucket_policy(Bucket="by-policy")["Policy"] == document
        assert read(bob, "by-policy", "home/bob/a") == b"home/bob/a"
        bob.put_object(Bucket="by-policy", Key="home/bob/b", Body=b"b")
        listed = bob.list_objects_v2(Bucket="by-policy", Prefix="home/bob/")
        assert [entry["Key"] for entry in listed["Contents"]] == ["home/bob/a", "home/bob/b"]
        assert code_of(bob.list_objects_v2, Bucket="by-policy", Prefix="home/") == "AccessDenied"
        assert code_of(bob.get_object, Bucket="by-policy", Key="home/alice/a") == "AccessDenied"
        assert code_of(bob.put_object, Bucket="by-policy", Key="home/alice/b", Body=b"b") == "AccessDenied"
        assert read(nobody, "by-policy", "open/a") == b"open/a"
        assert code_of(nobody.get_object, Bucket="by-policy", Key="home/bob/a") == "AccessDenied"
        assert server.terminate() == 0
        server.start()
    alice.delete_bucket_policy(Bucket="by-policy")
    assert code_of(alice.get_bucket_policy, Bucket="by-policy") == "NoSuchBucketPolicy"
    assert code_of(bob.get_object, Bucket="by-policy", Key="home/bob/a") == "AccessDenied"


def test_a_copy_across_users_needs_both_rights(alice: S3Client, bob: S3Client) -> None:
    alice.create_bucket(Bucket="source")
    alice.put_object(Bucket="source", Key="key", Body=b"data")
    bob.create_bucket(Bucket="destination")
    copy = {"Bucket": "destination", "Key": "copy", "CopySource": {"Bucket": "source", "Key": "key"}}
    assert code_of(bob.copy_object, **copy) == "AccessDenied"
    assert code_of(alice.copy_object, **copy) == "AccessDenied"
    alice.put_object_acl(Bucket="source", Key="key", ACL="authenticated-read")
    bob.copy_object(**copy)
    assert read(bob, "destination", "copy") == b"data"
    assert code_of(alice.get_object, Bucket="destination", Key="copy") == "AccessDenied"


def test_an_upload_in_parts_has_the_acl_that_it_was_begun_with(
    server: ServerProcess, alice: S3Client, nobody: S3Client
) -> None:
    alice.create_bucket(Bucket="in-parts")
    upload = alice.create_multipart_upload(Bucket="in-parts", Key="key", ACL="public-read")["UploadId"]
    assert server.terminate() == 0  # the ACL waits where the parts do
    server.start()
    part = alice.upload_part(Bucket="in-parts", Key="key", UploadId=upload, PartNumber=1, Body=b"data")
    alice.complete_multipart_upload(
        Bucket="in-parts",
        Key="key",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    )
    assert read(nobody, "in-parts", "key") == b"data"


def test_an_address_counts_as_a_trusted_proxy_tells_it(server: ServerProcess, alice: S3Client) -> None:
    alice.create_bucket(Bucket="by-address")
    alice.put_object(Bucket="by-address", Key="key", Body=b"data")
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::by-address/*",
        "Condition": {"IpAddress": {"aws:SourceIp": NETWORK}},
    }
    alice.put_bucket_policy(Bucket="by-address", Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    assert alice.get_bucket_policy_status(Bucket="by-address")["PolicyStatus"] == {"IsPublic": False}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    for forwarded, status in (
        (None, 403),
        ("10.99.1.2", 200),
        ("10.99.1.2, 192.0.2.1", 403),
        ("192.0.2.1,10.99.1.2", 200),
    ):
        headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
        connection.request("GET", "/by-address/key", headers=headers)
        reply = connection.getresponse()
        assert (reply.status, reply.read() == b"data") == (status, status == 200), forwarded
    connection.close()


def test_root_passes_every_deny(server: ServerProcess, alice: S3Client) -> None:
    alice.create_bucket(Bucket="denied")
    alice.put_object(Bucket="denied", Key="key", Body=b"data")
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": ["arn:aws:s3:::denied", "arn:aws:s3:::denied/*"],
    }
    alice.put_bucket_policy(Bucket="denied", Policy=json.dumps({"Version": "2012-10-17", "Statement": statement}))
    assert code_of(alice.get_object, Bucket="denied", Key="key") == "AccessDenied"
    assert code_of(alice.list_objects_v2, Bucket="denied") == "AccessDenied"
    root = boto3_client(server)
    assert read(root, "denied", "key") == b"data"
    root.close()
    alice.delete_bucket_policy(Bucket="denied")
    assert read(alice, "denied", "key") == b"data"
