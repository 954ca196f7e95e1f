"""TLS of worker processes: whatever the files hold when one is started, it has the pair that is in use."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority, Pair
from cryptography import x509
from module_paths import ModulePaths
from server_process import ServerProcess, wait_until
from worker_server import is_ready, kill_all_workers, wait_for_workers, worker_server, workers_of


class TlsWorkers:
    """A server of two workers with a pair that can be replaced."""

    def __init__(self, process: ServerProcess, authority: Authority, certificate: Path, key: Path) -> None:
        self.process = process
        self.authority = authority
        self.certificate = certificate
        self.key = key

    def use(self, pair: Pair) -> None:
        """Put it in place, and let the server read it; returns when it did."""
        pair.write(self.certificate, self.key)
        self.hang_up("TLS certificate read again")

    def serials(self) -> set[int]:
        """Of the certificates that new connections are shown: as many as come to both workers in all likelihood."""
        return {self._serial() for _ in range(16)}

    def _serial(self) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((self.process.host, self.process.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number

    def hang_up(self, expected: str) -> None:
        """SIGHUP; returns when the log has one line more with this text."""

        def told() -> int:
            return self.process.log_path.read_text().count(expected)

        before = told()
        os.kill(self.process.pid, signal.SIGHUP)
        wait_until(lambda: told() > before, timeout_seconds=20, what=expected)

    def replace_workers(self) -> None:
        """Kill all; returns when others serve."""
        wait_for_workers(self.process, without=kill_all_workers(self.process))


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[TlsWorkers]:
    directory = module_paths.mktemp("tls-workers")
    authority = Authority.make(directory)
    certificate, key = directory / "tls.pem", directory / "tls.key"
    authority.sign().write(certificate, key)
    files = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
    with worker_server(directory / "server", sections={"server": files}) as process:
        yield TlsWorkers(process, authority, certificate, key)


@pytest.fixture
def first(server: TlsWorkers) -> Pair:
    """In use, and the test's own."""
    pair = server.authority.sign()
    server.use(pair)
    return pair


def without_its_key(server: TlsWorkers) -> None:
    server.certificate.write_bytes(server.authority.sign().certificate)


def gone(server: TlsWorkers) -> None:
    server.certificate.unlink()
    server.key.unlink()


@pytest.mark.parametrize("spoil", [without_its_key, gone], ids=["the certificate is there, its key is not", "gone"])
def test_workers_that_die_after_a_bad_reload_are_replaced_with_the_pair_in_use(
    server: TlsWorkers, first: Pair, spoil: Callable[[TlsWorkers], None]
) -> None:
    spoil(server)
    server.hang_up("the TLS certificate was not read again")
    server.replace_workers()
    assert server.serials() == {first.serial}
    assert is_ready(server.process)
    assert {worker["last_end"] for worker in workers_of(server.process)} == {"SIGKILL"}
    mended = server.authority.sign()
    server.use(mended)
    assert server.serials() == {mended.serial}


@pytest.mark.usefixtures("first")
def test_workers_that_are_started_later_have_the_pair_that_was_read_last(server: TlsWorkers) -> None:
    second = server.authority.sign()
    server.use(second)
    gone(server)  # nobody asks for it to be read again
    server.replace_workers()
    assert server.serials() == {second.serial}
