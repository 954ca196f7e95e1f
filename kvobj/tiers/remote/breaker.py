"""The circuit breaker: a server that fails much is left alone for a while, then asked once, then used again.

Pure but for its clock. `closed`: requests pass. `open`: none does, until a time that doubles with each failed trial. `half-open`:
one request passes, and its outcome decides. What the server refuses or does not have is no failure: it answers.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

from kvobj.clock import Clock

BreakerState = Literal["closed", "open", "half-open"]

_WINDOW_SECONDS: Final = 10.0
_REQUESTS_MIN: Final = 20
_FAILED_SHARE: Final = 0.6
_IN_A_ROW: Final = 8
_OPEN_SECONDS: Final = 0.5
_OPEN_SECONDS_MAX: Final = 15.0
_TRIAL_SECONDS_MAX: Final = 30.0
_REMEMBERED_MAX: Final = 4096


class CircuitBreaker:
    """Event loop only. Each request that `admits` is told of by exactly one of `succeeded`, `failed` and `abandoned`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_REMEMBERED_MAX)
        self._failures = 0
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._open_seconds = _OPEN_SECONDS
        self._trial_since: float | None = None

    @property
    def state(self) -> BreakerState:
        """As it is now."""
        if self._opened_at is None:
            return "closed"
        return "half-open" if self._is_due() or self._trial_since is not None else "open"

    @property
    def failed_share(self) -> float:
        """Of the requests of the last seconds; 0 where there were none."""
        self._forget()
        return self._failures / len(self._outcomes) if self._outcomes else 0.0

    @property
    def retry_seconds(self) -> float:
        """How long until a trial is due; 0 where requests pass."""
        if self._opened_at is None:
            return 0.0
        return max(self._opened_at + self._open_seconds - self._clock.monotonic(), 0.0)

    def admits(self) -> bool:
        """Whether a request may be made now; while half-open the first to ask becomes the trial."""
        if self._opened_at is None:
            return True
        now = self._clock.monotonic()
        if self._trial_since is not None:
            # A trial that is never told of must not keep it open for ever.
            if now - self._trial_since < _TRIAL_SECONDS_MAX:
                return False
        elif not self._is_due():
            return False
        self._trial_since = now
        return True

    def succeeded(self) -> None:
        """The server answered. What was under way when it opened does not close it: a trial does."""
        self._in_a_row = 0
        if self._trial_since is not None:
            self._close()
        self._note(is_failure=False)

    def failed(self) -> None:
        """The server did not answer, or answered that it cannot."""
        self._note(is_failure=True)
        if self._opened_at is not None:
            if self._trial_since is not None:
                self._trial_since = None
                self._open(min(self._open_seconds * 2, _OPEN_SECONDS_MAX))
            return
        self._in_a_row += 1
        is_much = len(self._outcomes) >= _REQUESTS_MIN and self.failed_share >= _FAILED_SHARE
        if self._in_a_row >= _IN_A_ROW or is_much:
            self._open(_OPEN_SECONDS)

    def abandoned(self) -> None:
        """The request was given up before its outcome was known."""
        self._trial_since = None

    def _is_due(self) -> bool:
        return self.retry_seconds == 0.0

    def _open(self, seconds: float) -> None:
        self._opened_at = self._clock.monotonic()
        self._open_seconds = seconds

    def _close(self) -> None:
        self._opened_at = self._trial_since = None
        self._open_seconds = _OPEN_SECONDS
        self._outcomes.clear()
        self._failures = 0

    def _note(self, *, is_failure: bool) -> None:
        if len(self._outcomes) == _REMEMBERED_MAX:
            self._failures -= self._outcomes[0][1]
        self._outcomes.append((self._clock.monotonic(), is_failure))
        self._failures += is_failure
        self._forget()

    def _forget(self) -> None:
        horizon = self._clock.monotonic() - _WINDOW_SECONDS
        while self._outcomes and self._outcomes[0][0] < horizon:
            self._failures -= self._outcomes.popleft()[1]
