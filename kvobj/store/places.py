"""Where a chunk belongs: its namespace, its place in its chain, and the size that its layout gives it. Pure.

Source: `kv-api` §2 to §4. In a namespace with `ids: kvobj` the S3 key is the bare chunk id; in other declared ones it is
`NAME/KEY`, and parents are named without the `NAME/`; `default` takes every other key as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import MAX_KEY_BYTES, NamespaceQuota, ObjectRow
from kvobj.errors import InvalidChunkIdError, InvalidRequestError, InvalidTokensError, LayoutMismatchError

DEFAULT_NAMESPACE: Final = "default"
DEFAULT_HINT: Final = (
    "namespace default is the bucket owner's alone: "
    "make the bucket with --owner USER, or have its owner grant a namespace"
)
"""What to do, for a user who may not use `default`, or nothing of a bucket. Whose the bucket is it does not tell."""
ROOT_PARENT: Final = "root"
# Of a key in `default`, which knows no chunk length: what one call may name.
LOOSE_TOKENS_MAX: Final = 4 * 1024 * 1024
_CHUNK_ID: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One of the parts in which a chunk arrives from several writers; `index` counts from 0."""

    index: int
    count: int


class ChunkPlace(msgspec.Struct, frozen=True):
    """A chunk's namespace and place in its chain; `parent` and `tokens` are as in `ObjectRow`."""

    namespace: NamespaceRow
    parent: str | None = None
    tokens: int = 0
    group: GroupPart | None = None

    @property
    def quota(self) -> NamespaceQuota | None:
        """The namespace's quota, or None where it has no bound."""
        quota = self.namespace.quota
        return None if quota.chunks is None and quota.size_bytes is None else quota

    @property
    def namespace_root(self) -> bytes:
        """What tells the namespace from another that is declared under its name; empty for `default`."""
        return self.namespace.root

    @property
    def parent_tokens(self) -> int:
        """How many tokens a chunk needs to have children: only the last of a sequence is partial (`kv-api` §3)."""
        return self.namespace.chunk_tokens


@lru_cache(maxsize=1024)
def default_namespace(bucket: str) -> NamespaceRow:
    """The namespace that every KV bucket has without a declaration: no layout, keys as they are, owners only."""
    return NamespaceRow(
        bucket=bucket,
        name=DEFAULT_NAMESPACE,
        declaration=b"",
        fingerprint=b"",
        wrapped_key=b"",
        root=b"",
        ids="foreign",
        chunk_tokens=0,
        chunk_bytes=None,
        part_axis=None,
        created_ms=0,
        owner="",
    )


class _Layout(msgspec.Struct, frozen=True):
    kind: str
    layers: int = 0
    order: tuple[str, ...] = ()


class _Declaration(msgspec.Struct, frozen=True):
    layout: _Layout


@lru_cache(maxsize=1024)
def _layout(declaration: bytes) -> _Layout:
    return msgspec.json.decode(declaration, type=_Declaration).layout


def place_of(
    namespace: NamespaceRow,
    key: str,
    *,
    parent: str | None = None,
    tokens: int | None = None,
    group: GroupPart | None = None,
) -> ChunkPlace:
    """The place of the chunk under this S3 key. `parent` is as a client names it: `root`, an id, or a key without `NAME/`.

    Raises `InvalidChunkIdError` (the key is none of the namespace's, or the parent is no id), `InvalidRequestError` (no parent
    where one is needed), `InvalidTokensError`, `LayoutMismatchError` (a part where the namespace declares no axis of parts).
    """
    if group is not None and namespace.part_axis is None:
        raise LayoutMismatchError("the namespace declares no part_axis", differs=("part_axis",))
    return ChunkPlace(namespace, _parent(namespace, key, parent), _tokens(namespace, tokens), group)


def _parent(namespace: NamespaceRow, key: str, parent: str | None) -> str | None:
    if namespace.name == DEFAULT_NAMESPACE:
        return "" if parent == ROOT_PARENT else parent
    if namespace.ids == "kvobj":
        if not _CHUNK_ID(key):
            raise InvalidChunkIdError("the key is no chunk id, which the namespace has: 64 lower-case hex digits")
        if parent is None:
            raise InvalidRequestError("a chunk of this namespace needs x-kvobj-parent: its parent's id, or root")
        if parent != ROOT_PARENT and not _CHUNK_ID(parent):
            raise InvalidChunkIdError("the parent is neither root nor a chunk id: 64 lower-case hex digits")
        return "" if parent == ROOT_PARENT else parent
    front = f"{namespace.name}/"
    if not key.startswith(front) or key == front:
        raise InvalidChunkIdError(f"the key of a chunk of this namespace begins with {front}")
    if parent is None or parent == ROOT_PARENT:
        return None if parent is None else ""
    if len(front) + len(parent.encode()) > MAX_KEY_BYTES:
        raise InvalidChunkIdError("the parent is longer than a key can be")
    return front + parent


