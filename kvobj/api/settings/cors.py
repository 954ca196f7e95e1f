"""Cross-origin rules of a bucket: the document, put, got and deleted whole. What the rules do is in `cross_origin`.

Source: S3 API reference, PutBucketCors and CORSRule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.checksums import parse_announced
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeleteBucketCors, GetBucketCors, PutBucketCors
from kvobj.catalog.setting_rows import BucketUpdate, CorsRule

MAX_DOCUMENT_BYTES: Final = 64 * 1024
MAX_RULES: Final = 100
MAX_ID_CHARACTERS: Final = 255
METHODS: Final = ("GET", "PUT", "POST", "DELETE", "HEAD")
_MAX_AGE: Final = re.compile(r"\d{1,10}\Z", re.ASCII).match
_MAX_INTEGER: Final = 2**31 - 1
# What is told in a header of a reply may hold nothing else.
_VISIBLE: Final = re.compile(r"[\x20-\x7e]*\Z").match
_LISTS: Final = frozenset({"AllowedOrigin", "AllowedMethod", "AllowedHeader", "ExposeHeader"})
_SINGLES: Final = frozenset({"ID", "MaxAgeSeconds"})


class CorsSettings:
    """Handlers of ?cors."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, exchange: Exchange, operation: GetBucketCors) -> Reply:
        """The bucket's rules; without any it is a 404."""
        catalog = self._store.catalog
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.GET_BUCKET_CORS)
        if not row.cors:
            raise S3Error("NoSuchCORSConfiguration", BucketName=row.name)
        return exchange.xml(xml.document("CORSConfiguration", cors_document(row.cors)))

    async def put(self, exchange: Exchange, operation: PutBucketCors) -> Reply:
        """Replace the bucket's rules."""
        catalog = self._store.catalog
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.PUT_BUCKET_CORS)
        announced = parse_announced(exchange.fields, exchange.authentication)
        rules = parse_cors(await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES))
        await catalog.update_bucket(row.name, BucketUpdate(cors=rules), made_ms=row.created_ms)
        return exchange.reply(200)

    async def delete(self, exchange: Exchange, operation: DeleteBucketCors) -> Reply:
        """Take the bucket's rules away, if there are any."""
        catalog = self._store.catalog
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.PUT_BUCKET_CORS)
        if row.cors:
            await catalog.update_bucket(row.name, BucketUpdate(cors=()), made_ms=row.created_ms)
        return exchange.reply(204)


def parse_cors(document: bytes) -> tuple[CorsRule, ...]:
    """The rules of a CORSConfiguration, in its order. Raises `S3Error`: MalformedXML, InvalidRequest, InvalidArgument."""
    try:
        root = xml.parse(document, root="CORSConfiguration")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    if not root.children or any(child.name != "CORSRule" for child in root.children):
        raise S3Error("MalformedXML")
    if len(root.children) > MAX_RULES:
        raise S3Error(
            "InvalidRequest", f"The number of CORS rules should not exceed allowed limit of {MAX_RULES} rules."
        )
    return tuple(_parse_rule(element) for element in root.children)


def _parse_rule(element: xml.Element) -> CorsRule:
    lists: dict[str, list[str]] = {name: [] for name in _LISTS}
    singles: dict[str, str] = {}
    for child in element.children:
        if child.name in _LISTS:
            lists[child.name].append(child.text.strip())
        elif child.name in _SINGLES and child.name not in singles:
            singles[child.name] = child.text
        else:
            raise S3Error("MalformedXML")
    if not lists["AllowedOrigin"] or not lists["AllowedMethod"]:
        raise S3Error("MalformedXML")
    _check_lists(lists)
    rule_id = singles.get("ID", "")
    if len(rule_id) > MAX_ID_CHARACTERS:
        raise S3Error("InvalidArgument", f"ID length should not exceed allowed limit of {MAX_ID_CHARACTERS}")
    return CorsRule(
        id=rule_id,
        origins=tuple(lists["AllowedOrigin"]),
        methods=tuple(lists["AllowedMethod"]),
        headers=tuple(lists["AllowedHeader"]),
        exposed=tuple(lists["ExposeHeader"]),
        max_age_seconds=_parse_max_age(singles.get("MaxAgeSeconds")),
    )


def _check_lists(lists: dict[str, list[str]]) -> None:
    for method in lists["AllowedMethod"]:
        if method not in METHODS:
            raise S3Error(
                "InvalidRequest", f"Found unsupported HTTP method in CORS config. Unsupported method is {method}"
            )
    for name in ("AllowedOrigin", "AllowedHeader"):
        for pattern in lists[name]:
            if pattern.count("*") > 1:
                raise S3Error("InvalidRequest", f'{name} "{pattern}" can not have more than one wildcard.')
    for header in lists["ExposeHeader"]:
        if "*" in header:
            raise S3Error(
                "InvalidRequest",
                f'ExposeHeader "{header}" contains wildcard. We currently do not support wildcard for ExposeHeader.',
            )
        if not _VISIBLE(header):
            raise S3Error("InvalidRequest", "An ExposeHeader is no name of a header.")


def _parse_max_age(value: str | None) -> int | None:
    if value is None:
        return None
    value = value.strip()
    if not _MAX_AGE(value) or int(value) > _MAX_INTEGER:
        raise S3Error("MalformedXML")
    return int(value)


def cors_document(rules: Iterable[CorsRule]) -> list[xml.Node]:
    """The children of a CORSConfiguration that tells of the rules."""
    return [("CORSRule", _rule_nodes(rule)) for rule in rules]


def _rule_nodes(rule: CorsRule) -> list[xml.Node]:
    nodes: list[xml.Node] = [("ID", rule.id)] if rule.id else []
    nodes += [("AllowedOrigin", origin) for origin in rule.origins]
    nodes += [("AllowedMethod", method) for method in rule.methods]
    nodes += [("AllowedHeader", header) for header in rule.headers]
    nodes += [("ExposeHeader", header) for header in rule.exposed]
    if rule.max_age_seconds is not None:
        nodes.append(("MaxAgeSeconds", str(rule.max_age_seconds)))
    return nodes
