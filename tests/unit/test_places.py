"""Where a chunk belongs: keys, parents and sizes of namespaces."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import Durability, NamespaceQuota, ObjectRow, PartInfo
from kvobj.errors import InvalidChunkIdError, InvalidRequestError, InvalidTokensError, LayoutMismatchError
from kvobj.store.places import (
    ChunkPlace,
    GroupPart,
    check_size,
    default_namespace,
    expected_bytes,
    layer_span,
    place_of,
)

ID, OTHER = "ab" * 32, "cd" * 32
ORDER = ("layer", "kv", "head", "token", "dim")


def namespace(
    *,
    ids: str = "kvobj",
    kind: str = "kv",
    layers: int = 32,
    order: tuple[str, ...] = ORDER,
    axis: str | None = None,
    quota: NamespaceQuota | None = None,
) -> NamespaceRow:
    layout = {"kind": kind, "layers": layers, "order": order} if kind != "opaque" else {"kind": kind}
    return NamespaceRow(
        bucket="chunks",
        name="ns",
        declaration=msgspec.json.encode({"model": "m", "layout": layout}),
        fingerprint=b"f" * 32,
        wrapped_key=b"k",
        root=b"r" * 32,
        ids=ids,
        chunk_tokens=16,
        chunk_bytes=None if kind == "opaque" else layers * 16 * 4,
        part_axis=axis,
        created_ms=1,
        owner="alice",
        quota=quota or NamespaceQuota(),
    )


def row(size_bytes: int, parts: tuple[PartInfo, ...] = ()) -> ObjectRow:
    return ObjectRow(
        bucket="chunks", key=ID, blobs=(), size_bytes=size_bytes, etag="e", modified_ms=1, owner="alice",
        durability=Durability.MEMORY, parts=parts, namespace="ns",
    )  # fmt: skip


def test_a_chunk_id_needs_a_parent() -> None:
    assert place_of(namespace(), ID, parent="root") == ChunkPlace(namespace(), "", 16)
    assert place_of(namespace(), ID, parent=OTHER, tokens=3) == ChunkPlace(namespace(), OTHER, 3)
    with pytest.raises(InvalidRequestError, match="x-kvobj-parent"):
        place_of(namespace(), ID)


@pytest.mark.parametrize("key", ["ns/" + ID, ID.upper(), ID[:-1], ID + "0", "key", ID + "\n"])
def test_what_is_no_chunk_id_is_refused_where_ids_are_ours(key: str) -> None:
    with pytest.raises(InvalidChunkIdError):
        place_of(namespace(), key, parent="root")
    with pytest.raises(InvalidChunkIdError):
        place_of(namespace(), ID, parent=key)


def test_keys_of_engines_begin_with_the_namespace_and_parents_do_not() -> None:
    foreign = namespace(ids="foreign")
    assert place_of(foreign, "ns/k").parent is None
    assert place_of(foreign, "ns/k", parent="root").parent == ""
    assert place_of(foreign, "ns/k", parent="ns/j").parent == "ns/ns/j"
    for key in ("k", "ns/", "nsx/k", "NS/k"):
        with pytest.raises(InvalidChunkIdError):
            place_of(foreign, key)
    with pytest.raises(InvalidChunkIdError):
        place_of(foreign, "ns/k", parent="p" * 1022)


def test_the_default_namespace_takes_any_key_and_any_number_of_tokens() -> None:
    default = default_namespace("chunks")
    assert place_of(default, "any/key") == ChunkPlace(default)
    place = place_of(default, "k", parent="p", tokens=300)
    assert (place.parent, place.tokens, place.quota, expected_bytes(place)) == ("p", 300, None, None)
    check_size(place, 12345)


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_chunk_has_no_more_tokens_than_a_full_one(tokens: int) -> None:
    with pytest.raises(InvalidTokensError):
        place_of(namespace(), ID, parent="root", tokens=tokens)


def test_the_size_follows_from_layout_and_tokens() -> None:
    full = place_of(namespace(), ID, parent="root")
    check_size(full, 2048)
    check_size(place_of(namespace(), ID, parent="root", tokens=5), 640)
    for size_bytes in (0, 2047, 2049, 640):
        with pytest.raises(LayoutMismatchError) as caught:
            check_size(full, size_bytes)
        assert caught.value.data["differs"] == ("size_bytes",)
    check_size(place_of(namespace(kind="opaque"), ID, parent="root"), 999)


def test_parts_need_an_axis_that_was_declared() -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        place_of(namespace(), ID, parent="root", group=GroupPart(0, 2))
    assert caught.value.data["differs"] == ("part_axis",)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.sampled_from(["layer", "kv", "rank"]))
def test_the_parts_of_a_chunk_have_together_what_the_chunk_has(layers: int, count: int, tokens: int, axis: str) -> None:
    declared = namespace(layers=layers, axis=axis)
    whole = expected_bytes(place_of(declared, ID, parent="root", tokens=tokens))
    places = [
        place_of(declared, ID, parent="root", tokens=tokens, group=GroupPart(index, count)) for index in range(count)
    ]
    assert whole is not None
    fits = count <= layers if axis == "layer" else whole % count == 0 and (axis == "rank" or count <= 2)
    if not fits:
        with pytest.raises(LayoutMismatchError):
            expected_bytes(places[0])
        return
    sizes = [expected_bytes(place) or 0 for place in places]
    assert sum(sizes) == whole
    assert max(sizes) - min(sizes) <= (tokens * 4 if axis == "layer" else 0)


def test_k_and_v_are_two_parts_at_most() -> None:
    with pytest.raises(LayoutMismatchError):
        check_size(place_of(namespace(axis="kv"), ID, parent="root", group=GroupPart(0, 4)), 512)
    check_size(place_of(namespace(axis="kv"), ID, parent="root", group=GroupPart(1, 2)), 1024)


def test_layers_are_a_range_of_the_bytes_where_the_layout_puts_them_first() -> None:
    assert layer_span(namespace(), row(2048), 0, 31) == (0, 2048)
    assert layer_span(namespace(), row(640), 1, 2) == (20, 60)
    for first, last in ((0, 32), (3, 2)):
        with pytest.raises(InvalidRequestError, match="0 to 31"):
            layer_span(namespace(), row(2048), first, last)
    parts = (PartInfo(1, 1024), PartInfo(2, 1024))
    assert layer_span(namespace(axis="layer"), row(2048, parts), 16, 31) == (1024, 2048)
    for declared in (
        namespace(order=("kv", "layer", "head", "token", "dim")),
        namespace(kind="opaque"),
        default_namespace("chunks"),
        namespace(axis="kv"),
    ):
        with pytest.raises(InvalidRequestError):
            layer_span(declared, row(2048, parts), 0, 0)


def test_a_quota_without_bounds_is_none() -> None:
    assert place_of(namespace(), ID, parent="root").quota is None
    bounded = namespace(quota=NamespaceQuota(chunks=3))
    assert place_of(bounded, ID, parent="root").quota == NamespaceQuota(chunks=3)
