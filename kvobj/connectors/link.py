"""What every connector stands on: a connection to a store that heals itself, and answers a miss where anything goes wrong.

One link is one bucket and one namespace for one process. What its methods do is split to the API's bounds; what they may not do is
raise for what a server or a network does, or wait beyond their deadline (`LinkSettings.timeout_seconds`), however many requests
they make. A server that does not answer is left alone for a rest (`outage`), and its begin and its end are a log line each. A
process that was forked has connections and a session of its own, and holds nothing that its parent holds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from kvobj.client.call_scope import current_scope, ends_by
from kvobj.client.kv_values import Name, Namespace, NewChunk
from kvobj.connectors.bucket_calls import PAGE_KEYS_MAX
from kvobj.connectors.link_calls import STORE_THREADS, LinkCalls
from kvobj.connectors.link_settings import LinkSettings
from kvobj.connectors.outage import Outage, Turn
from kvobj.connectors.storing import Outcome
from kvobj.connectors.tally import Tally, kind_of
from kvobj.connectors.used_namespace import NotGrantedError
from kvobj.errors import (
    AccessDeniedError,
    BusyError,
    ConfigurationError,
    KvobjError,
    NamespaceConflictError,
    NoSuchBucketError,
    NoSuchNamespaceError,
    PinLimitExceededError,
    QuotaExceededError,
    UnavailableError,
)

_LOG: Final = logging.getLogger("kvobj.connectors")
_WRONG_PLACE: Final = (AccessDeniedError, NoSuchBucketError, NoSuchNamespaceError, NamespaceConflictError)
"""What no call changes, but somebody else may: asked again after a rest, as a server that does not answer."""

_STORE: Final = "store"
_LOAD: Final = "load"
_LOOK_UP: Final = "look-up"
_DELETE: Final = "delete"
_LIST: Final = "list"
"""Sorts of calls: what one is refused says nothing of another."""
_SAME_HOST_TOLD_MAX: Final = 3

T = TypeVar("T")
U = TypeVar("U")


class StoreLink:
    """A connection that heals itself. Thread-safe and blocking; no method raises for what the server or the network does.

    Names are those of its namespace, as `kvobj.client` has them: strings, or raw digests of 32 bytes; one call has one kind.
    """

    def __init__(
        self, settings: LinkSettings, *, log: logging.Logger | None = None, store_threads: int = STORE_THREADS
    ) -> None:
        """`store_threads`: how many threads of its owner's store at once. Together with those that help them they leave half of the
        connections to all else, or more threads than that have none to help them."""
        self.settings = settings
        self._store_threads = store_threads
        self._unheld_told_at = float("-inf")
        self._same_host_told: set[str] = set()
        self.log = log or _LOG
        """Where outages and faults are told."""
        self._is_closed = False
        self._begin()
        _links.add(self)

    @property
    def is_up(self) -> bool:
        """Whether the last that was heard of the store was an answer; so at first."""
        return self._outage.is_up

    def connect(self) -> None:
        """Begin, in the background, what the first transfer would have to wait for: the same-host connection and its memory. The
        store is asked first whether this place may be used, so that a wrong one shows in the log and in `is_up` from the start."""
        threading.Thread(target=self._connect, name="kvobj-connect", daemon=True).start()

    def _connect(self) -> None:
        if self.ping():
            _ = self._calls.is_same_host  # finds out
            self._note_same_host(self._calls)

    # -- what is stored ------------------------------------------------------------------------------------------
    def hold(self, names: Sequence[Name]) -> list[bool]:
        """Which are stored; those are pinned until `release`, each once more than before. What a session may not pin any more is
        answered False."""
        nothing = [False] * len(names)
        held = self._asked(lambda calls: calls.hold(names), nothing) if names else nothing
        self._tally.looked_up(held)
        return held

    def hold_or_find(self, names: Sequence[Name]) -> list[tuple[bool, bool]]:
        """As `hold`, but what a session may not pin any more is looked up without: of each name whether it is stored, and whether
        it is held. The store's eviction passes over what it told of for its grace, and a load of what is gone says so."""
        nothing = [(False, False)] * len(names)
        answers = self._asked(lambda calls: calls.hold_or_find(names), nothing) if names else nothing
        self._tally.looked_up([found for found, _ in answers])
        if unheld := sum(found and not is_held for found, is_held in answers):
            self._note_unheld(unheld)
        return answers

    def hold_run(self, names: Sequence[Name]) -> int:
        """How long the stored run at the head of the list is; its names are pinned until `release`. Of a chain the tail alone
        counts against what a session may pin."""
        run = self._asked(lambda calls: calls.hold_run(names), 0) if names else 0
        self._tally.looked_up_run(run, len(names))
        return run

    def present(self, names: Sequence[Name]) -> list[bool]:
        """Which are stored, without holding them."""
        nothing = [False] * len(names)
        found = self._asked(lambda calls: calls.present(names), nothing) if names else nothing
        self._tally.looked_up(found)
        return found

    def run(self, names: Sequence[Name]) -> int:
        """How long the stored run at the head of the list is, without holding it: the store's eviction passes over what it told of,
        for its grace."""
        run = self._asked(lambda calls: calls.run(names), 0) if names else 0
        self._tally.looked_up_run(run, len(names))
        return run

    def release(self, names: Sequence[Name]) -> None:
        """Let go of each name once. Never fails, sends nothing itself; names that are not held are passed over."""
        try:
            self._calls.release(names)
        except Exception:  # a bug: the engine has ended with these chunks, and their lease ends what is left of it
            self.log.exception("letting go of chunks failed")

    def open_ahead(self, names: Sequence[Name]) -> None:
        """Names that are held and are going to be loaded together: on the same host the load then need not ask where they lie.
        Never fails; done by a thread that nobody waits for."""
        if names and self._outage.is_up and not self._is_closed:
            try:
                with self._time_of_one_call():
                    self._calls.open_ahead(names)
            except KvobjError:
                return  # the load tells
            except Exception:  # a bug, of what only saves time: the load asks for itself
                self.log.exception("opening chunks ahead failed")

    # -- chunks --------------------------------------------------------------------------------------------------
    def load(self, names: Sequence[Name], rooms: Sequence[memoryview]) -> list[bool]:
        """Fill each room with its chunk's bytes. False: a miss, a chunk of another size, bytes that are not right, or a connection
        that broke; what the room then holds is undefined."""
        found = self._filled(names, rooms, exact=True)
        return [each is not None for each in found]

    def fetch(self, names: Sequence[Name], rooms: Sequence[memoryview]) -> list[memoryview | None]:
        """As `load`, but a chunk of another size than its room comes in memory of its own: `found[i] is rooms[i]` where it fits."""
        return self._filled(names, rooms, exact=False)

    def store(self, chunks: Sequence[NewChunk]) -> list[bool]:
        """Store chunks, parents before their children: which are stored now, whoever stored them. See `put`."""
        return [outcome is not Outcome.FAILED for outcome in self.put(chunks)]

    def put(self, chunks: Sequence[NewChunk]) -> list[Outcome]:
        """As `store`, and tells whose bytes they are. A live chunk of that name with another size, and one that its namespace
        refuses, failed, and is counted as a disagreement in `report`."""
        outcomes = [Outcome.FAILED] * len(chunks)
        if chunks:
            self._moved(lambda calls: calls.store(chunks, outcomes), _STORE)
            self._note_differences()
        if Outcome.STORED in outcomes and Outcome.FAILED not in outcomes:  # what existed needed no room and no right
            self._tally.went_well(_STORE)
        self._tally.stored([outcome is not Outcome.FAILED for outcome in outcomes], chunks)
        return outcomes

    def gave_up(self, count: int, why: str) -> None:
        """So many chunks are not going to be stored, since their owner could wait no longer: counted and told as failed stores."""
        self._tally.gave_up(count)
        self._note_refusal(BusyError(why))

    def read(self, names: Sequence[Name]) -> list[memoryview | None]:
        """Chunks of any size, in memory of their own; None as `load` answers False."""
        found: list[memoryview | None] = [None] * len(names)
        if names:
            self._moved(lambda calls: calls.read(names, found), _LOAD)
        self._tally.read(found)
        return found

    def delete(self, names: Sequence[Name]) -> bool:
        """Remove chunks; what is held stays readable by who holds it. Whether the store did so: False as well where the call's time
        ended before all were asked for, and some of them are gone."""
        return self._asked(lambda calls: calls.delete(names), False, _DELETE) if names else True  # noqa: FBT003 - as elsewhere

    # -- what the namespace has ----------------------------------------------------------------------------------
    def page(
        self, *, after: str = "", limit: int = PAGE_KEYS_MAX, key_prefix: str = ""
    ) -> list[tuple[str, int]] | None:
        """Stored foreign keys that begin so, with sizes in bytes, in order and strictly after `after`; fewer than `limit` only at
        the end. None where the store did not tell (it cannot be reached, or the user may not list) or not all of it in the call's
        time, so that it is not taken for one that has nothing, or nothing more."""
        return self._asked(lambda calls: calls.names(after=after, limit=limit, key_prefix=key_prefix), None, _LIST)

    def namespace(self) -> Namespace | None:
        """The namespace with its key, for who names chunks by token ids; None while the store cannot be reached."""
        return self._asked(lambda calls: calls.namespace(), None)

    def usage(self) -> tuple[int, int]:
        """Chunks and bytes of the namespace; zeros while the store cannot be reached."""
        return self._asked(lambda calls: calls.usage(), (0, 0))

    def ping(self) -> bool:
        """Whether the store answers and the namespace may be used. Rests with the other calls."""
        return self._asked(lambda calls: calls.ping(), otherwise=False)

    def report(self) -> dict[str, object]:
        """For an engine's status page and its scheduler; asks nobody and waits for nothing."""
        calls = self._calls
        return {
            "endpoint": self.settings.endpoint,
            "bucket": self.settings.bucket,
            "namespace": self.settings.namespace,
            "is_up": self._outage.is_up,
            "same_host": calls.is_same_host_now,
            "same_host_reason": calls.same_host_reason,
            "held": calls.held,
            **self._tally.report(),
        }

    def close(self) -> None:
        """Let go of everything. Every call after it is a miss. Idempotent, bounded by a few deadlines."""
        self._is_closed = True
        self._calls.close(is_up=self._outage.is_up)

    # -- inside --------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Start anew: at first, and in a forked process, where the locks of these may be held by threads that are not there."""
        settings = self.settings
        self._outage = Outage(rest=settings.rest_seconds, rest_max=settings.rest_seconds_max)
        self._tally = Tally()
        self._calls = LinkCalls(
            settings, self._tally, note_refusal=self._note_refusal, store_threads=self._store_threads
        )

    def _begin_in_child(self) -> None:
        try:
            self._begin()
        except ConfigurationError as error:  # `ca_bundle` is not there any more; other links are begun all the same
            self._is_closed = True
            self.log.warning("%s cannot be used in a forked process: %s", self._place, error)

    def _filled(self, names: Sequence[Name], rooms: Sequence[memoryview], *, exact: bool) -> list[memoryview | None]:
        found: list[memoryview | None] = [None] * len(names)
        if names:
            self._moved(lambda calls: calls.load(names, rooms, found, exact=exact), _LOAD)
            self._note_differences()
        self._tally.read(found)
        return found

    def _moved(self, move: Callable[[LinkCalls], None], sort: str) -> None:
        """Move chunks, or not, by a deadline that follows from their bytes. Where there is no room the server lets who would store
        or read wait, perhaps for longer than the link does: it is full then, and not away, and what it has in memory goes on being
        loaded."""

        def within(calls: LinkCalls) -> None:
            try:
                move(calls)
            except UnavailableError as error:
                if self._is_closed or not calls.is_answered():
                    raise
                raise BusyError("the chunks were not moved, and the server answers", reason=str(error)) from error
            finally:
                self._note_same_host(calls)

        self._made(within, None, sort)

    def _asked(self, ask: Callable[[LinkCalls], T], otherwise: U, sort: str = _LOOK_UP) -> T | U:
        """A call that moves no bytes: all that it asks for, in however many requests (also for the namespace and a session, where
        they are not known yet), in the time of one call."""

        def within(calls: LinkCalls) -> T:
            with self._time_of_one_call():
                return ask(calls)

        return self._made(within, otherwise, sort)

    def _time_of_one_call(self) -> AbstractContextManager[None]:
        return ends_by(time.monotonic() + self.settings.timeout_seconds)

    def _made(self, call: Callable[[LinkCalls], T], otherwise: U, sort: str) -> T | U:
        """What a call of that sort answers, or `otherwise`."""
        turn = Turn.REST if self._is_closed else self._outage.turn()
        if turn is Turn.REST:
            return otherwise
        try:
            return self._outcome(turn, call, otherwise, sort)
        except BaseException:  # the thread was interrupted: nobody else could probe
            self._outage.left(turn)
            raise

    def _outcome(self, turn: Turn, call: Callable[[LinkCalls], T], otherwise: U, sort: str) -> T | U:
        try:
            answer = call(self._calls)
        except UnavailableError as error:
            self._failed(turn, error)
        except _WRONG_PLACE as error:
            if isinstance(error, PinLimitExceededError | QuotaExceededError | NotGrantedError):
                self._refused(turn, error, sort)
            else:
                self._failed(turn, error)
        except KvobjError as error:
            self._refused(turn, error, sort)
        except Exception as error:
            # A bug, or an argument that cannot be sent: the engine serves on, misses its chunks, and is told.
            self._outage.left(turn)
            if self._tally.failed(error, sort):
                self.log.exception("a call of a connector failed")
        else:
            self._answered(turn)
            if sort != _STORE:  # of which chunks are refused one by one
                self._tally.went_well(sort)
            return answer
        return otherwise

    def _answered(self, turn: Turn) -> None:
        seconds = self._outage.answered(turn)
        if seconds is not None:
            self.log.warning("%s answers again after %.1f s", self._place, seconds)

    def _refused(self, turn: Turn, error: KvobjError, sort: str) -> None:
        self._answered(turn)
        self._note_refusal(error, sort)

    def _note_refusal(self, error: KvobjError, sort: str = _STORE) -> None:
        count = self._tally.failed(error, sort)
        if count == 1:
            self.log.warning("%s refused a call: %s", self._place, str(error))
        elif count:
            self.log.warning("%s refused %d calls since that was told last: %s", self._place, count, str(error))

    def _note_differences(self) -> None:
        """Of the chunks of a call, or of some minutes, in one line."""
        count, difference = self._tally.differences()
        if count:
            self.log.warning(
                "%s: %d chunks %s: another model or chunk size under this namespace; give it a namespace of its own",
                self._place,
                count,
                difference,
            )

    def _note_same_host(self, calls: LinkCalls) -> None:
        """Why there is no shared memory though the server offers it: once, as everything works without."""
        reason = calls.same_host_reason
        if reason and reason not in self._same_host_told and len(self._same_host_told) < _SAME_HOST_TOLD_MAX:
            self._same_host_told.add(reason)
            self.log.info(
                "%s: %s; chunks go over HTTP: on the server's own host, [same_host] socket names a place that both may open",
                self._place,
                reason,
            )

    def _note_unheld(self, count: int) -> None:
        """Counted, and told in the log once a rest: it goes on for as long as an engine asks for so much."""
        self._tally.found_unheld(count)
        now = time.monotonic()
        if now - self._unheld_told_at >= self.settings.rest_seconds_max:
            self._unheld_told_at = now
            self.log.warning(
                "%s: %d chunks were found and not pinned, since this process may pin no more; eviction may take them before they"
                " are loaded",
                self._place,
                count,
            )

    def _failed(self, turn: Turn, error: KvobjError) -> None:
        scope = current_scope()
        if scope is not None and scope.is_cancelled:  # what it failed with says nothing of the server
            self._outage.left(turn)
            return
        self._tally.failed(error)
        self._calls.forget_namespace()
        # However a server that is not there is found so, while it starts again too, is one reason.
        reason = ("nobody answers",) if isinstance(error, UnavailableError) else kind_of(error)
        if self._outage.failed(turn, reason) and not self._is_closed:
            # Its words: who keeps log records would keep the error, and with its traceback the engine's memory.
            self.log.warning("%s cannot be used, all chunks are misses until it can: %s", self._place, str(error))

    @property
    def _place(self) -> str:
        """As log lines begin: engines show them without the logger's name."""
        settings = self.settings
        return f"kvobj: {settings.endpoint}/{settings.bucket} (namespace {settings.namespace})"


_links: Final[weakref.WeakSet[StoreLink]] = weakref.WeakSet()


def _begin_in_child() -> None:
    for link in list(_links):
        link._begin_in_child()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_begin_in_child)
