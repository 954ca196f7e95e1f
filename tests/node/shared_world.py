"""A node whose remote tier is a bucket of another kvobj process, behind a proxy that can do to it what networks do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_http import RawReply, RawS3
from remote_servers import RemoteStore
from s3_proxy import FaultProxy, Plan, Toxic, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

SHARED = {"x-kvobj-durability": "shared"}
BUCKETS = (
    BucketSetting("plain"),
    BucketSetting("safe", durability="shared"),
    BucketSetting("chunks", "kv", "memory"),
    BucketSetting("always", remote="always"),
    BucketSetting("reused", remote="reused"),
)
AWAY = Plan((Toxic.UNAVAILABLE_BARE,), rate=1.0)
QUICK = {
    "share_timeout": '"20 s"',
    "connect_timeout": '"1 s"',
    "request_timeout": '"2 s"',
    "operation_timeout": '"3 s"',
    "stall_timeout": '"500 ms"',
}


@dataclass(slots=True)
class World:
    """The node, what is behind it, and what is between them."""

    node: ServerProcess
    store: RemoteStore
    proxy: FaultProxy

    def put(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> RawReply:
        """One PUT on a connection of its own."""
        with self.node.raw(timeout_seconds=60) as raw:
            return raw.request("PUT", path, body, headers=dict(headers or {}), payload=body)

    def get(self, path: str) -> RawReply:
        """One GET."""
        with self.node.raw() as raw:
            return raw.request("GET", path)

    def blobs(self, name: str) -> list[str]:
        """Keys of blobs on the remote whose object has this name."""
        return [key for key in self.store.keys(f"{self.store.prefix}blobs/") if key.endswith(f"/{name}")]

    def manifests(self) -> list[str]:
        """Keys of manifests on the remote."""
        return self.store.keys(f"{self.store.prefix}manifests/")

    def remote(self) -> dict[str, Any]:
        """What `status` says of the remote."""
        found: dict[str, Any] = self.node.status()["remote"]
        return found

    def queued(self) -> int:
        """How many objects wait to be uploaded."""
        return int(self.remote()["queue"]["queued_objects"])

    def durability(self, bucket: str, key: str) -> str:
        """The class that the object has reached."""
        found = self.node.admin("GET", "/api/v1/inspect", query={"bucket": bucket, "key": key})
        return str(found["durability"])

    def wait_for_shared(self, bucket: str, key: str, *, timeout_seconds: float = 30.0) -> None:
        """Wait until the object is of class shared."""
        wait_until(
            lambda: self.durability(bucket, key) == "shared",
            timeout_seconds=timeout_seconds,
            what=f"{bucket}/{key} to be shared:\n{self.node.log_tail()}",
        )


def settings_for(store: RemoteStore, *, workers: int = 1, **more: str) -> ServerSettings:
    """Small tiers, short deadlines, one bucket of each kind."""
    return ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=256 * MIB,
        buckets=BUCKETS,
        remote=store.tier(**{**QUICK, **more}),
        sections={"log": {"requests": "false"}, "limits": {"reserve_timeout": '"1 s"'}},
        workers=workers,
    )


@contextmanager
def shared_world(
    directory: Path, store: RemoteStore, *, plan: Plan | None = None, workers: int = 1, **more: str
) -> Iterator[World]:
    """A running world; `more` are lines of the tier's configuration."""
    with proxy_thread(store.host, store.port) as proxy:
        if plan is not None:
            proxy.plan = plan
        settings = settings_for(store.behind(proxy.port), workers=workers, **more)
        with ServerProcess(directory, settings) as node:
            yield World(node, store, proxy)


def chunk_headers(parent: str | None, **more: str) -> dict[str, str]:
    """Of a PUT into a KV bucket: "" is the root."""
    return {**({} if parent is None else {"x-kvobj-parent": parent or "root"}), **more}


def read_all(raw: RawS3, paths: Mapping[str, bytes]) -> None:
    """Every object has its bytes."""
    for path, body in paths.items():
        assert raw.request("GET", path).body == body
