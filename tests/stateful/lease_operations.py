"""The verbs of the lease machine: each can be run on the real catalog, alone or beside others, and be said to the reference.

`run` gives what the catalog answered, errors by their names; `expect` does the same to the reference, which is told the ids that
the catalog drew, and gives what the answer should have been.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from blake3 import blake3
from lease_reference import TOKENS, Reference, Version
from lease_world import BUCKET, USER, LeaseWorld, row_of

from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.rows import ChunkName, CommitMode, CommitOutcome, ObjectRow, WriteCondition
from kvobj.errors import KvobjError

NO_PIN = b""
STRANGERS = tuple(ChunkName(BUCKET, f"stranger {number}", b"") for number in range(64))
"""With these a batch is as large as a collector's mostly are: not looked at where it arrives."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` is compared; `ids` are those that the catalog drew on the way."""

    value: object
    ids: tuple[bytes, ...] = ()


class Operation(Protocol):
    """See the module's text."""

    async def run(self, world: LeaseWorld) -> Answer: ...

    def expect(self, reference: Reference, got: Answer) -> object: ...


@runtime_checkable
class Relying(Protocol):
    """An operation that comes to nothing unless some chunks are live, and has others wait or turn away while it is on its way."""

    @property
    def counts_on(self) -> Sequence[str]: ...


async def _answer(work: Awaitable[Answer]) -> Answer:
    try:
        return await work
    except KvobjError as error:
        return Answer(type(error).__name__)


def _blob(row: ObjectRow | None) -> bytes:
    return row.blobs[0].blob_id if row is not None else b""


def chunk_list(keys: Sequence[str]) -> ChunkList:
    """As ids where all of the keys are some."""
    if keys and all(len(key) == 64 for key in keys):
        return IdList(b"".join(bytes.fromhex(key) for key in keys))
    return KeyList(keys)


@dataclass(frozen=True, slots=True)
class Commit:
    version: Version
    replaces: bool = False

    @property
    def counts_on(self) -> Sequence[str]:
        return [self.version.parent] if self.version.parent else []

    async def run(self, world: LeaseWorld) -> Answer:
        async def work() -> Answer:
            mode, condition = CommitMode.FIRST_WRITER_WINS, WriteCondition(if_match="*") if self.replaces else None
            now_ms = world.clock.now_ms()
            done = await world.catalog.commit(row_of(self.version), mode=mode, condition=condition, now_ms=now_ms)
            await _written(world, done)
            return Answer(_outcome(done))

        try:
            return await _answer(work())
        finally:
            world.uploads.discard(self.version.blob)

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        said, blob = reference.commit(self.version, replaces=self.replaces)
        return (said, blob) if blob else said


async def _written(world: LeaseWorld, done: CommitOutcome) -> None:
    if not done.existed:
        await world.collector.written(done.row)


def _outcome(done: CommitOutcome) -> tuple[str, bytes]:
    return "existed" if done.existed else "stored", _blob(done.row)


@dataclass(frozen=True, slots=True)
class CommitChain:
    versions: tuple[Version, ...]

    @property
    def counts_on(self) -> Sequence[str]:
        return [version.parent for version in self.versions if version.parent]

    async def run(self, world: LeaseWorld) -> Answer:
        try:
            outcomes = await world.catalog.commit_chain(
                [row_of(version) for version in self.versions], now_ms=world.clock.now_ms()
            )
        finally:
            world.uploads.difference_update(version.blob for version in self.versions)
        said: list[object] = []
        for outcome in outcomes:
            if isinstance(outcome, KvobjError):
                said.append(type(outcome).__name__)
            else:
                await _written(world, outcome)
                said.append(_outcome(outcome))
        return Answer(said)

    def expect(self, reference: Reference, got: Answer) -> object:
        # Who asks takes marks away before anything else happens.
        reference.rescue(key for version in self.versions for key in (version.key, version.parent or ""))
        return [Commit(version).expect(reference, got) for version in self.versions]


