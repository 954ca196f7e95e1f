"""Tags as S3 has them: sets of at most 10 (an object) or 50 (a bucket) names with values, in XML or in a header. Pure.

Source: S3 User Guide, "Categorizing your storage using tags", and its tag restrictions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote_plus

from kvobj.api import xml
from kvobj.api.errors import S3Error

OBJECT_TAGS_MAX: Final = 10
BUCKET_TAGS_MAX: Final = 50
MAX_NAME_CHARACTERS: Final = 128
MAX_VALUE_CHARACTERS: Final = 256
MAX_HEADER_CHARACTERS: Final = 8192
TAGGING_HEADER: Final = "x-amz-tagging"

_PLAIN: Final = re.compile(r"[\w\s+\-=._:/@]*\Z").match
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})").search


def parse_tagging(document: bytes, *, tags_max: int) -> dict[str, str]:
    """The tags of a Tagging document. Raises `S3Error`: MalformedXML, InvalidTag, BadRequest for too many."""
    try:
        root = xml.parse(document, root="Tagging")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    sets = [child for child in root.children if child.name == "TagSet"]
    if len(sets) != 1 or len(root.children) != 1:
        raise S3Error("MalformedXML")
    return tags_of_elements(sets[0].children, tags_max=tags_max)


def tags_of_elements(elements: Iterable[xml.Element], *, tags_max: int) -> dict[str, str]:
    """The tags of Tag elements. Raises `S3Error` as `parse_tagging`."""
    pairs: list[tuple[str, str]] = []
    for tag in elements:
        names = [child.name for child in tag.children]
        if tag.name != "Tag" or sorted(names) != ["Key", "Value"]:
            raise S3Error("MalformedXML")
        pairs.append((tag.child_text("Key") or "", tag.child_text("Value") or ""))
    return checked_tags(pairs, tags_max=tags_max)


def tags_of_header(fields: Mapping[str, str]) -> dict[str, str]:
    """The tags of x-amz-tagging: names and values URL-encoded, as in a query.

    Raises `S3Error`: InvalidArgument, InvalidTag, BadRequest.
    """
    value = fields.get(TAGGING_HEADER)
    if not value:
        return {}
    if len(value) > MAX_HEADER_CHARACTERS or _BAD_ESCAPE(value):
        raise S3Error(
            "InvalidArgument",
            "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters "
            "without tag name duplicates.",
            ArgumentName=TAGGING_HEADER,
        )
    pairs: list[tuple[str, str]] = []
    for piece in value.split("&"):
        name, _, text = piece.partition("=")
        try:
            pairs.append((unquote_plus(name, errors="strict"), unquote_plus(text, errors="strict")))
        except UnicodeDecodeError as error:
            raise S3Error("InvalidTag", "A tag is not UTF-8.") from error
    return checked_tags(pairs, tags_max=OBJECT_TAGS_MAX)


def replaces_tags(fields: Mapping[str, str]) -> bool:
    """Whether a copy has the tags of x-amz-tagging, and not its source's."""
    return fields.get("x-amz-tagging-directive") == "REPLACE"


def checked_tags(pairs: list[tuple[str, str]], *, tags_max: int) -> dict[str, str]:
    """The tags by name. Raises `S3Error` InvalidTag for what no tag can be, and BadRequest for more than there may be."""
    tags: dict[str, str] = {}
    for name, value in pairs:
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not _PLAIN(name):
            raise S3Error("InvalidTag", "The TagKey you have provided is invalid", TagKey=name)
        if name.lower().startswith("aws:"):
            raise S3Error("InvalidTag", "System tags cannot be added/updated by requester", TagKey=name)
        if len(value) > MAX_VALUE_CHARACTERS or not _PLAIN(value):
            raise S3Error("InvalidTag", "The TagValue you have provided is invalid", TagKey=name, TagValue=value)
        if name in tags:
            raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key", TagKey=name)
        tags[name] = value
    if len(tags) > tags_max:
        noun = "Object" if tags_max == OBJECT_TAGS_MAX else "Bucket"
        raise S3Error("BadRequest", f"{noun} tags cannot be greater than {tags_max}")
    return tags


def tagging_document(tags: Mapping[str, str]) -> bytes:
    """The Tagging document that tells of the tags, by name."""
    nodes: list[xml.Node] = [("Tag", [("Key", name), ("Value", value)]) for name, value in sorted(tags.items())]
    return xml.document("Tagging", [("TagSet", nodes)])
