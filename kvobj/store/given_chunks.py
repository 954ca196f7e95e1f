"""Which of the chunks that are stored a reader would be given, by which codecs it takes: of some a lossy copy alone is left.

To who takes none of those they are misses, so they are none of what a match or a pin finds for it: a client that asks what is there
and puts the rest puts them again. Rows are looked at where that may be so at all: in a namespace with lossy copies, what is not in
memory, where bytes lie as they were put; and everything for who takes no plain bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvobj.catalog.chunk_heads import MatchedChunk
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import CODEC_RAW
from kvobj.store.lossy_namespaces import LossyNamespaces
from kvobj.store.representation import Accepted, takes_raw

PLAIN: Final = (Accepted(CODEC_RAW),)
"""What a reader takes that says nothing: the bytes as they were put."""
_LOOKED_UP: Final = 1024
"""Keys in one go; between two of them others run."""
_ASKED: Final = 256
"""Rows whose tiers are asked; then others run."""


class GivenChunks:
    """See the module's text. `in_memory` tells which blobs memory holds, `would_give` is `Store.would_give`. Event-loop-only."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        lossy: LossyNamespaces,
        in_memory: Callable[[Sequence[bytes]], Sequence[bool]],
        would_give: Callable[[ObjectRow, Sequence[Accepted]], Awaitable[bool]],
    ) -> None:
        self._catalog = catalog
        self._lossy = lossy
        self._in_memory = in_memory
        self._would_give = would_give

    def is_sure(self, namespace: NamespaceRow, accepts: Sequence[Accepted]) -> bool:
        """Whether this reader is given every chunk of the namespace that is live."""
        return takes_raw(accepts) and not self._lossy.may_be(namespace)

    async def run(self, bucket: str, found: Sequence[MatchedChunk], accepts: Sequence[Accepted]) -> int:
        """How many chunks at the head of a run the reader is given."""
        for start in range(0, len(found), _LOOKED_UP):
            some = found[start : start + _LOOKED_UP]
            doubtful: Sequence[int] = range(len(some))
            if takes_raw(accepts):
                held = self._in_memory([chunk.blob_id for chunk in some])
                doubtful = [index for index in doubtful if not held[index]]
            given = await self.each(bucket, [some[index].key for index in doubtful], accepts, is_run=True)
            if False in given:
                return start + doubtful[given.index(False)]
            await asyncio.sleep(0)
        return len(found)

    async def each(
        self, bucket: str, keys: Sequence[str], accepts: Sequence[Accepted], *, is_run: bool = False
    ) -> list[bool]:
        """Whether the reader is given each of these. `is_run`: up to the first that it is not given."""
        given: list[bool] = []
        for start in range(0, len(keys), _LOOKED_UP):
            for row in await self._catalog.lookup(bucket, keys[start : start + _LOOKED_UP]):
                given.append(row is not None and await self._is_given(row, accepts))
                if is_run and not given[-1]:
                    return given
                if len(given) % _ASKED == 0:
                    await asyncio.sleep(0)
        return given

    async def _is_given(self, row: ObjectRow, accepts: Sequence[Accepted]) -> bool:
        if row.lossy is None and takes_raw(accepts):
            return True
        return await self._would_give(row, accepts)