@dataclass(frozen=True, slots=True)
class Delete:
    keys: tuple[str, ...]

    async def run(self, world: LeaseWorld) -> Answer:
        outcomes = await world.catalog.delete(BUCKET, self.keys, now_ms=world.clock.now_ms())
        for outcome in outcomes:
            world.collector.removed([*([outcome.removed] if outcome.removed else []), *outcome.descendants])
        return Answer([(_blob(each.removed), frozenset(map(_blob, each.descendants))) for each in outcomes])

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        return [reference.hide(key) for key in self.keys]


@dataclass(frozen=True, slots=True)
class Recall:
    owner: str

    async def run(self, world: LeaseWorld) -> Answer:
        page = await world.catalog.recall(BUCKET, writer=self.owner, now_ms=world.clock.now_ms())
        assert page.next_after is None
        world.collector.removed(page.recalled)
        return Answer(frozenset(map(_blob, page.recalled)))

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        return reference.recall(self.owner)


@dataclass(frozen=True, slots=True)
class Lose:
    """All tiers lose the bytes of a chunk, and the store finds out."""

    version: Version

    async def run(self, world: LeaseWorld) -> Answer:
        world.lose(self.version.blob)
        await world.catalog.drop_rows([row_of(self.version)])
        return Answer(None)

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        reference.bytes_gone.add(self.version.blob)
        reference.hide(self.version.key, lost=self.version.blob)
        return None


@dataclass(frozen=True, slots=True)
class WriteDown:
    """Write-behind brings rows to a better class: rows as they were when it read them."""

    rows: tuple[ObjectRow, ...]

    async def run(self, world: LeaseWorld) -> Answer:
        raised = await world.write_down(self.rows)
        return Answer([_blob(row) for row in raised])

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        versions = [(row, Version(row.key, _blob(row), row.parent)) for row in self.rows]
        return [_blob(row) for row, version in versions if reference.raise_durability(version)]


@dataclass(frozen=True, slots=True)
class Lookup:
    keys: tuple[str, ...]
    rescue: bool

    async def run(self, world: LeaseWorld) -> Answer:
        return Answer([_blob(row) for row in await world.catalog.lookup(BUCKET, self.keys, rescue=self.rescue)])

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        if self.rescue:
            reference.rescue(self.keys)
        return [row.blob if (row := reference.found(key)) is not None else b"" for key in self.keys]


@dataclass(frozen=True, slots=True)
class Match:
    """A match, with a pin where `session` is given."""

    keys: tuple[str, ...]
    now_ms: int
    rows: bool = False
    session: bytes | None = None

    @property
    def counts_on(self) -> Sequence[str]:
        return () if self.session is None else self.keys

    async def run(self, world: LeaseWorld) -> Answer:
        async def work() -> Answer:
            found = await world.catalog.leases.match(
                BUCKET,
                chunk_list(self.keys),
                rows=self.rows,
                pin_for=self.session,
                user=USER,
                now_boot_ms=self.now_ms,
            )
            blobs = tuple(chunk.blob_id for chunk in found.rows) if self.rows else None
            value = (found.matched, found.tokens, found.size_bytes, _blob(found.tail), blobs, found.pin is not None)
            return Answer(value, (found.pin or NO_PIN,))

        return await _answer(work())

    def expect(self, reference: Reference, got: Answer) -> object:
        if self.session is not None and (error := reference.living(self.session, now_ms=self.now_ms)):
            return error
        run = reference.run_of(self.keys)
        targets = reference.targets_of(run)
        reference.rescue(row.key for row in targets)
        pinned = self.session is not None and bool(run)
        if self.session is not None and pinned and got.ids:
            session = reference.sessions[self.session]
            session.grant += 1
            reference.pin(self.session, got.ids[0], targets, session.grant)
        blobs = tuple(row.blob for row in run) if self.rows else None
        size_bytes = sum(row.size_bytes for row in run)
        return len(run), TOKENS * len(run), size_bytes, run[-1].blob if run else b"", blobs, pinned


