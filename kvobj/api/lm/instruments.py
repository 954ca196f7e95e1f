"""What the `lm://` listener counts and logs. Drops are told once in a while and not once each: a full store drops thousands."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvobj.api.lm.commands import PutOutcome
from kvobj.clock import Clock
from kvobj.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

LOG_SECONDS: Final = 10.0


class LmInstruments:
    """Event loop only."""

    def __init__(
        self, metrics: Metrics, clock: Clock, log: logging.Logger, *, connections: Callable[[], float]
    ) -> None:
        self._requests = metrics.counter(
            "kvobj_lm_requests", "Requests of lm:// clients, by command and result.", ("command", "result")
        )
        self._seconds = metrics.histogram(
            "kvobj_lm_request_duration_seconds",
            "From the end of the head to the last byte of the reply, or of a PUT to its commit.",
            ("command",),
        )
        self._bytes_in = metrics.counter("kvobj_lm_received_bytes", "Bytes of lm:// PUTs, dropped ones included.")
        self._bytes_out = metrics.counter("kvobj_lm_sent_bytes", "Bytes of replies to lm:// clients, heads included.")
        self.cut_replies = metrics.counter("kvobj_lm_cut_replies", "Replies that could not be sent whole.")
        self._refused = metrics.counter(
            "kvobj_lm_refused_connections", "Connections reset at once, by reason.", ("reason",)
        )
        self.accept_waits = metrics.counter(
            "kvobj_lm_accept_waits",
            "Seconds in which no connection could be accepted for want of descriptors or memory.",
        )
        self._stalled = metrics.counter("kvobj_lm_stalled_connections", "Connections ended for a missed deadline.")
        metrics.gauge_of("kvobj_lm_connections", "Open connections of lm:// clients.", connections)
        self._clock = clock
        self._log = log
        self._children: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._untold: Tally[str] = Tally()
        self._told_at = float("-inf")

    def count(self, command: str, result: str, *, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count one request."""
        children = self._children.get((command, result))
        if children is None:  # looked up once: that costs more than all else here
            children = (self._requests.labels(command, result), self._seconds.labels(command))
            self._children[command, result] = children
        children[0].inc()
        children[1].observe(seconds)
        if bytes_in:
            self._bytes_in.inc(bytes_in)
        if bytes_out:
            self._bytes_out.inc(bytes_out)

    def dropped(self, outcome: PutOutcome, why: str) -> None:
        """A PUT came to nothing, and its client cannot be told."""
        self._tell(f"put {outcome.value}", why)

    def failed(self, command: str, why: str) -> None:
        """A request was answered as a miss since the store could not say."""
        self._tell(f"{command} failed", why)

    def refused(self, reason: str, remote: str) -> None:
        """A connection was not taken in."""
        self._refused.labels(reason).inc()
        self._tell(f"connection refused: {reason}", f"remote {remote}")

    def ended(self, why: str, remote: str) -> None:
        """A connection was given up because of what its client sent."""
        self._tell("connection ended", f"{why}, remote {remote}")

    def stalled(self, what: str, remote: str) -> None:
        """A connection missed a deadline."""
        self._stalled.inc()
        self._log.info("lm: connection ended: %s, remote %s", what, remote)

    def _tell(self, what: str, why: str) -> None:
        self._untold[what] += 1
        now = self._clock.monotonic()
        if now - self._told_at < LOG_SECONDS:
            return
        self._told_at = now
        counts = ", ".join(f"{what} {count}" for what, count in sorted(self._untold.items()))
        self._untold.clear()
        self._log.warning("lm: %s; the last one: %s", counts, why)
