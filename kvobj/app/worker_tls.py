"""TLS of worker processes: a pair that came as bytes, so that no worker depends on what the files hold when it starts.

What is to be said and counted of a certificate the store process does, once for all. Importing this takes as long as `tls`.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from kvobj.app.tls import ServedCertificate
from kvobj.app.worker_orders import TlsPair
from kvobj.clock import SystemClock
from kvobj.config.settings import TlsSettings
from kvobj.errors import ConfigurationError
from kvobj.metrics import Metrics


class GivenCertificate:
    """A `ServedCertificate` whose files lie in memory. `ConfigurationError` for a pair that cannot be used."""

    __slots__ = ("_certificate", "_key", "_served")

    def __init__(self, pair: TlsPair) -> None:
        self._certificate, self._key = os.memfd_create("kvobj-tls-certificate"), os.memfd_create("kvobj-tls-key")
        self._put(pair)
        settings = TlsSettings(_path(self._certificate), _path(self._key))
        quiet = logging.getLogger("kvobj.worker.given")  # one of the tree: what is below another would be heard
        quiet.setLevel(logging.CRITICAL + 1)
        try:
            self._served = ServedCertificate.load(settings, SystemClock(), Metrics(), quiet)
        except ConfigurationError:
            self.close()
            raise

    @property
    def context(self) -> ssl.SSLContext:
        """What listeners are given; it has each new pair too."""
        return self._served.context

    def replace(self, pair: TlsPair) -> None:
        """Use this pair from the next handshake on. One that cannot be used changes nothing."""
        self._put(pair)
        self._served.reload()

    def close(self) -> None:
        """Nothing is replaced any more."""
        os.close(self._certificate)
        os.close(self._key)

    def _put(self, pair: TlsPair) -> None:
        for file, content in ((self._certificate, pair.certificate), (self._key, pair.key)):
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)


def is_usable(pair: TlsPair) -> bool:
    """Whether workers can be given this pair."""
    try:
        GivenCertificate(pair).close()
    except ConfigurationError:
        return False
    return True


def _path(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}")
