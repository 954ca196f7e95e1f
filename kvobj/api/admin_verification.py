"""One verification of the store at a time, running in the background and asked for its progress.

A job that is polled, not one long reply: a client that goes away loses nothing, and a proxy's deadline does not matter. The report
of a finished verification stays until the next begins. Problems are counted without bound, listed up to a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Literal

from kvobj.api.admin_view import VerifiedObject
from kvobj.errors import ConflictError, KvobjError

PROBLEMS_LISTED_MAX: Final = 1000

VerificationState = Literal["none", "running", "done", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """Progress of the last verification. `total_objects` is what was there at its start; `failure` says why it `failed`."""

    state: VerificationState
    bucket: str | None = None
    checked_objects: int = 0
    checked_bytes: int = 0
    total_objects: int = 0
    problem_count: int = 0
    problems: tuple[VerifiedObject, ...] = ()
    failure: str | None = None


class Verification:
    """Event-loop-only. `verify` opens the store's iterator over verified objects."""

    def __init__(self, verify: Callable[[str | None], AsyncGenerator[VerifiedObject, None]]) -> None:
        self._verify = verify
        self._task: asyncio.Task[None] | None = None
        self._state: VerificationState = "none"
        self._bucket: str | None = None
        self._checked_objects = 0
        self._checked_bytes = 0
        self._total_objects = 0
        self._problem_count = 0
        self._problems: list[VerifiedObject] = []
        self._failure: str | None = None

    def start(self, bucket: str | None, *, total_objects: int) -> VerificationReport:
        """Begin. `ConflictError` while one is running."""
        if self._state == "running":
            raise ConflictError("a verification is running already", bucket=self._bucket)
        self._state, self._bucket, self._total_objects = "running", bucket, total_objects
        self._checked_objects = self._checked_bytes = self._problem_count = 0
        self._problems, self._failure = [], None
        self._task = asyncio.get_running_loop().create_task(self._run(bucket))
        return self.report()

    def report(self) -> VerificationReport:
        """How far it is."""
        return VerificationReport(
            state=self._state,
            bucket=self._bucket,
            checked_objects=self._checked_objects,
            checked_bytes=self._checked_bytes,
            total_objects=self._total_objects,
            problem_count=self._problem_count,
            problems=tuple(self._problems),
            failure=self._failure,
        )

    async def cancel(self) -> VerificationReport:
        """Stop it and wait until it has stopped. Nothing if none is running."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            if self._state == "running":  # cancelled before its first step: the task's own code never ran
                self._state = "cancelled"
        return self.report()

    async def _run(self, bucket: str | None) -> None:
        try:
            await self._check_all(bucket)
            self._state = "done"
        except asyncio.CancelledError:
            self._state = "cancelled"
            raise
        except KvobjError as error:
            self._state, self._failure = "failed", str(error)
        finally:
            if self._state == "running":  # a defect: the task keeps its traceback, the report must not run for ever
                self._state, self._failure = "failed", "internal error"

    async def _check_all(self, bucket: str | None) -> None:
        async with aclosing(self._verify(bucket)) as verified_objects:
            async for verified in verified_objects:
                self._count(verified)

    def _count(self, verified: VerifiedObject) -> None:
        self._checked_objects += 1
        self._checked_bytes += verified.size_bytes
        if verified.problem is not None:
            self._problem_count += 1
            if len(self._problems) < PROBLEMS_LISTED_MAX:
                self._problems.append(verified)
