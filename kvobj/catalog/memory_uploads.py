"""The reference driver's multipart uploads, and the epoch that fences what they bring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from kvobj.catalog.lease_protocol import LeaseLimits
from kvobj.catalog.memory_chains import MemoryChains
from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.memory_tables import blob_ids_of
from kvobj.catalog.namespace_changes import no_such_namespace
from kvobj.catalog.rows import BlobRef, Durability, PartRow, UploadPage, UploadRow
from kvobj.catalog.unfinished import UnfinishedBytes
from kvobj.errors import FencedError, KvobjError, NoSuchBucketError, NoSuchUploadError
from kvobj.ids import epoch_of


class MemoryUploads(MemoryChains):
    """See the module's text and `protocol.Catalog`."""

    _namespaces: MemoryNamespaces

    def __init__(self, limits: LeaseLimits, *, has_remote: bool = False) -> None:
        super().__init__(limits, has_remote=has_remote)
        self._epoch: int | None = None
        self._uploads: dict[tuple[str, bytes, str], UploadRow] = {}
        self._parts: dict[tuple[str, int], PartRow] = {}
        self.unfinished = UnfinishedBytes()

    async def create_upload(self, upload: UploadRow, *, made_ms: int | None = None, limit: int | None = None) -> None:
        """See `Catalog.create_upload`."""
        self.unfinished.check(upload.owner)
        self._require_bucket(upload.bucket)
        if self._is_anew(upload.bucket, made_ms):
            raise NoSuchBucketError("no such bucket", bucket=upload.bucket)
        if not self._is_namespace_meant(upload, upload.namespace_root):
            raise no_such_namespace(upload.bucket, upload.namespace)
        if not upload.group_parts:
            self.unfinished.begin(upload.upload_id, upload.owner, upload.bucket, limit=limit)
        place = (upload.bucket, upload.key.encode(), upload.upload_id)
        if not (upload.group_parts and place in self._uploads):
            self._uploads[place] = upload

    def _is_anew(self, bucket: str, made_ms: int | None) -> bool:
        """Whether the bucket of this name is another than the one that was made then."""
        row = self._buckets.get(bucket)
        return row is not None and made_ms is not None and row.created_ms != made_ms

    def _is_namespace_meant(self, upload: UploadRow, namespace_root: bytes) -> bool:
        """Whether the upload's namespace is the one of this root still. Empty: whichever."""
        return not namespace_root or self._namespaces.is_meant(upload.bucket, upload.namespace, namespace_root)

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """See `Catalog.upload`."""
        return self._uploads.get((bucket, key.encode(), upload_id))

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
        name = (bucket, key.encode())
        is_anew = self._is_anew(bucket, made_ms)
        upload = None if is_anew else self._uploads.get((*name, part.upload_id))
        if upload is not None and namespace_root and upload.namespace_root != namespace_root:
            upload = None
        is_memory = upload is not None and upload.durability is Durability.MEMORY
        error: KvobjError | None = self._fenced(part.blobs, ())
        if is_anew:
            error = NoSuchBucketError("no such bucket", bucket=bucket)
        elif upload is None:
            error = NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=part.upload_id)
        elif not self._is_namespace_meant(upload, namespace_root):
            error = no_such_namespace(bucket, upload.namespace)
        if error is not None:
            self._enqueue(part.blob_ids, set(), name, volatile=is_memory, now_ms=now_ms)
            raise error
        before = self._parts.get((part.upload_id, part.number))
        if before is not None and upload is not None and upload.group_parts:
            self._enqueue(part.blob_ids, set(before.blob_ids), name, volatile=is_memory, now_ms=now_ms)
            return before
        self._parts[part.upload_id, part.number] = part
        added_bytes = part.size_bytes - (0 if before is None else before.size_bytes)
        self.unfinished.placed(part.upload_id, "" if upload is None else upload.owner, bucket, added_bytes)
        if before is not None:
            self._enqueue(before.blob_ids, set(part.blob_ids), name, volatile=is_memory, now_ms=now_ms)
        return part

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """See `Catalog.parts`."""
        return self._parts_of(self._require_upload(bucket, key, upload_id).upload_id)

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
        upload = self._require_upload(bucket, key, upload_id)
        is_other = bool(namespace_root) and upload.namespace_root != namespace_root
        if is_other or self._is_anew(bucket, made_ms):
            raise NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=upload_id)
        if if_empty and self._parts_of(upload_id):
            return
        is_memory = upload.durability is Durability.MEMORY
        self._enqueue(
            blob_ids_of(self._parts_of(upload_id)), set(), (bucket, key.encode()), volatile=is_memory, now_ms=now_ms
        )
        self._forget_upload(upload)

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
        self._require_bucket(bucket)
        rows: list[UploadRow] = []
        prefixes: list[str] = []
        last = None
        behind = (after[0].encode(), after[1])
        for place in sorted(place for place in self._uploads if place[0] == bucket):
            row = self._uploads[place]
            if not row.key.startswith(key_prefix) or (place[1], place[2]) <= behind:
                continue
            if row.group_parts and not groups:
                continue
            common = common_prefix(row.key, key_prefix, delimiter)
            if common is not None and (common == after[0] or common in prefixes):
                continue
            if len(rows) + len(prefixes) >= limit:
                return UploadPage(tuple(rows), tuple(prefixes), last)
            if common is None:
                rows.append(row)
            else:
                prefixes.append(common)
            last = (row.key, row.upload_id) if common is None else (common, "")
        return UploadPage(tuple(rows), tuple(prefixes), None)

    async def scan_parts(self) -> AsyncIterator[PartRow]:
        """See `Catalog.scan_parts`."""
        for part in list(self._parts.values()):
            yield part

    # -- what the verbs are made of --------------------------------------------------------------------------------

    def _fenced(self, blobs: Iterable[BlobRef], parts: Sequence[PartRow]) -> FencedError | None:
        known = set(blob_ids_of(parts))
        for blob in blobs:
            if blob.blob_id not in known and epoch_of(blob.blob_id) != self._epoch:
                return FencedError("the session epoch of a blob is not alive")
        return None

    def _parts_of(self, upload_id: str) -> tuple[PartRow, ...]:
        return tuple(self._parts[place] for place in sorted(self._parts) if place[0] == upload_id)

    def _forget_upload(self, upload: UploadRow) -> None:
        del self._uploads[upload.bucket, upload.key.encode(), upload.upload_id]
        for part in self._parts_of(upload.upload_id):
            del self._parts[upload.upload_id, part.number]
        self.unfinished.ended(upload.upload_id)

    def _require_upload(self, bucket: str, key: str, upload_id: str) -> UploadRow:
        upload = self._uploads.get((bucket, key.encode(), upload_id))
        if upload is None:
            raise NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=upload_id)
        return upload


def common_prefix(key: str, key_prefix: str, delimiter: str) -> str | None:
    """The key's leading part up to and with the first delimiter past `key_prefix`."""
    if not delimiter or delimiter not in key[len(key_prefix) :]:
        return None
    return key[: key.index(delimiter, len(key_prefix)) + len(delimiter)]
