"""What of a request its rights may depend on."""

from __future__ import annotations

from typing import Protocol

from kvobj.api.message import RequestHead
from kvobj.api.sigv4 import Authentication
from kvobj.clock import Clock


class RequestFacts(Protocol):
    """The part of an `Exchange` that policies look at: who asks (`authentication`), from where (`source_address`), how
    (`is_secure`), with which headers (`fields`) and query (`overrides`), when (`clock`)."""

    @property
    def authentication(self) -> Authentication:
        """Who asks."""
        ...

    @property
    def head(self) -> RequestHead:
        """The request line, the client's address, whether over TLS."""
        ...

    @property
    def fields(self) -> dict[str, str]:
        """Headers by lower-case name."""
        ...

    @property
    def overrides(self) -> dict[str, str]:
        """The query's parameters, decoded."""
        ...

    @property
    def source_address(self) -> str:
        """The client's address: the socket's, or what a trusted proxy says."""
        ...

    @property
    def is_secure(self) -> bool:
        """The client spoke TLS, with us or with a trusted proxy."""
        ...

    @property
    def clock(self) -> Clock:
        """Time now."""
        ...
