"""Why a chain breaks where it does: the first chunk that a match did not find, looked up in all that is known of it.

For people and for tuning, not for the fast path: bounded work, and only when it is asked for (`kv-api` §5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Final

from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, is_same_namespace
from kvobj.errors import KvobjError
from kvobj.ids.chunk_ids import TOKEN_BYTES
from kvobj.store.chunk_naming import count_of_tokens, has_raw_ids
from kvobj.store.chunk_values import MissExplanation, OpenNamespace

NAMESPACES_MAX: Final = 16
"""Other namespaces that one explanation computes the ids of."""
CHUNKS_MAX: Final = 65_536
"""Ids that one explanation computes, of all namespaces together."""


class MissReason(StrEnum):
    """Why a chunk was not found, as replies say it. `lost`: its bytes were, by a crash or a bad medium; `not-accepted`: what is
    left of it, as a lossy copy, is none of what the request takes."""

    UNKNOWN = "unknown"
    NEVER_STORED = "never-stored"
    EVICTED = "evicted"
    DELETED = "deleted"
    RECALLED = "recalled"
    LOST = "lost"
    PARENT_MISSING = "parent-missing"
    UPLOADING = "uploading"
    OTHER_NAMESPACE = "other-namespace"
    NOT_ACCEPTED = "not-accepted"


_REMOVALS: Final = {
    RemovalReason.EVICTED: MissReason.EVICTED,
    RemovalReason.DELETED: MissReason.DELETED,
    RemovalReason.RECALLED: MissReason.RECALLED,
    RemovalReason.LOST: MissReason.LOST,
}


class Explainer:
    """See the module's text. `chunks_of_tokens` names a sequence's chunks in a namespace; `differs` names the fields of two
    declarations that are not equal; `is_arriving` answers whether somebody is writing the key."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        chunks_of_tokens: Callable[[OpenNamespace, bytes], Awaitable[ChunkList]],
        differs: Callable[[bytes, bytes], Sequence[str]],
        is_arriving: Callable[[str, str, str], bool],
    ) -> None:
        self._catalog = catalog
        self._chunks_of_tokens = chunks_of_tokens
        self._differs = differs
        self._is_arriving = is_arriving

    async def explain(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        chunks: ChunkList,
        matched: int,
        *,
        tokens: bytes | None,
        others: Sequence[OpenNamespace],
    ) -> MissExplanation | None:
        """Why the run ended after `matched` chunks; None where it did not end. `others`: what else the asker may use, looked into
        where tokens were given. What there is or was under the id in a namespace that is not this one is told as nothing: the asker
        may be nobody there."""
        if matched >= len(chunks):
            return None
        key = chunks.key(matched)
        (row,) = await self._catalog.lookup(bucket.name, [key])
        if row is not None and is_same_namespace(row.namespace, namespace.row.name):
            # It is live, so it hangs elsewhere: the element before it in the list is not its parent.
            return MissExplanation(matched, MissReason.PARENT_MISSING)
        if await self._is_uploading(bucket.name, key, namespace.row.name):
            return MissExplanation(matched, MissReason.UPLOADING)
        removal = await self._catalog.history.why_removed(bucket.name, key)
        if removal is not None and is_same_namespace(removal.namespace, namespace.row.name):
            return MissExplanation(matched, _REMOVALS[removal.reason], removal.when_ms)
        if tokens is not None:
            differs = await self._elsewhere(bucket, namespace, matched, tokens, others)
            if differs is not None:
                return MissExplanation(matched, MissReason.OTHER_NAMESPACE, namespace_differs=differs)
        is_whole = await self._catalog.history.remembers_all(bucket.name)  # what is not in the log then never went
        return MissExplanation(matched, MissReason.NEVER_STORED if is_whole else MissReason.UNKNOWN)

    async def _is_uploading(self, bucket: str, key: str, namespace: str) -> bool:
        if self._is_arriving(bucket, key, namespace):
            return True
        page = await self._catalog.list_uploads(bucket, key_prefix=key, limit=1, groups=True)
        found = page.rows[0] if page.rows else None
        return found is not None and found.key == key and is_same_namespace(found.namespace, namespace)

    async def _elsewhere(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        matched: int,
        tokens: bytes,
        others: Sequence[OpenNamespace],
    ) -> tuple[str, ...] | None:
        """In what the nearest other namespace that holds the same tokens differs from this one; None where none does."""
        end = (matched + 1) * namespace.row.chunk_tokens * TOKEN_BYTES
        span = tokens[:end]
        budget = CHUNKS_MAX
        best: tuple[str, ...] | None = None
        for other in others[:NAMESPACES_MAX]:
            row = other.row
            if row.name == namespace.row.name or not has_raw_ids(row):
                continue
            try:
                budget -= count_of_tokens(row, span)
                if budget < 0:
                    break
                elsewhere = await self._chunks_of_tokens(other, span)
            except KvobjError:
                continue
            if not len(elsewhere):
                continue
            (found,) = await self._catalog.lookup(bucket.name, [elsewhere.key(len(elsewhere) - 1)])
            if found is not None:
                differs = tuple(self._differs(namespace.row.declaration, row.declaration))
                if best is None or len(differs) < len(best):
                    best = differs
            await asyncio.sleep(0)
        return best
