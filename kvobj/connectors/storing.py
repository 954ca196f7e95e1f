"""How a link stores a batch of chunks: cut to what a server takes at once, and one by one where one of them spoils it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final

from kvobj.client.kv import KvClient
from kvobj.client.kv_values import Namespace, NewChunk, StoredChunk
from kvobj.connectors.helpers import Helpers
from kvobj.connectors.pieces import MOVED_AT_ONCE, bytes_for, cut
from kvobj.connectors.tally import Tally, another_size
from kvobj.errors import (
    ConflictError,
    ImmutableChunkError,
    InvalidRequestError,
    KvobjError,
    LayoutMismatchError,
    ParentNotFoundError,
)

STORED_BYTES_AT_ONCE: Final = 64 * 1024 * 1024
"""A batch may take up a quarter of the server's arena at most; a chunk may always."""
STORED_BYTES_AT_LEAST: Final = 8 * 1024 * 1024
STORED_IN_TURN: Final = 3
"""What one call stores on the same host goes in so many batches: in fewer, of about so many bytes each, where it is little, and in
more where they would be of more than goes at once. The server's work on one is done while the next is copied, but for the first
one's beginning and the last one's end."""

_SPOILED: Final = (InvalidRequestError, LayoutMismatchError)
"""How a batch is refused that one of its chunks spoils, or that is too large."""


class Outcome(Enum):
    """What became of a chunk that was to be stored: it is there, it was there before, or it is not."""

    STORED = auto()
    EXISTED = auto()
    FAILED = auto()


class ChunkWriter:
    """Thread-safe. Where a batch is refused as a whole, or nobody answers, its error is raised; what was stored until then has been
    told of. `note_refusal` is told why a chunk was not stored where others of its batch may have been. Over the network so many
    threads at most store a batch, with `helpers`."""

    def __init__(
        self,
        client: KvClient,
        tally: Tally,
        helpers: Helpers,
        *,
        threads: int,
        durability: str | None,
        note_refusal: Callable[[KvobjError], None],
    ) -> None:
        self._client = client
        self._tally = tally
        self._helpers = helpers
        self._threads = threads
        self._durability = durability
        self._note_refusal = note_refusal

    def store(
        self, space: Namespace, chunks: Sequence[NewChunk], sizes: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        """Store chunks of these sizes; sets `outcomes[i]` once that chunk is stored."""

        def put(start: int, stop: int) -> None:
            note(start, self._put_piece(space, chunks[start:stop]))

        def note(start: int, answers: Sequence[StoredChunk | KvobjError]) -> None:
            for index, told in enumerate(answers, start=start):
                if isinstance(told, StoredChunk):
                    outcomes[index] = Outcome.EXISTED if told.existed else Outcome.STORED
                elif isinstance(told, ConflictError):
                    self._tally.disagreed(told, _difference(told, sizes[index]))
                else:
                    self._note_refusal(told)

        if any(chunk.parent is not None for chunk in chunks):  # a child waits for its parent
            for start, stop in cut(sizes, STORED_BYTES_AT_ONCE, MOVED_AT_ONCE):
                put(start, stop)
        elif self._client.is_same_host:
            share = bytes_for(sizes, STORED_IN_TURN)
            size_bytes = min(max(share, STORED_BYTES_AT_LEAST), STORED_BYTES_AT_ONCE)
            self._put_in_turn(space, list(cut(sizes, size_bytes, MOVED_AT_ONCE)), chunks, note)
        else:
            for start, stop in cut(sizes, STORED_BYTES_AT_ONCE, MOVED_AT_ONCE):
                self._helpers.divide(sizes, start, stop, put, threads=self._threads)

    def _put_in_turn(
        self,
        space: Namespace,
        pieces: Sequence[tuple[int, int]],
        chunks: Sequence[NewChunk],
        note: Callable[[int, Sequence[StoredChunk | KvobjError]], None],
    ) -> None:
        """Store pieces as batches, and tell of those that were stored. Raises what one of them was refused with as a whole."""
        refused = self._put_batches(space, pieces, chunks, note)
        try:
            if refused is not None:
                raise refused
        finally:
            # The traceback has this frame: what is raised must not be in it, or it keeps the engine's memory until the interpreter
            # looks for cycles.
            del refused

    def _put_batches(
        self,
        space: Namespace,
        pieces: Sequence[tuple[int, int]],
        chunks: Sequence[NewChunk],
        note: Callable[[int, Sequence[StoredChunk | KvobjError]], None],
    ) -> KvobjError | None:
        """See `_put_in_turn`; what that raises."""
        answers = self._client.mput_batches(
            [chunks[start:stop] for start, stop in pieces],
            namespace=space,
            durability=self._durability,
        )
        refused: KvobjError | None = None
        spoiled: list[tuple[int, int]] = []
        for piece, told in zip(pieces, answers, strict=True):
            if not isinstance(told, KvobjError):
                note(piece[0], told)
            elif isinstance(told, _SPOILED):
                spoiled.append(piece)
            else:
                refused = refused or told
        for start, stop in spoiled:
            note(start, [self._put(space, chunk) for chunk in chunks[start:stop]])
        return refused

    def _put_piece(self, space: Namespace, chunks: Sequence[NewChunk]) -> list[StoredChunk | KvobjError]:
        """One batch: for each chunk what a PUT of it tells, or its error."""
        if len(chunks) > 1:
            with suppress(*_SPOILED):
                return self._client.mput(chunks, namespace=space, durability=self._durability)
        return [self._put(space, chunk) for chunk in chunks]

    def _put(self, space: Namespace, chunk: NewChunk) -> StoredChunk | KvobjError:
        try:
            return self._client.put_chunk(
                chunk.id,
                chunk.data,
                namespace=space,
                parent=chunk.parent,
                tokens=chunk.tokens,
                durability=self._durability,
            )
        except (InvalidRequestError, ConflictError) as error:
            return error


def _difference(error: ConflictError, size_bytes: int) -> str:
    """What a log line says of a chunk of so many bytes that was refused; "" for what comes to pass where nothing is wrong: a parent
    that was evicted meanwhile."""
    if isinstance(error, ParentNotFoundError):
        return ""
    stored_bytes = error.data.get("size_bytes")
    if isinstance(error, ImmutableChunkError) and isinstance(stored_bytes, int):  # a batch tells it, a PUT does not
        return another_size(stored_bytes, size_bytes)
    return f"were refused: {error}"
