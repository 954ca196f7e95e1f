"""What only an operator can cure: the remote is full, has no such bucket, knows the credentials no more, or its clock is off.

Each is said plainly in `status` and in the log, once; what is here is read as ever, class shared is refused with a 503 or a 507 and
never a 500, and as soon as it is cured the node goes on without a restart.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from radosgw_server import Radosgw
from raw_http import Credentials, RawReply, RawS3
from remote_servers import RemoteStore, drop_bucket, make_bucket
from s3_proxy import NOTHING, FaultProxy, Plan, Toxic, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

BODY = bytes(range(256)) * 300


@dataclass(frozen=True, slots=True)
class Node:
    """A node whose remote is behind a proxy."""

    server: ServerProcess
    proxy: FaultProxy

    def put(self, key: str, *, durability: str = "shared", body: bytes = BODY) -> RawReply:
        with self.server.raw(timeout_seconds=30) as raw:
            return raw.request("PUT", f"/plain/{key}", body, headers={"x-kvobj-durability": durability})

    def get(self, key: str) -> RawReply:
        with self.server.raw() as raw:
            return raw.request("GET", f"/plain/{key}", payload=None)

    def remote(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.status()["remote"]
        return found

    def logged(self, *words: str) -> int:
        """How many lines of the log have all of the words."""
        return sum(all(word in line for word in words) for line in self.server.log_path.read_text().splitlines())

    def wait_for(self, **expected: str) -> None:
        """Wait until `status` says this of the remote."""
        wait_until(
            lambda: {name: self.remote()[name] for name in expected} == expected,
            timeout_seconds=20,
            what=f"{expected}, is {json.dumps(self.remote())}",
        )

    def wait_until_shared(self, key: str) -> None:
        """Wait until class shared can be had again."""
        wait_until(lambda: self.put(key).status == 200, timeout_seconds=30, what="class shared to be had again")

    def check_local_life(self) -> None:
        """What is here is read, and what need not go to the remote is written."""
        assert self.get("before").body == BODY
        assert self.put("local", durability="local").status == 200
        assert self.get("local").body == BODY


@contextmanager
def node_before(store: RemoteStore, directory: Path, **more: str) -> Iterator[Node]:
    with proxy_thread(store.host, store.port) as proxy:
        lines = store.behind(proxy.port).tier(
            share_timeout='"3 s"', request_timeout='"2 s"', operation_timeout='"3 s"', **more
        )
        settings = ServerSettings(
            dram_bytes=64 * MIB,
            nvme_bytes=256 * MIB,
            buckets=(BucketSetting("plain"),),
            remote=lines,
            sections={"log": {"requests": "false"}},
            workers=1,
        )
        with ServerProcess(directory / "node", settings) as server:
            yield Node(server, proxy)


def test_a_bucket_that_is_not_there_is_named_and_used_as_soon_as_it_is(
    kvobj_remote: RemoteStore, tmp_path: Path
) -> None:
    drop_bucket(kvobj_remote)
    with node_before(kvobj_remote, tmp_path) as node:
        assert node.put("before", durability="local").status == 200
        node.wait_for(state="refused")
        assert "no such bucket" in node.remote()["reason"]
        assert node.put("refused").status == 503
        assert node.get("refused").status == 404
        node.check_local_life()
        assert node.logged("warning", "no such bucket") >= 1
        make_bucket(kvobj_remote)
        node.wait_until_shared("after")
        assert node.remote()["state"] == "ok"


def test_a_bucket_that_goes_is_named_and_what_is_here_stays(kvobj_remote: RemoteStore, tmp_path: Path) -> None:
    with node_before(kvobj_remote, tmp_path) as node:
        assert node.put("before").status == 200
        drop_bucket(kvobj_remote)
        assert node.put("during").status == 503
        node.wait_for(state="refused")
        assert "no such bucket" in node.remote()["reason"]
        node.check_local_life()


def test_credentials_that_are_revoked_in_flight_are_named_and_taken_again_when_they_are_back(
    kvobj_remote: RemoteStore, kvobj_remote_server: ServerProcess, tmp_path: Path
) -> None:
    pair = Credentials(f"AK{secrets.token_hex(8)}", secrets.token_hex(20))
    user = {"id": "node", "access_key": pair.access_key, "secret_key": pair.secret_key}
    add_user(kvobj_remote_server, user)
    own = replace(kvobj_remote, credentials=pair, bucket=f"test-{secrets.token_hex(6)}")
    make_bucket(own)
    try:
        with node_before(own, tmp_path) as node:
            assert node.put("before").status == 200
            kvobj_remote_server.admin("DELETE", "/api/v1/users", query={"id": "node"})
            wait_until(lambda: node.put("during").status == 503, timeout_seconds=20, what="the remote to know")
            node.wait_for(state="refused")
            assert "access_key" in node.remote()["reason"]
            assert node.logged("warning", "the remote does not know the access key") >= 1
            node.check_local_life()
            add_user(kvobj_remote_server, user)
            node.wait_until_shared("after")
            node.wait_for(state="ok")
            wait_until(lambda: not node.remote()["queue"]["queued_objects"], timeout_seconds=30, what="the queue")
    finally:
        drop_bucket(replace(own, credentials=kvobj_remote.credentials))


def test_a_clock_that_is_off_is_named_and_goes_on_when_it_is_right(kvobj_remote: RemoteStore, tmp_path: Path) -> None:
    with node_before(kvobj_remote, tmp_path) as node:
        assert node.put("before").status == 200
        node.proxy.plan = Plan((Toxic.SKEWED,), rate=1.0)
        assert node.put("during").status == 503
        node.wait_for(state="refused")
        status = node.remote()
        assert "clock" in status["reason"]
        assert status["clock_skew_seconds"] == pytest.approx(86400, abs=30)
        assert node.logged("warning", "clock") >= 1
        node.check_local_life()
        node.proxy.plan = NOTHING
        node.wait_until_shared("after")
        node.wait_for(state="ok")


def test_a_full_remote_is_named_and_taken_again_when_there_is_room(tmp_path: Path) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB, nvme_bytes=64 * MIB, nvme_segment_bytes=64 * MIB, sections={"log": {"requests": "false"}}
    )
    with ServerProcess(tmp_path / "remote", settings) as remote:
        store = RemoteStore("kvobj", remote.host, remote.port, remote.credentials(), "full")
        make_bucket(store)
        with node_before(store, tmp_path) as node:
            assert node.put("before").status == 200
            junk = fill(store)
            refused = node.put("during", body=BODY * 20)
            check_full(node, refused)
            store.remove(junk)
            node.wait_until_shared("after")
            wait_until(lambda: not node.remote()["queue"]["queued_objects"], timeout_seconds=60, what="the queue")


def test_a_quota_that_is_used_up_is_named_and_taken_again_when_it_is_raised(
    radosgw: RemoteStore, radosgw_gateway: Radosgw, tmp_path: Path
) -> None:
    user = f"user-{secrets.token_hex(4)}"
    pair = Credentials(f"AK{secrets.token_hex(8)}", secrets.token_hex(20))
    radosgw_gateway.admin(
        "user", "create", f"--uid={user}", "--display-name=x", f"--access-key={pair.access_key}",
        f"--secret-key={pair.secret_key}",
    )  # fmt: skip
    own = replace(radosgw, credentials=pair, bucket=f"test-{secrets.token_hex(6)}")
    make_bucket(own)
    try:
        with node_before(own, tmp_path) as node:
            assert node.put("before").status == 200
            set_quota(radosgw_gateway, user, "1B")
            wait_until(lambda: node.put("during").status != 200, timeout_seconds=20, what="the quota to be heeded")
            check_full(node, node.put("during"))
            set_quota(radosgw_gateway, user, "1G")
            node.wait_until_shared("after")
            wait_until(lambda: not node.remote()["queue"]["queued_objects"], timeout_seconds=60, what="the queue")
    finally:
        drop_bucket(own)


def add_user(server: ServerProcess, user: dict[str, str]) -> None:
    body = json.dumps(user).encode()
    with RawS3(server.host, server.admin_port, server.credentials()) as raw:
        assert raw.request("POST", "/api/v1/users", body, payload=body).status == 200
    pair = Credentials(user["access_key"], user["secret_key"])
    with RawS3(server.host, server.port, pair) as raw:  # the server keeps the users that it knows for a second
        wait_until(
            lambda: raw.request("GET", "/", payload=None).status == 200, timeout_seconds=10, what="the user to be known"
        )


def set_quota(gateway: Radosgw, user: str, size: str) -> None:
    gateway.admin("quota", "set", "--quota-scope=user", f"--uid={user}", f"--max-size={size}")
    gateway.admin("quota", "enable", "--quota-scope=user", f"--uid={user}")


def check_full(node: Node, refused: RawReply) -> None:
    """A write of class shared was refused, and it is said why."""
    assert refused.status in {503, 507}, refused
    status = node.remote()
    assert "full" in f"{status['reason']} {status['uploads_held_by']}", status
    assert node.logged("warning", "full") >= 1
    node.check_local_life()


def fill(store: RemoteStore) -> list[str]:
    """Fill the remote until it takes no more; the keys."""
    keys: list[str] = []
    with store.raw() as raw:
        for size in (8 * MIB, MIB, 64 * 1024):
            while len(keys) < 2000:
                key = f"junk-{len(keys)}"
                reply = raw.request("PUT", f"/{store.bucket}/{key}", secrets.token_bytes(size))
                if reply.status == 507:
                    break
                assert reply.status == 200, reply
                keys.append(key)
    return keys
