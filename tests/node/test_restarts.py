"""Restarts as clients see them: sockets that outlive the server, handed over by systemd's protocol or kept by `--hold-sockets`."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import boto3
import pytest
from awscrt import auth, http, io, s3  # type: ignore[import-untyped]
from botocore.config import Config
from module_paths import ModulePaths
from raw_http import RawConnection, RawS3
from server_process import BucketSetting, ServerProcess, ServerSettings, wait_until, write_configuration

PAUSE_SECONDS = 0.02
READY = "kvobj ready "


class HeldServer:
    """A `kvobj serve --hold-sockets` and the servers that it starts."""

    def __init__(self, directory: Path) -> None:
        buckets = [BucketSetting("objects"), BucketSetting("chunks", "kv", "memory")]
        self.process = ServerProcess(directory, ServerSettings(buckets=buckets, arguments=("--hold-sockets",)))

    @property
    def server_pid(self) -> int:
        """The process that serves, not the one that holds; 0 while there is none."""
        children = self._children()
        return int(children[0]) if children else 0

    def children(self) -> int:
        return len(self._children())

    def _children(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def starts(self) -> int:
        return self.process.log_path.read_text().count(READY)

    def log_from_now(self) -> Callable[[], str]:
        """What the log says from now on. Not its last lines: those of requests come up to a tenth of a second later, in one go."""
        path = self.process.log_path
        begins = path.stat().st_size

        def log() -> str:
            return path.read_bytes()[begins:].decode()

        return log

    def restart_by(self, end: Callable[[], None]) -> None:
        """End the server and wait for the next one."""
        before = self.starts()
        end()
        wait_until(lambda: self.starts() > before, timeout_seconds=30, what=f"a start:\n{self.process.log_tail()}")

    def terminate_server(self) -> None:
        os.kill(self.server_pid, signal.SIGTERM)

    def kill_server(self) -> None:
        os.kill(self.server_pid, signal.SIGKILL)

    def renew(self) -> None:
        os.kill(self.process.pid, signal.SIGUSR2)


@contextmanager
def held_server(directory: Path) -> Iterator[HeldServer]:
    held = HeldServer(directory)
    try:
        held.process.start()
        yield held
    finally:
        with suppress(RuntimeError, TimeoutError):
            held.process.terminate()
        held.process.close()


@pytest.fixture(scope="module")
def held(module_paths: ModulePaths) -> Iterator[HeldServer]:
    """One that every test leaves holding, and served."""
    with held_server(module_paths.mktemp("held") / "held") as running:
        yield running


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[HeldServer]:
    """One that the test ends."""
    with held_server(tmp_path / "held") as running:
        yield running


# -- clients that do not stop ------------------------------------------------------------------------------------------


@dataclass
class Busy:
    """A client in a thread: one `step` after the other, until told to stop."""

    step: Callable[[int], None]
    close: Callable[[], None] = lambda: None
    done: int = 0
    errors: list[BaseException] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            try:
                self.step(self.done)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
                self.errors.append(error)
            self.done += 1

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
        self.close()


@contextmanager
def busy(clients: Sequence[Busy]) -> Iterator[None]:
    """All of them at work; on leaving, each has gone on for some more steps and stopped."""
    try:
        for client in clients:
            client.start()
        yield
        counts = [client.done for client in clients]
        wait_until(
            lambda: all(client.done > count + 2 for client, count in zip(clients, counts, strict=True)),
            timeout_seconds=30,
            what="steps after the last restart",
        )
    finally:
        for client in clients:
            client.stop()


class RawClient:
    """Puts objects and reads them back over one keep-alive connection, with no second try."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.s3 = RawS3(server.host, server.port, server.credentials())
        self.name = name
        self.stored: list[str] = []

    def step(self, number: int) -> None:
        connection = self.s3._connection
        if connection is not None and select.select([connection._socket], [], [], 0)[0]:
            self.s3.close()  # the server closed it while it was idle: every HTTP client looks before it sends
        path, body = f"/objects/{self.name}-{number}", f"{self.name} {number}".encode() * 1000
        assert self.s3.request("PUT", path, body).status == 200
        self.stored.append(path)
        got = self.s3.request("GET", path)
        assert (got.status, got.body) == (200, body)


