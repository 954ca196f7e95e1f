"""What signals ask of a running server. Event loop only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Self


class ServerSignals:
    """SIGTERM and SIGINT: stop. SIGUSR2: stop, leaving what is in memory to the next start. SIGHUP: `on_hangup`.

    A second interrupt from the keyboard ends the process at once; a second of the others changes nothing, but a SIGTERM after
    a SIGUSR2 asks for the clean stop after all.
    """

    __slots__ = ("_stop", "keeps_memory", "on_hangup")

    def __init__(self, on_hangup: Callable[[], None]) -> None:
        self.on_hangup = on_hangup
        self._stop = asyncio.Event()
        self.keeps_memory = False
        """Whether the stop that was asked for is the one that writes nothing down."""

    @classmethod
    def listen(cls, *, on_hangup: Callable[[], None]) -> Self:
        """Handle the running loop's signals from here on."""
        signals = cls(on_hangup)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, signals._interrupt)
        loop.add_signal_handler(signal.SIGTERM, signals._terminate)
        loop.add_signal_handler(signal.SIGUSR2, signals._hand_over)
        loop.add_signal_handler(signal.SIGHUP, signals._hang_up)
        return signals

    async def wait_for_stop(self) -> None:
        """Wait until a stop is asked for."""
        await self._stop.wait()

    def _hang_up(self) -> None:
        self.on_hangup()

    def _interrupt(self) -> None:
        if self._stop.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self._terminate()

    def _terminate(self) -> None:
        self.keeps_memory = False
        self._stop.set()

    def _hand_over(self) -> None:
        self.keeps_memory = not self._stop.is_set()
        self._stop.set()
