"""The manifests of one store on the remote: written, listed, read and removed by name. Knows keys and bytes, not what follows.

Writers draw names that nobody ever drew before, so that a write may be repeated until its answer comes: same name, same bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from kvobj.errors import CorruptionError, TierUnavailableError
from kvobj.manifests.format import (
    DIGEST_BYTES,
    MAX_OBJECT_BYTES,
    ManifestEntry,
    ManifestHead,
    ManifestKind,
    digest_and_tag,
    encode_manifest,
    read_manifest,
)
from kvobj.manifests.names import FOLDER, ManifestName, lineage_folder
from kvobj.manifests.signing import UNSIGNED, Signing
from kvobj.tiers.verified import RunOnPool

_INLINE_ENTRIES: Final = 64
_RECENT_BYTES: Final = 8 * 1024 * 1024
DELETE_BATCH: Final = 1000


class ListedObject(Protocol):
    """One key of a listing."""

    @property
    def key(self) -> str:
        """The whole key."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its length."""
        ...


class SmallObjects(Protocol):
    """As much of `kvobj.tiers.remote.bucket.RemoteBucket` as manifests need."""

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Write one object."""
        ...

    async def get_small(self, key: str, *, max_bytes: int) -> tuple[bytes, str] | None:
        """One object and its ETag, or None."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; absent is fine."""
        ...

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ListedObject]:
        """Keys under a prefix, ascending."""
        ...


