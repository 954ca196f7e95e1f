"""What the commands of `lm://` mean: one bucket of kind kv, used as one user, through the same store as every other request.

LMCache's key is the chunk's S3 key, a foreign key of `default`, or of the namespace that it begins with. What LMCache says of the
bytes stands in the row's metadata; a chunk without it came by another way, and is a miss here: nobody could say its shape. So is
one that is larger than a reply's head can tell.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvobj.api.lm.protocol import BODY_BYTES_MAX, Form, Request
from kvobj.api.message import ByteSource
from kvobj.api.object_store import ObjectStore, Reader
from kvobj.api.users import UserDirectory
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.errors import (
    AccessDeniedError,
    CapacityError,
    ConflictError,
    IncompleteBodyError,
    InvalidRequestError,
    KvobjError,
    NoSuchBucketError,
    NoSuchUserError,
)
from kvobj.store.given_chunks import PLAIN
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, check_size, default_namespace, place_of
from kvobj.store.requests import PutRequest

FORM_NAME: Final = "lmcache-form"
"""The metadata that a chunk's form stands under: to S3 clients, x-amz-meta-lmcache-form."""
LISTED_BYTES_MAX: Final = 4 * 2**20
PUT_WAIT_SECONDS: Final = 1.0
"""How long a PUT waits for room. Its client hears nothing of it, but its next look-up waits behind it."""

_READ_ATTEMPTS: Final = 3
_PAGE: Final = 1000


