"""DeleteObjects: up to 1,000 keys in one document, a result a key. Conditions on ETags are checked in the same step.

Source: S3 API reference, DeleteObjects. Content-MD5 is never required: any checksum, or the signed payload digest, does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.access.bucket_access import BucketAccess
from kvobj.api.checksums import parse_announced
from kvobj.api.conditions import delete_condition
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeleteObjects
from kvobj.api.request import check_key
from kvobj.catalog.rows import DeleteOutcome, WriteCondition

MAX_DELETE_BYTES: Final = 2 * 1024 * 1024
MAX_DELETE_KEYS: Final = 1000
_DENIED: Final = ("AccessDenied", "Access Denied")
_ABSENT: Final = ("NoSuchKey", "The specified key does not exist.")


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """One object of the document. `problem` is the code and message of one that cannot be deleted, `etag` what the document says,
    which is this entry's If-Match."""

    key: str
    version_id: str | None
    condition: WriteCondition | None
    problem: tuple[str, str] | None = None
    etag: str | None = None

    @property
    def stated(self) -> dict[str, str]:
        """What it states as headers of DELETE do."""
        return {} if self.etag is None else {"if-match": self.etag}


class ObjectDeletes:
    """Handler of DeleteObjects."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def delete(self, exchange: Exchange, operation: DeleteObjects) -> Reply:
        """Delete what the document names, and tell of each key (with Quiet: of failures only)."""
        rights = exchange.access(await self._store.catalog.bucket(operation.bucket), operation.bucket)
        if not rights.bucket.policy:
            # Grants are the bucket's alone: no need to read what is denied as a whole.
            rights.require(Action.DELETE_OBJECT)
        announced = parse_announced(exchange.fields, exchange.authentication)
        document = await exchange.read_document(announced, limit_bytes=MAX_DELETE_BYTES)
        entries, is_quiet = parse_delete(document)
        if rights.bucket.policy:
            entries = [
                entry
                if rights.may(Action.DELETE_OBJECT, key=entry.key, stated=entry.stated)
                else replace(entry, problem=_DENIED)
                for entry in entries
            ]
        if not rights.may_all:
            entries = await self._comparable(rights, entries)
        wanted = [entry for entry in entries if entry.problem is None]
        outcomes: list[DeleteOutcome] = []
        if wanted:
            conditions = [entry.condition for entry in wanted] if any(entry.condition for entry in wanted) else ()
            bucket, keys = rights.bucket, [entry.key for entry in wanted]
            outcomes = await self._store.delete(bucket.name, keys, conditions, made_ms=bucket.created_ms)
        nodes = [_told(rights, entry, outcome) for entry, outcome in zip(wanted, outcomes, strict=True)]
        if is_quiet:
            nodes = [node for node in nodes if node[0] != "Deleted"]
        nodes += [_error(entry, *entry.problem) for entry in entries if entry.problem is not None]
        return exchange.xml(xml.document("DeleteResult", nodes))

    async def _comparable(self, rights: BucketAccess, entries: list[DeleteEntry]) -> list[DeleteEntry]:
        """The entries, those denied that compare what the caller may not read: the answer would tell of it."""
        comparing = [entry.key for entry in entries if entry.condition is not None and entry.condition.compares]
        if not comparing:
            return entries
        rows = dict(zip(comparing, await self._store.catalog.lookup(rights.bucket.name, comparing), strict=True))
        denied = {
            key for key, row in rows.items() if row is not None and not rights.may(Action.GET_OBJECT, key=key, row=row)
        }
        return [
            replace(entry, problem=_DENIED)
            if entry.problem is None and entry.condition is not None and entry.key in denied
            else entry
            for entry in entries
        ]


def parse_delete(document: bytes) -> tuple[list[DeleteEntry], bool]:
    """The document's entries and whether it is quiet. Raises `S3Error` MalformedXML, also above 1,000 keys."""
    try:
        root = xml.parse(document, root="Delete")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    objects = [element for element in root.children if element.name == "Object"]
    if not 1 <= len(objects) <= MAX_DELETE_KEYS:
        raise S3Error("MalformedXML")
    return [_parse_entry(element) for element in objects], (root.child_text("Quiet") or "").strip().lower() == "true"


def _parse_entry(element: xml.Element) -> DeleteEntry:
    key, version_id, etag = (element.child_text(name) for name in ("Key", "VersionId", "ETag"))
    if not key:
        raise S3Error("MalformedXML")
    condition, problem = None, None
    if version_id not in (None, "", "null"):
        problem = ("NoSuchVersion", "The specified version does not exist.")
    else:
        try:
            check_key(key)
            condition = delete_condition(etag, element.child_text("Size"), element.child_text("LastModifiedTime"))
        except S3Error as error:
            problem = (error.code, error.message)
    return DeleteEntry(key, version_id, condition, problem, etag)


def _told(rights: BucketAccess, entry: DeleteEntry, outcome: DeleteOutcome) -> xml.Node:
    """What the reply says of one entry."""
    if outcome.precondition_failed:
        return _error(entry, "PreconditionFailed", "At least one of the preconditions did not hold.")
    if outcome.kept:
        return _error(entry, "ImmutableChunk", f"The object stays: {outcome.kept}.")
    if outcome.removed is None and entry.condition is not None and entry.condition.if_match is not None:
        return _error(entry, *(_ABSENT if rights.may_know_absence(entry.key, Action.DELETE_OBJECT) else _DENIED))
    about: list[xml.Node] = [("Key", entry.key)]
    if entry.version_id is not None:
        about.append(("VersionId", entry.version_id))
    return ("Deleted", about)


def _error(entry: DeleteEntry, code: str, message: str) -> xml.Node:
    return ("Error", [("Key", entry.key), ("Code", code), ("Message", message)])
