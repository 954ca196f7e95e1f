"""A real `kvobj serve` as a child process, for tests that must see what a client sees and kill what a client cannot.

Owns its data directory and its place in shared memory, and removes the latter when closed whatever happened.
Not for many threads: one owner starts, stops and kills.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self
from urllib.parse import urlsplit

from free_ports import free_port
from raw_http import Credentials, RawS3

MIB: Final = 1024 * 1024
REPOSITORY: Final = Path(__file__).resolve().parent.parent
_READY: Final = "kvobj ready "
_SHARED_MEMORY: Final = Path("/dev/shm")


def wait_until(
    condition: Callable[[], bool], *, timeout_seconds: float, what: str, pause_seconds: float = 0.05
) -> None:
    """Wait for something in another process that gives no signal; TimeoutError names it."""
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        pause.wait(pause_seconds)


@dataclass(frozen=True, slots=True)
class BucketSetting:
    """One `[[buckets]]` entry."""

    name: str
    kind: str = "ordinary"
    durability: str = "local"
    regions: str = "shared"
    owner: str = "root"
    remote: str = "never"


@dataclass(frozen=True, slots=True)
class UserSetting:
    """One `[[users]]` entry; a display name that differs from the id shows where which of them is told."""

    id: str
    access_key: str
    secret_key: str
    same_host: str = "no"

    @property
    def display_name(self) -> str:
        """What listings call the user."""
        return f"The {self.id}"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a test's server is given. Small by default; `sections` is more TOML by section name. `workers`: by default what the
    environment variable KVOBJ_TEST_WORKERS says, so that any of these tests can be run against worker processes. `hbm`, `remote`
    and each of `upstreams` are the lines of those tables, whose values are TOML; `RemoteStore.tier()` makes the second."""

    dram_bytes: int = 128 * MIB
    nvme_bytes: int = 1024 * MIB
    buckets: Sequence[BucketSetting] = ()
    users: Sequence[UserSetting] = ()
    domains: Sequence[str] = ("localhost",)
    nvme_path: Path | None = None
    nvme_segment_bytes: int | None = None
    dram_path: Path | None = None
    hbm: Mapping[str, str] | None = None
    remote: Mapping[str, str] | None = None
    upstreams: Sequence[Mapping[str, str]] = ()
    sections: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    workers: int = int(os.environ.get("KVOBJ_TEST_WORKERS", "1"))


def write_configuration(
    path: Path, settings: ServerSettings, *, data: Path, dram_path: Path, listen: str, admin_port: int
) -> None:
    """Write the TOML file that `kvobj serve --config` is given."""
    lines = [
        "[server]",
        f'listen = "{listen}"',
        f'data = "{data}"',
        f"domains = {json.dumps(list(settings.domains))}",
        f"workers = {settings.workers}",
        *(f"{name} = {value}" for name, value in settings.sections.get("server", {}).items()),
        "[admin]",
        f'listen = "127.0.0.1:{admin_port}"',
        *(f"{name} = {value}" for name, value in settings.sections.get("admin", {}).items()),
    ]
    for bucket in settings.buckets:
        lines += [
            "[[buckets]]",
            f'name = "{bucket.name}"',
            f'kind = "{bucket.kind}"',
            f'durability = "{bucket.durability}"',
            f'regions = "{bucket.regions}"',
            f'owner = "{bucket.owner}"',
        ]
        if bucket.remote != "never":
            lines.append(f'remote = "{bucket.remote}"')
    for user in settings.users:
        lines += [
            "[[users]]",
            f'id = "{user.id}"',
            f'display_name = "{user.display_name}"',
            f'access_key = "{user.access_key}"',
            f'secret_key = "{user.secret_key}"',
            f'same_host = "{user.same_host}"',
        ]
    for upstream in settings.upstreams:
        lines += ["[[upstreams]]", *(f"{name} = {value}" for name, value in upstream.items())]
    lines += _tiers(settings, dram_path)
    sections: dict[str, dict[str, str]] = {"gc": {"sweep_interval": '"1 s"'}}
    for name, values in settings.sections.items():
        if name not in ("server", "admin"):
            sections.setdefault(name, {}).update(values)
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")


def _tiers(settings: ServerSettings, dram_path: Path) -> list[str]:
    """The `[[tiers]]` entries, fast to slow."""
    lines = []
    if settings.hbm is not None:
        lines += ["[[tiers]]", 'kind = "hbm"', *(f"{name} = {value}" for name, value in settings.hbm.items())]
    lines += [
        "[[tiers]]",
        'kind = "dram"',
        f'capacity = "{settings.dram_bytes // MIB} MiB"',
        f'path = "{dram_path}"',
        "[[tiers]]",
        'kind = "nvme"',
        f'capacity = "{settings.nvme_bytes // MIB} MiB"',
    ]
    if settings.nvme_path is not None:
        lines.append(f'path = "{settings.nvme_path}"')
    if settings.nvme_segment_bytes is not None:
        lines.append(f'segment_size = "{settings.nvme_segment_bytes // MIB} MiB"')
    if settings.remote is not None:  # the last tier always
        lines += ["[[tiers]]", 'kind = "remote"', *(f"{name} = {value}" for name, value in settings.remote.items())]
    return lines


