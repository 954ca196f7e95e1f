"""The HEAD that nearly all clients send, and the GET of an object that lies in memory: answered at once, without steps that they
do not need.

What asks for anything else goes the way of all requests (`objects_read`), which answers the same; a test holds the two against
each other. Only what is known to change nothing about a read may stand in its head, and only who may do all with the bucket is
answered here.
"""

from __future__ import annotations

from typing import Final

from kvobj.api.exchange import Header
from kvobj.api.message import Reply, RequestHead, ready_fields
from kvobj.api.object_headers import object_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetObject
from kvobj.api.request import Target
from kvobj.api.sigv4 import ANONYMOUS
from kvobj.catalog.rows import BucketRow, ObjectRow, UserRow
from kvobj.store.at_once import at_once

_CHECKSUM_MODE: Final = "x-amz-checksum-mode"
# Of what SDKs send, and of what proxies add, all that no read looks at; and the checksum mode, which this one looks at.
PLAIN_FIELDS: Final = frozenset(
    {
        _CHECKSUM_MODE,
        "accept",
        "accept-encoding",
        "accept-language",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "authorization",
        "cache-control",
        "connection",
        "content-length",
        "content-type",
        "date",
        "host",
        "pragma",
        "user-agent",
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-user-agent",
        "x-forwarded-for",
        "x-forwarded-proto",
    }
)
_METHODS: Final = frozenset({"GET", "HEAD"})
_TIER: Final = "dram"
_REMEMBERED_ROWS: Final = 2048
_REMEMBERED_HEAD_CHARACTERS: Final = 1024


def _is_plain(head: RequestHead, target: Target, fields: dict[str, str]) -> bool:
    """Whether the request, which has no body, is a GET or HEAD of a whole object and says nothing else that counts."""
    return head.method in _METHODS and target.key != "" and not target.parameters and fields.keys() <= PLAIN_FIELDS


def wants_checksums(fields: dict[str, str]) -> bool:
    """Whether the reply is to tell the object's checksums."""
    return _CHECKSUM_MODE in fields and fields[_CHECKSUM_MODE].upper() == "ENABLED"


def is_owners_alone(bucket: BucketRow, user: UserRow) -> bool:
    """Whether the user may do all with the bucket, and the bucket has no say in what is done."""
    return not (bucket.policy or bucket.lifecycle or user is ANONYMOUS) and (user.is_root or bucket.owner == user.id)


class HotReads:
    """Answers plain reads of what is in memory. Event-loop-only."""

    __slots__ = ("_host_id", "_known", "_store")

    def __init__(self, store: ObjectStore, *, host_id: str) -> None:
        self._store = store
        self._host_id: Header = ("x-amz-id-2", host_id)
        # What a row's reply says, by the row itself: one that is read again is the same object where the catalog remembers it.
        self._known: dict[tuple[int, bool, bool], tuple[ObjectRow, str]] = {}

    def reply(
        self, head: RequestHead, target: Target, fields: dict[str, str], user: UserRow, log: dict[str, object]
    ) -> Reply | None:
        """The reply to a request without a body of a user whose signature was verified, or of `ANONYMOUS`; None: it is no plain
        read, or is of more than is at hand. Nothing was done then but that a mark of policy's may be gone, and the handlers are to
        answer. Raises what they would. `log` becomes the reply's."""
        if not _is_plain(head, target, fields):
            return None
        store, name = self._store, target.bucket
        bucket = at_once(store.catalog.bucket(name))
        if bucket is None or not is_owners_alone(bucket, user):
            return None
        is_head = head.method == "HEAD"
        found = (store.look_up_hot if is_head else store.read_hot)(bucket, target.key)
        if found is None:
            return None
        row, body = found.row, found.body
        if is_head and row.lossy is not None:
            return None  # whether a GET would find plain bytes has to be asked
        size_bytes = row.size_bytes if is_head else None
        with_checksums = wants_checksums(fields)
        log["operation"] = GetObject.__name__
        headers: tuple[Header, ...] = (("x-amz-request-id", head.request_id), self._host_id)
        try:
            ready = self._ready(row, bucket, with_checksums=with_checksums, is_head=is_head)
        except ValueError:  # a row that nobody here wrote: who sends replies refuses it, and gives the body back
            said = _said(row, bucket, with_checksums=with_checksums, is_head=is_head)
            return Reply(200, (*headers, *said), body, size_bytes, log=log)
        return Reply(200, headers, body, size_bytes, log=log, ready=ready)

    def short(self, target: Target, user: UserRow, *, with_checksums: bool) -> tuple[str, bytes] | None:
        """As `reply`, to a GET of this object, if it is a short one: what the reply says by its row, as `ready_fields`, and the
        body. Raises `ValueError` where a row holds what no reply may say."""
        store = self._store
        bucket = at_once(store.catalog.bucket(target.bucket))
        if bucket is None or not is_owners_alone(bucket, user):
            return None
        found = store.read_hot(bucket, target.key, only_short=True)
        if found is None or not isinstance(found.body, bytes):
            return None
        return self._ready(found.row, bucket, with_checksums=with_checksums, is_head=False), found.body

    def _ready(self, row: ObjectRow, bucket: BucketRow, *, with_checksums: bool, is_head: bool) -> str:
        """What a reply says by the row. Raises `ValueError`."""
        known = self._known.get((id(row), with_checksums, is_head))
        if known is not None:
            return known[1]
        ready = ready_fields(_said(row, bucket, with_checksums=with_checksums, is_head=is_head))
        # A row that says more is another object each time; and what is remembered is the row, which may be large where its reply
        # is not (parts).
        if len(ready) <= _REMEMBERED_HEAD_CHARACTERS and len(row.blobs) == 1 and not row.parts and row.acl is None:
            if len(self._known) >= _REMEMBERED_ROWS:
                self._known.clear()
            self._known[id(row), with_checksums, is_head] = (row, ready)  # the row, so that its id stays its own
        return ready


def _said(row: ObjectRow, bucket: BucketRow, *, with_checksums: bool, is_head: bool) -> list[Header]:
    headers = object_headers(row, bucket, overrides={}, with_checksums=with_checksums)
    if row.tags:
        headers.append(("x-amz-tagging-count", str(len(row.tags))))
    if not is_head:
        headers.append(("x-kvobj-tier", _TIER))
    return headers
