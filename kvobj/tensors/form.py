"""The form of a chunk's tensor: kind, dtype, sizes, and the order of its axes in the plain bytes. Pure.

Plain bytes are one dense array over the five axes in the declared order, the last one fastest (`kv-api` §3). Frames hold it as
*blocks*, one a (layer, kind) pair, layer-major. Axes that a form does not have (`kv` of a single kind) have size 1 and count in
the order all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Final, Literal, Self, cast, get_args

from kvobj.errors import InvalidRequestError

Kind = Literal["kv", "k", "v", "mla"]
Dtype = Literal["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32", "int8", "uint8"]

AXES: Final = ("layer", "kv", "head", "token", "dim")
"""The axes in their default order."""
ORDERS: Final = tuple(permutations(AXES))
"""All orders, lexicographic by the places in `AXES`: frames name one by its index, so 0 is the default order."""
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
AXIS_MAX: Final = 2**20
"""The most that a namespace may declare for an axis."""

_ORDER_INDEX: Final = {order: index for index, order in enumerate(ORDERS)}
_KINDS: Final = frozenset(get_args(Kind))


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A chunk's tensor. `order` names the five axes, slowest first. `mla` has one head, `head_dim` wide.

    ValueError, which names the field, for anything that no namespace can declare.
    """

    kind: Kind
    dtype: Dtype
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(sorted(_KINDS))}")
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is none of {', '.join(sorted(ELEMENT_BYTES))}")
        for name in ("layers", "kv_heads", "head_dim", "tokens"):
            size = getattr(self, name)
            if not isinstance(size, int) or not 1 <= size <= AXIS_MAX:
                raise ValueError(f"{name}: {size!r} is not from 1 to {AXIS_MAX}")
        if self.kind == "mla" and self.kv_heads != 1:
            raise ValueError(f"kv_heads: a latent has one head, got {self.kv_heads}")
        if self.order not in _ORDER_INDEX:
            raise ValueError(f"order: has each of {', '.join(AXES)} once, got {self.order!r}")

    @classmethod
    def from_layout(cls, layout: Mapping[str, object], tokens: int) -> Self | None:
        """The form of a chunk of so many tokens under a namespace's declared layout; None for an opaque one.

        `layout` is that part of a declaration, as parsed from JSON, its defaults filled in or not. `InvalidRequestError` where it
        is no layout.
        """
        kind = layout.get("kind")
        if kind == "opaque":
            return None
        order = layout.get("order")
        heads = layout.get("kv_heads")
        try:
            return cls(
                kind=cast("Kind", kind),
                dtype=cast("Dtype", layout.get("dtype")),
                layers=cast("int", layout.get("layers")),
                kv_heads=1 if heads is None and kind == "mla" else cast("int", heads),
                head_dim=cast("int", layout.get("head_dim")),
                tokens=tokens,
                order=AXES if order is None else tuple(cast("list[str]", order)),
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"layout: {error}", field="layout") from error

    @property
    def kinds(self) -> int:
        """How many blocks a layer has: K and V, or one."""
        return 2 if self.kind == "kv" else 1

    @property
    def element_bytes(self) -> int:
        """Width of a value."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """How many blocks the tensor has: block number = layer * kinds + kind."""
        return self.layers * self.kinds

    @property
    def block_values(self) -> int:
        """Values of a block."""
        return self.kv_heads * self.tokens * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Plain bytes of a block."""
        return self.block_values * self.element_bytes

    @property
    def plain_bytes(self) -> int:
        """Plain bytes of the whole."""
        return self.blocks * self.block_bytes

    @property
    def order_index(self) -> int:
        """Place of `order` in `ORDERS`."""
        return _ORDER_INDEX[self.order]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, in the order of `AXES`."""
        return {
            "layer": self.layers, "kv": self.kinds, "head": self.kv_heads, "token": self.tokens, "dim": self.head_dim,
        }  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis, in the declared order."""
        sizes = self.sizes
        return tuple(sizes[axis] for axis in self.order)

    @property
    def strides(self) -> dict[str, int]:
        """For each axis how many elements lie between neighbours along it, in the declared order."""
        sizes, strides, step = self.sizes, dict.fromkeys(AXES, 0), 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        return strides

    @property
    def is_layer_major(self) -> bool:
        """Whether each layer's plain bytes lie together, so that a range of layers is one range of bytes."""
        return self.layers == 1 or math.prod(self._sizes_before("layer")) == 1

    @property
    def is_block_major(self) -> bool:
        """Whether each block's plain bytes lie together, one block after the other as in a frame."""
        sizes = self.sizes
        wide = [axis for axis in self.order if sizes[axis] > 1]
        leading = [axis for axis in ("layer", "kv") if sizes[axis] > 1]
        return wide[: len(leading)] == leading

    @property
    def is_head_major(self) -> bool:
        """Whether a block's plain bytes lie together *and* are in [head][token][dim] order: what codecs work on."""
        sizes = self.sizes
        wide = [axis for axis in self.order if sizes[axis] > 1]
        return wide == [axis for axis in AXES if sizes[axis] > 1]

    def layer_spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """The plain bytes of the layers `first` to `last`, both included, as half-open ranges in ascending order.

        One range where the form is layer-major; else one for each combination of the axes outside the layers: two for
        [kv, layer, …]. ValueError if these are no layers of it.
        """
        if not 0 <= first <= last < self.layers:
            raise ValueError(f"{first}-{last} are no layers of {self.layers}")
        if self.layers == 1:
            return [(0, self.plain_bytes)]
        outer = math.prod(self._sizes_before("layer"))
        layer_bytes = self.strides["layer"] * self.element_bytes
        every = layer_bytes * self.layers
        return [(at * every + first * layer_bytes, at * every + (last + 1) * layer_bytes) for at in range(outer)]

    def layers_only(self, layers: range) -> TensorForm:
        """The form of consecutive layers by themselves."""
        return TensorForm(self.kind, self.dtype, len(layers), self.kv_heads, self.head_dim, self.tokens, self.order)

    def _sizes_before(self, axis: str) -> list[int]:
        sizes = self.sizes
        return [sizes[each] for each in self.order[: self.order.index(axis)]]