@dataclass(frozen=True, slots=True)
class PinTails:
    session: bytes
    keys: tuple[str, ...]
    release: tuple[bytes, ...]
    now_ms: int

    @property
    def counts_on(self) -> Sequence[str]:
        return self.keys

    async def run(self, world: LeaseWorld) -> Answer:
        async def work() -> Answer:
            granted = await world.catalog.leases.pin_tails(
                self.session, self.keys, release=self.release, user=USER, bucket=BUCKET, now_boot_ms=self.now_ms
            )
            pins = tuple(each.pin or NO_PIN for each in granted.pins)
            return Answer([(each.tail, each.pin is not None) for each in granted.pins], pins)

        return await _answer(work())

    def expect(self, reference: Reference, got: Answer) -> object:
        if error := reference.living(self.session, now_ms=self.now_ms):
            return error
        session = reference.sessions[self.session]
        rows = [reference.live(key) for key in self.keys]
        if any(row is not None for row in rows):
            session.grant += 1
        for row, pin in zip(rows, got.ids or [NO_PIN] * len(rows), strict=True):
            if row is not None:
                reference.rescue([row.key])
                reference.pin(self.session, pin, [row], session.grant)
        reference.release(self.session, self.release)
        return [(key, row is not None) for key, row in zip(self.keys, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Renew:
    """`pins`: what the holder believes to hold."""

    session: bytes
    pins: frozenset[bytes]
    as_of: int
    release: tuple[bytes, ...]
    now_ms: int

    async def run(self, world: LeaseWorld) -> Answer:
        async def work() -> Answer:
            renewed = await world.catalog.leases.renew(
                self.session,
                user=USER,
                bucket=BUCKET,
                as_of=self.as_of,
                pins=len(self.pins),
                pins_digest=blake3(b"".join(sorted(self.pins))).digest(),
                release=self.release,
                now_boot_ms=self.now_ms,
            )
            return Answer((renewed.ttl_ms, renewed.reclaim))

        return await _answer(work())

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        if error := reference.living(self.session, now_ms=self.now_ms):
            return error
        reference.release(self.session, self.release)
        session = reference.sessions[self.session]
        session.expires_ms = max(session.expires_ms, self.now_ms + session.ttl_ms)
        return session.ttl_ms, reference.held_by(self.session, as_of=self.as_of) != self.pins


@dataclass(frozen=True, slots=True)
class Close:
    session: bytes

    async def run(self, world: LeaseWorld) -> Answer:
        async def work() -> Answer:
            await world.catalog.leases.close_session(self.session, user=USER, bucket=BUCKET)
            return Answer(None)

        return await _answer(work())

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        if self.session not in reference.sessions:
            return "NoSuchSessionError"
        reference.end_session(self.session)
        return None


@dataclass(frozen=True, slots=True)
class OpenSession:
    ttl_ms: int
    now_ms: int

    async def run(self, world: LeaseWorld) -> Answer:
        session = await world.catalog.leases.open_session(
            user=USER, bucket=BUCKET, holder="h", ttl_ms=self.ttl_ms, now_boot_ms=self.now_ms
        )
        return Answer((session.ttl_ms, session.expires_boot_ms), (session.id,))

    def expect(self, reference: Reference, got: Answer) -> object:
        reference.open_session(got.ids[0], ttl_ms=self.ttl_ms, now_ms=self.now_ms)
        return self.ttl_ms, self.now_ms + self.ttl_ms


@dataclass(frozen=True, slots=True)
class Beat:
    """One step of the expiry worker. How many sessions ended shows in what is left: two that expire them beside each other count
    the same ones."""

    now_ms: int

    async def run(self, world: LeaseWorld) -> Answer:
        await world.expiry.step()
        return Answer(None)

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        reference.beat(now_ms=self.now_ms)
        return None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a collector does that decided long ago."""

    now_ms: int

    @property
    def look(self) -> Look:
        return Look()

    async def run(self, world: LeaseWorld) -> Answer:
        claimed = await world.catalog.claim(now_boot_ms=self.now_ms, now_ms=world.clock.now_ms())
        for chunk in claimed.chunks:
            world.collector.gone(chunk.bucket, chunk.key, chunk.blob_id)
        world.collector.removed(claimed.hidden)
        return Answer(frozenset([chunk.blob_id for chunk in claimed.chunks] + [_blob(row) for row in claimed.hidden]))

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        return reference.claim(now_ms=self.now_ms)


@dataclass(frozen=True, slots=True)
class Look:
    """The first step of a claim, for the reference alone: it finds the hidden rows that it will take if they are so still."""

    async def run(self, world: LeaseWorld) -> Answer:  # noqa: ARG002
        return Answer(None)

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        reference.looked.append(reference.look())
        return None


@dataclass(frozen=True, slots=True)
class Condemn:
    """Policy condemns these (key, blob), children first. Two steps in a large batch, and whatever happens in between is of no
    account until the claim: `decision` looks at the chunks, which are marked afterwards."""

    chunks: tuple[tuple[str, bytes], ...]
    due_ms: int
    in_a_large_batch: bool = False

    @property
    def decision(self) -> Decision:
        return Decision(self.chunks)

    async def run(self, world: LeaseWorld) -> Answer:
        named = [ChunkName(BUCKET, key, blob) for key, blob in self.chunks]
        strangers = STRANGERS if self.in_a_large_batch else ()
        done = await world.catalog.condemn([*named, *strangers], not_before_boot_ms=self.due_ms)
        assert not any(done[len(named) :])
        return Answer(done[: len(named)])

    def expect(self, reference: Reference, got: Answer) -> object:
        """After its decision, if that was said."""
        if reference.decided is None:
            self.decision.expect(reference, got)
        decided, reference.decided = reference.decided or [], None
        chosen = [chunk for chunk, may in zip(self.chunks, decided, strict=True) if may]
        reference.mark(chosen, due_ms=self.due_ms)
        return decided


@dataclass(frozen=True, slots=True)
class Decision:
    """The first step of a condemnation, for the reference alone."""

    chunks: tuple[tuple[str, bytes], ...]

    async def run(self, world: LeaseWorld) -> Answer:  # noqa: ARG002
        return Answer(None)

    def expect(self, reference: Reference, got: Answer) -> object:  # noqa: ARG002
        reference.decided = reference.may_condemn(self.chunks)
        return None


@dataclass(slots=True)
class Race:
    """Operations begun one after another while the durable writer is held up, each going as far as it can in some rounds.

    A large condemnation has looked at its chunks, and marked none, when those after it begin.
    The last `late` ones begin when the changes of the others have run and readers see none of them yet; what these ask of the
    reading thread and what the writer has done is then told to the event loop in one turn, the writer first if `writer_first`.
    """

    operations: Sequence[Operation]
    rounds: Sequence[int]
    late: int = 0
    writer_first: bool = True
    answers: list[Answer] = field(default_factory=list)

    async def run(self, world: LeaseWorld) -> list[Answer]:
        early = len(self.operations) - self.late
        gate, held = world.hold_writer()
        tasks: list[asyncio.Task[Answer]] = []
        following: tuple[threading.Event, asyncio.Future[None]] | None = None
        try:
            await world.pump(1)
            for operation, rounds in zip(self.operations[:early], self.rounds, strict=False):
                tasks.append(asyncio.create_task(operation.run(world)))
                if isinstance(operation, Condemn):
                    await asyncio.sleep(0)
                    world.wait_for_reader()
                else:
                    await world.pump(rounds)
            if self.late:
                await world.pump(1)  # whoever was given no round so far
                following = world.hold_writer()  # the last change of the group of those that wait
        finally:
            gate.set()
        await held
        if following is not None:
            reading = world.hold_reader()
            try:
                for operation in self.operations[early:]:
                    tasks.append(asyncio.create_task(operation.run(world)))
                    await asyncio.sleep(0)
            finally:
                world.let_go(writer=following[0], reader=reading, writer_first=self.writer_first)
            await following[1]
        self.answers = await asyncio.gather(*tasks)
        return self.answers
