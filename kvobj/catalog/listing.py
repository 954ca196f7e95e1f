"""One page of a listing with key prefix and delimiter, over anything sorted that can be entered at a key. Pure.

Guarantees: a common prefix costs one seek, however many keys it stands for; `after` equal to a common prefix skips all of it,
`after` inside one does not skip the rest of it (S3 reference, ListObjectsV2, StartAfter). All keys are bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Page(Generic[T]):
    """`entries` and `common_prefixes` in order; `has_more` says that something follows the last of both."""

    entries: list[tuple[bytes, T]] = field(default_factory=list)
    common_prefixes: list[bytes] = field(default_factory=list)
    has_more: bool = False
    ends_in_prefix: bool = False


def list_page(
    items: Callable[[bytes], Iterator[tuple[bytes, T]]],
    *,
    key_prefix: bytes,
    delimiter: bytes,
    after: bytes,
    start: bytes,
    limit: int,
    encode: Callable[[bytes], bytes] = bytes,
) -> Page[T]:
    """The page behind `after`. `items(place)` iterates over (key, item) from an encoded place on; `encode` makes the place where a
    key begins (keys that share a leading part share the encoded one); `start` is the place right behind `after`."""
    page: Page[T] = Page()
    if limit <= 0:
        return page
    if after and _common_prefix(after, key_prefix, delimiter) == after:
        start = successor(encode(after))
    place: bytes | None = max(start, encode(key_prefix))
    while place is not None:
        place = _fill(page, items(place), key_prefix=key_prefix, delimiter=delimiter, limit=limit, encode=encode)
    return page


def _fill(
    page: Page[T],
    items: Iterator[tuple[bytes, T]],
    *,
    key_prefix: bytes,
    delimiter: bytes,
    limit: int,
    encode: Callable[[bytes], bytes],
) -> bytes | None:
    """Take items up to the first common prefix; returns the place behind it, None when the page is done."""
    room = limit - len(page.entries) - len(page.common_prefixes)
    for key, item in items:
        if not key.startswith(key_prefix):
            return None
        if not room:
            page.has_more = True
            return None
        room -= 1
        common = _common_prefix(key, key_prefix, delimiter)
        page.ends_in_prefix = common is not None
        if common is not None:
            page.common_prefixes.append(common)
            return successor(encode(common))
        page.entries.append((key, item))
    return None


def _common_prefix(key: bytes, key_prefix: bytes, delimiter: bytes) -> bytes | None:
    """The key's leading part up to and with the first delimiter past `key_prefix`."""
    if not delimiter or not key.startswith(key_prefix):
        return None
    place = key.find(delimiter, len(key_prefix))
    return None if place < 0 else key[: place + len(delimiter)]


def successor(lead: bytes) -> bytes:
    """The least bytes above everything that starts with `lead`, which is not all 0xff (UTF-8 has no such byte)."""
    stripped = lead.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])


def merged(above: Iterator[tuple[bytes, T]], below: Iterator[tuple[bytes, T]]) -> Iterator[tuple[bytes, T]]:
    """Two sorted iterations as one; where both have a key, the one `above` counts."""
    upper = next(above, None)
    for key, item in below:
        while upper is not None and upper[0] < key:
            yield upper
            upper = next(above, None)
        if upper is not None and upper[0] == key:
            yield upper
            upper = next(above, None)
        else:
            yield key, item
    while upper is not None:
        yield upper
        upper = next(above, None)
