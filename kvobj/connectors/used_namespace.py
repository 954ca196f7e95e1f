"""The namespace that a link uses: asked for once, asked for anew where that may have changed, and what the user may do in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from kvobj.client.kv import KvClient
from kvobj.client.kv_values import DEFAULT, DEFAULT_NAME, Namespace
from kvobj.connectors.declared import differing
from kvobj.connectors.link_settings import LinkSettings
from kvobj.errors import (
    AccessDeniedError,
    InvalidRequestError,
    KvobjError,
    NamespaceConflictError,
    NoSuchNamespaceError,
    PinLimitExceededError,
    QuotaExceededError,
)

RIGHTS_SECONDS: Final = 60.0
"""Who may only read asks again after so long whether it may store."""

T = TypeVar("T")


class NotGrantedError(AccessDeniedError):
    """The user may not do this in a place that it may use: nothing is wrong with the place."""


class UsedNamespace:
    """Thread-safe. Errors are those of the client's calls; `NoSuchNamespaceError` for a bucket that has none,
    `NamespaceConflictError` for one that is declared otherwise."""

    def __init__(self, client: KvClient, settings: LinkSettings) -> None:
        self._client = client
        self._settings = settings
        self._told: Namespace | None = None
        self._may_write_due = 0.0

    @property
    def known(self) -> Namespace | None:
        """It, if it is known; asks nobody. Another thread may forget it at any time."""
        return self._told

    def get(self) -> Namespace:
        """It; declared, if that is due."""
        space = self._told
        if space is None:
            try:
                space = self._asked()
            except InvalidRequestError as error:  # an ordinary bucket, which would take PUTs all the same
                raise NoSuchNamespaceError(error.message, **error.data) from error
            self._told = space
            self._may_write_due = time.monotonic() + RIGHTS_SECONDS
        return space

    def forget(self) -> None:
        """Ask again which namespace this is: somebody may have removed or declared it."""
        self._told = None

    def ping(self) -> None:
        """Find out whether the server answers and the namespace may be used."""
        space = self.get()
        self._client.match(namespace=space, ids=[bytes(32)] if space.has_chains else ["ping"])

    def check_may_write(self) -> None:
        """`NotGrantedError` where the server has said that the user may only read: no bytes are sent to hear it again. Asked anew
        now and then, since rights change. Asks which namespace this is if nobody has: a server that hangs is then waited for once,
        and not for each way to store."""
        if not self.get().may_write and time.monotonic() >= self._may_write_due:
            self.forget()
        if not self.get().may_write:
            raise NotGrantedError("the user may read this namespace, and not store", namespace=self.get().name)

    def granted(self, call: Callable[[], T]) -> T:
        """Make a call that wants more than reading: `NotGrantedError` where that is refused, and reading is not."""
        try:
            return call()
        except (PinLimitExceededError, QuotaExceededError):
            raise
        except AccessDeniedError as error:
            if not self._may_read():
                raise
            raise NotGrantedError(error.message, **error.data) from error

    def _may_read(self) -> bool:
        try:
            self.ping()
        except KvobjError:
            return False
        return True

    def _asked(self) -> Namespace:
        name, declaration = self._settings.namespace, self._settings.declaration
        if declaration is not None:
            if self._settings.declare:
                return self._client.declare_namespace(name, declaration)
            space = self._client.namespace(name)
            if differs := differing(space.declaration, declaration):
                raise NamespaceConflictError(
                    f"the namespace is declared otherwise: {', '.join(differs)}", namespace=name, differs=differs
                )
            return space
        if name != DEFAULT_NAME:
            return self._client.namespace(name)
        self._client.match(namespace=DEFAULT, ids=["ping"])  # told of to owners alone, used by whom it may be used
        return DEFAULT