def boto3_client(server: ServerProcess) -> Busy:
    """One that tries nothing twice."""
    credentials = server.credentials()
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=credentials.region,
        config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
    )

    def step(number: int) -> None:
        body = b"boto3" * (number + 1)
        client.put_object(Bucket="objects", Key=f"boto3-{number}", Body=body)
        with client.get_object(Bucket="objects", Key=f"boto3-{number}")["Body"] as stream:
            assert stream.read() == body

    return Busy(step, client.close)


def awscrt_client(server: ServerProcess) -> Busy:
    """The client under LMCache's S3 adapter."""
    credentials = server.credentials()
    group = io.EventLoopGroup(1)
    client = s3.S3Client(
        bootstrap=io.ClientBootstrap(group, io.DefaultHostResolver(group)),
        region=credentials.region,
        credential_provider=auth.AwsCredentialsProvider.new_static(credentials.access_key, credentials.secret_key),
        tls_mode=s3.S3RequestTlsMode.DISABLED,
    )

    def send(kind: s3.S3RequestType, method: str, path: str, body: bytes = b"") -> bytes:
        headers = http.HttpHeaders([("Host", f"{server.host}:{server.port}")])
        if body:
            headers.add("Content-Length", str(len(body)))
        received = bytearray()

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            received[offset:] = chunk

        request = http.HttpRequest(method, path, headers, BytesIO(body) if body else None)
        sent = client.make_request(type=kind, request=request, on_body=on_body)
        finished: Future[None] = sent.finished_future
        finished.result(30)
        return bytes(received)

    def step(number: int) -> None:
        body = b"awscrt" * (number + 1)
        send(s3.S3RequestType.PUT_OBJECT, "PUT", f"/objects/awscrt-{number}", body)
        assert send(s3.S3RequestType.GET_OBJECT, "GET", f"/objects/awscrt-{number}") == body

    return Busy(step)


def test_no_request_fails_while_servers_are_replaced_in_good_order(held: HeldServer) -> None:
    raw = [RawClient(held.process, name) for name in ("a", "b", "c")]
    clients = [Busy(client.step, client.s3.close) for client in raw]
    clients += [boto3_client(held.process), awscrt_client(held.process)]
    with busy(clients):
        pids = [held.server_pid]
        for end in (held.terminate_server, held.renew):
            held.restart_by(end)
            pids.append(held.server_pid)
    assert len(set(pids)) == 3
    assert [client.errors for client in clients] == [[]] * len(clients)


def test_no_client_is_refused_when_a_server_is_killed(held: HeldServer) -> None:
    raw = [RawClient(held.process, name) for name in ("a", "b", "c")]
    clients = [Busy(client.step, client.s3.close) for client in raw]
    with_retries = awscrt_client(held.process)
    with busy([*clients, with_retries]):
        for _ in range(2):
            held.restart_by(held.kill_server)
    for client in clients:
        assert len(client.errors) <= 2, "at most what was in flight at each kill"
        for error in client.errors:
            assert isinstance(error, ConnectionError), error
            assert not isinstance(error, ConnectionRefusedError)
    assert with_retries.errors == [], "the SDK repeats what was cut"
    with held.process.raw() as reader:
        for path in (path for client in raw for path in client.stored):
            assert reader.request("HEAD", path).status == 200


# -- what a holder does ------------------------------------------------------------------------------------------------


