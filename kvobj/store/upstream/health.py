"""How an upstream has been answering, for `status`, the log, and who refuses writes that could not reach it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from kvobj.clock import Clock

if TYPE_CHECKING:  # who is told of it need not load what asks
    from kvobj.tiers.remote.breaker import CircuitBreaker
    from kvobj.tiers.remote.faults import RemoteFault

UpstreamState = Literal["unasked", "ok", "down", "refused"]


class UpstreamHealth(msgspec.Struct, frozen=True):
    """What one process has found. `down`: the latest request had no answer, or one that it cannot; `refused`: it answers, and
    refuses this store's user. `since_ms` and `heard_ms` (the latest outcome; 0: none) are wall time; `last_error` stays when all is
    well again. `is_held_back`: the breaker lets at most a trial through. `namespaces` that are not used there, with why."""

    bucket: str
    state: UpstreamState
    reason: str
    since_ms: int
    heard_ms: int
    is_held_back: bool
    last_error: str
    last_error_ms: int
    namespaces: dict[str, str] = {}


class HealthRecord:
    """Of one upstream, by the outcomes of its requests; event loop only. Each change is one line in the log: chunks are asked for
    too often to say it each time. `where` is for people."""

    def __init__(self, bucket: str, where: str, breaker: CircuitBreaker, *, clock: Clock, log: logging.Logger) -> None:
        self._bucket = bucket
        self._where = where
        self._breaker = breaker
        self._clock = clock
        self._log = log
        self._state: UpstreamState = "unasked"
        self._since_ms = clock.now_ms()
        self._heard_ms = 0
        self._last_error = ""
        self._last_error_ms = 0
        self.trouble = ""
        """What is wrong with it, as the latest request found; empty: nothing."""

    @property
    def is_failing(self) -> bool:
        """Whether it is as if there were none, as the latest request found."""
        return bool(self.trouble)

    def note(self, fault: RemoteFault | None) -> None:
        """An attempt's outcome; None, and what it does not have or does not take: it answered."""
        now_ms = self._clock.now_ms()
        self._heard_ms = now_ms
        state: UpstreamState = "ok"
        trouble = ""
        if fault is not None and (fault.is_ambiguous or fault.kind == "refused"):
            state = "refused" if fault.kind == "refused" else "down"
            trouble = fault.detail or fault.kind
            self._last_error, self._last_error_ms = trouble, now_ms
        if state != self._state:
            self._state, self._since_ms = state, now_ms
        if bool(trouble) != bool(self.trouble):
            if trouble:
                self._log.warning(
                    "upstream of %s: %s fails, as if there were none: %s", self._bucket, self._where, trouble
                )
            else:
                self._log.info("upstream of %s: %s answers again", self._bucket, self._where)
        self.trouble = trouble

    def present(self, namespaces: dict[str, str]) -> UpstreamHealth:
        """As it is now."""
        return UpstreamHealth(
            bucket=self._bucket,
            state=self._state,
            reason=self.trouble,
            since_ms=self._since_ms,
            heard_ms=self._heard_ms,
            is_held_back=self._breaker.state != "closed",
            last_error=self._last_error,
            last_error_ms=self._last_error_ms,
            namespaces=namespaces,
        )


def latest(found: Sequence[UpstreamHealth]) -> UpstreamHealth:
    """Of several processes' findings of one upstream, the one that was heard last; what each says of namespaces together."""
    newest = max(found, key=lambda each: each.heard_ms)
    worst = max(found, key=lambda each: each.last_error_ms)
    return msgspec.structs.replace(
        newest,
        last_error=worst.last_error,
        last_error_ms=worst.last_error_ms,
        namespaces={name: why for each in found for name, why in each.namespaces.items()},
    )
