"""A chunk that arrives in parts from several writers: which upload they meet in, and what they must agree on. Pure.

The parts of a key meet in one upload with a name of its own, whoever sends them and in whatever order; the chunk is committed whole
by whoever finds the last of them there. Source: `kv-api` §4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvobj.catalog.rows import Durability, ObjectRow, PartRow, UploadRow
from kvobj.errors import ImmutableChunkError, LayoutMismatchError
from kvobj.store.places import ChunkPlace, GroupPart
from kvobj.store.requests import PutRequest, PutResult

# No upload id that a client can send has this in front (`api.routing`), so that only parts of the chunk come here.
_FRONT: Final = "=parts-"


def group_upload_id(bucket: str, key: str) -> str:
    """The id of the upload in which the parts of a chunk meet: the same for every writer."""
    return _FRONT + blake3(f"{bucket}/{key}".encode()).hexdigest(length=16)


@dataclass(frozen=True, slots=True)
class GroupStart:
    """What stands before a part's body: the live chunk, or an earlier writer's same part, or neither: then `request` writes it."""

    existing: ObjectRow | None = None
    part: PartRow | None = None
    request: PutRequest | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """After a part: how many of the chunk's parts are there, and the chunk where that is all. `existed`: the part that was sent, or
    the whole chunk, is an earlier writer's."""

    have: int
    count: int
    result: PutResult | None
    existed: bool = False


def group_upload(
    request: PutRequest, place: ChunkPlace, group: GroupPart, durability: Durability, now_ms: int
) -> UploadRow:
    """The upload that the first writer of a part begins."""
    return UploadRow(
        bucket=request.bucket.name,
        key=request.key,
        upload_id=group_upload_id(request.bucket.name, request.key),
        initiated_ms=now_ms,
        owner=request.owner,
        durability=durability,
        headers=dict(request.headers),
        metadata=dict(request.metadata),
        group_parts=group.count,
        parent=place.parent,
        namespace=place.namespace.name,
        tokens=place.tokens,
        tags=dict(request.tags),
        namespace_root=place.namespace_root,
    )


def check_same_group(upload: UploadRow, place: ChunkPlace, group: GroupPart) -> None:
    """Raise `LayoutMismatchError` naming what this writer says otherwise than the first one."""
    differs = [
        name
        for name, first, other in (
            ("part", upload.group_parts, group.count),
            ("namespace", upload.namespace, place.namespace.name),
            ("parent", upload.parent, place.parent),
            ("tokens", upload.tokens, place.tokens),
        )
        if first != other
    ]
    if differs:
        what = "number of parts" if differs[0] == "part" else differs[0]
        raise LayoutMismatchError(f"the chunk's other parts have another {what}", differs=tuple(differs))


def check_same_part(row: ObjectRow, group: GroupPart, size_bytes: int) -> None:
    """Refuse a part that the live chunk does not answer: `LayoutMismatchError` (another number of parts), `ImmutableChunkError`."""
    sizes = [part.size_bytes for part in row.parts] or [row.size_bytes]
    if len(sizes) != group.count:
        raise LayoutMismatchError("the live chunk has another number of parts", differs=("part",))
    if sizes[group.index] != size_bytes:
        raise ImmutableChunkError("the live chunk's part has another size", key=row.key, size_bytes=sizes[group.index])
