"""Removing objects and buckets: rows go at once, their bytes soon after; whoever follows a key or waits for the remote is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import DeleteOutcome, ObjectRow, WriteCondition
from kvobj.clock import Clock
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.remote_class import SharedWrites
from kvobj.store.uploads import UploadEnds
from kvobj.tensors.profiles import KEY_PREFIX


class Removals:
    """Of one store. Event loop only."""

    __slots__ = ("_arriving", "_catalog", "_clock", "_named_profiles", "_on_removed", "_shared", "_uploads")

    def __init__(
        self,
        *,
        catalog: Catalog,
        arriving: ArrivingKeys,
        uploads: UploadEnds,
        shared: SharedWrites | None,
        clock: Clock,
        on_removed: Callable[[Sequence[ObjectRow]], None],
        named_profiles: Callable[[str, Sequence[str]], Awaitable[Mapping[str, str]]],
    ) -> None:
        """`on_removed` is told of rows that went. `named_profiles`: of keys of profiles, the namespaces that name them."""
        self._catalog = catalog
        self._arriving = arriving
        self._uploads = uploads
        self._shared = shared
        self._clock = clock
        self._on_removed = on_removed
        self._named_profiles = named_profiles

    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        """Hide the keys at once, of chunks with all that follows on them; their bytes go soon after. See `Catalog.delete`.
        Parts of a chunk that is not whole yet are given up. A profile that a namespace names stays (`DeleteOutcome.kept`)."""
        kept = await self._named_profiles(bucket, keys) if any(key.startswith(KEY_PREFIX) for key in keys) else {}
        if kept:
            return await self._delete_others(bucket, keys, conditions, kept, made_ms)
        outcomes = await self._catalog.delete(
            bucket, keys, conditions=conditions, made_ms=made_ms, now_ms=self._clock.now_ms()
        )
        gone = [outcome.key for outcome in outcomes if not outcome.precondition_failed]
        await self._uploads.give_up_parts(bucket, gone, made_ms=made_ms)
        if self._arriving.is_watched:
            for key in gone:
                self._arriving.tell(bucket, key)
        removed = [outcome.removed for outcome in outcomes if outcome.removed is not None]
        removed += [row for outcome in outcomes for row in outcome.descendants]
        self._on_removed(removed)
        await self.removed(bucket)
        return outcomes

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """Remove an empty bucket. Errors as `Catalog.delete_bucket`."""
        await self._catalog.delete_bucket(name, made_ms=made_ms)
        self._on_removed([])  # parts of uploads that ended with it
        await self.removed(name)

    async def removed(self, bucket: str | None) -> None:
        """Before anybody is told that a bucket or something of it (None: a user) is gone: see `SharedWrites.removed`."""
        if self._shared is not None:
            await self._shared.removed(bucket)

    async def _delete_others(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None],
        kept: Mapping[str, str],
        made_ms: int | None,
    ) -> list[DeleteOutcome]:
        """Delete all keys but those of profiles that namespaces name."""
        chosen = [index for index, key in enumerate(keys) if key not in kept]
        some = [conditions[index] for index in chosen] if conditions else []
        others = iter(
            await self.delete(bucket, [keys[index] for index in chosen], some, made_ms=made_ms) if chosen else []
        )
        return [
            DeleteOutcome(key, None, kept=f"the namespace {kept[key]} names this profile")
            if key in kept
            else next(others)
            for key in keys
        ]

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and its parts. `NoSuchUploadError`."""
        await self._catalog.abort_upload(bucket, key, upload_id, now_ms=self._clock.now_ms())
        self._arriving.tell(bucket, key)
        self._on_removed([])
