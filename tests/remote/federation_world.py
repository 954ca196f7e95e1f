"""Two kvobj processes for the tests of upstreams: `near` asks `far`, through a proxy that can do to it what networks do."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from free_ports import free_port
from kv_driver import (
    CHUNK_TOKENS,
    JSON,
    MSGPACK,
    STREAM,
    Item,
    Namespace,
    chain_stream,
    declaration,
    parse_stream,
    payload,
)
from raw_http import Credentials, RawReply, RawS3
from s3_proxy import FaultProxy, Plan, Toxic, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting

from kvobj.client import Credentials as ClientCredentials
from kvobj.client import KvClient

AWAY = Plan((Toxic.UNAVAILABLE_BARE,), rate=1.0)
ALICE = UserSetting("alice", "ALICE00000000000000", "alice-secret-alice-secret")
BOB = UserSetting("bob", "BOB000000000000000000", "bob-secret-bob-secret")


@dataclass(slots=True)
class World:
    """Both servers. Every test makes namespaces of its own in the bucket `cache`."""

    near: ServerProcess
    far: ServerProcess
    proxy: FaultProxy
    lm_port: int
    """Where near speaks LMCache's own protocol."""

    def declare(self, server: ServerProcess, name: str, *, key: str | None = None, **fields: object) -> Namespace:
        document = declaration(**fields) | ({} if key is None else {"key": key})
        body = msgspec.json.encode(document)
        headers = {"content-type": JSON}
        reply = call(server, "PUT", "/cache", body, query={"namespace": name}, headers=headers)
        assert reply.status == 200, reply.body
        value = json.loads(reply.body)
        return Namespace(name, bytes.fromhex(value["key"]), bytes.fromhex(value["root"]))

    def declare_both(self, name: str, **fields: object) -> Namespace:
        """The same namespace, with one key, in both."""
        namespace = self.declare(self.far, name, key=None, **fields)
        again = self.declare(self.near, name, key=namespace.key.hex(), **fields)
        assert again == namespace
        return namespace

    def upstream(self, metric: str, **labels: str) -> float:
        """One of near's figures about upstreams, summed over what else it is labelled with."""
        total = 0.0
        for line in metrics_of(self.near).splitlines():
            if line.startswith(f"kvobj_upstream_{metric}") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def status(self) -> dict[str, Any]:
        """What near's status says of its upstream."""
        (told,) = self.near.admin("GET", "/api/v1/status")["upstreams"]
        found: dict[str, Any] = told
        return found

    def same_host_client(self) -> KvClient:
        """A client of near that shares its memory."""
        pair = self.near.credentials()
        credentials = ClientCredentials(pair.access_key, pair.secret_key)
        return KvClient(self.near.endpoint, credentials, "cache", same_host=True, timeout_seconds=20.0, connections=2)


def metrics_of(server: ServerProcess) -> str:
    """The metrics page."""
    with RawS3("127.0.0.1", server.admin_port, server.credentials(), 10.0) as raw:
        return raw.request("GET", "/metrics").body.decode()


def call(
    server: ServerProcess,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    user: UserSetting | None = None,
) -> RawReply:
    """One signed request on a connection of its own."""
    pair = server.credentials() if user is None else Credentials(user.access_key, user.secret_key)
    with RawS3(server.host, server.port, pair, 30.0) as raw:
        return raw.request(method, path, body, query=dict(query or {}), headers=dict(headers or {}), payload=body)


def ids_of(namespace: Namespace, count: int, *, first: int = 0) -> list[str]:
    """A chain's ids in hex."""
    return [each.hex() for each in namespace.ids(list(range(first, first + count * CHUNK_TOKENS)))]


def put(
    server: ServerProcess,
    namespace: Namespace,
    chunk_id: str,
    parent: str,
    *,
    user: UserSetting | None = None,
    **more: str,
) -> RawReply:
    """One chunk; `more` are headers of ours."""
    data = payload(bytes.fromhex(chunk_id))
    named = {"namespace": namespace.name, "parent": parent, **more}
    headers = {f"x-kvobj-{name}": value for name, value in named.items()}
    return call(server, "PUT", f"/cache/{chunk_id}", data, headers=headers, user=user)


