"""Who asks whom: a question names the stores that it came by, so that two that are each other's upstream do not ask in a ring; and
log lines name the request that they are of.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import Final

VIA_HEADER: Final = "x-kvobj-via"
HOPS_MAX: Final = 4
"""A question that has come by so many stores goes no further."""

_IDS: Final = re.compile(r"[0-9a-f]{1,64}(?:,[0-9a-f]{1,64}){0,15}\Z").match
_via: ContextVar[tuple[str, ...]] = ContextVar("kvobj_via", default=())
_request_id: ContextVar[str] = ContextVar("kvobj_request_id", default="")


class Via:
    """The stores that the current request came by, and this one, whose id is `store_id` in hex. The former are the task's."""

    def __init__(self, store_id: str) -> None:
        self._store_id = store_id

    @property
    def came_by(self) -> tuple[str, ...]:
        """The stores that the current request came by, the first asker's first."""
        return _via.get()

    @property
    def is_at_end(self) -> bool:
        """Whether the request has come by here before, or by too many: nobody else is asked for it."""
        came_by = _via.get()
        return self._store_id in came_by or len(came_by) >= HOPS_MAX

    def headers(self) -> dict[str, str]:
        """What a question says that this request makes."""
        return {VIA_HEADER: ",".join((*_via.get(), self._store_id))}


class Request:
    """A context in which a request is answered; `written` is its header, which anybody may have sent: it only keeps from asking."""

    def __init__(self, written: str, *, request_id: str = "") -> None:
        self._came_by = tuple(written.split(",")) if _IDS(written) else ()
        self._request_id = request_id

    def __enter__(self) -> None:
        self._tokens = _via.set(self._came_by), _request_id.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        came_by, request_id = self._tokens
        _via.reset(came_by)
        _request_id.reset(request_id)


def tell_request(record: logging.LogRecord) -> bool:
    """A filter of loggers: the line names the request that the upstream was asked for first, where there is one."""
    request_id = _request_id.get()
    if request_id:
        record.msg, record.args = f"{record.getMessage()} request_id={request_id}", ()
    return True
