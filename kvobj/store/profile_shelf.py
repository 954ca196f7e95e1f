"""Profiles of models, as objects of KV buckets: found by their digest, read once, checked, and kept for who encodes and decodes.

A profile lies at `profiles/<digest in hex>` of a bucket's namespace `default`. Frames name it by its digest alone, so any bucket's
object of that name will do: its bytes are hashed before they are used.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import FrameCorruptError, InvalidRequestError, KvobjError, NoSuchBucketError
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.transcoding_rules import form_of
from kvobj.tensors.profiles import KEY_PREFIX, Profile, object_key, parse_named
from kvobj.tiers.verified import RunOnPool

PROFILE_BYTES_MAX: Final = 512 * 2**20
KEPT_BYTES_MAX: Final = 2**30
"""Of profiles in memory; the one used last is kept whatever it takes."""
ABSENT_SECONDS: Final = 5.0
"""For so long a profile that was not there is not looked for again."""
_ABSENT_MAX: Final = 1024
_PAGE: Final = 1000
_KEY: Final = re.compile(rf"{KEY_PREFIX}[0-9a-f]{{64}}\Z").match


def is_profile(row: ObjectRow) -> bool:
    """Whether the row is of a profile, going by its name. Policy leaves such alone: who put them takes them away."""
    return row.namespace in ("", DEFAULT_NAMESPACE) and _KEY(row.key) is not None


class ProfileShelf:
    """See the module's text. `read` gives an object's bytes, None where they are lost; `run` is the pool that parses.
    Event-loop-only."""

    def __init__(
        self, *, catalog: Catalog, read: Callable[[ObjectRow], Awaitable[bytes | None]], run: RunOnPool, clock: Clock
    ) -> None:
        self._catalog = catalog
        self._read = read
        self._run = run
        self._clock = clock
        self._kept: OrderedDict[bytes, Profile] = OrderedDict()
        self._absent: dict[bytes, float] = {}
        self._loading = asyncio.Lock()

    async def get(self, digest: bytes) -> Profile | None:
        """The profile of this digest; None where no bucket has it, or what it has is none."""
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
            return found
        if self._clock.monotonic() < self._absent.get(digest, 0.0):
            return None
        async with self._loading:  # large, so one at a time; and who waited finds it
            found = self._kept.get(digest)
            if found is None:
                with suppress(KvobjError):
                    found = await self._load(digest)
        if found is None:
            if len(self._absent) >= _ABSENT_MAX:
                self._absent.clear()
            self._absent[digest] = self._clock.monotonic() + ABSENT_SECONDS
        return found

    async def check(self, namespace: NamespaceRow) -> None:
        """Refuse a namespace whose profile is not in its bucket, is none, or is of another model: `InvalidRequestError`, with
        `field`."""
        row = await self._row(namespace.bucket, namespace.profile)
        if row is None:
            raise _refusal(f"the bucket has no object {object_key(namespace.profile)}")
        try:
            async with self._loading:
                profile = await self._parsed(row, namespace.profile)
        except FrameCorruptError as error:
            raise _refusal(str(error)) from error
        form = form_of(namespace.declaration, namespace.chunk_tokens)
        if form is None or not profile.fits(form):
            raise _refusal("it is of another model than the layout")
        if profile.has_rope and not _keys_are_rotated(namespace.declaration):
            raise _refusal("it turns keys back that the declaration says are stored before RoPE")
        self._absent.pop(namespace.profile, None)

    async def named(self, bucket: str, keys: Sequence[str]) -> dict[str, str]:
        """Which of the keys are of profiles that a namespace of the bucket names, and which namespace does."""
        wanted = {key for key in keys if _KEY(key)}
        found: dict[str, str] = {}
        after = ""
        with suppress(NoSuchBucketError):
            while wanted and (rows := await self._catalog.namespaces.page(bucket, after=after, limit=_PAGE)):
                for row in rows:
                    if row.profile and object_key(row.profile) in wanted:
                        found[object_key(row.profile)] = row.name
                after = rows[-1].name
        return found

    async def _load(self, digest: bytes) -> Profile | None:
        for bucket in await self._catalog.buckets():
            row = await self._row(bucket.name, digest) if bucket.kind is BucketKind.KV else None
            if row is not None:
                with suppress(FrameCorruptError):
                    return await self._parsed(row, digest)
        return None

    async def _row(self, bucket: str, digest: bytes) -> ObjectRow | None:
        (row,) = await self._catalog.lookup(bucket, [object_key(digest)], rescue=True)
        return row if row is not None and is_profile(row) else None

    async def _parsed(self, row: ObjectRow, digest: bytes) -> Profile:
        """Read and keep it. `FrameCorruptError` where it is none."""
        if row.size_bytes > PROFILE_BYTES_MAX:
            raise FrameCorruptError(f"profiles have at most {PROFILE_BYTES_MAX} bytes", size_bytes=row.size_bytes)
        data = await self._read(row)
        if data is None:
            raise FrameCorruptError("its bytes are lost")
        profile = await self._run(parse_named, data, digest)
        self._kept[digest] = profile
        while len(self._kept) > 1 and sum(len(each.data) for each in self._kept.values()) > KEPT_BYTES_MAX:
            self._kept.popitem(last=False)
        return profile


def _keys_are_rotated(declaration: bytes) -> bool:
    rope = msgspec.json.decode(declaration, type=dict[str, object]).get("rope")
    return not isinstance(rope, dict) or bool(rope.get("applied", True))


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"profile: {problem}", field="profile")
