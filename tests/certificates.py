"""Certificates for tests of TLS: an authority of the test's own, and pairs that it signs for loopback names."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its chain and its key, as PEM."""

    certificate: bytes
    key: bytes
    serial: int
    not_after: dt.datetime

    def write(self, certificate: Path, key: Path) -> None:
        """Put both where a server is told to find them."""
        certificate.write_bytes(self.certificate)
        key.write_bytes(self.key)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates; `bundle` is what clients are told to trust."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    bundle: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """A new authority whose bundle lies in `directory`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder("kvobj test authority", key.public_key(), "kvobj test authority", days=2)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        certificate = builder.sign(key, hashes.SHA256())
        bundle = directory / "authority.pem"
        bundle.write_bytes(certificate.public_bytes(Encoding.PEM))
        return cls(certificate, key, bundle)

    def sign(self, name: str = "localhost", *, days: int = 2) -> Pair:
        """A new pair for `name`, the names under s3.localhost and 127.0.0.1; negative `days`: expired so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, key.public_key(), "kvobj test authority", days=days)
        names = [
            x509.DNSName("localhost"),
            x509.DNSName("*.s3.localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(authority_key, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        chain = certificate.public_bytes(Encoding.PEM) + self.certificate.public_bytes(Encoding.PEM)
        key_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pair(chain, key_bytes, certificate.serial_number, certificate.not_valid_after_utc)

    def client_context(self) -> ssl.SSLContext:
        """A client's context that trusts this authority and checks names."""
        return ssl.create_default_context(cafile=self.bundle)


def _builder(subject: str, public_key: ec.EllipticCurvePublicKey, issuer: str, *, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 30 * _DAY)
        .not_valid_after(now + days * _DAY)
    )
