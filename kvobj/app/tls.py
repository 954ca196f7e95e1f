"""TLS of a listener: one certificate chain and its key, checked whole before they are used, and replaced without a pause.

TLS 1.2 and 1.3, forward secrecy and authenticated ciphers only; HTTP/1.1 is the one protocol offered (ALPN). `reload` puts a new
pair into the context that the listeners have: handshakes from then on use it, connections that are open go on with theirs. Both
files are read once and what was checked is what is loaded, so a file that changes meanwhile does no harm. Event loop only.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvobj.clock import Clock
from kvobj.config.settings import TlsSettings
from kvobj.errors import ConfigurationError
from kvobj.metrics import Metrics

# TLS 1.2 (RFC 9325 §4.2); those of TLS 1.3 are all sound and OpenSSL's own choice.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_PEM_BYTES_MAX: Final = 1024 * 1024
Section = Literal["server", "admin"]
"""Of the configuration: whose pair it is."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says of itself. Times are UTC; `names`: the DNS names and addresses that clients may ask for."""

    subject: str
    names: tuple[str, ...]
    not_before: dt.datetime
    not_after: dt.datetime

    def __str__(self) -> str:
        names = ", ".join(self.names) or "(none)"
        return f"subject {self.subject or '(none)'}, names {names}, expires {self.not_after.isoformat()}"

    def complaint(self, now: dt.datetime) -> str | None:
        """Why clients will refuse it at this time, or None."""
        if now >= self.not_after:
            return "it has expired"
        if now < self.not_before:
            return f"it is not valid before {self.not_before.isoformat()}"
        return None


class ServedCertificate:
    """The pair in use, and the context with it that listeners are given."""

    __slots__ = ("_clock", "_failures", "_log", "_section", "_settings", "certificate", "context")

    def __init__(
        self,
        settings: TlsSettings,
        context: ssl.SSLContext,
        certificate: Certificate,
        *,
        section: Section,
        clock: Clock,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        """`metrics` have no other certificate of the section."""
        self._settings = settings
        self._section = section
        self._clock = clock
        self._log = log.getChild("tls")
        self.context = context
        self.certificate = certificate
        prefix = "kvobj_tls" if section == "server" else "kvobj_admin_tls"
        metrics.gauge_of(
            f"{prefix}_certificate_expiry_timestamp_seconds",
            "when the TLS certificate in use expires, in seconds since 1970",
            self._expiry,
        )
        self._failures = metrics.counter(
            f"{prefix}_reload_failures", "times a TLS certificate was to be read again and could not be used"
        )

    @classmethod
    def load(
        cls,
        settings: TlsSettings,
        clock: Clock,
        metrics: Metrics,
        log: logging.Logger,
        *,
        section: Section = "server",
    ) -> Self:
        """Read and check the pair. Raises `ConfigurationError` with the path of the file at fault."""
        pair, context = _Pair.read(settings, section), _context()
        _put_into(context, pair, settings, section)
        served = cls(settings, context, pair.certificate, section=section, clock=clock, metrics=metrics, log=log)
        served._tell("in use")
        return served

    def reload(self) -> None:
        """Read the pair again and use it from the next handshake on. Where it cannot be used, that is logged and the one in
        use stays."""
        try:
            pair = _Pair.read(self._settings, self._section)
            # What cannot be loaded leaves a context without a key: not ours.
            _put_into(_context(), pair, self._settings, self._section)
            _put_into(self.context, pair, self._settings, self._section)
        except ConfigurationError as error:
            self._failures.inc()
            self._log.error(
                "the TLS certificate%s was not read again, the one in use stays (%s): %s",
                self._of_which_port(),
                self.certificate,
                error,
            )
            return
        self.certificate = pair.certificate
        self._tell("read again")

    def _expiry(self) -> float:
        return self.certificate.not_after.timestamp()

    def _tell(self, what: str) -> None:
        self._log.info("TLS certificate%s %s: %s", self._of_which_port(), what, self.certificate)
        now = dt.datetime.fromtimestamp(self._clock.now_ms() / 1000, dt.UTC)
        if complaint := self.certificate.complaint(now):
            self._log.warning("clients will refuse the TLS certificate%s: %s", self._of_which_port(), complaint)

    def _of_which_port(self) -> str:
        return " of the admin port" if self._section == "admin" else ""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both files' contents, which fit each other."""

    chain: bytes
    key: bytes
    certificate: Certificate

    @classmethod
    def read(cls, settings: TlsSettings, section: Section) -> Self:
        problems: list[str] = []
        chain = _read(settings.certificate, f"{section}.tls_certificate", problems)
        key = _read(settings.key, f"{section}.tls_key", problems)
        leaf = _leaf(chain, f"{section}.tls_certificate: {settings.certificate}", problems)
        private = _private_key(key, f"{section}.tls_key: {settings.key}", problems)
        if leaf and private and _public_bytes(leaf) != _public_bytes(private):
            problems.append(
                f"{section}.tls_key: {settings.key}: is not the key of the certificate {settings.certificate}"
            )
        if problems or leaf is None:
            raise ConfigurationError(problems)
        return cls(chain, key, _described(leaf))


def _context() -> ssl.SSLContext:
    # Not `create_default_context`: that obeys SSLKEYLOGFILE, and the secrets of all connections would go to a file.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _put_into(context: ssl.SSLContext, pair: _Pair, settings: TlsSettings, section: Section) -> None:
    with _as_file(pair.chain) as chain, _as_file(pair.key) as key:
        try:
            context.load_cert_chain(chain, key, password=b"")
        except ssl.SSLError as error:
            where = f"{section}.tls_certificate: {settings.certificate}"
            raise ConfigurationError(
                [f"{where}: cannot be used with {settings.key}: {error.reason or error}"]
            ) from error


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path for OpenSSL, which takes nothing else, to bytes in memory."""
    file = os.memfd_create("kvobj-tls")
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _read(path: Path, setting: str, problems: list[str]) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_PEM_BYTES_MAX + 1)
    except OSError as error:
        problems.append(f"{setting}: {path}: cannot be read: {error.strerror}")
        return b""
    if len(content) > _PEM_BYTES_MAX:
        problems.append(f"{setting}: {path}: is no PEM file: longer than {_PEM_BYTES_MAX} bytes")
        return b""
    if not content:
        problems.append(f"{setting}: {path}: is empty")
    return content


def _leaf(chain: bytes, where: str, problems: list[str]) -> x509.Certificate | None:
    if not chain:
        return None
    try:
        return x509.load_pem_x509_certificates(chain)[0]
    except ValueError:
        problems.append(f"{where}: holds no certificate that can be read (PEM)")
        return None


def _private_key(key: bytes, where: str, problems: list[str]) -> PrivateKeyTypes | None:
    if not key:
        return None
    try:
        return load_pem_private_key(key, password=None)
    except TypeError:
        problems.append(f"{where}: is encrypted: a server has nobody to ask for a passphrase")
    except Exception:  # noqa: BLE001 - unknown algorithms come as errors of their own kinds
        problems.append(f"{where}: holds no private key that can be read (PEM)")
    return None


def _public_bytes(of: x509.Certificate | PrivateKeyTypes) -> bytes:
    return of.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _described(leaf: x509.Certificate) -> Certificate:
    try:
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = tuple(str(name.value) for name in extension.value)
    except (x509.ExtensionNotFound, ValueError):
        names = ()
    return Certificate(
        subject=leaf.subject.rfc4514_string(),
        names=names,
        not_before=leaf.not_valid_before_utc,
        not_after=leaf.not_valid_after_utc,
    )
