"""What the next cycle would condemn and why, for an operator to read before it happens. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.clock import Clock, boot_ms
from kvobj.gc.choice import Choice
from kvobj.gc.home_chunks import HomeChunks
from kvobj.gc.plan import Reason, Victim
from kvobj.gc.quotas import Place, over_quota

# A dry run looks at no more chunks than this for each reason.
PLAN_MAX: Final = 10_000


class DryRun:
    """Asks the same questions as the collector, in the same order, of a `Choice` that changes nothing by itself."""

    def __init__(
        self,
        catalog: Catalog,
        chunks: HomeChunks,
        choice: Choice,
        clock: Clock,
        *,
        refused: Callable[[], Iterable[tuple[str, str, int]]],
        for_space: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`for_space`: whether a chunk would be condemned for want of room at all."""
        self._catalog = catalog
        self._chunks = chunks
        self._choice = choice
        self._clock = clock
        self._refused = refused
        self._for_space = for_space

    async def victims(self, leaving: Mapping[Place, tuple[int, int]], *, lacking_bytes: int) -> list[Victim]:
        """All of them, first to go first. `leaving` and `lacking_bytes` are what is condemned already, and what is not yet."""
        planned: dict[bytes, Victim] = {}
        for excess in await over_quota(self._catalog, leaving):
            self._add(planned, self._choice.of_namespace(excess, PLAN_MAX), Reason.QUOTA)
        self._add(planned, self._choice.expired(PLAN_MAX), Reason.EXPIRED)
        lacking_bytes -= sum(victim.size_bytes for victim in planned.values())
        if lacking_bytes > 0:
            names = self._choice.for_space(lacking_bytes, PLAN_MAX, but=planned.keys(), eligible=self._for_space)
            self._add(planned, names, Reason.SPACE)
        refused = [Victim(bucket, key, Reason.REFUSED, size_bytes) for bucket, key, size_bytes in self._refused()]
        return [*refused, *planned.values()]

    def _add(self, planned: dict[bytes, Victim], names: Iterable[bytes], reason: Reason) -> None:
        for name in names:
            chunk = self._chunks.chunk(name)
            if chunk is None or name in planned:
                continue
            unused = (boot_ms(self._clock) - chunk.used_ms) / 1000 if self._choice.follows_use else None
            planned[name] = Victim(chunk.chunk.bucket, chunk.chunk.key, reason, chunk.size_bytes, unused)
