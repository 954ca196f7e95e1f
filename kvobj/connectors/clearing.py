"""Removing all that a namespace has, while others may go on storing in it."""

from __future__ import annotations

import time

from kvobj.connectors.bucket_calls import PAGE_KEYS_MAX
from kvobj.connectors.link import StoreLink
from kvobj.connectors.used_namespace import NotGrantedError
from kvobj.errors import AccessDeniedError, KvobjError, UnavailableError


def clear(link: StoreLink, *, seconds: float) -> None:
    """Remove the chunks of the link's namespace in one pass, in order of their names. What stood there at the beginning is gone
    after it; of what is stored meanwhile that which comes behind the pass may stay.

    Raises, and logs as an error, where chunks were not removed and may be had on: `AccessDeniedError` for who may not remove them,
    else `UnavailableError`, also where the pass did not end within so many seconds (and two calls' time): there was more, or
    others store as fast. What it had removed by then stays so.
    """
    deadline, after = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        page = link.page(after=after, limit=PAGE_KEYS_MAX)
        names = [name for name, _size in page or ()]
        if page is None or not link.delete(names):
            reason = str(link.report()["last_error"])
            is_forbidden = reason.startswith(NotGrantedError.__name__)
            raise _told(link, AccessDeniedError if is_forbidden else UnavailableError, reason)
        if len(names) < PAGE_KEYS_MAX:
            return
        after = names[-1]
    raise _told(link, UnavailableError, f"there were more than could be removed in {seconds:g} s")


def _told(link: StoreLink, kind: type[KvobjError], reason: str) -> KvobjError:
    why = f"the chunks in namespace {link.settings.namespace} were not removed, and may be had on"
    link.log.error("%s: %s", why, reason)
    return kind(why, reason=reason)
