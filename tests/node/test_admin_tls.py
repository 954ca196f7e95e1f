"""TLS on the admin port: what it speaks, whom kvobj-admin trusts, and how a new certificate comes into use; with workers, too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from certificates import Authority
from cryptography import x509
from module_paths import ModulePaths
from raw_http import RawConnection, RawS3
from server_process import REPOSITORY, ServerProcess, ServerSettings, wait_until

from kvobj.admin.cli import main
from kvobj.data_directory import read_admin_endpoint


class AdminServer:
    """A server whose two ports have a pair each."""

    def __init__(self, authority: Authority, directory: Path, *, workers: int) -> None:
        self.authority = authority
        self.directory = directory
        self.pairs: dict[str, tuple[Path, Path]] = {}
        sections: dict[str, dict[str, str]] = {}
        for section in ("server", "admin"):
            certificate, key = directory / f"{section}.pem", directory / f"{section}.key"
            self.pairs[section] = (certificate, key)
            sections[section] = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
            self.renew(section)
        self.process = ServerProcess(directory / "server", ServerSettings(sections=sections, workers=workers))

    def renew(self, section: str) -> int:
        """Write a new pair; its serial number."""
        pair = self.authority.sign()
        pair.write(*self.pairs[section])
        return pair.serial

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.process.admin_port}"

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=10, context=self.authority.client_context()) as reply:  # noqa: S310 - https
            text: str = reply.read().decode()
        return text

    def serial(self, section: str) -> int:
        port = self.process.admin_port if section == "admin" else self.process.port
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            self.authority.client_context().wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "workers"])
def server(request: pytest.FixtureRequest, module_paths: ModulePaths) -> Iterator[AdminServer]:
    directory = module_paths.mktemp("admin-tls")
    running = AdminServer(Authority.make(directory), directory, workers=request.param)
    with running.process:
        yield running


def test_health_and_metrics_are_scraped_over_tls(server: AdminServer) -> None:
    assert server.get("/health/live") == "live\n"
    assert server.get("/health/ready") == "ready\n"
    metrics = server.get("/metrics")
    assert "kvobj_admin_tls_certificate_expiry_timestamp_seconds " in metrics
    assert "kvobj_admin_requests_total" in metrics


def test_plain_http_is_turned_away(server: AdminServer) -> None:
    with RawConnection("127.0.0.1", server.process.admin_port, 10) as plain:
        plain.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert plain.is_closed_by_peer()
    assert server.get("/health/live") == "live\n"


def test_kvobj_admin_finds_the_port_by_its_note_and_trusts_the_bundle_that_it_is_given(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_admin_endpoint(server.process.data) == server.url
    data, bundle = str(server.process.data), str(server.authority.bundle)
    assert main(["--data", data, "--ca-bundle", bundle, "--json", "status"], environment={}) == 0
    assert json.loads(capsys.readouterr().out)["is_ready"]
    endpoint = f"https://localhost:{server.process.admin_port}"
    assert main(["--data", data, "ls", "--endpoint", endpoint, "--ca-bundle", bundle], environment={}) == 0


def test_kvobj_admin_takes_the_bundle_of_a_profile_or_of_the_environment(
    server: AdminServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = server.process.credentials()
    (tmp_path / "kvobj").mkdir()
    (tmp_path / "kvobj" / "profiles.toml").write_text(
        f'[here]\nendpoint = "{server.url}"\naccess_key = "{keys.access_key}"\nsecret_key = "{keys.secret_key}"\n'
        f'ca_bundle = "{server.authority.bundle}"\n'
    )
    assert main(["--profile", "here", "user", "list"], environment={"XDG_CONFIG_HOME": str(tmp_path)}) == 0
    assert "root" in capsys.readouterr().out
    command = [sys.executable, "-m", "kvobj.admin", "--data", str(server.process.data), "--json", "status"]
    environment = {**os.environ, "SSL_CERT_FILE": str(server.authority.bundle)}
    told = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (told.returncode, json.loads(told.stdout)["is_ready"]) == (0, True)


def test_kvobj_admin_refuses_a_server_that_it_does_not_trust(
    server: AdminServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, stranger = str(server.process.data), Authority.make(tmp_path)
    assert main(["--data", data, "--ca-bundle", str(stranger.bundle), "status"], environment={}) == 1
    assert "certificate verify failed" in capsys.readouterr().err
    assert main(["--data", data, "--ca-bundle", str(tmp_path / "absent"), "status"], environment={}) == 2
    assert f"--ca-bundle: {tmp_path / 'absent'}: cannot be used" in capsys.readouterr().err


def test_a_hangup_brings_the_new_certificates_of_both_ports(server: AdminServer) -> None:
    serials = {section: server.renew(section) for section in ("server", "admin")}
    os.kill(server.process.pid, signal.SIGHUP)
    for section, serial in serials.items():
        wait_until(lambda s=section, n=serial: server.serial(s) == n, timeout_seconds=10, what=f"{section}'s")  # type: ignore[misc]


def test_a_bad_pair_of_one_port_leaves_it_and_the_other_is_renewed(server: AdminServer) -> None:
    before, renewed = server.serial("admin"), server.renew("server")
    certificate, _ = server.pairs["admin"]
    certificate.write_text("no certificate")
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: server.serial("server") == renewed, timeout_seconds=10, what="the server's")
    wait_until(
        lambda: f"admin.tls_certificate: {certificate}: holds no" in server.process.log_tail(20),
        timeout_seconds=10,
        what="the complaint",
    )
    assert server.serial("admin") == before
    assert "kvobj_admin_tls_reload_failures_total 1.0" in server.get("/metrics")
    server.renew("admin")


def test_requests_of_s3_are_served_beside_it(server: AdminServer) -> None:
    context = server.authority.client_context()
    with RawS3("localhost", server.process.port, server.process.credentials(), tls=context) as s3:
        assert s3.request("PUT", "/beside").status == 200


def test_a_start_refuses_a_pair_that_cannot_be_used(tmp_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text(
        f'[server]\nlisten = "127.0.0.1:0"\ndata = "{tmp_path}/data"\n[admin]\nlisten = "127.0.0.1:0"\n'
        f'tls_certificate = "{tmp_path}/absent.pem"\ntls_key = "{tmp_path}/absent.key"\n'
    )
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert f"admin.tls_certificate: {tmp_path}/absent.pem: cannot be read" in ended.stderr


def test_handshakes_that_stall_count_among_the_connections_of_every_process(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    authority.sign().write(certificate, key)
    files = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
    limits = {"connections": "8", "header_timeout": '"1 s"'}
    settings = ServerSettings(sections={"server": files, "limits": limits}, workers=2)
    with ServerProcess(tmp_path / "server", settings) as process:
        silent = [socket.create_connection((process.host, process.port), timeout=20) for _ in range(64)]
        try:
            wait_until(lambda: _gauge(process, "kvobj_s3_tls_handshakes") == 64, timeout_seconds=5, what="handshakes")
            for each in silent:  # ended at the deadline
                assert each.recv(1) == b""
        finally:
            for each in silent:
                each.close()
        wait_until(lambda: _gauge(process, "kvobj_s3_connections") == 0, timeout_seconds=5, what="their places")
        # The kernel deals by chance: each of the two takes up to the whole of so small a limit.
        assert _gauge(process, "kvobj_s3_refused_connections_total") == 64 - 2 * 8
        assert _gauge(process, "kvobj_s3_failed_tls_handshakes_total") == 64
        with RawS3("localhost", process.port, process.credentials(), tls=authority.client_context()) as s3:
            assert s3.request("GET", "/").status == 200


def _gauge(process: ServerProcess, name: str) -> float:
    with RawConnection(process.host, process.admin_port) as admin:
        admin.send(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
        lines = admin.read_reply().body.decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(name + " "))