def test_a_renewed_server_is_warm_and_holds_what_was_in_memory_alone(held: HeldServer) -> None:
    with held.process.raw() as client:
        assert client.request("PUT", "/chunks/a", b"chunk" * 1000).headers["x-kvobj-durability"] == "memory"
        held.restart_by(held.renew)
    with held.process.raw() as client:
        got = client.request("GET", "/chunks/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (b"chunk" * 1000, "dram")


def test_the_end_of_the_holder_is_a_clean_stop(doomed: HeldServer) -> None:
    server = doomed.server_pid
    with doomed.process.raw() as client:
        client.request("PUT", "/chunks/a", b"chunk")
    assert doomed.process.terminate() == 0
    assert not Path(f"/proc/{server}").exists()
    memory = doomed.process.shared_memory
    assert not list(memory.parent.glob(memory.name + "*")), "memory is freed"
    with pytest.raises(ConnectionRefusedError):
        RawConnection(doomed.process.host, doomed.process.port, 5)


def test_a_server_whose_holder_is_killed_stops_by_itself(doomed: HeldServer) -> None:
    server = doomed.server_pid
    doomed.process.kill()
    wait_until(lambda: not Path(f"/proc/{server}").exists(), timeout_seconds=20, what="the server to stop")
    doomed.process.start()  # both ports and the data directory are free again
    with doomed.process.raw() as client:
        assert client.request("GET", "/").status == 200


def test_two_hundred_clients_wait_until_a_start_succeeds_at_last(held: HeldServer) -> None:
    good = held.process.configuration.read_text()
    log = held.log_from_now()
    held.process.configuration.write_text("colour = 1\n")
    held.kill_server()
    wait_until(lambda: "the server ended with status 2" in log(), timeout_seconds=20, what="a failed start")
    with ExitStack() as stack:
        client = stack.enter_context(held.process.raw())
        waiting = [stack.enter_context(client.connect()) for _ in range(200)]
        for connection in waiting:
            connection.send(client.head("GET", "/").head)
        held.process.configuration.write_text(good)
        assert {connection.read_reply().status for connection in waiting} == {200}


def test_a_restart_with_a_configuration_that_cannot_be_used_leaves_the_server_alone(held: HeldServer) -> None:
    server, good, log = held.server_pid, held.process.configuration.read_text(), held.log_from_now()
    held.process.configuration.write_text("colour = 1\n")
    os.kill(held.process.pid, signal.SIGUSR2)
    wait_until(lambda: "no restart, the server goes on" in log(), timeout_seconds=20, what="the refusal")
    assert "colour: is no known key" in log()
    with held.process.raw() as client:
        assert client.request("GET", "/").status == 200
    assert held.server_pid == server
    held.process.configuration.write_text(good)
    held.restart_by(held.renew)
    assert held.server_pid != server


@contextmanager
def hanging_check(held: HeldServer) -> Iterator[None]:
    """A restart was asked for, and the check of the configuration hangs: that is a pipe with nobody at its other end."""
    configuration = held.process.configuration
    good = configuration.rename(configuration.with_suffix(".good"))
    os.mkfifo(configuration)
    try:
        held.renew()
        wait_until(lambda: held.children() == 2, timeout_seconds=20, what="the check")
        yield
    finally:
        good.rename(configuration)


def test_a_check_that_hangs_does_not_keep_a_holder_from_stopping(doomed: HeldServer) -> None:
    with hanging_check(doomed):
        assert doomed.process.terminate() == 0
    assert "the check of the configuration" not in doomed.process.log_path.read_text()


def test_a_server_that_is_killed_while_a_check_hangs_is_started_again(held: HeldServer) -> None:
    before = held.starts()
    with hanging_check(held):
        pass
    held.kill_server()
    wait_until(lambda: held.starts() > before, timeout_seconds=30, what="the next server")
    wait_until(lambda: held.children() == 1, timeout_seconds=20, what="the end of the check")


def test_a_check_that_hangs_is_given_up(held: HeldServer) -> None:
    server, told = held.server_pid, "no restart, the server goes on: the check of the configuration did not end"
    log = held.log_from_now()
    with hanging_check(held):
        wait_until(lambda: told in log(), timeout_seconds=30, what="the end of the check")
    assert held.server_pid == server
    held.restart_by(held.renew)


EARLIER_VERSION = """
import argparse, os, signal, sys
from kvobj.app.readiness import READY, tell
parser = argparse.ArgumentParser(prog="kvobj")
parser.add_argument("serve")
parser.parse_args()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
tell(os.environ, READY)
print("ready", flush=True)
sys.exit(0 if signal.sigwait({signal.SIGUSR2, signal.SIGTERM}) == signal.SIGTERM else 3)
"""
HOLDER = """
import os, sys
from kvobj.app.holder import hold
from kvobj.config.settings import AdminSettings, ListenAddress, ServerSettings, Settings
any_port = ListenAddress("127.0.0.1", 0)
settings = Settings(server=ServerSettings(listen=any_port), admin=AdminSettings(listen=any_port))
sys.exit(hold(settings, [sys.executable, sys.argv[1], "serve"], os.environ))
"""


def test_a_version_that_knows_no_check_is_started_without(tmp_path: Path) -> None:
    (tmp_path / "earlier.py").write_text(EARLIER_VERSION)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "earlier.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        holder.send_signal(signal.SIGUSR2)
        assert holder.stdout.readline() == "ready\n"
        holder.terminate()
        _, error = holder.communicate(timeout=30)
    assert holder.returncode == 0
    assert "cannot check its configuration: restarting as it is" in error
    assert "the server ended with status 3" in error


def test_a_hangup_is_passed_on_and_ends_nobody(held: HeldServer) -> None:
    server, told = held.server_pid, "hangup: there is no TLS"
    before = held.process.log_path.read_text().count(told)
    os.kill(held.process.pid, signal.SIGHUP)
    wait_until(lambda: held.process.log_path.read_text().count(told) > before, timeout_seconds=10, what="the hangup")
    assert held.server_pid == server
    with held.process.raw() as client:
        assert client.request("GET", "/").status == 200


def test_a_first_start_that_fails_ends_the_holder(tmp_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stranger").touch()
    config.write_text(f'[server]\nlisten = "127.0.0.1:0"\ndata = "{tmp_path}/data"\n[admin]\nlisten = "127.0.0.1:0"\n')
    command = [sys.executable, "-m", "kvobj", "serve", "--hold-sockets", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "is neither empty nor a kvobj data directory" in ended.stderr


def test_a_port_in_use_ends_the_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "kvobj", "serve", "--hold-sockets", "--data", str(tmp_path / "data")]
        command += ["--listen", f"127.0.0.1:{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert f"server.listen: cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr


# -- systemd's protocol ------------------------------------------------------------------------------------------------

LAUNCHER = """
import fcntl, os, sys
names, numbers, command = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
moved = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in numbers]
for place, number in enumerate(moved, 3):
    os.dup2(number, place)
    os.close(number)
os.environ.update(LISTEN_FDS=str(len(moved)), LISTEN_PID=str(os.getpid()))
if names:
    os.environ["LISTEN_FDNAMES"] = names
os.execv(command[0], command)
"""


@dataclass
class Activated:
    """A server started as systemd starts one, with `sockets` that stay the test's."""

    sockets: Sequence[socket.socket]
    names: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self, directory: Path, dram_path: Path) -> subprocess.Popen[str]:
        config = directory / "kvobj.toml"
        settings = ServerSettings(buckets=[BucketSetting("objects")])
        write_configuration(
            config, settings, data=directory / "data", dram_path=dram_path, listen="127.0.0.1:0", admin_port=0
        )
        numbers = [each.fileno() for each in self.sockets]
        launch = [sys.executable, "-c", LAUNCHER, self.names, ",".join(map(str, numbers))]
        command = [*launch, sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
        self.process = subprocess.Popen(
            command, pass_fds=numbers, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def stop(self) -> tuple[str, str]:
        """SIGTERM, and what it had written to standard output and standard error."""
        assert self.process is not None
        self.process.terminate()
        return self.process.communicate(timeout=30)


@pytest.fixture
def activate(tmp_path: Path, shm_path: Path) -> Iterator[Callable[..., Activated]]:
    with ExitStack() as stack:

        def start(*sockets: socket.socket, names: str = "") -> Activated:
            activated = Activated(sockets, names)
            process = activated.start(tmp_path, shm_path / "arena")
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return activated

        yield start


@pytest.fixture
def listening() -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))


def asked(listener: socket.socket, target: str) -> int:
    """The status of an unsigned request, which waits as long as it has to: 403 on the S3 port."""
    with RawConnection(*listener.getsockname()[:2]) as connection:
        connection.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return connection.read_reply().status


def test_sockets_are_taken_over_and_who_came_before_the_start_is_answered(
    activate: Callable[..., Activated], listening: Callable[[], socket.socket]
) -> None:
    first, second = listening(), listening()
    with RawConnection(*first.getsockname()[:2]) as early:
        early.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server = activate(first, second)
        assert early.read_reply().status == 403
    assert asked(second, "/health/ready") == 200
    out, _ = server.stop()
    assert f"{READY}http://127.0.0.1:{first.getsockname()[1]}\n" in out
    with RawConnection(*second.getsockname()[:2]) as waiting:  # accepted by the kernel, for the next server
        waiting.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        activate(second, first, names="admin:s3")
        assert waiting.read_reply().status == 200
    assert asked(first, "/") == 403


def test_what_is_no_listening_socket_is_refused(activate: Callable[..., Activated]) -> None:
    with socket.socket() as unbound:
        server = activate(unbound)
        assert server.process is not None
        _, error = server.process.communicate(timeout=30)
        assert server.process.returncode == 2
        assert "\n  LISTEN_FDS: descriptor 3 (s3): is no listening TCP socket\n" in error
