"""The LMDB catalog's multipart uploads, and the parts of chunks that come from several writers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice

from kvobj.catalog import flight_keys
from kvobj.catalog.catalog_rows import require_root, root_of
from kvobj.catalog.encoding import (
    BUCKETS,
    PARTS,
    PARTS_VOLATILE,
    decode_part,
    decode_stored_bucket,
    escaped,
    upload_key,
)
from kvobj.catalog.followed import followed
from kvobj.catalog.listing import list_page
from kvobj.catalog.lmdb_base import INLINE_ROWS, LmdbBase
from kvobj.catalog.object_changes import Refusal
from kvobj.catalog.rows import Durability, PartRow, UploadPage, UploadRow
from kvobj.catalog.upload_changes import AbortUpload, CreateUpload, NameUploads, PlacedPart, PutPart, begun_unnamed
from kvobj.errors import NoSuchUploadError


class LmdbUploads(LmdbBase):
    """See the module's text and `protocol.Catalog`."""

    async def create_upload(self, upload: UploadRow, *, made_ms: int | None = None, limit: int | None = None) -> None:
        """See `Catalog.create_upload`."""
        self.unfinished.check(upload.owner)
        upload_id = upload.upload_id
        counts = not upload.group_parts and self.unfinished.begin(upload_id, upload.owner, upload.bucket, limit=limit)

        def over(created: asyncio.Future[None]) -> None:
            if counts and (created.cancelled() or created.exception() is not None):
                self.unfinished.ended(upload_id)

        change = CreateUpload(self._uploads, upload, made_ms)
        keys, database = [flight_keys.upload_key(upload_id)], self._database
        in_memory = upload.durability is Durability.MEMORY
        waits_for = [*keys, flight_keys.bucket_key(upload.bucket)]
        try:
            if in_memory and not database.is_in_flight(waits_for):
                database.write_volatile(change)
                return
            submitted = database.submit(change, keys, synced=not in_memory)
        except BaseException:
            if counts:
                self.unfinished.ended(upload_id)
            raise
        await followed(submitted, over)

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """See `Catalog.upload`."""
        with self._database.read() as view:
            root = root_of(view, bucket)
            found = None if root is None else self._uploads.find(view, root, key.encode(), upload_id)
        return None if found is None else found.row

    async def put_part(
        self,
        bucket: str,
        key: str,
        part: PartRow,
        *,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
    ) -> PartRow:
        """See `Catalog.put_part`."""
        change = partial(
            PutPart,
            self._objects,
            self._uploads,
            bucket,
            key,
            part,
            now_ms,
            made_ms=made_ms,
            namespace_root=namespace_root,
        )

        def then(outcome: PlacedPart | Refusal) -> None:
            if isinstance(outcome, PlacedPart):
                self._note_placed(bucket, key, part.upload_id, outcome)

        keys = [flight_keys.upload_key(part.upload_id)]
        outcome = await self._write_fast(change, keys, bucket=bucket, then=then)
        if isinstance(outcome, Refusal):
            raise outcome.error
        return outcome.part

    def _note_placed(self, bucket: str, key: str, upload_id: str, placed: PlacedPart) -> None:
        with self._database.read() as view:
            root = root_of(view, bucket)
            stands = None if root is None else self._uploads.find(view, root, key.encode(), upload_id)
        if stands is not None:  # else it has ended meanwhile, and nobody would tell so again
            self.unfinished.placed(upload_id, placed.owner, bucket, placed.added_bytes)

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """See `Catalog.parts`."""
        return await self._on_thread(self._parts, bucket, key, upload_id)

    def _parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        with self._database.read() as view:
            root = root_of(view, bucket)
            found = None if root is None else self._uploads.find(view, root, key.encode(), upload_id)
            if found is None:
                raise NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=upload_id)
            return self._uploads.parts(view, found)

    async def abort_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        *,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        if_empty: bool = False,
        now_ms: int,
    ) -> None:
        """See `Catalog.abort_upload`."""
        change = partial(
            AbortUpload,
            self._objects,
            self._uploads,
            bucket,
            key,
            upload_id,
            now_ms,
            made_ms=made_ms,
            namespace_root=namespace_root,
            if_empty=if_empty,
        )

        def then(has_ended: bool) -> None:  # noqa: FBT001 - the change's outcome
            if has_ended:
                self.unfinished.ended(upload_id)

        await self._write_fast(change, [flight_keys.upload_key(upload_id)], bucket=bucket, then=then)

    async def _name_uploads(self) -> None:
        """Write down of which namespaces uploads of an older version are: when the catalog is opened."""
        with self._database.read() as view:
            if next(begun_unnamed(view, self._uploads), None) is None:
                return
        await self._database.write(NameUploads(self._uploads))

    def _count_unfinished(self) -> None:
        """Count what the rows hold: when the catalog is opened."""
        with self._database.read() as view:
            for name, value in view.range(BUCKETS):
                for upload in self._uploads.first(view, decode_stored_bucket(value).root, sys.maxsize):
                    row, bucket = upload.row, name.decode()
                    if not row.group_parts:
                        self.unfinished.begin(row.upload_id, row.owner, bucket)
                    held = sum(part.size_bytes for part in self._uploads.parts(view, upload))
                    if held:
                        self.unfinished.placed(row.upload_id, row.owner, bucket, held)

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
        groups: bool = False,
    ) -> UploadPage:
        """See `Catalog.list_uploads`."""
        read = partial(self._list_uploads, bucket, key_prefix, delimiter, after, limit, groups=groups)
        return await self._on_thread(read)

    def _list_uploads(
        self, bucket: str, key_prefix: str, delimiter: str, after: tuple[str, str], limit: int, *, groups: bool
    ) -> UploadPage:
        after_key = after[0].encode()
        with self._database.read() as view:
            page = list_page(
                partial(self._uploads.items, view, require_root(view, bucket), groups=groups),
                key_prefix=key_prefix.encode(),
                delimiter=delimiter.encode(),
                after=after_key,
                start=upload_key(after_key, after[1]) + b"\0" if after_key else b"",
                limit=limit,
                encode=escaped,
            )
        next_after = None
        if page.has_more and page.ends_in_prefix:
            next_after = (page.common_prefixes[-1].decode(), "")
        elif page.has_more:
            last = page.entries[-1][1]
            next_after = (last.key, last.upload_id)
        prefixes = tuple(prefix.decode() for prefix in page.common_prefixes)
        return UploadPage(tuple(row for _, row in page.entries), prefixes, next_after)

    async def scan_parts(self) -> AsyncIterator[PartRow]:
        """See `Catalog.scan_parts`."""
        for table in (PARTS_VOLATILE, PARTS):
            start: bytes | None = b""
            while start is not None:
                with self._database.read() as view:
                    page = list(islice(view.range(table, start), INLINE_ROWS))
                for _, value in page:
                    yield decode_part(value)
                start = page[-1][0] + b"\0" if len(page) == INLINE_ROWS else None
