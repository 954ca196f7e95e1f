"""What the manifests of a store say, put together: the newest complete snapshot, then every record above its position, in order.

A lineage begins with a snapshot, so the newest lineage that has a complete one is the store; older ones are ignored. Journals are
merged by position, whoever wrote them and however often: applying them in order leaves each subject as its highest record says. A
span of positions that no journal covers is an error, since what happened there is not known. Memory is bounded by the manifests
that are read ahead and by those whose spans overlap, 16 MiB each.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from kvobj.errors import CorruptionError, NotFoundError, UntrustedError
from kvobj.manifests.folder import ManifestFolder, read_ahead
from kvobj.manifests.format import ManifestEntry, ManifestKind
from kvobj.manifests.names import ManifestName
from kvobj.manifests.snapshot import Snapshot, read_snapshot_head

_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class StoredState:
    """Which manifests make the state of a store. `passed_over`: newer snapshots that cannot be read, and why. `gaps`: spans
    (after, last] of positions that some journal told of, and none of `journals` does."""

    snapshot: Snapshot
    journals: tuple[ManifestName, ...]
    passed_over: tuple[str, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def lineage(self) -> int:
        """Whose they are."""
        return self.snapshot.name.lineage

    @property
    def position(self) -> int:
        """The highest position that they tell of."""
        return max((name.last for name in self.journals), default=self.snapshot.position)

    @property
    def entries_max(self) -> int:
        """How many records there are at most, for a progress bar: positions of a journal may be void."""
        return self.snapshot.entries + self.position - self.snapshot.position


async def find_state(
    folder: ManifestFolder, *, newest: int, without: Collection[ManifestName] = (), may_lack_journals: bool = False
) -> StoredState:
    """The state of the newest lineage, up to `newest`, that has a complete snapshot, other than one whose head is in `without`.

    A snapshot whose head or whose parts' names are not there any more is passed over for an older one, where the journals reach
    back that far. Journals in `without` are not read: others have to cover what they do, unless it `may_lack_journals`
    (`StoredState.gaps`). `NotFoundError`: there is no snapshot at all. `CorruptionError`: there is none that can be used;
    `UntrustedError`: there is one that is not to be believed, and none else.
    """
    for lineage in [each for each in await folder.lineages() if each <= newest]:
        names = await folder.names(lineage)
        heads = [name for name in names if name.kind is ManifestKind.HEAD]
        if not heads:
            continue
        problems: list[str] = []
        is_untrusted = False
        there = set(names)
        for head in reversed(heads):
            if head in without:
                problems.append(f"a part of this snapshot cannot be read name={head.key}")
                continue
            try:
                snapshot = await read_snapshot_head(folder, head)
                told = journals_above(names, snapshot.position)
                journals = [name for name in told if name not in without]
                gaps = tuple(_gaps(journals, snapshot.position, upto=max((name.last for name in told), default=0)))
                _require(snapshot, there, () if may_lack_journals else gaps)
            except CorruptionError as error:
                is_untrusted = is_untrusted or isinstance(error, UntrustedError)
                problems.append(str(error))
                continue
            return StoredState(snapshot, tuple(journals), tuple(problems), gaps)
        kind = UntrustedError if is_untrusted else CorruptionError
        raise kind("no snapshot of the store can be used", lineage=lineage, problems="; ".join(problems))
    raise NotFoundError("there are no manifests of a store", newest_lineage=newest)


def journals_above(names: Sequence[ManifestName], position: int) -> list[ManifestName]:
    """Journals that have to be read behind a snapshot at `position`, in the order in which they begin."""
    wanted = (name for name in names if name.kind is ManifestKind.JOURNAL and name.last > position)
    return sorted(wanted, key=lambda name: (name.after, name.last, name.epoch, name.number))


def first_gap(journals: Sequence[ManifestName], position: int) -> tuple[int, int] | None:
    """The first span (after, last] above `position` that none of `journals_above` covers."""
    return next(_gaps(journals, position), None)


def _gaps(journals: Sequence[ManifestName], position: int, *, upto: int = 0) -> Iterator[tuple[int, int]]:
    """All such spans, and the one up to `upto`."""
    for name in journals:
        if name.after > position:
            yield position, name.after
        position = max(position, name.last)
    if position < upto:
        yield position, upto


async def read_state(
    folder: ManifestFolder, state: StoredState, *, on_manifest: Callable[[ManifestName], None] = lambda _: None
) -> AsyncGenerator[list[ManifestEntry], None]:
    """All records, in lists of a thousand or so: the snapshot's (buckets before what lies in them), then the journals' ascending.

    `CorruptionError` for a manifest that is damaged or gone: `find_state` again, and without this snapshot where that finds the
    same (it does not where a node that still works has tidied up meanwhile).
    """
    async with aclosing(read_ahead(folder, state.snapshot.part_names)) as parts:
        async for name, _, entries in parts:
            on_manifest(name)
            for batch in batched(entries):
                yield batch
    async with aclosing(
        merge(folder, state.journals, above=state.snapshot.position, on_manifest=on_manifest)
    ) as merged:
        async for batch in merged:
            yield batch


async def merge(
    folder: ManifestFolder,
    journals: Sequence[ManifestName],
    *,
    above: int = 0,
    on_manifest: Callable[[ManifestName], None] = lambda _: None,
) -> AsyncGenerator[list[ManifestEntry], None]:
    """The records of journals (as `journals_above` orders them) with positions above `above`, ascending, each once."""
    merged = _Merged(above)
    async with aclosing(read_ahead(folder, journals)) as manifests:
        async for name, head, entries in manifests:
            # Nothing in this manifest or in a later one lies at or below its `after`.
            for batch in batched(merged.take(head.after)):
                yield batch
            on_manifest(name)
            merged.open(entries)
    for batch in batched(merged.take(max((name.last for name in journals), default=0))):
        yield batch


class _Merged:
    """Streams of ascending entries as one, from a position on; of entries of one position one."""

    def __init__(self, above: int) -> None:
        self._taken = above
        self._heads: list[tuple[ManifestEntry, int, Iterator[ManifestEntry]]] = []
        self._numbers = count()

    def open(self, entries: Iterator[ManifestEntry]) -> None:
        first = next(entries, None)
        if first is not None:
            heapq.heappush(self._heads, (first, next(self._numbers), entries))

    def take(self, stop: int) -> Iterator[ManifestEntry]:
        """What lies up to and with `stop`."""
        heads = self._heads
        while heads and heads[0][0].position <= stop:
            entry, number, entries = heads[0]
            following = next(entries, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following, number, entries))
            if entry.position > self._taken:
                self._taken = entry.position
                yield entry


def batched(entries: Iterator[ManifestEntry]) -> Iterator[list[ManifestEntry]]:
    """Entries in lists of a thousand."""
    while batch := list(islice(entries, _BATCH)):
        yield batch


def _require(snapshot: Snapshot, there: Collection[ManifestName], gaps: Sequence[tuple[int, int]]) -> None:
    for part in snapshot.part_names:
        if part not in there:
            raise CorruptionError("a part of the snapshot is gone", name=part.key)
    for after, last in gaps:
        raise CorruptionError("journals are missing", after=after, last=last, snapshot=snapshot.name.key)