def _tokens(namespace: NamespaceRow, tokens: int | None) -> int:
    is_loose = namespace.name == DEFAULT_NAMESPACE
    most = LOOSE_TOKENS_MAX if is_loose else namespace.chunk_tokens
    if tokens is None:
        return 0 if is_loose else namespace.chunk_tokens
    if not 1 <= tokens <= most:
        raise InvalidTokensError(f"a chunk of this namespace has 1 to {most} tokens")
    return tokens


def parent_name(row: ObjectRow) -> str | None:
    """The parent as a client names it: `root`, an id, or a key without `NAME/`; None for a key without a parent."""
    return name_of_parent(row.parent, row.namespace)


def name_of_parent(parent: str | None, namespace: str) -> str | None:
    """`parent_name` of what is no row yet; `parent` as in `ObjectRow`."""
    if parent == "":
        return ROOT_PARENT
    if parent is None or namespace in ("", DEFAULT_NAMESPACE):
        return parent
    return parent.removeprefix(f"{namespace}/")


def expected_bytes(place: ChunkPlace) -> int | None:
    """What the chunk, or the part of it, has to have; None where no layout says it. Raises `LayoutMismatchError` for a part of
    as many as the axis does not have."""
    namespace = place.namespace
    if namespace.chunk_bytes is None:
        return None
    whole = namespace.chunk_bytes * place.tokens // namespace.chunk_tokens
    return whole if place.group is None else _part_bytes(place, place.group, whole)


def check_size(place: ChunkPlace, size_bytes: int) -> None:
    """Raise `LayoutMismatchError` unless the chunk, or the part of it, has the size that its layout gives it."""
    expected = expected_bytes(place)
    if expected not in (None, size_bytes):
        raise LayoutMismatchError(
            f"the layout gives {expected} bytes, and these are {size_bytes}",
            differs=("size_bytes",),
            expected_bytes=expected,
        )


def _part_bytes(place: ChunkPlace, group: GroupPart, whole: int) -> int:
    """Layers are dealt out evenly, the first parts have one more where they do not divide; K and V, and ranks, are equal."""
    axis = place.namespace.part_axis
    if axis == "layer":
        layers = _layout(place.namespace.declaration).layers
        if group.count <= layers:
            share, rest = divmod(layers, group.count)
            return whole // layers * (share + (group.index < rest))
    elif whole % group.count == 0 and (axis != "kv" or group.count <= 2):  # noqa: PLR2004 - K and V
        return whole // group.count
    raise LayoutMismatchError(f"the chunk has not {group.count} parts along {axis}", differs=("part",))


def part_sizes(place: ChunkPlace, count: int) -> list[int] | None:
    """The sizes of a chunk's `count` parts in order; None where no layout says them."""
    if place.namespace.chunk_bytes is None:
        return None
    whole = place.namespace.chunk_bytes * place.tokens // place.namespace.chunk_tokens
    return [_part_bytes(place, GroupPart(index, count), whole) for index in range(count)]


def layer_count(namespace: NamespaceRow) -> int:
    """How many layers the chunks of the namespace have; 0 where no layout says it."""
    return 0 if namespace.name == DEFAULT_NAMESPACE else _layout(namespace.declaration).layers


def layer_span(namespace: NamespaceRow, row: ObjectRow, first: int, last: int) -> tuple[int, int]:
    """Where the bytes of layers `first` to `last` (inclusive) of the chunk lie: `(start, stop)`.

    Raises `InvalidRequestError` where the layout does not put layers first, or has no such layers.
    """
    return layer_span_of(namespace, row.size_bytes, first, last, in_parts=bool(row.parts))


def layer_span_of(
    namespace: NamespaceRow, size_bytes: int, first: int, last: int, *, in_parts: bool
) -> tuple[int, int]:
    """`layer_span` of a chunk of so many bytes, which lies, or comes, in parts or not."""
    layout = _layout(namespace.declaration) if namespace.name != DEFAULT_NAMESPACE else _Layout("opaque")
    if layout.kind == "opaque" or layout.order[:1] != ("layer",):
        raise InvalidRequestError("the chunk's layout does not put layers first")
    if in_parts and namespace.part_axis not in (None, "layer"):
        raise InvalidRequestError(f"the chunk lies in parts along {namespace.part_axis}, not by layers")
    if not 0 <= first <= last < layout.layers:
        raise InvalidRequestError(f"the chunk has layers 0 to {layout.layers - 1}")
    layer_bytes = size_bytes // layout.layers
    return first * layer_bytes, (last + 1) * layer_bytes
