"""A server with users of each kind, clients of it, and a child process that holds what it opened until it is told otherwise."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from blake3 import blake3
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings, UserSetting, wait_until

from kvobj.client import DEFAULT, ChunkView, Credentials, KvClient, Namespace
from kvobj.client.connection import Endpoint, SignedConnection
from kvobj.client.same_host_lane import GrantAnswer
from kvobj.client.transport import read_answer
from kvobj.same_host.framing import Unframer, framed
from kvobj.same_host.messages import REPLY_BYTES_MAX, Regions, Reply, Request, decode_reply, encode

TRUSTED = UserSetting("writer", "writer-access", "writer-secret", same_host="trusted")
READER = UserSetting("reader", "reader-access", "reader-secret", same_host="all")
STRANGER = UserSetting("stranger", "stranger-access", "stranger-secret")
USERS = (TRUSTED, READER, STRANGER)
HOLDER = Path(__file__).parent / "holder.py"


def settings(*, lease: str = "30 s", dram_mib: int = 256, **sections: dict[str, str]) -> ServerSettings:
    return ServerSettings(
        dram_bytes=dram_mib * MIB,
        nvme_bytes=1024 * MIB,
        buckets=(
            BucketSetting("cache", "kv", "memory"),
            BucketSetting("apart", "kv", "memory", regions="own", owner=STRANGER.id),
        ),
        users=USERS,
        sections={
            "log": {"requests": "false"},
            "gc": {"lease_ttl": f'"{lease}"', "grace": '"1 s"', "sweep_interval": '"1 s"'},
            **sections,
        },
    )


def client_of(
    server: ServerProcess,
    user: UserSetting | None = None,
    *,
    bucket: str = "cache",
    same_host: bool = True,
    timeout_seconds: float = 10.0,
) -> KvClient:
    keys = server.credentials()
    credentials = Credentials(keys.access_key, keys.secret_key)
    if user is not None:
        credentials = Credentials(user.access_key, user.secret_key)
    return KvClient(
        server.endpoint, credentials, bucket, same_host=same_host, timeout_seconds=timeout_seconds, connections=4
    )


def payload(name: str, size_bytes: int) -> memoryview:
    return memoryview(blake3(name.encode()).digest(length=size_bytes))


def noise(size_bytes: int) -> memoryview:
    return memoryview(os.urandom(size_bytes))


def viewed(client: KvClient, name: bytes | str, *, namespace: Namespace = DEFAULT) -> ChunkView:
    """A view of a chunk that is there."""
    view = client.view_chunk(name, namespace=namespace)
    assert view is not None
    return view


def gauge(server: ServerProcess, name: str) -> int:
    """One of the server's metrics."""
    connection = socket.create_connection(("127.0.0.1", server.admin_port), 10)
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        stream.flush()
        for line in stream.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return int(float(line.split()[1]))
    raise AssertionError(f"no metric {name}")


def pinned_bytes(server: ServerProcess) -> int:
    """Bytes of the arena that clients hold."""
    return gauge(server, "kvobj_same_host_pinned_bytes")


def wait_for_pinned(server: ServerProcess, size_bytes: int) -> None:
    """Until clients hold so many bytes of the arena."""
    wait_until(lambda: pinned_bytes(server) == size_bytes, timeout_seconds=15, what=f"{size_bytes} bytes pinned")


def wait_for_nothing_held(server: ServerProcess) -> None:
    """Until no connection, pin, staging room or prepared room is left of any same-host client."""
    for name in ("connections", "pinned_bytes", "handles", "staging_bytes", "prepared_bytes"):
        metric = f"kvobj_same_host_{name}"
        wait_until(lambda metric=metric: gauge(server, metric) == 0, timeout_seconds=15, what=metric)  # type: ignore[misc]


def grant_of(server: ServerProcess, user: UserSetting | None = None, *, bucket: str = "cache") -> GrantAnswer:
    """A grant, asked for as a client does."""
    keys = server.credentials()
    credentials = Credentials(keys.access_key, keys.secret_key)
    if user is not None:
        credentials = Credentials(user.access_key, user.secret_key)
    headers = {"accept": "application/msgpack"}
    with SignedConnection(Endpoint.parse(server.endpoint), credentials) as connection:
        answer = connection.request("POST", f"/{bucket}", query=(("same-host", ""),), headers=headers)
    return read_answer(answer.body, GrantAnswer)


class RawPeer:
    """A connection to the socket that says whatever a test wants."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(path)
        self._unframer = Unframer(REPLY_BYTES_MAX)
        self.descriptors: list[int] = []

    def say(self, request: Request) -> None:
        self.socket.sendall(framed(encode(request)))

    def hear(self) -> Reply | None:
        """The next reply; None once the server has ended the connection."""
        while (message := self._unframer.take()) is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 64)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.descriptors += descriptors
            self._unframer.feed(data)
        return decode_reply(message)

    def ask(self, request: Request) -> Reply | None:
        """Say it, and what is answered but for the regions that come before."""
        self.say(request)
        while isinstance(reply := self.hear(), Regions):
            continue
        return reply

    def is_ended(self) -> bool:
        return self.hear() is None

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw_peer(path: str) -> Iterator[RawPeer]:
    peer = RawPeer(path)
    try:
        yield peer
    finally:
        peer.close()


class Holder:
    """A child process that does what its lines say, and answers each with one."""

    def __init__(self, server: ServerProcess, user: UserSetting | None = None) -> None:
        keys = server.credentials()
        access, secret = (keys.access_key, keys.secret_key) if user is None else (user.access_key, user.secret_key)
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), server.endpoint, access, secret],
            cwd=REPOSITORY,
            env={"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open no file more within the block."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
