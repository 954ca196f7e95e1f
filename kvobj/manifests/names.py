"""Keys of manifests, under the remote tier's key prefix: what a LIST tells of them without reading one.

`manifests/LINEAGE/LAST-EPOCH-AFTER-NUMBER.KIND`, all numbers in lower-case hex of fixed width, so that the order of keys is that of
lineages and in them that of the last positions. EPOCH and NUMBER make a key one that nobody else ever writes: the writer's session
epoch and its count. What lies there under other names is nobody's manifest and is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from kvobj.manifests.format import ManifestKind

FOLDER: Final = "manifests/"
_NAME: Final = re.compile(
    r"manifests/([0-9a-f]{8})/([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})\.(journal|part|head)"
)
_SUFFIXES: Final = {ManifestKind.JOURNAL: "journal", ManifestKind.PART: "part", ManifestKind.HEAD: "head"}
_KINDS: Final = {suffix: kind for kind, suffix in _SUFFIXES.items()}


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """A manifest's place. Orders as its key does: by lineage, then by last position."""

    lineage: int
    last: int
    epoch: int
    after: int
    number: int
    kind: ManifestKind

    @property
    def key(self) -> str:
        """The key under the tier's prefix."""
        numbers = f"{self.last:016x}-{self.epoch:016x}-{self.after:016x}-{self.number:08x}"
        return f"{lineage_folder(self.lineage)}{numbers}.{_SUFFIXES[self.kind]}"

    @classmethod
    def parse(cls, key: str) -> Self | None:
        """The name that a key (without the tier's prefix) is, None for no manifest's."""
        match = _NAME.fullmatch(key)
        if match is None:
            return None
        lineage, last, epoch, after, number = (int(digits, 16) for digits in match.groups()[:5])
        return cls(lineage, last, epoch, after, number, _KINDS[match[6]])


def lineage_folder(lineage: int) -> str:
    """Where the manifests of a lineage lie."""
    return f"{FOLDER}{lineage:08x}/"
