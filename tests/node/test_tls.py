"""TLS of a real server: what it speaks, how a new certificate comes into use, and what a start says of a pair it cannot use."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority, Pair
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from module_paths import ModulePaths
from raw_http import RawConnection, RawS3, sign_head
from server_process import MIB, ServerProcess, ServerSettings, wait_until

BODY = bytes(range(256)) * (16 * MIB // 256)


class TlsServer:
    """A server with a pair that can be replaced."""

    def __init__(self, authority: Authority, directory: Path) -> None:
        self.authority = authority
        self.certificate, self.key = directory / "tls.pem", directory / "tls.key"
        self.first = authority.sign()
        self.first.write(self.certificate, self.key)
        files = {"tls_certificate": f'"{self.certificate}"', "tls_key": f'"{self.key}"'}
        self.process = ServerProcess(
            directory / "server", ServerSettings(domains=("s3.localhost",), sections={"server": files})
        )

    def handshake(self, context: ssl.SSLContext | None = None, name: str = "localhost") -> ssl.SSLSocket:
        """A connection of the caller's own."""
        plain = socket.create_connection((self.process.host, self.process.port), timeout=10)
        try:
            return (context or self.authority.client_context()).wrap_socket(plain, server_hostname=name)
        except BaseException:
            plain.close()
            raise

    def serial(self) -> int:
        """The serial number of the certificate that a new connection is shown, be it good or not."""
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        with self.handshake(unverified) as connection:
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number

    def s3(self) -> RawS3:
        return RawS3("localhost", self.process.port, self.process.credentials(), tls=self.authority.client_context())

    def hang_up(self, until: Callable[[], bool]) -> None:
        os.kill(self.process.pid, signal.SIGHUP)
        wait_until(until, timeout_seconds=10, what=f"the reload:\n{self.process.log_tail(5)}", pause_seconds=0.01)

    def metric(self, name: str) -> float:
        with RawConnection(self.process.host, self.process.admin_port) as admin:
            admin.send(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            text = admin.read_reply().body.decode()
        (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])


@pytest.fixture(scope="module")
def authority(module_paths: ModulePaths) -> Authority:
    return Authority.make(module_paths.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority, module_paths: ModulePaths) -> Iterator[TlsServer]:
    running = TlsServer(authority, module_paths.mktemp("tls"))
    with running.process:
        with running.s3() as s3:
            assert s3.request("PUT", "/objects").status == 200
            assert s3.request("PUT", "/objects/large", BODY).status == 200
        yield running


# -- what is spoken ----------------------------------------------------------------------------------------------------


def only(version: ssl.TLSVersion, authority: Authority) -> ssl.SSLContext:
    context = authority.client_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is what these versions are, and why they are refused
        context.minimum_version, context.maximum_version = version, version
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken_with_authenticated_ciphers(server: TlsServer, version: ssl.TLSVersion) -> None:
    with server.handshake(only(version, server.authority)) as connection:
        cipher = connection.cipher()
        assert connection.version() == version.name.replace("v1_", "v1.")
        assert cipher is not None
        assert any(name in cipher[0] for name in ("GCM", "CHACHA20"))


def test_tls_1_1_is_refused(server: TlsServer) -> None:
    context = only(ssl.TLSVersion.TLSv1_1, server.authority)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        server.handshake(context)


def test_a_cipher_without_authentication_is_refused(server: TlsServer) -> None:
    context = only(ssl.TLSVersion.TLSv1_2, server.authority)
    context.set_ciphers("ECDHE-ECDSA-AES256-SHA")
    with pytest.raises(ssl.SSLError):
        server.handshake(context)
    context.set_ciphers("ECDHE-ECDSA-AES256-SHA:ECDHE-ECDSA-AES256-GCM-SHA384")
    with server.handshake(context) as connection:
        assert connection.version() == "TLSv1.2"


def test_of_the_protocols_that_a_client_offers_http_1_1_is_taken(server: TlsServer) -> None:
    for offered, taken in ((["h2", "http/1.1"], "http/1.1"), (["h2"], None), ([], None)):
        context = server.authority.client_context()
        context.set_alpn_protocols(offered)
        with server.handshake(context) as connection:
            assert connection.selected_alpn_protocol() == taken


def test_a_bucket_is_reached_by_its_name_under_the_domain(server: TlsServer) -> None:
    host = f"objects.s3.localhost:{server.process.port}"
    signed = sign_head(server.process.credentials(), "GET", host, "/large", headers={"range": "bytes=5-9"})
    with server.handshake(name="objects.s3.localhost") as connection:
        connection.sendall(signed.head)
        reply = b""
        while not reply.endswith(BODY[5:10]):
            piece = connection.recv(65536)
            assert piece, reply
            reply += piece
    assert reply.startswith(b"HTTP/1.1 206 ")


