"""How chunks reach the home tier in the codec that their namespace says: lossless under their own blob id, lossy under another.

A lossless frame is the same blob in fewer bytes: readers are given it decoded, and nobody above the tier knows. A lossy one is
another representation (`LossyCopy`): the blob itself then is in memory alone, and is gone when it leaves that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Protocol

from kvobj.arena import PinnedFrame
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import LossyCopy, ObjectRow
from kvobj.errors import CapacityError, CorruptionError, KvobjError
from kvobj.ids import BlobId
from kvobj.store.transcoding import CodedFrame, Transcoder
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.coded_frames import Coding
from kvobj.tiers.protocol import BlobNames, Tier

_FAILURES_TOLD: Final = 10


class CodedTier(Tier, Protocol):
    """A tier that can hold a blob in another codec than readers are given (`tiers.coded.CodedHome`)."""

    async def put_coded(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, plain_bytes: int) -> None:
        """`Tier.put` of a frame that readers are to be given decoded."""
        ...


class HomeTranscoding:
    """Event-loop-only. `allocate` gives blob ids for lossy copies."""

    def __init__(
        self,
        *,
        home: CodedTier,
        transcoder: Transcoder,
        rules: CodingRules,
        allocate: Callable[[], BlobId],
        log: logging.Logger,
    ) -> None:
        self._home = home
        self._transcoder = transcoder
        self._rules = rules
        self._allocate = allocate
        self._log = log
        self.failures = 0

    def of_chunk(self, namespace: NamespaceRow, *, tokens: int, plain_bytes: int) -> Coding | None:
        """How a chunk whose class promises its bytes lies at home: never lossy. None: as it was put."""
        return self._rules.of_chunk(
            namespace, self._home.name, tokens=tokens, plain_bytes=plain_bytes, may_be_lossy=False
        )

    async def of_row(self, row: ObjectRow) -> Coding | None:
        """How a chunk of class `memory` is to lie at home; None: as it was put."""
        return await self._rules.of_row(row, self._home.name)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, coding: Coding) -> bool:
        """Put the blob of a sealed `raw` frame into the home tier, coded. False, and nothing is done, where it is to be put as it
        is: it does not shrink, or there is no room to encode it in. Errors as of `Tier.put`."""
        coded = await self._encoded(frame, coding)
        if coded is None:
            return False
        try:
            await self._home.put_coded(blob_id, coded.frame, names, plain_bytes=coded.head.plain_bytes)
        finally:
            coded.frame.release()
        return True

    async def put_lossy(self, frame: PinnedFrame, names: BlobNames, coding: Coding) -> LossyCopy | None:
        """Put a lossy copy of the blob into the home tier, under a blob id of its own; None as `put`. Errors as of `Tier.put`;
        `FrameCorruptError` where the bytes are not what was put."""
        coded = await self._encoded(frame, coding)
        if coded is None:
            return None
        head, blob_id = coded.head, self._allocate()
        try:
            if not math.isfinite(head.max_error):
                return None  # no reader could be told how far off it is
            await self._home.put_coded(blob_id, coded.frame, names, plain_bytes=head.plain_bytes)
        finally:
            coded.frame.release()
        return LossyCopy(
            blob_id=bytes(blob_id),
            plain_bytes=head.plain_bytes,
            frame_bytes=coded.frame.frame_bytes,
            digest=head.digest,
            codec=head.codec,
            max_error=head.max_error,
            profile=b"" if head.tensor is None else head.tensor.profile_digest or b"",
        )

    async def _encoded(self, frame: PinnedFrame, coding: Coding) -> CodedFrame | None:
        try:
            return await self._transcoder.encode(frame, coding, tier=self._home.name)
        except CapacityError:
            return None  # what waits to be written down must not wait for room to encode it in
        except KvobjError as error:
            if coding.is_lossy and isinstance(error, CorruptionError):
                raise  # no copy is made of what was never put
            self.failures += 1
            if self.failures <= _FAILURES_TOLD:
                self._log.warning("codec %s failed, a chunk is stored as it was put: %s", coding.codec, error)
            return None
