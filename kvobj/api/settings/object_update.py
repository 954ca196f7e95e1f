"""A change of what is said of an object, by who was found to have the right to it."""

from __future__ import annotations

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.catalog.setting_rows import ObjectUpdate
from kvobj.errors import ConflictError, NoSuchKeyError


async def update_checked(catalog: Catalog, row: ObjectRow, update: ObjectUpdate) -> None:
    """Change the very object whose row the rights were checked of.

    `NoSuchKeyError`, and `ConflictError` where another object has its key by now: that one's owner may not have let the caller.
    """
    if await catalog.update_object(row.bucket, row.key, update, sequence=row.sequence) is None:
        (live,) = await catalog.lookup(row.bucket, [row.key])
        if live is None:
            raise NoSuchKeyError("no such key", bucket=row.bucket, key=row.key)
        raise ConflictError("the object was replaced meanwhile", bucket=row.bucket, key=row.key)