def test_a_client_that_speaks_no_tls_is_turned_away(server: TlsServer) -> None:
    with RawConnection(server.process.host, server.process.port, 10) as plain:
        plain.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert plain.is_closed_by_peer()
    assert server.serial() == server.first.serial


# -- a new certificate -------------------------------------------------------------------------------------------------


def test_a_hangup_brings_a_new_certificate_and_no_body_notices(server: TlsServer) -> None:
    with server.s3() as s3, s3.connect() as sending, s3.connect() as receiving:
        head = s3.head("PUT", "/objects/over-the-reload", headers={"content-length": str(len(BODY))}).head
        sending.send(head + BODY[: MIB + 17])
        receiving.send(s3.head("GET", "/objects/large").head)

        second = server.authority.sign()
        second.write(server.certificate, server.key)
        server.hang_up(lambda: server.serial() == second.serial)

        sending.send(BODY[MIB + 17 :])
        assert sending.read_reply().status == 200
        got = receiving.read_reply()
        assert (got.status, got.body) == (200, BODY)
        sending.send(s3.head("GET", "/objects/over-the-reload").head)  # the connection goes on with the old one
        assert sending.read_reply().body == BODY
    assert server.metric("kvobj_tls_certificate_expiry_timestamp_seconds") == second.not_after.timestamp()
    said = f"subject CN=localhost, names localhost, *.s3.localhost, 127.0.0.1, expires {second.not_after.isoformat()}"
    assert f"TLS certificate read again: {said}" in server.process.log_path.read_text()


def test_a_bad_pair_is_logged_and_the_one_in_use_stays(server: TlsServer) -> None:
    before, failures = server.serial(), server.metric("kvobj_tls_reload_failures_total")
    server.key.write_bytes(server.authority.sign().key)
    server.hang_up(lambda: f"tls_key: {server.key}: is not the key" in server.process.log_tail(20))
    assert server.serial() == before
    server.certificate.write_text("no certificate")
    server.hang_up(lambda: f"tls_certificate: {server.certificate}: holds no" in server.process.log_tail(20))
    assert server.serial() == before
    assert server.metric("kvobj_tls_reload_failures_total") == failures + 2
    mended = server.authority.sign()
    mended.write(server.certificate, server.key)
    server.hang_up(lambda: server.serial() == mended.serial)


def test_a_certificate_that_has_expired_is_served_with_a_warning(server: TlsServer) -> None:
    server.authority.sign(days=-1).write(server.certificate, server.key)
    server.hang_up(lambda: "clients will refuse the TLS certificate: it has expired" in server.process.log_tail(20))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        server.handshake()
    mended = server.authority.sign()
    mended.write(server.certificate, server.key)
    server.hang_up(lambda: server.serial() == mended.serial)


# -- a pair that cannot be used ----------------------------------------------------------------------------------------


def absent(pair: Pair, certificate: Path, key: Path) -> str:
    key.write_bytes(pair.key)
    return f"server.tls_certificate: {certificate}: cannot be read: No such file or directory"


def a_directory(pair: Pair, certificate: Path, key: Path) -> str:
    pair.write(certificate, key)
    key.unlink()
    key.mkdir()
    return f"server.tls_key: {key}: cannot be read: Is a directory"


def another_key(pair: Pair, certificate: Path, key: Path) -> str:
    other = Authority.make(key.parent).sign()
    pair.write(certificate, key)
    key.write_bytes(other.key)
    return f"server.tls_key: {key}: is not the key of the certificate {certificate}"


def swapped(pair: Pair, certificate: Path, key: Path) -> str:
    pair.write(key, certificate)
    return f"server.tls_certificate: {certificate}: holds no certificate that can be read (PEM)"


def an_encrypted_key(pair: Pair, certificate: Path, key: Path) -> str:
    pair.write(certificate, key)
    plain = load_pem_private_key(pair.key, password=None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    return f"server.tls_key: {key}: is encrypted: a server has nobody to ask for a passphrase"


def an_empty_file(pair: Pair, certificate: Path, key: Path) -> str:
    pair.write(certificate, key)
    certificate.write_bytes(b"")
    return f"server.tls_certificate: {certificate}: is empty"


@pytest.mark.parametrize("fault", [absent, a_directory, another_key, swapped, an_encrypted_key, an_empty_file])
def test_a_start_refuses_a_pair_that_cannot_be_used(
    authority: Authority, tmp_path: Path, fault: Callable[[Pair, Path, Path], str]
) -> None:
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    problem = fault(authority.sign(), certificate, key)
    config = tmp_path / "kvobj.toml"
    config.write_text(
        f'[server]\nlisten = "127.0.0.1:0"\ndata = "{tmp_path}/data"\n'
        f'tls_certificate = "{certificate}"\ntls_key = "{key}"\n[admin]\nlisten = "127.0.0.1:0"\n'
    )
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == "kvobj: this configuration cannot be used:"
    assert f"  {problem}" in ended.stderr.splitlines()[1:]
