"""DeleteObjects: up to 1,000 keys in one document, a result a key. Conditions on ETags are checked in the same step.

Source: S3 API reference, DeleteObjects. Content-MD5 is never required: any checksum, or the signed payload digest, does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
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


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """One object of the document. `problem` is the code and message of one that cannot be deleted."""

    key: str
    version_id: str | None
    condition: WriteCondition | None
    problem: tuple[str, str] | None = None


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
                entry if rights.may(Action.DELETE_OBJECT, key=entry.key) else replace(entry, problem=_DENIED)
                for entry in entries
            ]
        wanted = [entry for entry in entries if entry.problem is None]
        outcomes: list[DeleteOutcome] = []
        if wanted:
            conditions = [entry.condition for entry in wanted] if any(entry.condition for entry in wanted) else ()
            bucket, keys = rights.bucket, [entry.key for entry in wanted]
            outcomes = await self._store.delete(bucket.name, keys, conditions, made_ms=bucket.created_ms)
        nodes: list[xml.Node] = []
        for entry, outcome in zip(wanted, outcomes, strict=True):
            if outcome.precondition_failed:
                nodes.append(_error(entry, "PreconditionFailed", "At least one of the preconditions did not hold."))
            elif outcome.kept:
                nodes.append(_error(entry, "ImmutableChunk", f"The object stays: {outcome.kept}."))
            elif not is_quiet:
                about: list[xml.Node] = [("Key", entry.key)]
                if entry.version_id is not None:
                    about.append(("VersionId", entry.version_id))
                nodes.append(("Deleted", about))
        nodes += [_error(entry, *entry.problem) for entry in entries if entry.problem is not None]
        return exchange.xml(xml.document("DeleteResult", nodes))


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
    return DeleteEntry(key, version_id, condition, problem)


def _error(entry: DeleteEntry, code: str, message: str) -> xml.Node:
    return ("Error", [("Key", entry.key), ("Code", code), ("Message", message)])
