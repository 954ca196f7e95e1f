"""A chunk's bytes where they are: in the server's memory on the same host, or in memory of one's own after they came over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Never, Self, SupportsIndex

from blake3 import blake3

from kvobj.client.same_host_lane import Lane
from kvobj.errors import UnavailableError


class ChunkView:
    """A chunk to be looked at until it is released; a context manager. Made by `KvClient.view_chunk`. Thread-safe.

    `data` is read-only and of the chunk's size. On the same host it is the store's own memory, pinned: nothing is copied, and
    nothing else may be put there before the release, unless this process stalls past its lease, loses the server, or loses the
    connection that the view came by: a call that waits for its answer there, and is ended by its deadline or from outside, ends
    it. So who has used the bytes asks `is_valid` afterwards, and takes them for nothing where that is False. `data` and all that
    was made of it without a copy is not to be touched after the release: other bytes may be there, and nothing says so. That the
    view is collected is a release, too: an array made of `data` does not keep the view, so whoever keeps such an array keeps the
    view beside it. A view is not copied nor pickled (TypeError): one release would be of both. `digest` is BLAKE3 of the bytes,
    None where it is not known yet.
    """

    __slots__ = ("_data", "_is_released", "_lane", "_on_release", "digest", "tier")

    def __init__(
        self,
        data: memoryview,
        *,
        digest: bytes | None,
        tier: str = "",
        lane: Lane | None = None,
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_released = True  # until there is something to release
        self.digest = digest
        self.tier = tier
        self._data = data.toreadonly()
        self._lane = lane
        self._on_release = on_release
        self._is_released = False

    @property
    def data(self) -> memoryview:
        """The bytes. ValueError after the release."""
        if self._is_released:
            raise ValueError("the view was released")
        return self._data

    @property
    def size_bytes(self) -> int:
        """How many there are."""
        return self._data.nbytes

    @property
    def is_shared(self) -> bool:
        """Whether `data` is the store's memory."""
        return self._lane is not None

    @property
    def is_valid(self) -> bool:
        """Whether `data`, read until this moment, was the chunk's bytes. A few microseconds."""
        return not self._is_released and (self._lane is None or self._lane.is_valid)

    def check(self) -> bool:
        """Hash the bytes: whether they have the digest and the view is valid still. True without hashing where no digest is known.

        `UnavailableError` where the view is not valid.
        """
        is_right = self._is_released or self.digest is None or blake3(self._data).digest() == self.digest
        if not self.is_valid:
            raise UnavailableError("the view does not hold any more")
        return is_right

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        try:
            with suppress(BufferError):  # somebody has made something of it, and was told what that means
                self._data.release()
        finally:
            self._on_release()

    def __len__(self) -> int:
        return self.size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Never:  # what `copy` and `pickle` ask for
        raise TypeError("a view is of memory that is pinned once: copy its data")

    def __del__(self) -> None:
        if not getattr(self, "_is_released", True):  # it was made to its end
            self.release()
