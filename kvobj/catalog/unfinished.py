"""How many bytes the parts of unfinished uploads hold, of each user, and how many uploads a bucket has in progress, and the bounds
of both.

S3's uploads count, and so do the bytes of chunks that come in parts: theirs is who began the upload, whoever sends the parts. The
catalog counts what its rows hold, from the rows when it is opened and from each change since; who is about to receive a part
reserves its size first, and who begins an upload its place, so that those who come at once are told in time which of them is too
much.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvobj.errors import QuotaExceededError, TooManyUploadsError


@dataclass(slots=True)
class _Upload:
    owner: str
    bucket: str
    size_bytes: int
    has_place: bool = False
    """It is one of those that its bucket has in progress: S3's, not a chunk that comes in parts."""


class Reservation:
    """Room for one part that is being received, until it is given back: once the part is committed, or given up."""

    __slots__ = ("_bytes", "_owner", "_unfinished")

    def __init__(self, unfinished: UnfinishedBytes, owner: str, size_bytes: int) -> None:
        self._unfinished = unfinished
        self._owner = owner
        self._bytes = size_bytes

    def release(self) -> None:
        """Give it back. Idempotent."""
        size_bytes, self._bytes = self._bytes, 0
        self._unfinished.add(self._owner, -size_bytes)


class UnfinishedBytes:
    """See the module's text. Event-loop-only; one of each catalog, which calls `begin`, `placed` and `ended`."""

    __slots__ = ("_exempt", "_in_bucket", "_of_user", "_uploads", "limit_bytes", "refusals")

    def __init__(self) -> None:
        self._of_user: dict[str, int] = {}
        self._in_bucket: dict[str, int] = {}
        self._uploads: dict[str, _Upload] = {}
        self._exempt: frozenset[str] = frozenset()
        self.limit_bytes: int | None = None
        """What one user may hold; None: any number."""
        self.refusals = 0
        """Parts and uploads that were refused for it."""

    @property
    def of_users(self) -> Mapping[str, int]:
        """Bytes by user, of those who hold any: parts that are there, and those that are being received."""
        return self._of_user

    def bound(self, limit_bytes: int, *, exempt: Collection[str] = ()) -> None:
        """Refuse what is above the limit from here on, but to the exempt."""
        self.limit_bytes = limit_bytes
        self._exempt = frozenset(exempt)

    def check(self, owner: str) -> None:
        """`QuotaExceededError` where the user may not hold one byte more: no upload is to be begun."""
        self._require(owner, 1)

    def begin(self, upload_id: str, owner: str, bucket: str, *, limit: int | None = None) -> bool:
        """Count an upload of S3 that is about to begin; `ended` takes that back where it does not. False: it counts already.
        `TooManyUploadsError` where its bucket has `limit` or more, and nothing is counted."""
        if upload_id in self._uploads:
            return False
        in_progress = self._in_bucket.get(bucket, 0)
        if limit is not None and in_progress >= limit:
            raise TooManyUploadsError("the bucket has too many uploads in progress", bucket=bucket, limit=limit)
        self._in_bucket[bucket] = in_progress + 1
        self._uploads[upload_id] = _Upload(owner, bucket, 0, has_place=True)
        return True

    def reserve(self, owner: str, size_bytes: int) -> Reservation:
        """Count a part that is about to be received. `QuotaExceededError`, and nothing is counted."""
        if size_bytes:
            self._require(owner, size_bytes)
        self.add(owner, size_bytes)
        return Reservation(self, owner, size_bytes)

    def placed(self, upload_id: str, owner: str, bucket: str, added_bytes: int) -> None:
        """A part was put into an upload, which holds so much more than before: less than the part where it replaced one."""
        upload = self._uploads.setdefault(upload_id, _Upload(owner, bucket, 0))
        upload.size_bytes += added_bytes
        self.add(upload.owner, added_bytes)

    def ended(self, upload_id: str) -> None:
        """The upload was completed or given up, or could not begin. Idempotent."""
        upload = self._uploads.pop(upload_id, None)
        if upload is None:
            return
        self.add(upload.owner, -upload.size_bytes)
        if upload.has_place:
            left = self._in_bucket.pop(upload.bucket) - 1
            if left:
                self._in_bucket[upload.bucket] = left

    def bucket_ended(self, bucket: str) -> None:
        """The bucket was deleted, with uploads that were in progress in it."""
        for upload_id in [name for name, upload in self._uploads.items() if upload.bucket == bucket]:
            self.ended(upload_id)

    def add(self, owner: str, size_bytes: int) -> None:
        """Count so many bytes more of a user."""
        held = self._of_user.get(owner, 0) + size_bytes
        if held:
            self._of_user[owner] = held
        else:
            self._of_user.pop(owner, None)

    def _require(self, owner: str, size_bytes: int) -> None:
        limit = self.limit_bytes
        if limit is None or owner in self._exempt:
            return
        held = self._of_user.get(owner, 0)
        if held + size_bytes > limit:
            self.refusals += 1
            raise QuotaExceededError(
                "the user's unfinished uploads hold as much as they may: complete or abort some",
                user=owner,
                held_bytes=held,
                limit_bytes=limit,
            )
