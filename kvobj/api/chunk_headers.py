"""Headers of ours that tell of a chunk: parsed strictly from a PUT, told again on GET and HEAD. Pure.

Those that carry identity are signed, or the request is refused before it comes here (`sigv4`). Source: `kv-api` §1 and §4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.api.header_text import Header, from_wire, is_plain, to_wire
from kvobj.catalog.rows import MAX_KEY_BYTES, MAX_PARTS, ObjectRow
from kvobj.errors import InvalidTokensError
from kvobj.store.places import DEFAULT_NAMESPACE, GroupPart, parent_name

NAMESPACE_HEADER: Final = "x-kvobj-namespace"
PARENT_HEADER: Final = "x-kvobj-parent"
TOKENS_HEADER: Final = "x-kvobj-tokens"
PART_HEADER: Final = "x-kvobj-part"
PARTS_HEADER: Final = "x-kvobj-parts"
PIN_HEADER: Final = "x-kvobj-pin"
ACCEPT_HEADER: Final = "x-kvobj-accept"
SIZE_HEADER: Final = "x-kvobj-size-bytes"
HINT_HEADER: Final = "x-kvobj-hint"
PLACE_HEADERS: Final = frozenset({NAMESPACE_HEADER, PARENT_HEADER, TOKENS_HEADER, PART_HEADER})
_TOKENS: Final = re.compile(r"[1-9]\d{0,9}\Z", re.ASCII).match
_PART: Final = re.compile(r"(0|[1-9]\d{0,4})/([1-9]\d{0,4})\Z", re.ASCII).match
_HINT: Final = re.compile(r"output-tokens=(\d{1,10})\Z", re.ASCII).match
_PIN: Final = re.compile(r"[0-9a-f]{32}\Z", re.ASCII).match


@dataclass(frozen=True, slots=True)
class ChunkHeaders:
    """What a PUT says of its chunk; None: it does not say."""

    namespace: str | None = None
    parent: str | None = None
    tokens: int | None = None
    part: GroupPart | None = None


NO_CHUNK_HEADERS: Final = ChunkHeaders()


def parse_chunk_headers(fields: Mapping[str, str]) -> ChunkHeaders:
    """The place that a PUT names. Raises `S3Error` InvalidArgument and `InvalidTokensError`."""
    if PLACE_HEADERS.isdisjoint(fields):
        return NO_CHUNK_HEADERS
    return ChunkHeaders(
        namespace=_name(fields, NAMESPACE_HEADER),
        parent=_name(fields, PARENT_HEADER),
        tokens=_parse_tokens(fields.get(TOKENS_HEADER)),
        part=_parse_part(fields.get(PART_HEADER)),
    )


def refuse_chunk_headers(fields: Mapping[str, str]) -> None:
    """Raise `S3Error` InvalidRequest if the request tells of a chunk: ordinary buckets hold none."""
    if not PLACE_HEADERS.isdisjoint(fields):
        name = min(PLACE_HEADERS.intersection(fields))
        raise S3Error("InvalidRequest", f"{name} is for buckets of kind kv.", ArgumentName=name)


def parse_pin(fields: Mapping[str, str]) -> bytes | None:
    """The pin that a reader names, 16 bytes in hex. Raises `S3Error` InvalidArgument."""
    value = fields.get(PIN_HEADER)
    if value is None:
        return None
    # What is converted is what was checked: str.strip takes more for white space than bytes.fromhex and int do.
    value = value.strip()
    if not _PIN(value):
        raise S3Error("InvalidArgument", "A pin is 32 hex digits.", ArgumentName=PIN_HEADER)
    return bytes.fromhex(value)


def parse_hint(fields: Mapping[str, str]) -> int | None:
    """How many output tokens a writer expects of its request (`output-tokens=N`); None where it does not say. Raises `S3Error`
    InvalidArgument."""
    value = fields.get(HINT_HEADER)
    if value is None:
        return None
    found = _HINT(value.strip())
    if found is None:
        raise S3Error("InvalidArgument", "A hint is output-tokens=N.", ArgumentName=HINT_HEADER)
    return int(found[1])


def chunk_headers(row: ObjectRow) -> list[Header]:
    """A chunk's place, as a PUT would name it. Nothing of a key that was put without one."""
    return place_headers(row.namespace, parent_name(row), row.tokens)


def place_headers(namespace: str, parent: str | None, tokens: int) -> list[Header]:
    """The same of what is no row yet; `parent` as a client names it."""
    headers: list[Header] = []
    if namespace not in ("", DEFAULT_NAMESPACE):
        headers.append((NAMESPACE_HEADER, to_wire(namespace)))
    if parent is not None and is_plain(parent):  # a batch may name what no header can carry
        headers.append((PARENT_HEADER, to_wire(parent)))
    if tokens:
        headers.append((TOKENS_HEADER, str(tokens)))
    return headers


def _name(fields: Mapping[str, str], header: str) -> str | None:
    value = fields.get(header)
    if value is None:
        return None
    value = from_wire(value.strip())
    if not value or len(value.encode()) > MAX_KEY_BYTES or not is_plain(value):
        raise S3Error("InvalidArgument", f"{header} holds no name.", ArgumentName=header)
    return value


def _parse_tokens(value: str | None) -> int | None:
    if value is None:
        return None
    value = value.strip()
    if not _TOKENS(value):
        raise InvalidTokensError(f"{TOKENS_HEADER} is a number of tokens, 1 or more")
    return int(value)


def _parse_part(value: str | None) -> GroupPart | None:
    if value is None:
        return None
    found = _PART(value.strip())
    if found is None or not int(found[1]) < int(found[2]) <= MAX_PARTS:
        raise S3Error(
            "InvalidArgument",
            f"{PART_HEADER} is I/N: the part's index from 0, and how many parts there are, at most {MAX_PARTS}.",
            ArgumentName=PART_HEADER,
        )
    return GroupPart(int(found[1]), int(found[2]))
