"""Multipart uploads and their parts in both environments. An upload and all its parts lie in one of them, by its durability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvobj.catalog.encoding import (
    PARTS,
    PARTS_VOLATILE,
    UPLOADS,
    UPLOADS_VOLATILE,
    decode_part,
    decode_upload,
    encode_row,
    part_key,
    part_range,
    upload_key,
)
from kvobj.catalog.key_tree import KeyTree
from kvobj.catalog.listing import merged
from kvobj.catalog.log_entries import PartPut, UploadRemoved, encode_entry
from kvobj.catalog.rows import PartRow, UploadRow
from kvobj.database import ReadView, Table, WriteView


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An upload and which environment it lies in."""

    row: UploadRow
    is_volatile: bool

    @property
    def parts_table(self) -> Table:
        """Where its parts lie."""
        return PARTS_VOLATILE if self.is_volatile else PARTS


class UploadRows:
    """The upload tables. Stateless: every call works on the given view."""

    __slots__ = ("durable", "volatile")

    def __init__(self, allocate: Callable[[], int]) -> None:
        self.durable = KeyTree(UPLOADS, allocate)
        self.volatile = KeyTree(UPLOADS_VOLATILE, allocate)

    def find(self, view: ReadView, root: bytes, key: bytes, upload_id: str) -> StoredUpload | None:
        """The upload, or None."""
        place = upload_key(key, upload_id)
        value = self.volatile.get(view, root, place)
        if value is not None:
            return StoredUpload(decode_upload(value), is_volatile=True)
        value = self.durable.get(view, root, place)
        return None if value is None else StoredUpload(decode_upload(value), is_volatile=False)

    def items(
        self, view: ReadView, root: bytes, start: bytes, *, groups: bool = False
    ) -> Iterator[tuple[bytes, UploadRow]]:
        """(key, upload) in (key, upload id) order from an encoded place on; those of chunks in parts only with `groups`."""
        for _, value in merged(self.volatile.items(view, root, start), self.durable.items(view, root, start)):
            row = decode_upload(value)
            if groups or not row.group_parts:
                yield row.key.encode(), row

    def first(self, view: ReadView, root: bytes, limit: int) -> list[StoredUpload]:
        """Some of the bucket's uploads, at most `limit` of each environment, S3's and those of chunks in parts."""
        return [
            StoredUpload(decode_upload(value), is_volatile=tree is self.volatile)
            for tree in (self.volatile, self.durable)
            for _, value in islice(tree.items(view, root), limit)
        ]

    def put(self, view: WriteView, root: bytes, upload: UploadRow, *, volatile: bool) -> None:
        """Record an upload."""
        tree = self.volatile if volatile else self.durable
        tree.put(view, root, upload_key(upload.key.encode(), upload.upload_id), encode_row(upload))
        if not volatile:
            view.log(encode_entry(upload))

    def part(self, view: ReadView, upload: StoredUpload, number: int) -> PartRow | None:
        """One part."""
        value = view.get(upload.parts_table, part_key(upload.row.upload_id, number))
        return None if value is None else decode_part(value)

    def parts(self, view: ReadView, upload: StoredUpload) -> tuple[PartRow, ...]:
        """All parts by number."""
        start, stop = part_range(upload.row.upload_id)
        return tuple(decode_part(value) for _, value in view.range(upload.parts_table, start, stop))

    def put_part(self, view: WriteView, upload: StoredUpload, part: PartRow) -> None:
        """Record a part."""
        view.put(upload.parts_table, part_key(part.upload_id, part.number), encode_row(part))
        if not upload.is_volatile:
            view.log(encode_entry(PartPut(upload.row.bucket, upload.row.key, part)))

    def remove(self, view: WriteView, root: bytes, upload: StoredUpload, parts: tuple[PartRow, ...]) -> None:
        """Forget an upload and the given parts, which are all it has."""
        row = upload.row
        tree = self.volatile if upload.is_volatile else self.durable
        tree.delete(view, root, upload_key(row.key.encode(), row.upload_id))
        for part in parts:
            view.delete(upload.parts_table, part_key(row.upload_id, part.number))
        if not upload.is_volatile:
            view.log(encode_entry(UploadRemoved(row.bucket, row.key, row.upload_id)))