class PutOutcome(StrEnum):
    """What became of a PUT. Nobody is told but who reads metrics and the log."""

    STORED = "stored"
    EXISTED = "existed"
    FULL = "full"
    REFUSED = "refused"
    FAILED = "failed"

    @property
    def is_drop(self) -> bool:
        """Whether the chunk is not there although it was put."""
        return self not in (PutOutcome.STORED, PutOutcome.EXISTED)


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk about to be sent. `reader` must be closed; None: it has no bytes."""

    size_bytes: int
    form: Form
    reader: Reader | None


class LmCommands:
    """See the module's text. Errors of the store pass through, but for those of a PUT. Event loop only."""

    def __init__(self, store: ObjectStore, users: UserDirectory, *, bucket: str, user_id: str) -> None:
        self._store = store
        self._users = users
        self._bucket = bucket
        self._user_id = user_id

    async def check(self) -> BucketRow:
        """The bucket, if the user may use it for this. `NoSuchBucketError`, `NoSuchUserError`, `InvalidRequestError` (it is no KV
        bucket), `AccessDeniedError` (not its owner). Asked anew for each command: users and buckets come and go."""
        bucket = await self._store.catalog.bucket(self._bucket)
        if bucket is None:
            raise NoSuchBucketError("no such bucket", bucket=self._bucket)
        if bucket.kind is not BucketKind.KV:
            raise InvalidRequestError("lm:// serves a bucket of kind kv", bucket=self._bucket)
        user = await self._users.with_id(self._user_id)
        if user is None:
            raise NoSuchUserError("no such user", user_id=self._user_id)
        if not user.is_root and bucket.owner != user.id:
            raise AccessDeniedError("not the bucket's owner", bucket=self._bucket, user_id=user.id)
        return bucket

    async def exists(self, key: str) -> bool:
        """Whether a GET would find the chunk. It is then held against policy for the grace time, as after a HEAD."""
        await self.check()
        row = await self._store.look_up(self._bucket, key)
        if row is None or _form(row) is None:
            return False
        # Where a lossy copy alone is left there is nothing for who can say of no codec that it takes it.
        return row.lossy is None or await self._store.represent(row, PLAIN) is not None

    async def open(self, key: str) -> OpenChunk | None:
        """The chunk, or None where there is none, or its bytes are not what was stored."""
        await self.check()
        for _ in range(_READ_ATTEMPTS):  # a row may go between its look-up and the read
            row = await self._store.look_up(self._bucket, key, will_open=True)
            form = None if row is None else _form(row)
            if row is None or form is None:
                return None
            if row.size_bytes == 0:
                return OpenChunk(0, form, None)
            reader = await self._store.open(row, 0, row.size_bytes)
            if reader is not None:
                return OpenChunk(row.size_bytes, form, reader)
        return None

    async def put(self, request: Request, source: ByteSource) -> tuple[PutOutcome, str]:
        """Store the request's body, if anything can be done with it; and why not. The body may be left unread.

        The errors of its arrival pass through (`IncompleteBodyError`, `ConnectionError`): nothing is stored then.
        """
        try:
            put_request = await self._request(request)
            try:
                async with asyncio.timeout(PUT_WAIT_SECONDS):
                    transfer = await self._store.start_put(put_request)
            except TimeoutError:
                # A chunk that stands is waited for where it is to be shared: nobody here asks how far that is.
                standing = await self._store.look_up(self._bucket, put_request.key)
                if standing is None:
                    raise
                return _existed(standing, put_request)
            async with transfer:
                existing = transfer.existing
                if existing is not None:
                    return _existed(existing, put_request)
                await transfer.receive(source)
                result = await transfer.commit()
        except IncompleteBodyError:
            raise
        except (CapacityError, TimeoutError) as error:
            return PutOutcome.FULL, str(error) or "no room in time"
        except (InvalidRequestError, AccessDeniedError, ConflictError) as error:
            return PutOutcome.REFUSED, str(error)
        except KvobjError as error:
            return PutOutcome.FAILED, str(error)
        return PutOutcome.EXISTED if result.existed else PutOutcome.STORED, ""

    async def remove(self, key: str) -> None:
        """Hide a chunk. Where that cannot be done it stays, until policy removes it."""
        with suppress(KvobjError):
            bucket = await self.check()
            await self._store.delete(bucket.name, [key], made_ms=bucket.created_ms)

    async def listed(self) -> bytes:
        """The keys of chunks in key order, a line each, as many as fit into `LISTED_BYTES_MAX`."""
        await self.check()
        keys: list[bytes] = []
        left_bytes = LISTED_BYTES_MAX
        after: str | None = ""
        while after is not None:
            page = await self._store.catalog.list_objects(self._bucket, after=after, limit=_PAGE)
            for row in page.rows:
                if _form(row) is None:
                    continue
                key = row.key.encode()
                left_bytes -= len(key) + 1
                if left_bytes < 0:
                    return b"\n".join(keys)
                keys.append(key)
            after = page.next_after
        return b"\n".join(keys)

    async def _request(self, request: Request) -> PutRequest:
        if request.key is None:
            raise InvalidRequestError("the key is none")
        bucket = await self.check()
        place = await self._place(request.key)
        check_size(place, request.body_bytes)
        return PutRequest(
            bucket=bucket,
            key=request.key,
            size_bytes=request.body_bytes,
            owner=self._user_id,
            metadata={FORM_NAME: request.form.to_text()},
            place=place,
        )

    async def _place(self, key: str) -> ChunkPlace:
        name, slash, _ = key.partition("/")
        namespace = None
        if slash and name not in ("", DEFAULT_NAMESPACE):
            namespace = await self._store.catalog.namespaces.namespace(self._bucket, name)
        return place_of(namespace or default_namespace(self._bucket), key)


def _form(row: ObjectRow) -> Form | None:
    """What LMCache said of the chunk; None for one that cannot be sent to it."""
    if row.size_bytes > BODY_BYTES_MAX:
        return None
    return Form.parse(row.metadata.get(FORM_NAME))


def _existed(row: ObjectRow, request: PutRequest) -> tuple[PutOutcome, str]:
    if row.size_bytes != request.size_bytes:
        return PutOutcome.REFUSED, "a live chunk has another size"
    if row.metadata.get(FORM_NAME) != request.metadata[FORM_NAME]:
        return PutOutcome.REFUSED, "a live chunk has another form"
    return PutOutcome.EXISTED, ""
