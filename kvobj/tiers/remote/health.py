"""How the remote server has been answering, for `status`, for readiness and for who decides whether to ask it at all."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

from kvobj.clock import Clock
from kvobj.tiers.remote.breaker import BreakerState, CircuitBreaker
from kvobj.tiers.remote.documents import http_date_ms
from kvobj.tiers.remote.faults import CLOCK_CODES, RemoteFault

RemoteState = Literal["ok", "probing", "degraded", "down", "refused"]

_DEGRADED_SHARE: Final = 0.05
_HALF_A_SECOND_MS: Final = 500


@dataclass(frozen=True, slots=True)
class RemoteHealth:
    """`probing`: not asked yet; `degraded`: some requests fail; `down`: the breaker is open, requests are not even tried;
    `refused`: it answers, but what no repeat cures stands in the way (`reason`). `since_ms` is wall time. `clock_skew_seconds`:
    how far the server's clock is ahead of ours, None before its first answer."""

    state: RemoteState
    reason: str
    since_ms: int
    breaker: BreakerState
    clock_skew_seconds: float | None

    @property
    def is_usable(self) -> bool:
        """Whether a request has a chance."""
        return self.state in ("ok", "degraded")


class HealthRecord:
    """What the outcomes of requests say of the server; event loop only. Each change is one line in the log."""

    def __init__(self, breaker: CircuitBreaker, *, clock: Clock, log: logging.Logger) -> None:
        self._breaker = breaker
        self._clock = clock
        self._log = log
        self._refusal = ""
        self._clock_refused = False
        self._latest_failure = ""
        self._state: RemoteState = "probing"
        self._since_ms = clock.now_ms()
        self.is_probed = False
        """Whether it is known what the server can do."""
        self.clock_skew_seconds: float | None = None

    def note(self, fault: RemoteFault | None) -> None:
        """A request's outcome; None: it succeeded."""
        if fault is None:
            if self._refusal and self._clock_refused:
                self.clock_skew_seconds = None  # it was too far, and is no more: how far it is now, nobody has looked
            self._refusal, self._clock_refused = "", False
            if self._state == "ok":
                return
        elif fault.kind == "refused":
            self._refusal = str(fault.error("", "").args[0])
            self._clock_refused = fault.code in CLOCK_CODES
            if self._clock_refused:
                self.note_date(fault.date, self._clock.now_ms())
        elif fault.is_ambiguous:
            self._latest_failure = fault.detail
        self.present()

    def note_date(self, date: str, taken_ms: int) -> None:
        """The Date of an answer that came at `taken_ms` of our wall time."""
        server_ms = http_date_ms(date)
        if server_ms is not None:
            self.clock_skew_seconds = (
                server_ms + _HALF_A_SECOND_MS - taken_ms
            ) / 1000  # the server tells whole seconds

    def present(self) -> RemoteHealth:
        """As it is now."""
        breaker = self._breaker.state
        reason = self._latest_failure
        state: RemoteState
        if self._refusal:
            state, reason = "refused", self._refusal
        elif breaker != "closed":
            state = "down"
        elif not self.is_probed:
            state = "probing"
        elif self._breaker.failed_share > _DEGRADED_SHARE:
            state = "degraded"
        else:
            state, reason = "ok", ""
        if state != self._state:
            self._changed(state, reason)
        return RemoteHealth(state, reason, self._since_ms, breaker, self.clock_skew_seconds)

    def _changed(self, state: RemoteState, reason: str) -> None:
        self._since_ms = self._clock.now_ms()
        level = logging.INFO if state in ("ok", "probing") else logging.WARNING
        self._log.log(level, "the remote is %s%s (was %s)", state, f": {reason}" if reason else "", self._state)
        self._state = state
