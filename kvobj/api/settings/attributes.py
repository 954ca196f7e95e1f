"""GetObjectAttributes: what is known of an object, by name, without its bytes. Source: S3 API reference, GetObjectAttributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.chunk_access import open_bucket
from kvobj.api.conditions import Verdict, http_date, judge_read
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_headers import entity_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetObjectAttributes
from kvobj.api.parameters import integer_of, limit_of
from kvobj.catalog.rows import BucketKind, Checksum, ObjectRow, PartInfo
from kvobj.errors import PreconditionFailedError

ATTRIBUTES_HEADER: Final = "x-amz-object-attributes"
_NAMES: Final = frozenset({"ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"})


class ObjectAttributes:
    """Handler of GetObjectAttributes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, exchange: Exchange, operation: GetObjectAttributes) -> Reply:
        """The attributes that the header names. Needs the right to read the object, and that to read its attributes."""
        catalog, fields, key = self._store.catalog, exchange.fields, operation.key
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.GET_OBJECT, key=key)
        (found,) = await catalog.lookup(operation.bucket, [key])
        row = await access.check_read(found, key)
        if access.bucket.kind is not BucketKind.KV:
            access.rights.require(Action.GET_OBJECT_ATTRIBUTES, key=key, row=row)
        wanted = parse_attributes(fields)
        verdict = judge_read(fields, row)
        if verdict is Verdict.FAILED:
            raise PreconditionFailedError("a condition does not hold", bucket=operation.bucket, key=key)
        if verdict is Verdict.NOT_MODIFIED:
            return exchange.reply(304, entity_headers(row))
        document = xml.document("GetObjectAttributesResponse", _nodes(row, wanted, fields))
        headers = [("last-modified", http_date(row.modified_ms)), ("content-type", "application/xml")]
        return exchange.reply(200, headers, document)


def parse_attributes(fields: Mapping[str, str]) -> frozenset[str]:
    """The attributes that x-amz-object-attributes names, in any number of headers. Raises `S3Error` InvalidArgument."""
    names = frozenset(name for piece in fields.get(ATTRIBUTES_HEADER, "").split(",") if (name := piece.strip()))
    if not names:
        raise S3Error(
            "InvalidArgument",
            f"The {ATTRIBUTES_HEADER} header specifying the attributes to be retrieved is either missing or empty.",
            ArgumentName=ATTRIBUTES_HEADER,
        )
    if not names <= _NAMES:
        raise S3Error("InvalidArgument", "Invalid attribute name specified.", ArgumentName=ATTRIBUTES_HEADER)
    return names


def _nodes(row: ObjectRow, wanted: frozenset[str], fields: dict[str, str]) -> list[xml.Node]:
    nodes: list[xml.Node] = []
    if "ETag" in wanted:
        nodes.append(("ETag", row.etag))  # without quotes, in this operation alone
    if "Checksum" in wanted and row.checksums:
        nodes.append(("Checksum", [node for checksum in row.checksums for node in _checksum_nodes(checksum)]))
    if "ObjectParts" in wanted and row.parts:
        nodes.append(("ObjectParts", _part_nodes(row.parts, fields)))
    if "StorageClass" in wanted:
        nodes.append(("StorageClass", "STANDARD"))
    if "ObjectSize" in wanted:
        nodes.append(("ObjectSize", str(row.size_bytes)))
    return nodes


def _checksum_nodes(checksum: Checksum) -> list[xml.Node]:
    # The number of parts behind a composite one is told by PartsCount, and not here.
    value = checksum.value.partition("-")[0]
    return [(f"Checksum{checksum.algorithm}", value), ("ChecksumType", checksum.type)]


def _part_nodes(parts: tuple[PartInfo, ...], fields: dict[str, str]) -> list[xml.Node]:
    nodes: list[xml.Node] = [("PartsCount", str(len(parts)))]
    if any(part.checksum is None for part in parts):
        return nodes  # S3 lists parts of objects with checksums only
    after = integer_of(fields, "x-amz-part-number-marker", default=0)
    limit = limit_of(fields, "x-amz-max-parts")
    following = [part for part in parts if part.number > after]
    page = following[:limit]
    nodes += [
        ("PartNumberMarker", str(after)),
        ("NextPartNumberMarker", str(page[-1].number if page else 0)),
        ("MaxParts", str(limit)),
        ("IsTruncated", "true" if len(following) > len(page) > 0 else "false"),
    ]
    for part in page:
        assert part.checksum is not None
        about: list[xml.Node] = [("PartNumber", str(part.number)), ("Size", str(part.size_bytes))]
        nodes.append(("Part", [*about, (f"Checksum{part.checksum.algorithm}", part.checksum.value)]))
    return nodes
