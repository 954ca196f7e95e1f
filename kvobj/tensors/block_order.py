"""Moves blocks between a tensor's declared order, the [head][token][dim] that codecs work on, and the [token][head][dim] of RAW."""

from __future__ import annotations

from typing import Final

from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels.launcher import Address, Launcher

CODE_ALIGNMENT: Final = 16
"""What codecs may rely on of every address."""

_HEAD_MAJOR: Final = ("head", "token", "dim")
_TOKEN_MAJOR: Final = ("token", "head", "dim")
_ROWS_A_WARP: Final = 64
_BATCH_BYTES: Final = 256 * 1024


def batch_of(form: TensorForm) -> int:
    """How many blocks are coded in one call on a CPU: few enough to stay in its cache, and small ones share the cost of a call."""
    return max(1, min(form.blocks, _BATCH_BYTES // form.block_bytes))


class BlockOrder:
    """The blocks of one form, by their numbers. Values are copied only where they do not lie as wanted already.

    `tensor` is always the address of the whole tensor, in the declared order.
    """

    __slots__ = ("_form", "_launcher", "_sizes", "_strides")

    def __init__(self, launcher: Launcher, form: TensorForm) -> None:
        self._launcher = launcher
        self._form = form
        self._sizes = form.sizes
        self._strides = form.strides

    def block_at(self, tensor: Address, number: int) -> Address:
        """The block's first value in the tensor."""
        layer, kind = divmod(number, self._form.kinds)
        elements = layer * self._strides["layer"] + kind * self._strides["kv"]
        return tensor.after(elements * self._form.element_bytes)

    def head_major(self, tensor: Address, number: int, spare: Address) -> Address:
        """Where the block's values are in [head][token][dim] order: in place, or packed into `spare`."""
        start = self.block_at(tensor, number)
        if self.is_in_place(start):
            return start
        self.to_head_major(tensor, number, spare)
        return spare

    def to_head_major(self, tensor: Address, number: int, packed: Address) -> None:
        """Write the block's values to `packed` in [head][token][dim] order."""
        self._pack(self.block_at(tensor, number), packed, _HEAD_MAJOR, self._strides)

    def is_in_place(self, start: Address) -> bool:
        """Whether codecs can work on the values of the block that begins there."""
        return self._form.is_head_major and start % CODE_ALIGNMENT == 0

    def from_raw(self, raw: Address, tensor: Address, number: int) -> None:
        """Write a RAW block's values to their places in the tensor."""
        self._unpack(raw, self.block_at(tensor, number), _TOKEN_MAJOR)

    def head_major_of_raw(self, raw: Address, to: Address) -> None:
        """Write a RAW block's values to `to` in [head][token][dim] order."""
        sizes = self._sizes
        strides = {"token": sizes["head"] * sizes["dim"], "head": sizes["dim"], "dim": 1}
        self._pack(raw, to, _HEAD_MAJOR, strides)

    def raw_of_head_major(self, values: Address, raw: Address) -> None:
        """Write values that are in [head][token][dim] order to `raw` in [token][head][dim] order."""
        sizes = self._sizes
        strides = {"head": sizes["token"] * sizes["dim"], "token": sizes["dim"], "dim": 1}
        self._pack(values, raw, _TOKEN_MAJOR, strides)

    def from_head_major(self, values: Address, tensor: Address, number: int) -> None:
        """Write values that are in [head][token][dim] order to their places in the tensor."""
        self._unpack(values, self.block_at(tensor, number), _HEAD_MAJOR)

    def within_block(self, values: Address, to: Address) -> None:
        """Write values that are in [head][token][dim] order to `to`, a block alone, in the declared order of these three axes.

        For forms whose blocks lie together.
        """
        self._unpack(values, to, _HEAD_MAJOR)

    def _pack(self, source: Address, to: Address, order: tuple[str, str, str], strides: dict[str, int]) -> None:
        outer, rows, row = (self._sizes[axis] for axis in order)
        apart = [strides[axis] for axis in order]
        self._launcher.launch(
            "pack_block",
            -(-outer * rows // _ROWS_A_WARP),
            source,
            to,
            self._form.element_bytes,
            outer,
            rows,
            row,
            *apart,
        )

    def _unpack(self, source: Address, to: Address, order: tuple[str, str, str]) -> None:
        outer, rows, row = (self._sizes[axis] for axis in order)
        apart = [self._strides[axis] for axis in order]
        self._launcher.launch(
            "unpack_block",
            -(-outer * rows // _ROWS_A_WARP),
            source,
            to,
            self._form.element_bytes,
            outer,
            rows,
            row,
            *apart,
        )
