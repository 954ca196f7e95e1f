"""Names under which changes wait for one another (`Database.write_fast`): what a change of the catalog holds and what it relies on.

An object has three: its row is changed, it may be removed, something relies on its being there. A change of a row holds the first;
a removal the first two, and waits for the third; a child's commit or a pin holds the third and waits for the second. So a child
need not wait while its parent is merely written down, and neither ever misses a removal that was begun before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvobj.catalog.key_tree import STRIDE_BYTES


def row_key(bucket: str, key: str) -> bytes:
    """Held by every change of the row. All keys with the same first stride share tree nodes, and so this name."""
    return b"o" + _name(bucket, key)


def removal_key(bucket: str, key: str) -> bytes:
    """Held by what may hide or remove the row."""
    return b"x" + _name(bucket, key)


def removal_keys(names: Iterable[tuple[str, str]]) -> list[bytes]:
    """What the removal of these (bucket, key) holds: `row_key` and `removal_key` of each."""
    encoded = [_name(bucket, key) for bucket, key in names]
    return [*map(b"o".__add__, encoded), *map(b"x".__add__, encoded)]


def reliance_key(bucket: str, key: str) -> bytes:
    """Held by what is only right while the row is live."""
    return b"r" + _name(bucket, key)


def bucket_key(bucket: str) -> bytes:
    """Held by the making and the removal of a bucket."""
    return b"b" + bucket.encode()


def upload_key(upload_id: str) -> bytes:
    """Held by every change of an upload."""
    return b"u" + upload_id.encode()


def session_key(session_id: bytes) -> bytes:
    """Held by every change of a session and its pins."""
    return b"s" + session_id


def _name(bucket: str, key: str) -> bytes:
    return bucket.encode() + b"\0" + key.encode()[:STRIDE_BYTES]
