"""Which chunks of the home tier go next: the policy's ranking, less what is held or was refused a moment ago. Changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from kvobj.clock import Clock, boot_ms
from kvobj.gc.holds import Holds
from kvobj.gc.home_chunks import HomeChunks
from kvobj.gc.quotas import Excess
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy

# A chunk that the catalog would not give up (a pin, a child) is not asked for again before this.
SPARED_MS: Final = 5_000
# The bytes of a namespace that has too many chunks: their number is what bounds it.
_ALL_BYTES: Final = 1 << 62


class Choice:
    """See the module's text. Answers are the policy's names, leaves first, first to go first. Event-loop-only."""

    def __init__(
        self, policy: ChunkPolicy, chunks: HomeChunks, holds: Holds, clock: Clock, *, chunk_ttl_ms: int | None
    ) -> None:
        self._policy = policy
        self._chunks = chunks
        self._holds = holds
        self._clock = clock
        self._chunk_ttl_ms = chunk_ttl_ms
        self._spared: OrderedDict[bytes, int] = OrderedDict()

    @property
    def follows_use(self) -> bool:
        """Whether the last use of each chunk is known: only where they have a time to live."""
        return self._chunk_ttl_ms is not None

    def spare(self, name: bytes) -> None:
        """The catalog would not give the chunk up: leave it alone for a while."""
        self._spared[name] = boot_ms(self._clock) + SPARED_MS
        self._spared.move_to_end(name)

    def is_spared(self, name: bytes) -> bool:
        """Whether it was refused a moment ago."""
        until_ms = self._spared.get(name)
        return until_ms is not None and boot_ms(self._clock) < until_ms

    def is_held(self, name: bytes) -> bool:
        """Whether a client asked for the chunk within the grace time."""
        return self._holds.is_held(name, now_boot_ms=boot_ms(self._clock))

    def expired(self, limit: int) -> list[bytes]:
        """What nobody used for the chunks' time to live."""
        if self._chunk_ttl_ms is None:
            return []
        before_ms = boot_ms(self._clock) - self._chunk_ttl_ms
        return [chunk.name for chunk in self._chunks.unused_since(before_ms, eligible=self._is_free(), limit=limit)]

    def for_space(
        self,
        wanted_bytes: int,
        limit: int,
        *,
        but: Collection[bytes] = (),
        eligible: Callable[[bytes], bool] | None = None,
    ) -> list[bytes]:
        """What the policy ranks lowest, of what is `eligible`, which is asked only of chunks that are known."""
        is_free = self._is_free()
        if not but and eligible is None:
            return self._victims(wanted_bytes, limit, is_free)
        return self._victims(
            wanted_bytes,
            limit,
            lambda name: name not in but and is_free(name) and (eligible is None or eligible(name)),
        )

    def uploadable(self, wanted_bytes: int, limit: int, *, eligible: Callable[[bytes], bool]) -> list[bytes]:
        """Chunks that may leave once they are uploaded: what the policy ranks lowest, or, where it names none, since all is the way
        to something in memory, what came first."""
        is_free = self._is_free()
        return self.for_space(wanted_bytes, limit, eligible=eligible) or self._chunks.oldest(
            eligible=lambda name: is_free(name) and eligible(name), limit=limit
        )

    def evictable(self, wanted_bytes: int, limit: int) -> list[bytes]:
        """Chunks in nvme that the remote has: what the policy ranks lowest, held or not. Where all that it may name is the way to
        something else, those that could go for longest."""
        if wanted_bytes <= 0 or not self._chunks.shared_bytes:
            return []
        names = self._victims(wanted_bytes, limit, self._chunks.is_evictable)
        return names or self._chunks.evictable(wanted_bytes, limit)

    def of_namespace(self, excess: Excess, limit: int) -> list[bytes]:
        """What the policy ranks lowest within a namespace at its quota."""
        if not excess.is_left:
            return []
        is_free, chunks = self._is_free(), self._chunks
        wanted_bytes = excess.size_bytes
        if excess.chunks > 0:
            wanted_bytes = max(wanted_bytes, _ALL_BYTES)
            limit = min(limit, excess.chunks)
        # What has left nvme is what the policy ranked lowest before.
        away = self._chunks.away_in(excess.place, wanted_bytes, eligible=is_free, limit=limit)
        if away:
            return away
        is_member = chunks.members(excess.place)
        if is_free == chunks.__contains__:
            return self._victims(wanted_bytes, limit, is_member)
        return self._victims(wanted_bytes, limit, lambda name: is_member(name) and is_free(name))

    def _victims(self, wanted_bytes: int, limit: int, eligible: Callable[[bytes], bool]) -> list[bytes]:
        return self._policy.victims(
            CacheTier.NVME, wanted_bytes, now_ms=boot_ms(self._clock), eligible=eligible, limit=limit
        )

    def _is_free(self) -> Callable[[bytes], bool]:
        now_ms = boot_ms(self._clock)
        while self._spared and next(iter(self._spared.values())) <= now_ms:
            self._spared.popitem(last=False)
        chunks, holds, spared = self._chunks, self._holds, self._spared
        if not len(holds) and not spared:
            return chunks.__contains__
        return lambda name: name in chunks and name not in spared and not holds.is_held(name, now_boot_ms=now_ms)
