"""A real server with worker processes, and what its tests ask of it: who the workers are, what they do, what is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raw_http import RawConnection
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

WORKERS = 2
BUCKETS = (BucketSetting("plain"), BucketSetting("cache", "kv", "memory"), BucketSetting("kept", "kv", "local"))


@contextmanager
def worker_server(
    directory: Path, *, dram_bytes: int = 96 * MIB, sections: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[ServerProcess]:
    """A running server of two workers with a bucket of each kind."""
    settings = ServerSettings(
        dram_bytes=dram_bytes, nvme_bytes=512 * MIB, buckets=BUCKETS, workers=WORKERS, sections=sections or {}
    )
    with ServerProcess(directory, settings) as server:
        yield server


def workers_of(server: ServerProcess) -> list[dict[str, Any]]:
    """The workers as `status` shows them."""
    workers: list[dict[str, Any]] = server.status()["workers"]
    return workers


def pids_of(server: ServerProcess) -> list[int]:
    """Process ids of the workers."""
    return [int(worker["pid"]) for worker in workers_of(server)]


def children_of(pid: int) -> set[int]:
    """Processes that a process has started, and that live: of a store process its workers and the idle one."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # ended since it was listed
                continue
            if int(parent) == pid and state != "Z":
                found.add(int(entry.name))
    return found


def idle_of(server: ServerProcess) -> int:
    """The process that is kept for the next worker that dies, once there is one."""
    found: set[int] = set()

    def is_there() -> bool:
        found.clear()
        found.update(children_of(server.pid) - set(pids_of(server)))
        return len(found) == 1

    wait_until(is_there, timeout_seconds=20, what="the idle process")
    return found.pop()


def kill_all_workers(server: ServerProcess) -> set[int]:
    """Kill the workers and the idle process, so that the next are started from nothing; who they were."""
    idle_of(server)
    victims = children_of(server.pid)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return victims


def is_ready(server: ServerProcess) -> bool:
    """What the admin port tells a load balancer."""
    with RawConnection(server.host, server.admin_port) as admin:
        admin.send(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return admin.read_reply().status == 200


def wait_for_workers(server: ServerProcess, *, without: set[int] | None = None, timeout_seconds: float = 30.0) -> None:
    """Wait until all workers accept connections, none of them one of `without`."""

    def are_there() -> bool:
        found = workers_of(server)
        return all(worker["is_ready"] and worker["pid"] not in (without or ()) for worker in found)

    wait_until(are_there, timeout_seconds=timeout_seconds, what="all workers")


def pid_behind(server: ServerProcess, connection: RawConnection) -> int:
    """The worker that has the other end of a connection, once it has accepted it: the one whose descriptors name its socket."""
    found: list[int] = []

    def is_accepted() -> bool:
        wanted = f"socket:[{_inode_of(server.port, connection.local_port)}]"
        found.extend(pid for pid in pids_of(server) if wanted in _descriptors_of(pid))
        return bool(found)

    wait_until(is_accepted, timeout_seconds=10, what="the connection to be accepted", pause_seconds=0.002)
    return found[0]


def _descriptors_of(pid: int) -> list[str]:
    names: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(descriptor.readlink()))
        except OSError:  # closed since it was listed
            continue
    return names


def _inode_of(server_port: int, client_port: int) -> str:
    """The inode of the server's end, from the kernel's table of connections."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(place.rpartition(":")[2], 16) for place in fields[1:3])
        if (local, remote) == (server_port, client_port):
            return fields[9]
    raise LookupError("no such connection")


def lives(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
