"""The lease and gc protocol as a model that can be explored whole: every order of its steps, crashes and pauses included.

One chain of `keys` chunks (each the parent of the next), writers that may die between upload and commit, holders of one lease each,
collectors that all believe they lead and may stop for ever between any two steps, DELETE at any time, one loss of all lease state.
A state is a tuple; a step is one transaction of the catalog or one call to a tier. `docs/gc.md` names the code of each step.

Safety, in every reachable state (`gc-protocol` §2.6):
  S1  what a holder may still rely on is readable: its tail with the blob that it pinned, its ancestors with right bytes
  S2  a live chunk's parent is live
  S3  a row's blob is in the tier
Liveness: from every reachable state an empty store can be reached.

A change of the protocol is made here first. `MUTANTS` are the rules, each left out once: every one must be found.
`explore.py` does the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LIVE, MARKED, HIDDEN = "live", "marked", "hidden"


class Row(NamedTuple):
    """A catalog row: its state and the blob it names."""

    state: str
    blob: int


class Entry(NamedTuple):
    """An entry of the delete queue. `waits`: the blob was pinned when it was queued."""

    blob: int
    waits: bool


class Writer(NamedTuple):
    """A writer with one session epoch: what it has uploaded and not committed, and whether its epoch is fenced."""

    key: int = -1
    blob: int = -1
    fenced: bool = False


class Holder(NamedTuple):
    """A holder's side (`tail`, `blob`: what it believes to hold, until its own deadline) and the catalog's (`pinned`, `key`)."""

    tail: int = -1
    blob: int = -1
    pinned: int = -1
    key: int = -1


class Collector(NamedTuple):
    """Between two steps: a claim decided on (mutant only), or a blob about to be deleted or deleted but still queued."""

    doing: str = ""
    key: int = -1
    blob: int = -1


class State(NamedTuple):
    """Everything. Rows by key; the rest as the field says."""

    rows: tuple[Row | None, ...]
    blobs: frozenset[tuple[int, int]]
    queue: frozenset[Entry]
    writers: tuple[Writer, ...]
    holders: tuple[Holder, ...]
    collectors: tuple[Collector, ...]
    quiet: bool
    uploads: int
    grants: int
    deletes: int
    losses: int


Step = tuple[str, State]

MUTANTS = {
    "blob ids are reused": "reuse",
    "a claim is decided in one step and done in another": "stale-claim",
    "collection is root first": "root-first",
    "a commit does not need a live parent": "orphan-commit",
    "the catalog expires a session before its holder does": "early-expiry",
    "a look-up and its pin are two steps": "stale-pin",
    "a replaced blob id is not queued": "no-queue",
    "dead epochs are not swept": "no-sweep",
    "a dead epoch may commit": "no-fence",
    "a claim does not check pins and children again": "blind-claim",
    "DELETE frees what is pinned": "delete-frees",
    "DELETE hides a parent before its children": "delete-parent-first",
    "a look-up rescues what DELETE hid": "rescue-hidden",
    "no quiet time after lease state was lost": "no-quiet",
    "a pinned blob does not wait in the delete queue": "no-wait",
    "condemning ignores pins and a pin rescues nothing": "pin-no-rescue",
    "a pin protects the blob of its key and not the key": "pins-name-blobs-only",
}
"""What each mutant is, and its name in the rules below."""

LIVENESS_MUTANTS = frozenset({"no-sweep"})
"""These lose no data; they leave garbage that nothing can ever clean."""

_LOOKED = -10
"""Mutant only: a holder that has looked at key k and not yet pinned it has `key` = _LOOKED - k."""


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration and the rules, less the one that `mutant` names."""

    keys: int = 2
    writers: int = 1
    holders: int = 1
    collectors: int = 2
    uploads: int = 3
    grants: int = 2
    deletes: int = 2
    losses: int = 1
    mutant: str = ""

    def start(self) -> State:
        """Nothing is stored."""
        return State(
            (None,) * self.keys, frozenset(), frozenset(),
            (Writer(),) * self.writers, (Holder(),) * self.holders, (Collector(),) * self.collectors,
            quiet=False, uploads=self.uploads, grants=self.grants, deletes=self.deletes, losses=self.losses,
        )  # fmt: skip

    # -- what the rules ask --------------------------------------------------------------------------------------

    def is_pinned(self, state: State, blob: int) -> bool:
        """Whether the catalog has a pin on the blob; in quiet time nobody can know, so yes. Asked of the delete queue."""
        return state.quiet or any(holder.pinned == blob for holder in state.holders)

    def is_held(self, state: State, key: int, row: Row) -> bool:
        """Whether the catalog has a pin on the key, whatever blob its row names by now. Asked of rows: were it asked by blob,
        a chunk that was deleted, stored anew and deleted again would take the ancestors of a pinned tail with it."""
        if self.mutant == "pins-name-blobs-only":
            return self.is_pinned(state, row.blob)
        return state.quiet or any(holder.key == key for holder in state.holders)

    def steps(self, state: State) -> Iterator[Step]:
        """Every step that can be taken from here."""
        yield from self._writer_steps(state)
        yield from self._holder_steps(state)
        yield from self._client_steps(state)
        for number, collector in enumerate(state.collectors):
            yield from self._collector_steps(state, number, collector)

    # -- writers ---------------------------------------------------------------------------------------------------

    def _writer_steps(self, state: State) -> Iterator[Step]:
        for number, writer in enumerate(state.writers):
            if writer.key < 0 and state.uploads and not writer.fenced:
                for key in range(self.keys):
                    # An id is (epoch, sequence); its number here counts down with the uploads, so it is never drawn again.
                    blob = key if self.mutant == "reuse" else 100 + state.uploads
                    yield (
                        f"writer {number} uploads blob {blob} for key {key}",
                        state._replace(
                            blobs=state.blobs | {(blob, number)},
                            uploads=state.uploads - 1,
                            writers=put(state.writers, number, Writer(key, blob)),
                        ),
                    )
            if writer.key >= 0 and (not writer.fenced or self.mutant == "no-fence"):
                yield f"writer {number} commits", self._commit(state, number, writer)
            if not writer.fenced:
                # It is gone or paused past its time: fenced first, swept after.
                yield (
                    f"writer {number}'s session ends",
                    state._replace(writers=put(state.writers, number, writer._replace(fenced=True))),
                )
            elif self.mutant != "no-sweep":
                named = {row.blob for row in state.rows if row} | {entry.blob for entry in state.queue}
                left = {blob for blob, epoch in state.blobs if epoch == number and blob not in named}
                if left:
                    yield (
                        f"dead epoch {number} is swept",
                        state._replace(queue=state.queue | {Entry(blob, waits=False) for blob in left}),
                    )

    def _commit(self, state: State, number: int, writer: Writer) -> State:
        key, rows = writer.key, list(state.rows)
        queue = set(state.queue)
        parent = rows[key - 1] if key else None
        before = rows[key]
        if key and (parent is None or parent.state == HIDDEN) and self.mutant != "orphan-commit":
            queue.add(Entry(writer.blob, waits=False))
        elif before is not None and before.state != HIDDEN:
            rows[key] = Row(LIVE, before.blob)  # the first writer wins, and the chunk is wanted
            if before.blob != writer.blob:
                queue.add(Entry(writer.blob, waits=False))
        else:
            if before is not None and before.blob != writer.blob and self.mutant != "no-queue":
                waits = self.is_pinned(state, before.blob) and self.mutant != "no-wait"
                queue.add(Entry(before.blob, waits))
            rows[key] = Row(LIVE, writer.blob)
            if key and parent is not None:
                rows[key - 1] = Row(LIVE if parent.state == MARKED else parent.state, parent.blob)
        writers = put(state.writers, number, Writer(fenced=writer.fenced))
        return state._replace(rows=tuple(rows), queue=frozenset(queue), writers=writers)

    # -- holders ---------------------------------------------------------------------------------------------------

    def _holder_steps(self, state: State) -> Iterator[Step]:
        for number, holder in enumerate(state.holders):
            if holder.tail < 0:
                if holder.key <= _LOOKED:
                    tail = _LOOKED - holder.key
                    late = Holder(tail, holder.blob, holder.blob, tail)
                    yield f"holder {number} pins key {tail}", self._with(state, number, late)
                elif holder.pinned >= 0:
                    yield f"the catalog expires holder {number}", self._with(state, number, Holder())
                elif state.grants:
                    yield from self._grants(state, number)
                continue
            yield f"holder {number} releases", self._with(state, number, Holder())
            yield (
                f"holder {number}'s own deadline passes",
                self._with(state, number, Holder(pinned=holder.pinned, key=holder.key)),
            )
            if self.mutant == "early-expiry" and holder.pinned >= 0:
                yield (
                    f"the catalog expires holder {number}",
                    self._with(state, number, holder._replace(pinned=-1, key=-1)),
                )
            row = state.rows[holder.tail]
            if holder.pinned < 0 and row is not None and row.state != HIDDEN and row.blob == holder.blob:
                rows = put(state.rows, holder.tail, Row(LIVE, row.blob))
                reclaimed = holder._replace(pinned=holder.blob, key=holder.tail)
                yield f"holder {number} pins again", self._with(state._replace(rows=rows), number, reclaimed)

    def _grants(self, state: State, number: int) -> Iterator[Step]:
        for tail in range(self.keys):
            row = state.rows[tail]
            if row is None or row.state == HIDDEN:
                break
            rescued = row.state if self.mutant == "pin-no-rescue" else LIVE
            rows = put(state.rows, tail, Row(rescued, row.blob))
            granted = state._replace(rows=rows, grants=state.grants - 1)
            if self.mutant == "stale-pin":
                looked = Holder(blob=row.blob, key=_LOOKED - tail)
                yield f"holder {number} looks at key {tail}", self._with(granted, number, looked)
                continue
            yield (
                f"holder {number} pins key {tail}",
                self._with(granted, number, Holder(tail, row.blob, row.blob, tail)),
            )

    @staticmethod
    def _with(state: State, number: int, holder: Holder) -> State:
        return state._replace(holders=put(state.holders, number, holder))

    # -- clients, operators and bad luck -----------------------------------------------------------------------------

    def _client_steps(self, state: State) -> Iterator[Step]:
        for key, row in enumerate(state.rows):
            if row is not None and row.state == MARKED:
                yield f"a look-up rescues key {key}", state._replace(rows=put(state.rows, key, Row(LIVE, row.blob)))
            if row is not None and row.state == HIDDEN and self.mutant == "rescue-hidden":
                yield f"a look-up rescues key {key}", state._replace(rows=put(state.rows, key, Row(LIVE, row.blob)))
            if row is not None and row.state != HIDDEN and state.deletes:
                yield f"DELETE of key {key}", self._delete(state, key)
        if state.losses:
            lost = tuple(holder._replace(pinned=-1, key=-1) for holder in state.holders)
            yield (
                "all lease state is lost",
                state._replace(holders=lost, losses=state.losses - 1, quiet=self.mutant != "no-quiet"),
            )
        # Quiet time is as long as the longest lease: when it ends, who did not pin again relies on nothing any more.
        if state.quiet and all(holder.tail < 0 or holder.pinned >= 0 for holder in state.holders):
            yield "quiet time ends", state._replace(quiet=False)

    def _delete(self, state: State, key: int) -> State:
        rows, queue = list(state.rows), set(state.queue)
        below = [key] if self.mutant == "delete-parent-first" else range(self.keys - 1, key - 1, -1)
        for at in below:
            row = rows[at]
            if row is None:
                continue
            has_child = at + 1 < self.keys and rows[at + 1] is not None
            keeps = has_child or self.is_held(state, at, row)
            if self.mutant == "delete-frees":
                keeps = False
            rows[at] = Row(HIDDEN, row.blob) if keeps else None
            if not keeps:
                queue.add(Entry(row.blob, waits=False))
        return state._replace(rows=tuple(rows), queue=frozenset(queue), deletes=state.deletes - 1)

    # -- collectors --------------------------------------------------------------------------------------------------

    def _collector_steps(self, state: State, number: int, collector: Collector) -> Iterator[Step]:
        if collector.doing == "claim":
            row = state.rows[collector.key]
            done = state._replace(collectors=put(state.collectors, number, Collector()))
            if row is not None and row.blob == collector.blob:
                done = self._remove(done, collector.key, row)
            yield f"collector {number} claims key {collector.key}", done
            return
        if collector.doing == "delete":
            yield (
                f"collector {number} deletes blob {collector.blob}",
                state._replace(
                    blobs=frozenset(place for place in state.blobs if place[0] != collector.blob),
                    collectors=put(state.collectors, number, Collector("reap", blob=collector.blob)),
                ),
            )
            return
        if collector.doing == "reap":
            yield (
                f"collector {number} forgets blob {collector.blob}",
                state._replace(
                    queue=frozenset(entry for entry in state.queue if entry.blob != collector.blob),
                    collectors=put(state.collectors, number, Collector()),
                ),
            )
            return
        for entry in state.queue:
            if not (entry.waits and self.is_pinned(state, entry.blob)):
                yield (
                    f"collector {number} takes blob {entry.blob}",
                    state._replace(collectors=put(state.collectors, number, Collector("delete", blob=entry.blob))),
                )
        for key, row in enumerate(state.rows):
            if row is not None and not state.quiet:
                yield from self._condemn_or_claim(state, number, key, row)

    def _condemn_or_claim(self, state: State, number: int, key: int, row: Row) -> Iterator[Step]:
        child = state.rows[key + 1] if key + 1 < self.keys else None
        pinned = self.is_held(state, key, row)
        if row.state == LIVE:
            leaf = child is None or child.state == MARKED
            unpinned = not pinned or self.mutant == "pin-no-rescue"
            if unpinned and (leaf or self.mutant == "root-first"):
                yield f"policy condemns key {key}", state._replace(rows=put(state.rows, key, Row(MARKED, row.blob)))
            return
        free = child is None and not pinned
        if self.mutant == "root-first":
            free = not pinned
        if self.mutant == "blind-claim" or (self.mutant == "pin-no-rescue" and child is None):
            free = True
        if free and self.mutant == "stale-claim":
            yield (
                f"collector {number} decides on key {key}",
                state._replace(collectors=put(state.collectors, number, Collector("claim", key, row.blob))),
            )
        elif free:
            yield f"collector {number} claims key {key}", self._remove(state, key, row)

    @staticmethod
    def _remove(state: State, key: int, row: Row) -> State:
        return state._replace(rows=put(state.rows, key, None), queue=state.queue | {Entry(row.blob, waits=False)})

    # -- what must hold ------------------------------------------------------------------------------------------------

    def violation(self, state: State) -> str | None:
        """The name of a broken invariant, or None."""
        present = {blob for blob, _ in state.blobs}
        for key, row in enumerate(state.rows):
            if row is None:
                continue
            if row.blob not in present:
                return f"S3: key {key} names a blob that is gone"
            parent = state.rows[key - 1] if key else None
            if key and row.state != HIDDEN and (parent is None or parent.state == HIDDEN):
                return f"S2: key {key} is live and its parent is not"
        for number, holder in enumerate(state.holders):
            if holder.tail < 0:
                continue
            if holder.blob not in present:
                return f"S1: holder {number}'s tail is gone"
            for key in range(holder.tail):
                if state.rows[key] is None:
                    return f"S1: an ancestor of holder {number}'s tail is gone"
        return None

    @staticmethod
    def is_empty(state: State) -> bool:
        """Nothing is stored and nothing awaits deletion."""
        return not state.blobs and not state.queue and not any(state.rows)


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    """The tuple with one element replaced."""
    return (*values[:at], value, *values[at + 1 :])
