"""How chunks are to lie in device memory: that tier is told blob ids alone, and what their namespaces say is found here.

Chunks go up when they are read, so those that somebody asked for lately are remembered; of others the tier holds what it is given.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvobj.catalog.rows import ObjectRow
from kvobj.ids import BlobId
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.coded_frames import Coding

REMEMBERED_MAX: Final = 16_384
_TIER: Final = "hbm"


class HbmCodings:
    """See the module's text. Event-loop-only; `note` takes half a microsecond."""

    def __init__(self, rules: CodingRules) -> None:
        self._rules = rules
        self._rows: OrderedDict[bytes, ObjectRow] = OrderedDict()

    def note(self, row: ObjectRow) -> None:
        """Somebody asks for the object."""
        if row.namespace in ("", DEFAULT_NAMESPACE) or len(row.blobs) != 1:
            return
        self._rows[row.blobs[0].blob_id] = row
        if len(self._rows) > REMEMBERED_MAX:
            self._rows.popitem(last=False)

    async def of_blob(self, blob_id: BlobId) -> Coding | None:
        """How the blob is to lie in device memory; None: as it is."""
        row = self._rows.get(blob_id)
        return None if row is None else await self._rules.of_row(row, _TIER)