class Lineage(Protocol):
    """As much of `kvobj.tiers.remote.identity.StoreIdentity` as manifests need."""

    @property
    def lineage(self) -> int:
        """Whose manifests are written; 0 before the store has claimed its place on the remote."""
        ...

    @property
    def is_fenced(self) -> bool:
        """Whether a newer lineage has taken the store over."""
        ...

    async def check(self) -> bool:
        """Look whether the place on the remote is still this store's; `is_fenced` is true to that afterwards. Raises where the
        server does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLineage:
    """For who only reads, or has just taken the store over."""

    lineage: int
    is_fenced: bool = False

    async def check(self) -> bool:
        """See `Lineage.check`."""
        return not self.is_fenced


class ManifestFolder:
    """Event-loop-only. `prefix` is the tier's key prefix, `epoch` the session epoch of this process (0: it only reads), `signing`
    says how manifests are signed and which are believed.

    What was written last is kept (8 MiB), so that putting small manifests together does not read them back.
    """

    def __init__(
        self,
        bucket: SmallObjects,
        *,
        prefix: str,
        store_id: bytes,
        identity: Lineage,
        epoch: int,
        run: RunOnPool,
        signing: Signing = UNSIGNED,
    ) -> None:
        self._signing = signing
        self.store_id = store_id
        self.identity = identity
        self.epoch = epoch
        self._bucket = bucket
        self._prefix = prefix
        self._run = run
        self._numbers = count(1)
        self._recent: OrderedDict[ManifestName, bytes] = OrderedDict()
        self._recent_bytes = 0

    @property
    def lineage(self) -> int:
        """Whose manifests these are. `TierUnavailableError` before that is known."""
        lineage = self.identity.lineage
        if not lineage:
            raise TierUnavailableError("the store has not claimed its place on the remote yet")
        return lineage

    async def encode(
        self, kind: ManifestKind, entries: Sequence[ManifestEntry], *, after: int, last: int
    ) -> tuple[ManifestName, bytes]:
        """A new manifest of this lineage, not yet written."""
        lineage = self.lineage
        is_signed = self._signing.key is not None
        head = ManifestHead(kind, self.store_id, lineage, self.epoch, after, last, is_signed=is_signed)
        name = ManifestName(lineage, last, self.epoch, after, next(self._numbers), kind)
        if len(entries) <= _INLINE_ENTRIES:
            content = encode_manifest(head, entries)
        else:
            content = await self._run(encode_manifest, head, entries)
        return name, content + self._signing.tag(content[-DIGEST_BYTES:], name.key) if is_signed else content

    async def write(self, name: ManifestName, content: bytes) -> None:
        """Write what `encode` made. Durable when it returns; may be repeated. Errors are the bucket's."""
        if await self._bucket.put_small(self._prefix + name.key, content) is None:
            raise TierUnavailableError("the remote names a condition that nobody set", name=name.key)
        if name.kind is ManifestKind.JOURNAL:
            self._keep(name, content)

    async def read(self, name: ManifestName) -> tuple[ManifestHead, Iterator[ManifestEntry]]:
        """A manifest, checked to be the one that its name says. `CorruptionError` where it is damaged, or gone; `UntrustedError`
        where it is not to be believed.

        What does not check out is asked for once more: it may have been damaged on its way.
        """
        content = self._recent.get(name)
        if content is not None:
            return self._checked(name, content)
        with suppress(CorruptionError):
            return self._checked(name, await self._fetched(name))
        return self._checked(name, await self._fetched(name))

    async def _fetched(self, name: ManifestName) -> bytes:
        found = await self._bucket.get_small(self._prefix + name.key, max_bytes=MAX_OBJECT_BYTES)
        if found is None:
            raise CorruptionError("a manifest is gone", name=name.key)
        return found[0]

    def _checked(self, name: ManifestName, content: bytes) -> tuple[ManifestHead, Iterator[ManifestEntry]]:
        try:
            head, entries = read_manifest(content, store_id=self.store_id)
        except CorruptionError as error:
            raise CorruptionError(error.message, name=name.key, **error.data) from error
        if (head.kind, head.lineage, head.epoch, head.after, head.last) != (
            name.kind,
            name.lineage,
            name.epoch,
            name.after,
            name.last,
        ):
            raise CorruptionError("a manifest is not the one that its name says", name=name.key)
        self._signing.check(*digest_and_tag(content), name.key)
        return head, entries

    async def names(self, lineage: int | None = None) -> list[ManifestName]:
        """The manifests of a lineage (None: of this one), ascending."""
        return [name async for name in self._names(lineage_folder(self.lineage if lineage is None else lineage))]

    async def lineages(self) -> list[int]:
        """Lineages that have a manifest, the newest first. One short LIST each, and one."""
        found: list[int] = []
        after = ""
        while True:
            try:
                name = await anext(self._names(FOLDER, after=after))
            except StopAsyncIteration:
                return found[::-1]
            found.append(name.lineage)
            after = self._prefix + lineage_folder(name.lineage + 1)[:-1]

    async def remove(self, names: Sequence[ManifestName]) -> None:
        """Remove manifests, in this order as far as batches go."""
        for start in range(0, len(names), DELETE_BATCH):
            batch = names[start : start + DELETE_BATCH]
            await self._bucket.delete([self._prefix + name.key for name in batch])
            for name in batch:
                self._forget(name)

    async def _names(self, folder: str, *, after: str = "") -> AsyncIterator[ManifestName]:
        async for listed in self._bucket.list(self._prefix + folder, after=after):
            name = ManifestName.parse(listed.key.removeprefix(self._prefix))
            if name is not None:
                yield name

    def _keep(self, name: ManifestName, content: bytes) -> None:
        self._forget(name)
        self._recent[name] = content
        self._recent_bytes += len(content)
        while self._recent_bytes > _RECENT_BYTES:
            self._forget(next(iter(self._recent)))

    def _forget(self, name: ManifestName) -> None:
        content = self._recent.pop(name, None)
        if content is not None:
            self._recent_bytes -= len(content)


async def read_ahead(
    folder: ManifestFolder, names: Sequence[ManifestName], *, window: int = 8
) -> AsyncGenerator[tuple[ManifestName, ManifestHead, Iterator[ManifestEntry]], None]:
    """Manifests in the order given, the next `window` being fetched meanwhile. Ends its requests when it is closed."""
    waiting: list[asyncio.Task[tuple[ManifestHead, Iterator[ManifestEntry]]]] = []
    try:
        for number, name in enumerate(names):
            ahead = names[number + len(waiting) : number + window]
            waiting += [asyncio.create_task(folder.read(each)) for each in ahead]
            head, entries = await waiting.pop(0)
            yield name, head, entries
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