class ServerProcess:
    """A kvobj server as a child process, restartable on the same data. A context manager: leaving kills what runs."""

    def __init__(self, directory: Path, settings: ServerSettings | None = None) -> None:
        self.directory = directory
        self.settings = settings or ServerSettings()
        self.data = directory / "data"
        self.configuration = directory / "kvobj.toml"
        self.shared_memory = self.settings.dram_path or _SHARED_MEMORY / f"kvobj-test-{secrets.token_hex(6)}"
        self.admin_port = free_port()
        self.host = "127.0.0.1"
        self.port = free_port()  # the same again at every start, as after a real crash
        self.scheme = "http"
        self.starts = 0
        self.start_seconds = 0.0
        self.log_path = directory / "server.log"
        self._process: subprocess.Popen[str] | None = None
        self._pump: threading.Thread | None = None
        self._is_ready = False
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The S3 endpoint's URL."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, timeout_seconds: float = 60.0) -> None:
        """Start and wait for the ready line. RuntimeError with the log's tail if it does not come."""
        if self.is_running:
            raise RuntimeError("the server is running")
        write_configuration(
            self.configuration,
            self.settings,
            data=self.data,
            dram_path=self.shared_memory,
            listen=f"{self.host}:{self.port}",
            admin_port=self.admin_port,
        )
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.settings.environment}
        command = [
            sys.executable,
            "-m",
            "kvobj",
            "serve",
            "--config",
            str(self.configuration),
            *self.settings.arguments,
        ]
        ready = threading.Event()
        self._is_ready = False
        began = time.monotonic()
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        if self._process.stdout is None:
            raise RuntimeError("no pipe to the server")
        self._pump = threading.Thread(target=self._read_output, args=(self._process.stdout, ready), daemon=True)
        self._pump.start()
        if not ready.wait(timeout_seconds) or not self._is_ready:
            tail = self.log_tail()
            self.kill()
            raise RuntimeError(f"the server did not become ready:\n{tail}")
        self.start_seconds = time.monotonic() - began
        self.starts += 1

    def _read_output(self, output: IO[str], ready: threading.Event) -> None:
        with output, self.log_path.open("a") as log:
            for line in output:
                log.write(line)
                log.flush()
                if line.startswith(_READY):
                    url = urlsplit(line[len(_READY) :].strip())
                    self.scheme, self.port = url.scheme, url.port or 0
                    self._is_ready = True
                    ready.set()
        ready.set()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the server wrote."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def terminate(self, *, by: signal.Signals = signal.SIGTERM, timeout_seconds: float = 60.0) -> int:
        """Signal it, wait, return the exit status. TimeoutError (after a kill) if it does not end."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(by)
        try:
            status = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the server did not stop:\n{self.log_tail()}") from None
        self._reap()
        return status

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Within the block it takes connections and answers nothing: a stopped process."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL and reap. Nothing if it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._reap()

    def _reap(self) -> None:
        if self._pump is not None:
            self._pump.join(10)
        self._process = None
        self._pump = None

    def close(self) -> None:
        """Kill what runs and remove what is left in shared memory."""
        self.kill()
        for leftover in self.shared_memory.parent.glob(self.shared_memory.name + "*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def credentials(self) -> Credentials:
        """The root key pair that the first start made."""
        values = tomllib.loads((self.data / "credentials").read_text())
        return Credentials(str(values["access_key"]), str(values["secret_key"]))

    def raw(self, *, timeout_seconds: float = 30.0) -> RawS3:
        """A raw S3 client, to be closed by the caller."""
        return RawS3(self.host, self.port, self.credentials(), timeout_seconds)

    def admin(self, method: str, path: str, *, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """One signed call of the admin API, its JSON answer. RuntimeError unless it is a 200."""
        with RawS3(self.host, self.admin_port, self.credentials(), 60.0) as raw:
            reply = raw.request(method, path, query=query, payload=None)
        if reply.status != 200:
            raise RuntimeError(f"admin call failed: {reply.status} {reply.body[:500]!r}")
        answer: dict[str, Any] = json.loads(reply.body or b"{}")
        return answer

    def status(self) -> dict[str, Any]:
        """The admin API's status document."""
        return self.admin("GET", "/api/v1/status")

    def tier(self, name: str) -> dict[str, Any]:
        """One tier's entry in the status document."""
        tiers: list[dict[str, Any]] = self.status()["tiers"]
        return next(tier for tier in tiers if tier["name"] == name)

    def occupancy(self) -> dict[str, int]:
        """Everything that a leak would leave behind: reserved arena bytes, and blobs of each tier."""
        status = self.status()
        found = {"arena reserved_bytes": int(status["arena"]["reserved_bytes"])}
        for tier in status["tiers"]:
            found[f"{tier['name']} blobs"] = int(tier["blobs"])
        return found

    def settled_occupancy(self, *, timeout_seconds: float = 30.0) -> dict[str, int]:
        """The occupancy once nothing waits to be written behind or reaped: what a test may compare with."""

        def is_settled() -> bool:
            queues = self.status()["queues"]
            return not any(queues[name] for name in ("delete", "write_behind", "blobs_in_use"))

        wait_until(is_settled, timeout_seconds=timeout_seconds, what="the queues to be empty")
        return self.occupancy()

    def wait_for_occupancy(self, expected: Mapping[str, int], *, timeout_seconds: float = 30.0) -> None:
        """Wait until the occupancy is as expected; AssertionError tells the difference."""
        try:
            wait_until(lambda: self.occupancy() == expected, timeout_seconds=timeout_seconds, what="occupancy")
        except TimeoutError:
            found, queues = self.occupancy(), self.status()["queues"]
            raise AssertionError(f"leak: expected {dict(expected)}, found {found}, queues {queues}") from None

    def cpu_seconds(self) -> float:
        """User and system CPU seconds that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> dict[str, int]:
        """RssAnon, RssShmem and RssFile of the process."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {
            name: int(value.split()[0]) * 1024
            for name, _, value in (line.partition(":") for line in lines)
            if name in {"RssAnon", "RssShmem", "RssFile"}
        }
