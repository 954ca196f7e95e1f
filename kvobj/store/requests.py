"""What callers ask of the store and what they get back: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvobj.catalog.rows import BucketRow, Durability, ObjectRow, PartRow, WriteCondition


@dataclass(frozen=True, slots=True)
class PartTarget:
    """The multipart upload and part number that a body belongs to."""

    upload_id: str
    number: int


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One object or part to be written. `size_bytes` is exact; `algorithms` names the digests the caller will ask for
    (`sha256`, `crc32`, …; `md5` is added by the store where an ETag needs it)."""

    bucket: BucketRow
    key: str
    size_bytes: int
    owner: str
    durability: Durability | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    condition: WriteCondition | None = None
    algorithms: frozenset[str] = frozenset()
    part: PartTarget | None = None


@dataclass(frozen=True, slots=True)
class PutResult:
    """What stands in the catalog after a write. `existed`: an earlier writer's object stood and was kept.

    `durability` is the class that was reached.
    """

    row: ObjectRow | PartRow
    existed: bool
    durability: Durability