def put_chain(server: ServerProcess, namespace: Namespace, ids: Sequence[str], *, parent: str = "root") -> None:
    """A chain, one after the other."""
    for chunk_id in ids:
        reply = put(server, namespace, chunk_id, parent)
        assert reply.status == 200, reply.body
        parent = chunk_id


def match(server: ServerProcess, namespace: Namespace, ids: Sequence[str], **more: object) -> dict[str, Any]:
    """`?match`."""
    body = json.dumps({"namespace": namespace.name, "ids": list(ids), **more}).encode()
    reply = call(server, "POST", "/cache", body, query={"match": ""}, headers={"content-type": JSON})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.body)
    return found


def mget(server: ServerProcess, ids: Sequence[str], **more: object) -> list[Item]:
    """`?mget`."""
    body = msgspec.msgpack.encode({"ids": b"".join(bytes.fromhex(each) for each in ids), **more})
    reply = call(server, "POST", "/cache", body, query={"mget": ""}, headers={"content-type": MSGPACK})
    assert reply.status == 200, reply.body
    return parse_stream(reply.body)


def mput(server: ServerProcess, namespace: Namespace, ids: Sequence[str], **headers: str) -> list[dict[str, Any]]:
    """`?mput` of a chain from its root; what became of each chunk."""
    return mput_stream(server, chain_stream(namespace, [bytes.fromhex(each) for each in ids]), **headers)


def mput_stream(server: ServerProcess, body: bytes, **headers: str) -> list[dict[str, Any]]:
    """`?mput`; `headers` are ours."""
    fields = {"content-type": STREAM, "accept": JSON} | {f"x-kvobj-{name}": value for name, value in headers.items()}
    reply = call(server, "POST", "/cache", body, query={"mput": ""}, headers=fields)
    assert reply.status == 200, reply.body
    items: list[dict[str, Any]] = json.loads(reply.body)["items"]
    return items


def lm_ask(port: int, command: int, key: str) -> tuple[int, tuple[int, ...], bytes]:
    """One request of LMCache's own protocol without a body: code, form and bytes of the answer."""
    with socket.create_connection(("127.0.0.1", port), 20.0) as connection, connection.makefile("rb") as replies:
        connection.sendall(struct.pack("<9i150s", command, 0, 1, 2, 0, 0, 0, 0, 0, key.encode().ljust(150)))
        code, length, fmt, dtype, *dimensions, _ = struct.unpack("<9i", replies.read(36))
        return code, (fmt, dtype, *dimensions), replies.read(length)


def stored(server: ServerProcess) -> set[str]:
    """The keys of all chunks that the server itself has, asked of nobody else."""
    return {each["key"] for each in server.admin("GET", "/api/v1/objects", query={"bucket": "cache"})["objects"]}


@contextmanager
def federation(
    root: Path, *, workers: int = 1, near_bytes: int = 32 * MIB, far_bytes: int = 16 * MIB, **upstream: str
) -> Iterator[World]:
    """`near_bytes` and `far_bytes`: of the arenas. `upstream`: further lines of the `[[upstreams]]` table, values in TOML."""
    users = [ALICE, BOB]
    sections = {"log": {"requests": "false"}}
    far_settings = ServerSettings(
        dram_bytes=far_bytes,
        nvme_bytes=128 * MIB,
        buckets=[BucketSetting("cache", "kv", "memory")],
        users=users,
        sections=sections,
    )
    with (
        ServerProcess(root / "far", far_settings) as far,
        proxy_thread(far.host, far.port, Plan((), rate=0.0)) as proxy,
    ):
        pair = far.credentials()
        table = {
            "bucket": '"cache"',
            "endpoint": f'"http://127.0.0.1:{proxy.port}"',
            "access_key": f'"{pair.access_key}"',
            "secret_key": f'"{pair.secret_key}"',
            "timeout": '"5 s"',
            **upstream,
        }
        lm_port = free_port()
        near_settings = ServerSettings(
            dram_bytes=near_bytes,
            nvme_bytes=128 * MIB,
            buckets=[BucketSetting("cache", "kv", "memory"), BucketSetting("own", "kv", "memory")],
            users=users,
            sections={**sections, "lm": {"listen": f'"127.0.0.1:{lm_port}"', "bucket": '"cache"'}},
            upstreams=[table],
            workers=workers,
        )
        with ServerProcess(root / "near", near_settings) as near:
            yield World(near, far, proxy, lm_port)
