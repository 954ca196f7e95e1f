"""Leases and gc against a reference of their own: every order of writers, holders, deletes, collectors, crashes and clocks.

After each step the catalog holds what the reference holds, and `gc-protocol` §2.6 is true: what a holder may rely on is readable
(S1), a live chunk's parent is live (S2), a row's bytes are there (S3), and after a quiet while nothing is left over (L1, L2).
Operations that run beside each other must have happened in some order. `KVOBJ_MACHINE` is the number of runs (80 by default).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, permutations, product

from catalog_consistency import assert_consistent
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lease_operations import (
    Answer,
    Beat,
    Claim,
    Close,
    Commit,
    CommitChain,
    Condemn,
    Decision,
    Delete,
    Look,
    Lookup,
    Lose,
    Match,
    OpenSession,
    Operation,
    PinTails,
    Race,
    Recall,
    Relying,
    Renew,
    WriteDown,
)
from lease_reference import Reference, Version, Waiting
from lease_world import BUCKET, GRACE_MS, USER, LeaseWorld

from kvobj.catalog.key_tree import STRIDE_BYTES
from kvobj.catalog.rows import ObjectRow, QueueEntry
from kvobj.ids import BlobId


def hex_key(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()


A, B, C, D, F, G = (hex_key(label) for label in "abcdfg")
LOOSE, BELOW_LOOSE, LONG, LONGER, WILD = "loose", "below", "n" * 500, "n" * 500 + "x", "wild"
PARENTS = {A: "", B: A, C: B, D: B, F: "", G: F, LOOSE: None, BELOW_LOOSE: LOOSE, LONG: "", LONGER: LONG, WILD: ""}
"""A forest: two chains of ids that fork, a chunk without a parent and a child of it, long names, and one that hangs anywhere."""

KEYS = st.sampled_from([C, B, A, C, B, A, D, C, B, G, F, LOOSE, BELOW_LOOSE, LONG, LONGER, WILD])
WILD_PARENTS = st.sampled_from([A, B, C, LOOSE, LONG, "", None])
TTLS = st.sampled_from([2_000, 5_000, 30_000])
OWNERS = st.sampled_from(["main", "main", "other"])
PAUSES = st.sampled_from([1, 400, 700, 1_000, 2_000, 3_000, 5_000, 30_000])
JUMPS = st.sampled_from([-3600.0, -1.0, 5.0, 3600.0])
ROUNDS = st.sampled_from([1, 2, 0])
ALL_ROUNDS = st.tuples(ROUNDS, ROUNDS, ROUNDS)
PLACES = st.integers(0, 2)
LATE = st.sampled_from([1, 0, 1, 1, 0, 2])
CLAIM_LAST = st.sampled_from([(0, 1, 2), (1, 0, 2), (0, 1, 2), (1, 0, 2), (0, 1, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0)])
"""Orders of three operations, the third of which mostly comes last: what is decided beside the others is decided by it."""
MARKS = st.sampled_from([2, 3, 1, 0])
RUNS = int(os.environ.get("KVOBJ_MACHINE", "80"))
STEPS = int(os.environ.get("KVOBJ_MACHINE_STEPS", "50"))
# What comes to light is made smaller, unless it is only asked whether something does (`tests/mutants`).
PHASES = [phase for phase in Phase if phase is not Phase.shrink or os.environ.get("KVOBJ_MACHINE_SHRINK") != "no"]
HOLDER_SLACK_MS = 500
FEW = 4
"""Chunks. Where fewer are live there is little to fight over."""


def path_to(key: str) -> list[str]:
    """The key and all above it, the first chunk first."""
    parent = PARENTS[key]
    return [*(path_to(parent) if parent else []), key]


@dataclass(slots=True)
class Holder:
    """A holder's own side: until when it relies on what (its clock), and the pins that it believes to hold."""

    ttl_ms: int
    relies_until_ms: int
    grant: int = 0
    pins: dict[bytes, tuple[tuple[tuple[str, bytes], ...], tuple[tuple[str, bytes], ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class PausedReaper:
    """A reaper that stopped somewhere: what it was about to delete, and whether it has."""

    entries: list[QueueEntry]
    has_deleted: bool = False


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = LeaseWorld()
        self.holders: dict[bytes, Holder] = {}
        self.gone_sessions: list[bytes] = []
        self.stale_rows: list[ObjectRow] = []
        self.dead_uploads: list[Version] = []
        self.reapers: list[PausedReaper] = []
        self.lost: set[bytes] = set()
        self.broken: set[bytes] = set()
        self.hot: list[str] = []

    def teardown(self) -> None:
        try:
            if self.world.sound:
                self.settle()
        finally:
            self.world.end()

    # -- running ---------------------------------------------------------------------------------------------------

    @property
    def reference(self) -> Reference:
        return self.world.reference

    @property
    def now_ms(self) -> int:
        return self.world.now_ms

    def do(self, operation: Operation) -> Answer:
        """Run it alone and compare."""
        sent_ms = self.world.holder_ms
        answer: Answer = self.world.run(operation.run(self.world))
        assert answer.value == operation.expect(self.reference, answer), operation
        self.note(operation, answer, sent_ms)
        return answer

    def race(
        self, operations: Sequence[Operation], rounds: Sequence[int], *, late: int = 0, writer_first: bool = True
    ) -> None:
        """Run them beside each other. What came out must be what some order of them gives."""
        sent_ms = self.world.holder_ms
        race = Race(operations, rounds, late, writer_first)
        self.world.run(race.run(self.world))
        started = list(zip(operations, race.answers, strict=True))
        differences: list[str] = []
        for spared, order, misses in product(self.spared(operations), self.orders(started), self.misses(operations)):
            reference = self.reference.copy()
            expected: list[object] = []
            for operation, answer in order:
                reference.absent = misses if isinstance(operation, Lookup | Match) else frozenset()
                reference.spared = spared
                expected.append(operation.expect(reference, answer))
            reference.absent = reference.spared = frozenset()
            if expected != [answer.value for _, answer in order]:
                differences.append(f"{[operation for operation, _ in order]} would answer {expected}")
                continue
            difference = self.difference(reference)
            if not difference:
                self.world.take_reference(reference)
                for operation, answer in started:
                    self.note(operation, answer, sent_ms)
                return
            differences.append(f"{[operation for operation, _ in order]} would leave {difference}")
        raise AssertionError("\n".join([f"no order gives {race.answers}", *differences]))

    @staticmethod
    def orders(started: Sequence[tuple[Operation, Answer]]) -> Iterator[tuple[tuple[Operation, Answer], ...]]:
        """In which they may have happened; a condemnation decides before it marks, and a claim looks for hidden rows before it
        takes any. Mostly nobody ran in between there: orders in which somebody did come last."""
        decisions: list[tuple[Operation, Answer]] = [
            (op.decision, Answer(None)) for op, _ in started if isinstance(op, Condemn)
        ]
        looks = [(op.look, Answer(None)) for op, _ in started if isinstance(op, Claim)]
        for firsts in [decisions, [*decisions, *looks]] if looks else [decisions]:
            for order in permutations([*firsts, *started]):
                kinds = [type(operation) for operation, _ in order]
                if decisions and kinds.index(Decision) > kinds.index(Condemn):
                    continue
                begun = list(accumulate((kind is Look) - (kind is Claim) for kind in kinds))
                if firsts is decisions or min(begun) >= 0:
                    yield order

    def misses(self, operations: Sequence[Operation]) -> list[frozenset[str]]:
        """What readers may take for absent: nothing, or what a claim among the operations has in hand."""
        due = {key for key, (_, due_ms) in self.reference.marks.items() if due_ms <= self.now_ms}
        is_claimed = due and any(isinstance(operation, Claim) for operation in operations)
        return [frozenset(), frozenset(due)] if is_claimed else [frozenset()]

    def spared(self, operations: Sequence[Operation]) -> list[frozenset[str]]:
        """What a claim among the operations may leave: nothing, or marked chunks that one or all of the others count on when it
        begins. Names that begin alike count as one."""
        if not self.reference.marks or not any(isinstance(operation, Claim) for operation in operations):
            return [frozenset()]
        each = [
            {key[:STRIDE_BYTES] for key in operation.counts_on}
            for operation in operations
            if isinstance(operation, Relying)
        ]
        found = [
            frozenset(key for key in PARENTS if key[:STRIDE_BYTES] in keys)
            for keys in (set(), *each, set().union(*each))
        ]
        return list(dict.fromkeys(found))

    def note(self, operation: Operation, answer: Answer, sent_ms: int) -> None:
        """What the holders and the writers concerned learn from an answer."""
        match operation:
            case OpenSession():
                self.holders[answer.ids[0]] = Holder(operation.ttl_ms, self.deadline(sent_ms, operation.ttl_ms))
            case Match(session=bytes() as session) | PinTails(session=session):
                if isinstance(operation, PinTails):
                    self.released(session, operation.release)
                self.granted(session, answer)
            case Renew():
                self.renewed(operation, answer, sent_ms)
            case Close():
                self.forget(operation.session)
            case Lose():
                self.lost.add(operation.version.blob)
                self.broken |= self.naming({operation.version.key})
            case _:
                pass

    def naming(self, keys: set[str]) -> set[bytes]:
        """Pins whose chain has a chunk under one of these keys, also where they name an earlier blob of it: the row was all there
        was."""
        pins = [each for holder in self.holders.values() for each in holder.pins.items()]
        return {pin for pin, (targets, above) in pins if not keys.isdisjoint(key for key, _ in (*targets, *above))}

    @staticmethod
    def deadline(sent_ms: int, ttl_ms: int) -> int:
        return sent_ms + ttl_ms * 9998 // 10_000 - HOLDER_SLACK_MS

    def granted(self, session: bytes, answer: Answer) -> None:
        holder = self.holders.get(session)
        if isinstance(answer.value, str):  # an error: the session is gone for its holder
            self.forget(session)
        elif holder is not None:
            for pin in filter(None, answer.ids):
                kept = self.reference.pins.get(pin)
                if kept is not None:  # else its session ended in the same race
                    holder.pins[pin] = (kept.targets, kept.above)
                    holder.grant = max(holder.grant, kept.grant)

    def released(self, session: bytes, pins: Sequence[bytes]) -> None:
        if session in self.holders:
            for pin in pins:
                self.holders[session].pins.pop(pin, None)

    def renewed(self, operation: Renew, answer: Answer, sent_ms: int) -> None:
        if isinstance(answer.value, str):
            self.forget(operation.session)
        elif operation.session in self.holders:
            holder = self.holders[operation.session]
            self.released(operation.session, operation.release)
            holder.relies_until_ms = self.deadline(sent_ms, holder.ttl_ms)

    def forget(self, session: bytes) -> None:
        if self.holders.pop(session, None) is not None:
            self.gone_sessions.append(session)

    # -- writers ---------------------------------------------------------------------------------------------------

    def count_live(self) -> int:
        return sum(self.reference.live(key) is not None for key in PARENTS)

    def a_live_key(self, data: st.DataObject) -> str:
        """Mostly one that is live; in a race one of those that are fought over."""
        if self.hot:
            return data.draw(st.sampled_from(self.hot))
        live = [key for key in PARENTS if self.reference.live(key) is not None]
        return data.draw(st.sampled_from([*live, *live, *live, *PARENTS]))

    def a_free_key(self, data: st.DataObject) -> str:
        """Mostly one that is not there and could be; in a race one of those that are fought over, or right below."""
        if self.hot:
            return data.draw(st.sampled_from([*self.hot, *(key for key in PARENTS if PARENTS[key] in self.hot)]))
        free = [
            key
            for key, parent in PARENTS.items()
            if self.reference.live(key) is None and (not parent or self.reference.live(parent) is not None)
        ]
        return data.draw(st.sampled_from([*free, *free, *free, *PARENTS]))

    def version(self, key: str, *, in_memory: bool, owner: str = USER, parent: str | None = None) -> Version:
        blob_id = self.world.upload(in_memory=in_memory)
        above = parent if key == WILD else PARENTS[key]
        return Version(key, bytes(blob_id), above, in_memory=in_memory, owner=owner)

    @initialize(
        tails=st.lists(KEYS, max_size=3, unique=True),
        classes=st.integers(0, 15),
        ttls=st.lists(TTLS, max_size=2),
        pinned=st.lists(KEYS, max_size=2),
    )
    def begin(self, tails: list[str], classes: int, ttls: list[int], pinned: list[str]) -> None:
        """Some chains are stored, some holders have pinned one."""
        for tail in tails:
            self.put_chain(tail, classes, "")
        for ttl_ms in ttls:
            self.open_session(ttl_ms)
        for session, tail in zip(self.holders, pinned, strict=False):
            self.do(Match(tuple(path_to(tail)), self.now_ms, session=session))

    @precondition(lambda self: self.count_live() < FEW)
    @rule(tails=st.lists(KEYS, min_size=2, max_size=3, unique=True), classes=st.integers(0, 15), ttl_ms=TTLS)
    def begin_again(self, tails: list[str], classes: int, ttl_ms: int) -> None:
        """Chains are stored anew, and one is pinned: else most steps would find nothing to work on."""
        self.begin(tails, classes, [ttl_ms] if len(self.holders) < 3 else [], [])
        *_, session = self.holders
        self.do(Match(tuple(path_to(tails[0])), self.now_ms, session=session))

    @rule(data=st.data(), in_memory=st.booleans(), owner=OWNERS, parent=WILD_PARENTS)
    def put(self, *, data: st.DataObject, in_memory: bool, owner: str, parent: str | None) -> None:
        key = self.a_free_key(data)
        self.do(Commit(self.version(key, in_memory=in_memory, owner=owner, parent=parent)))

    @rule(key=KEYS, classes=st.integers(0, 15), parent=WILD_PARENTS)
    def put_chain(self, key: str, classes: int, parent: str | None) -> None:
        path = path_to(key)
        versions = [
            self.version(each, in_memory=bool(classes >> at & 1), parent=parent) for at, each in enumerate(path)
        ]
        self.do(CommitChain(tuple(versions)))

    @precondition(lambda self: self.count_live())
    @rule(key=KEYS, in_memory=st.booleans())
    def put_another_size(self, *, key: str, in_memory: bool) -> None:
        version = self.version(key, in_memory=in_memory)
        live = self.reference.live(key)
        if live is not None:
            self.do(Commit(Version(key, version.blob, version.parent, live.size_bytes + 1, in_memory)))
        else:
            self.dead_uploads.append(version)

    @rule(key=KEYS, in_memory=st.booleans(), parent=WILD_PARENTS)
    def replace_on_condition(self, *, key: str, in_memory: bool, parent: str | None) -> None:
        self.do(Commit(self.version(key, in_memory=in_memory, parent=parent), replaces=True))

    @rule(key=KEYS, in_memory=st.booleans())
    def upload_and_pause(self, *, key: str, in_memory: bool) -> None:
        self.dead_uploads.append(self.version(key, in_memory=in_memory))

    @precondition(lambda self: self.dead_uploads)
    @rule()
    def go_on_with_an_upload(self) -> None:
        self.do(Commit(self.dead_uploads.pop(0)))

    @precondition(lambda self: self.count_live())
    @rule(data=st.data(), count=st.sampled_from([1, 1, 2]))
    def delete(self, data: st.DataObject, count: int) -> None:
        self.do(Delete(tuple(self.a_live_key(data) for _ in range(count))))

    @precondition(lambda self: self.count_live() >= FEW)
    @rule(data=st.data())
    def much_goes(self, data: st.DataObject) -> None:
        """What leaves little behind is one rule, and waits until there is something."""
        match data.draw(st.sampled_from(["recall", "loss", "loss", "end"])):
            case "recall":
                self.do(Recall(data.draw(OWNERS)))
            case "loss":
                self.lose_bytes(self.a_live_key(data))
            case _:
                self.settle()

    def lose_bytes(self, key: str) -> None:
        row = self.reference.live(key)
        if row is not None:
            self.do(Lose(row))

    @rule(keys=st.lists(KEYS, max_size=4, unique=True), rescue=st.booleans())
    def look_up(self, *, keys: list[str], rescue: bool) -> None:
        self.do(Lookup(tuple(keys), rescue))

    @rule(data=st.data(), count=st.integers(1, 4))
    def read_for_write_behind(self, data: st.DataObject, count: int) -> None:
        keys = sorted({self.a_live_key(data) for _ in range(count)})
        found = self.world.run(self.world.catalog.lookup(BUCKET, keys))
        self.stale_rows = [row for row in found if row is not None]

    @precondition(lambda self: self.stale_rows)
    @rule()
    def write_behind(self) -> None:
        self.do(WriteDown(tuple(self.stale_rows)))

    # -- holders ---------------------------------------------------------------------------------------------------

    def lists(self, data: st.DataObject) -> tuple[str, ...]:
        """A chain, whole or cut, doubled, or with strangers in it; or anything."""
        keys = path_to(self.a_live_key(data))
        change = data.draw(
            st.sampled_from(["none", "none", "none", "insert", "swap", "drop", "cross", "cross", "more", "any"])
        )
        if change == "insert":
            keys.insert(data.draw(st.integers(0, len(keys))), data.draw(KEYS))
        elif change == "swap":
            keys[data.draw(st.integers(0, len(keys) - 1))] = data.draw(KEYS)
        elif change == "drop":
            keys.pop(data.draw(st.integers(0, len(keys) - 1)))
        elif change == "cross":  # begins as one chain and goes on as another
            paths = [path_to(key) for key in PARENTS if self.reference.live(key) is not None]
            others = [path for path in paths if len(path) > 1 and path[0] != keys[0]]
            if others:
                keys[1:] = data.draw(st.sampled_from(others))[1:]
        elif change == "more":
            keys += data.draw(st.lists(KEYS, max_size=3))
        elif change == "any":
            keys = data.draw(st.lists(KEYS, max_size=6))
        return tuple(keys)

    def a_session(self, data: st.DataObject) -> bytes:
        """Mostly one that lives, as far as its holder knows."""
        holders = list(self.holders)
        return data.draw(st.sampled_from([*holders, *holders, *holders, *self.gone_sessions[-1:]]))

    @precondition(lambda self: len(self.holders) < 3)
    @rule(ttl_ms=TTLS)
    def open_session(self, ttl_ms: int) -> None:
        self.do(OpenSession(ttl_ms, self.now_ms))

    @rule(data=st.data(), rows=st.booleans())
    def match(self, *, data: st.DataObject, rows: bool) -> None:
        self.do(Match(self.lists(data), self.now_ms, rows))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), rows=st.booleans())
    def match_and_pin(self, *, data: st.DataObject, rows: bool) -> None:
        self.do(Match(self.lists(data), self.now_ms, rows, self.a_session(data)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keys=st.lists(KEYS, max_size=3))
    def pin_tails(self, data: st.DataObject, keys: list[str]) -> None:
        session = self.a_session(data)
        self.do(PinTails(session, tuple(keys), self.some_pins(data, session), self.now_ms))

    def some_pins(self, data: st.DataObject, session: bytes) -> tuple[bytes, ...]:
        holder = self.holders.get(session)
        held = [*holder.pins, bytes(16)] if holder is not None else [bytes(16)]
        return tuple(data.draw(st.lists(st.sampled_from(held), max_size=2, unique=True)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), counts_well=st.booleans())
    def renew(self, *, data: st.DataObject, counts_well: bool) -> None:
        session = self.a_session(data)
        holder = self.holders.get(session, Holder(0, 0))
        release = self.some_pins(data, session)
        pins = set(holder.pins) - set(release) if counts_well else {bytes(16)}
        self.do(Renew(session, frozenset(pins), holder.grant, release, self.now_ms))

    @precondition(lambda self: self.holders)
    @rule()
    def all_renew(self) -> None:
        for session, holder in list(self.holders.items()):
            self.do(Renew(session, frozenset(holder.pins), holder.grant, (), self.now_ms))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        self.do(Close(self.a_session(data)))

    # -- gc --------------------------------------------------------------------------------------------------------

    def may_go(self) -> list[str]:
        """Chunks that policy may condemn with all that hangs on them."""
        reference = self.reference
        held = {key for pin in reference.pins.values() for key, _ in pin.targets}
        rows = {key: row for key in PARENTS if (row := reference.top(key)) is not None}
        stay: set[str] = set()
        for key, row in rows.items():
            if row.hidden or key in held:
                at: str | None = key
                while at and at not in stay:
                    stay.add(at)
                    at = rows[at].parent if at in rows else None
        return [] if reference.quiet else [key for key in rows if key not in stay]

    def tree(self, key: str) -> list[str]:
        """The chunk and all that hangs on it, as things are."""
        return [key, *(each for child in self.reference.children(key) for each in self.tree(child))]

    @precondition(lambda self: self.count_live())
    @rule(data=st.data(), count=st.integers(1, 4), in_ms=st.sampled_from([0, 0, 1_000]))
    def condemn(self, data: st.DataObject, count: int, in_ms: int) -> None:
        """Mostly what may go."""
        going = self.may_go()
        going = [key for key in going if key in self.hot] or going
        if going and data.draw(st.sampled_from([True, True, True, False])):
            keys = self.tree(data.draw(st.sampled_from(going)))
        else:
            keys = [self.a_live_key(data) for _ in range(count)]
        self.do(self.a_condemnation(list(dict.fromkeys(keys)), in_ms))

    def a_condemnation(self, keys: Sequence[str], in_ms: int = 0, *, is_large: bool = False) -> Condemn:
        """Children before parents."""
        order = sorted(keys, key=lambda key: -len(path_to(key)))
        rows = [self.reference.top(key) for key in order]
        named = tuple((row.key, row.blob) for row in rows if row is not None)
        return Condemn(named, self.now_ms + in_ms, is_large)

    @precondition(lambda self: any(self.reference.condemned()))
    @rule()
    def claim(self) -> None:
        self.do(Claim(self.now_ms))

    @rule()
    def collect(self) -> None:
        self.world.run(self.world.collector.collect())

    @rule(needed=st.sampled_from([100, 300, 1_000]))
    def make_room(self, needed: int) -> None:
        self.world.run(self.world.collector.make_room(needed))

    @rule()
    def collect_after_grace(self) -> None:
        self.world.run(self.world.collector.collect())
        self.world.advance(GRACE_MS)
        self.world.run(self.world.collector.collect())

    @rule(sweeps=st.booleans())
    def reap(self, *, sweeps: bool) -> None:
        if sweeps:
            self.world.run(self.world.sweep())
        self.world.run(self.world.reap_all())

    @precondition(lambda self: self.reference.queue and len(self.reapers) < 2)
    @rule()
    def a_reaper_takes_entries_and_pauses(self) -> None:
        due = self.world.run(self.world.catalog.due(now_ms=1 << 62))
        self.reapers.append(PausedReaper(due))

    @precondition(lambda self: self.reapers)
    @rule(data=st.data())
    def a_paused_reaper_goes_on(self, data: st.DataObject) -> None:
        reaper = data.draw(st.sampled_from(self.reapers))
        if not reaper.has_deleted:
            blob_ids = [BlobId(entry.blob_id) for entry in reaper.entries]
            self.world.run(self.world.dram.delete(blob_ids))
            self.world.run(self.world.home.delete(blob_ids))
            reaper.has_deleted = True
        else:
            self.reapers.remove(reaper)
            self.world.run(self.world.catalog.reap(reaper.entries))
            self.reference.reap(entry.blob_id for entry in reaper.entries)

    # -- time and bad luck -----------------------------------------------------------------------------------------

    @rule(ms=PAUSES, beats=st.booleans())
    def time_passes(self, *, ms: int, beats: bool) -> None:
        self.world.advance(ms)
        if beats:
            self.do(Beat(self.now_ms))

    @rule(seconds=JUMPS)
    def wall_clock_jumps(self, seconds: float) -> None:
        self.world.clock.jump_wall(seconds)

    @precondition(lambda self: self.reference.keys())
    @rule(away_ms=PAUSES, how=st.sampled_from(["kill", "power", "power", "stop"]))
    def crash_or_stop(self, away_ms: int, how: str) -> None:
        if how == "kill":
            self.world.kill(away_ms=away_ms)
        else:
            is_clean = how == "stop"
            self.lose_memory(but_live=is_clean)
            if is_clean:
                self.world.stop(away_ms=away_ms)
            else:
                self.world.lose_power(away_ms=away_ms)
        self.dead()

    def dead(self) -> None:
        """Rows that write-behind had in hand are the dead process's; its reapers and uploads are late ones from now on."""
        self.stale_rows = []

    def lose_memory(self, *, but_live: bool = False) -> None:
        """Class `memory` promises no more: who holds a chain with such a chunk has a miss."""
        rows = [row for row in self.reference.volatile.values() if not (but_live and not row.hidden)]
        self.broken |= self.naming({row.key for row in rows})
        going = {row.blob for row in rows}
        going |= {entry.blob for entry in self.reference.queue if entry.volatile}
        self.lost |= going

    # -- what runs beside what -------------------------------------------------------------------------------------

    def an_operation(self, data: st.DataObject, *, claims: bool = True) -> Operation:
        """Anything that may run beside something else."""
        makers: list[Callable[[st.DataObject], Operation]] = [
            self.a_commit, self.a_commit, self.a_chain, self.a_delete, self.a_delete, self.a_delete, self.a_match, self.a_look_up,
            lambda _: Beat(self.now_ms),
        ]  # fmt: skip
        if claims:
            makers += [lambda _: Claim(self.now_ms), lambda _: Claim(self.now_ms)]
        if self.stale_rows:
            makers.append(lambda _: WriteDown(tuple(self.stale_rows)))
        if self.holders:
            makers += [self.a_pin, self.a_pin, self.some_tails, self.some_tails, self.a_renewal]
            makers.append(lambda data: Close(self.a_session(data)))
        return data.draw(st.sampled_from(makers))(data)

    def a_commit(self, data: st.DataObject) -> Operation:
        in_memory, parent = data.draw(st.booleans()), data.draw(WILD_PARENTS)
        version = self.version(self.a_free_key(data), in_memory=in_memory, parent=parent)
        return Commit(version, replaces=data.draw(st.sampled_from([False, False, False, True])))

    def a_replacement(self, data: st.DataObject) -> Operation:
        return Commit(self.version(self.a_live_key(data), in_memory=data.draw(st.booleans())), replaces=True)

    def a_chain(self, data: st.DataObject) -> Operation:
        in_memory = data.draw(st.booleans())
        return CommitChain(tuple(self.version(key, in_memory=in_memory) for key in path_to(self.a_free_key(data))))

    def a_delete(self, data: st.DataObject) -> Operation:
        return Delete((self.a_live_key(data),))

    def a_match(self, data: st.DataObject) -> Operation:
        return Match(self.lists(data), self.now_ms, data.draw(st.booleans()))

    def a_look_up(self, data: st.DataObject) -> Operation:
        return Lookup(tuple(path_to(self.a_live_key(data))), rescue=True)

    def a_pin(self, data: st.DataObject) -> Operation:
        keys = tuple(path_to(self.a_live_key(data)))
        return Match(keys, self.now_ms, data.draw(st.booleans()), self.a_session(data))

    def some_tails(self, data: st.DataObject) -> Operation:
        keys = dict.fromkeys(self.a_live_key(data) for _ in range(data.draw(st.sampled_from([2, 3, 4]))))
        return PinTails(self.a_session(data), tuple(keys), (), self.now_ms)

    def a_renewal(self, data: st.DataObject) -> Operation:
        session = self.a_session(data)
        holder = self.holders.get(session, Holder(0, 0))
        return Renew(session, frozenset(holder.pins), holder.grant, (), self.now_ms)

    def fight(
        self,
        data: st.DataObject,
        rounds: tuple[int, int, int],
        marks: int,
        makes: Callable[[], Sequence[Operation]],
        *,
        top: str | None = None,
    ) -> None:
        """A race for few keys, among them now and then one that was hidden; some may be condemned before. With a `top`, which is
        then one of them, nobody is late."""
        one, other = top or self.a_live_key(data), self.a_live_key(data)
        hidden = [key for key in PARENTS if (row := self.reference.top(key)) is not None and row.hidden]
        if bool(hidden) and data.draw(st.booleans()):
            other = data.draw(st.sampled_from(hidden))
        self.hot = list(dict.fromkeys([*path_to(one)[-2:], other]))
        try:
            if marks:
                self.condemn(data, marks, 0)
            operations = makes()
            late = 0 if top else data.draw(LATE)
            writer_first = data.draw(st.booleans())
        finally:
            self.hot = []
        self.race(operations, rounds[: len(operations)], late=late, writer_first=writer_first)

    def among_others(self, data: st.DataObject, place: int, one: Callable[[], Operation]) -> list[Operation]:
        operations = [self.an_operation(data), self.an_operation(data)]
        operations.insert(place, one())
        return operations

    @precondition(lambda self: self.count_live())
    @rule(data=st.data(), rounds=ALL_ROUNDS, marks=MARKS, count=st.sampled_from([2, 3]))
    def several_at_once(self, data: st.DataObject, rounds: tuple[int, int, int], marks: int, count: int) -> None:
        self.fight(data, rounds, marks, lambda: [self.an_operation(data) for _ in range(count)])

    @precondition(lambda self: self.count_live())
    @rule(data=st.data(), rounds=ALL_ROUNDS, marks=MARKS, place=st.sampled_from([2, 2, 1, 0]))
    def others_beside_a_claim(self, data: st.DataObject, rounds: tuple[int, int, int], marks: int, place: int) -> None:
        self.fight(data, rounds, marks, lambda: self.among_others(data, place, lambda: Claim(self.now_ms)))

    @precondition(lambda self: self.count_live())
    @rule(data=st.data(), rounds=ALL_ROUNDS, marks=MARKS, place=PLACES)
    def others_beside_a_delete(self, data: st.DataObject, rounds: tuple[int, int, int], marks: int, place: int) -> None:
        self.fight(data, rounds, marks, lambda: self.among_others(data, place, lambda: self.a_delete(data)))

    @precondition(lambda self: self.may_go())
    @rule(data=st.data(), rounds=ALL_ROUNDS, claims=st.sampled_from([True, True, False]))
    def others_beside_a_condemnation(self, data: st.DataObject, rounds: tuple[int, int, int], *, claims: bool) -> None:
        """A chunk and what hangs on it are other chunks, or somebody's, by the time that they are marked."""
        top = data.draw(st.sampled_from(self.may_go()))

        def all_three() -> list[Operation]:
            condemnation = self.a_condemnation(self.tree(top), is_large=True)
            makers = [
                self.a_replacement,
                self.a_replacement,
                self.a_delete,
                *([self.a_pin, self.some_tails] if self.holders else []),
            ]
            first = data.draw(st.sampled_from(makers))(data)
            return [condemnation, first, self.an_operation(data, claims=False)]

        self.fight(data, rounds, 0, all_three, top=top)
        if claims:
            self.do(Claim(self.now_ms))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), rounds=ALL_ROUNDS, marks=MARKS, order=CLAIM_LAST)
    def pins_beside_a_claim(
        self, data: st.DataObject, rounds: tuple[int, int, int], marks: int, order: tuple[int, int, int]
    ) -> None:
        def all_three() -> list[Operation]:
            other = data.draw(st.sampled_from([self.a_delete, self.a_delete, self.an_operation]))
            pin = data.draw(st.sampled_from([self.some_tails, self.a_pin]))
            operations = [other(data), pin(data), Claim(self.now_ms)]
            return [operations[at] for at in order]

        self.fight(data, rounds, marks, all_three)

    # -- what must hold --------------------------------------------------------------------------------------------

    def difference(self, reference: Reference) -> str:
        """How what the catalog holds differs from what the reference holds; "" if it does not."""
        difference: str = self.world.run(self._difference(reference))  # in one turn: this is asked after each step
        return difference

    async def _difference(self, reference: Reference) -> str:
        catalog = self.world.catalog
        keys = list(PARENTS)
        live = [row.blobs[0].blob_id if row is not None else None for row in await catalog.lookup(BUCKET, keys)]
        hidden = [await catalog.lookup_hidden(BUCKET, key) for key in keys]
        tops = [reference.top(key) for key in keys]
        usage = await catalog.bucket_usage(BUCKET)
        leases = catalog.leases.usage()
        queue = await catalog.due(now_ms=1 << 62)
        pairs: dict[str, tuple[object, object]] = {
            "live": (live, [row.blob if row is not None and not row.hidden else None for row in tops]),
            "hidden": (
                [row.blobs[0].blob_id if row is not None else None for row in hidden],
                [row.blob if row is not None and row.hidden else None for row in tops],
            ),
            "usage": ((usage.objects, usage.size_bytes), reference.usage()),
            "condemned": (catalog.condemned(), reference.condemned()),
            "leases": (
                (leases.sessions, leases.pins, leases.quiet),
                (len(reference.sessions), len(reference.pins), reference.quiet),
            ),
            "due": (
                sorted(Waiting(e.blob_id, e.volatile, e.pinned_blob if e.pinned else b"") for e in queue),
                reference.due(),
            ),
        }
        return "; ".join(
            f"{what}: {is_so} and not {should}" for what, (is_so, should) in pairs.items() if is_so != should
        )

    @invariant()
    def everything_holds(self) -> None:
        difference = self.difference(self.reference)
        assert not difference, difference
        assert_consistent(self.world.database, lost_memory=True)
        for blob in self.reference.blobs() - self.lost:
            assert self.world.has(blob), f"S3: {blob.hex()} is gone"
        for session, holder in self.holders.items():
            if self.world.holder_ms < holder.relies_until_ms:
                for pin, (targets, above) in holder.pins.items():
                    if pin not in self.broken and not {blob for _, blob in (*targets, *above)} & self.lost:
                        self.assert_readable(session, pin, targets, above)
        self.world.sound = True

    def assert_readable(
        self,
        session: bytes,
        pin: bytes,
        targets: tuple[tuple[str, bytes], ...],
        above: tuple[tuple[str, bytes], ...],
    ) -> None:
        reference = self.reference
        for key, blob in targets:
            assert self.world.has(blob), f"S1: the tail {key[:8]} that {session.hex()} holds is gone"
        wild = any(key == WILD and (row := reference.top(key)) and row.blob != blob for key, blob in targets)
        if not wild:
            for key, _ in above:
                row = reference.top(key)
                assert row is not None, f"S1: {key[:8]} above a tail that {session.hex()} holds is gone"
        if pin in reference.pins and not wild:
            kept = self.world.run(self.world.catalog.leases.pin(pin, user=USER, bucket=BUCKET))
            assert kept is not None
            for key, _ in (*targets, *above):
                assert self.world.run(self.world.catalog.leases.covers(kept, key)), f"{key[:8]} is not covered"

    def settle(self) -> None:
        """L1, L2: sessions end, what may go goes, and then the tiers hold what rows name and nothing else."""
        self.world.advance(62_000)
        self.do(Beat(self.now_ms))
        while self.do(Claim(self.now_ms)).value:
            pass
        self.reapers.clear()  # those that paused never come back
        self.world.run(self.world.sweep())
        self.world.run(self.world.reap_all())
        assert not self.reference.queue
        assert self.reference.condemned()[1] == 0
        assert self.world.stored() == self.reference.blobs() - self.lost


LeaseMachine.TestCase.settings = settings(
    max_examples=RUNS,
    phases=PHASES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLeaseMachine = LeaseMachine.TestCase
