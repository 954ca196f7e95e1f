"""Look-ups for a scheduler that must not wait: asked by key, sent in batches by a thread, answered when the engine asks again.

What is found is held (`StoreLink.hold`) until it is loaded, until a load of it failed, or until no request wants it any more, so a
hit stays one. After a failed load the key is a miss for all that asked: an engine that were told of a hit again would load it
again, for ever (vLLM #49176). A request that was told of a miss is told otherwise only of what the engine has stored or loaded
since; one that comes later asks the store anew.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.client.call_scope import CallScope
from kvobj.client.forking import forget_in_child
from kvobj.connectors.ending_threads import end_threads
from kvobj.connectors.link import StoreLink

_LOG: Final = logging.getLogger("kvobj.connectors")

PINS_MAX: Final = 3000
"""Below what a session may pin (4,096), so that there is room to pin the rest for a moment, which tells of each whether it is
stored. That is then not held: policy leaves alone for a while what it was asked for, and a load that comes too late says so."""
_ROUND_NAMES_MIN: Final = 256
"""A round that may ask for fewer is not worth its call."""
TOUCHED_MAX: Final = 4096
TOUCH_SECONDS: Final = 2.0


class _State:
    """One key that some request asked for."""

    __slots__ = ("answer", "is_held", "refused", "requests", "sent_at")

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.is_held = False
        self.requests: set[str] = set()
        self.refused: set[str] = set()
        """Of these requests those that were told of a miss before, and are not told otherwise."""
        self.sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Touched:
    """Keys that are used elsewhere, the latest last."""

    keys: list[bytes]


class Lookups:
    """Keys, which requests want them, and what the store says. Thread-safe. Only `deadline_seconds` after a question was sent is it
    a miss for want of an answer. `now`: `time.monotonic` but in tests.

    An answer is noted by the thread that has it, so that what nobody wants any more is let go of also where no method is called
    again: an engine may be idle from now on. In a forked child, which has no such thread, everything is a miss."""

    def __init__(
        self,
        link: StoreLink,
        *,
        name_of: Callable[[bytes], str],
        deadline_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hits = 0
        self.misses = 0
        self._link = link
        self._name_of = name_of
        self._deadline_seconds = deadline_seconds
        self._now = now
        self._states: dict[bytes, _State] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._asked: list[tuple[bytes, _State]] = []
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        self._touched_at = now()
        self._sent: queue.SimpleQueue[list[tuple[bytes, _State]] | _Touched | None] = queue.SimpleQueue()
        self._is_forked = False
        self._lock = threading.Lock()
        self._scope = CallScope()
        forget_in_child(self)
        self._thread = threading.Thread(target=self._run, name="kvobj-lookups", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """See `ForgetsInChild`: the parent goes on with what was asked, and holds what was found."""
        self._is_forked = True
        self._lock, self._scope = threading.Lock(), CallScope()
        self._states, self._keys_of, self._asked, self._touched = {}, {}, [], OrderedDict()

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the store has it; None: ask again later. Never waits for the store."""
        with self._lock:
            return self._ask(key, request)

    def flush(self) -> None:
        """Send what was asked since the last time: the end of a scheduler's step."""
        with self._lock:
            asked, self._asked = self._asked, []
            wanted = [(key, state) for key, state in asked if self._states.get(key) is state]
            for _key, state in wanted:
                state.sent_at = self._now()
            if wanted:
                self._sent.put(wanted)
            if self._touched and self._now() - self._touched_at >= TOUCH_SECONDS:
                self._touched_at = self._now()
                touched, self._touched = list(self._touched), OrderedDict()
                self._sent.put(_Touched(touched))

    def loaded(self, keys: Iterable[bytes]) -> None:
        """These have arrived: who asks for one again asks the store."""
        with self._lock:
            self._drop(keys)

    def failed(self, keys: Iterable[bytes]) -> None:
        """These did not arrive: misses for every request that has asked for them."""
        with self._lock:
            self._failed(keys)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These have been stored: what was a miss need not be one any more."""
        with self._lock:
            misses = [key for key in keys if (state := self._states.get(key)) is not None and state.answer is False]
            self._drop(misses)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These are used from a faster tier: the store's policy is told now and then, of the latest ones."""
        with self._lock:
            for key in deque(keys, TOUCHED_MAX):
                self._touched[key] = None
                self._touched.move_to_end(key)
            while len(self._touched) > TOUCHED_MAX:
                self._touched.popitem(last=False)

    def ended(self, request: str) -> None:
        """A request has ended. What only it wanted is let go of; a question on its way keeps its place until it is answered."""
        with self._lock:
            self._ended(request)

    def close(self, deadline: float | None = None) -> None:
        """End the thread; waits for the calls that it has to make until this moment of `time.monotonic`, by default for
        `ending_threads.CLOSE_SECONDS`, and ends them then. Idempotent."""
        self._sent.put(None)
        end_threads([self._thread], [self._scope], deadline)

    # -- inside, with the lock -----------------------------------------------------------------------------------
    def _ask(self, key: bytes, request: str) -> bool | None:
        if self._is_forked:
            return False
        state = self._states.get(key)
        if state is None or (state.answer is False and request not in state.requests):
            fresh = _State()
            if state is not None:  # a miss for others; who comes later asks anew
                fresh.requests, fresh.refused = state.requests, set(state.requests)
            state = self._states[key] = fresh
            self._asked.append((key, state))
        if request in state.refused:
            return False
        if request not in state.requests:
            state.requests.add(request)
            self._keys_of.setdefault(request, set()).add(key)
        is_late = state.sent_at is not None and self._now() - state.sent_at > self._deadline_seconds
        if state.answer is None and is_late:
            self._answered(state, found=False)
        return state.answer

    def _failed(self, keys: Iterable[bytes]) -> None:
        let_go: list[str] = []
        for key in keys:
            state = self._states.get(key)
            if state is not None and state.answer:
                state.answer = False
                if state.is_held:
                    state.is_held = False
                    let_go.append(self._name_of(key))
        self._link.release(let_go)

    def _ended(self, request: str) -> None:
        unwanted: list[bytes] = []
        for key in self._keys_of.pop(request, ()):
            state = self._states.get(key)
            if state is None:
                continue
            state.requests.discard(request)
            state.refused.discard(request)
            if not state.requests and (state.answer is not None or state.sent_at is None):
                unwanted.append(key)
            elif state.answer and state.requests == state.refused:
                self._failed([key])
        self._drop(unwanted)

    def _note_answers(self, answers: Iterable[tuple[bytes, _State, bool, bool]]) -> None:
        unwanted: list[str] = []
        for key, state, found, is_held in answers:
            is_current = self._states.get(key) is state and state.answer is None
            if is_current and state.requests != state.refused:
                state.is_held = is_held
                self._answered(state, found=found)
                continue
            if is_current and state.requests:
                state.answer = False
            elif is_current:
                del self._states[key]
            if is_held:
                unwanted.append(self._name_of(key))
        self._link.release(unwanted)

    def _answered(self, state: _State, *, found: bool) -> None:
        state.answer = found
        self.hits += found
        self.misses += not found

    def _drop(self, keys: Iterable[bytes]) -> None:
        let_go: list[str] = []
        for key in keys:
            state = self._states.pop(key, None)
            if state is not None and state.is_held:
                let_go.append(self._name_of(key))
        self._link.release(let_go)

    # -- the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        with self._scope.entered():
            self._run_questions()

    def _run_questions(self) -> None:
        while True:
            work = self._sent.get()
            if work is None:
                return
            if isinstance(work, _Touched):  # policy is told of the whole list, whether it is stored or not
                self._link.run([self._name_of(key) for key in work.keys])
                continue
            try:
                found = self._looked_up([self._name_of(key) for key, _state in work])
            except Exception:  # noqa: BLE001 - a thread that died would leave every question open until its deadline
                _LOG.exception("a look-up failed")
                found = [(False, False)] * len(work)
            with self._lock:
                self._note_answers((key, state, *each) for (key, state), each in zip(work, found, strict=True))

    def _looked_up(self, names: Sequence[str]) -> list[tuple[bool, bool]]:
        """Of each name whether it is stored, and whether it is held. In rounds, since only what was found takes up room; and never
        as a run: the names are several requests', and the first miss of one says nothing of the next one's."""
        answers: list[tuple[bool, bool]] = []
        while (room := PINS_MAX - self._held()) >= _ROUND_NAMES_MIN and len(answers) < len(names):
            answers += [(each, each) for each in self._link.hold(names[len(answers) : len(answers) + room])]
        rest = names[len(answers) :]
        return answers + ([(each, False) for each in self._link.present(rest)] if rest else [])

    def _held(self) -> int:
        held = self._link.report()["held"]
        return held if isinstance(held, int) else 0
