"""A node whose remote is a bucket of another kvobj: what the other offers is used, and a user with few rights is enough."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_http import Credentials, RawReply
from remote_servers import RemoteStore
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting, wait_until

from kvobj.tiers.remote.capabilities import Capabilities

KEEPER = UserSetting("keeper", "KEEPER00000000000000", "keeper-secret-keeper-secret")
STRANGER = UserSetting("stranger", "STRANGER000000000000", "stranger-secret-stranger")
BUCKET, PREFIX = "kept", "near/"

# What docs/federation.md tells an operator to set: tests and text must not differ.
ON_KEYS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
ON_BUCKET = ("s3:ListBucket", "s3:ListBucketMultipartUploads")


def policy(*, without: str = "") -> dict[str, object]:
    """The least that a store needs of its bucket, less one action."""
    principal = {"AWS": ["arn:aws:iam:::user/keeper"]}
    statements = [
        (ON_KEYS, f"arn:aws:s3:::{BUCKET}/{PREFIX}*"),
        (ON_BUCKET, f"arn:aws:s3:::{BUCKET}"),
    ]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": principal,
                "Action": [action for action in actions if action != without],
                "Resource": resource,
            }
            for actions, resource in statements
        ],
    }


def set_policy(far: ServerProcess, document: dict[str, object]) -> None:
    body = json.dumps(document).encode()
    with far.raw() as raw:
        assert raw.request("PUT", f"/{BUCKET}", body, query={"policy": ""}, payload=body).status in (200, 204)


def near_settings(far: ServerProcess, user: UserSetting) -> ServerSettings:
    return ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=128 * MIB,
        buckets=[BucketSetting("safe", durability="shared")],
        remote={
            "endpoint": f'"{far.endpoint}"',
            "bucket": f'"{BUCKET}"',
            "prefix": f'"{PREFIX}"',
            "access_key": f'"{user.access_key}"',
            "secret_key": f'"{user.secret_key}"',
            "share_timeout": '"10 s"',
            "part_size": '"5 MiB"',
        },
    )


@pytest.fixture
def far(tmp_path: Path) -> Iterator[ServerProcess]:
    """The kvobj that keeps, with its bucket under the policy."""
    settings = ServerSettings(
        dram_bytes=64 * MIB, nvme_bytes=256 * MIB, buckets=[BucketSetting(BUCKET)], users=[KEEPER, STRANGER]
    )
    with ServerProcess(tmp_path / "far", settings) as server:
        set_policy(server, policy())
        yield server


def put(near: ServerProcess, path: str, body: bytes) -> RawReply:
    with near.raw(timeout_seconds=60) as raw:
        return raw.request("PUT", path, body, payload=body)


def blobs(far: ServerProcess) -> list[str]:
    return RemoteStore("kvobj", far.host, far.port, far.credentials(), BUCKET, PREFIX).keys(f"{PREFIX}blobs/")


def test_a_store_lives_in_a_bucket_of_another_under_the_least_policy(far: ServerProcess, tmp_path: Path) -> None:
    small, large = os.urandom(10_000), os.urandom(12 * MIB)
    with ServerProcess(tmp_path / "near", near_settings(far, KEEPER)) as near:
        for name, body in (("small", small), ("large", large)):
            reply = put(near, f"/safe/{name}", body)
            assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "shared"), reply.body
        # The other is a new server, and everything it offers is made use of.
        remote = near.status()["remote"]
        assert remote["state"] == "ok"
        found = Capabilities(**remote["capabilities"])
        assert found.upload_check == "crc32c"
        assert found.if_absent
        assert found.if_match
        assert found.delete_many
        assert found.ranges
        assert {key.rpartition("/")[2] for key in blobs(far)} == {"large", "small"}
        with near.raw() as raw:
            assert raw.request("DELETE", "/safe/small", payload=None).status == 204
        wait_until(
            lambda: not any(key.endswith("/small") for key in blobs(far)), timeout_seconds=20, what="the blob to go"
        )
        near.kill()
        near.start()
        with near.raw() as raw:
            assert raw.request("GET", "/safe/large").body == large
            assert raw.request("GET", "/safe/small").status == 404
        wait_until(lambda: near.status()["remote"]["state"] == "ok", timeout_seconds=10, what="the probe")


def test_the_policy_opens_nothing_else(far: ServerProcess) -> None:
    body = b"not the store's"
    with far.raw() as root:
        assert root.request("PUT", f"/{BUCKET}/elsewhere", body, payload=body).status == 200
    for user, key, expected in ((KEEPER, f"{PREFIX}mine", 200), (KEEPER, "mine", 403), (STRANGER, f"{PREFIX}x", 403)):
        as_user = RemoteStore("kvobj", far.host, far.port, Credentials(user.access_key, user.secret_key), BUCKET)
        with as_user.raw() as raw:
            assert raw.request("PUT", f"/{BUCKET}/{key}", body, payload=body).status == expected
            assert raw.request("GET", f"/{BUCKET}/elsewhere").status == 403
            assert raw.request("DELETE", f"/{BUCKET}/elsewhere", payload=None).status == 403
            assert raw.request("PUT", f"/{BUCKET}", b"{}", query={"policy": ""}, payload=b"{}").status == 403
            assert raw.request("DELETE", f"/{BUCKET}", payload=None).status == 403


def is_denied(remote: dict[str, str]) -> bool:
    return remote["state"] == "refused" and "denies access" in remote["reason"]


def test_a_right_that_is_missing_is_named_and_nothing_is_acknowledged(far: ServerProcess, tmp_path: Path) -> None:
    set_policy(far, policy(without="s3:PutObject"))
    with ServerProcess(tmp_path / "near", near_settings(far, KEEPER)) as near:
        # One look: what may be read answers in between, and the state is that of the latest answer.
        wait_until(lambda: is_denied(near.status()["remote"]), timeout_seconds=20, what="the refusal")
        reply = put(near, "/safe/x", b"x")  # the class is the bucket's default: it falls to local, and says so
        assert (reply.status, reply.headers["x-kvobj-durability"]) == (200, "local")
        set_policy(far, policy())
        wait_until(lambda: len(blobs(far)) == 1, timeout_seconds=30, what="what was queued to be uploaded")
