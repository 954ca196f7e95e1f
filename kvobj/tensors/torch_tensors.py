"""Tensor frames of torch tensors, and torch tensors of tensor frames. The one module of the package that imports torch.

    frame = encode_tensor(kv, "x3")                      # kv: bfloat16 [layers, 2, kv_heads, tokens, head_dim]
    same = decode_tensor(frame)                          # equal bit for bit
    paged = decode_tensor(encode_tensor(x, "eq4", order=ENGINE_ORDERS["vllm"]))

A tensor has the five axes of `form.AXES`, in the order that is said; a kind without K and V (`k`, `v`, `mla`) has size 1
there. What lies on a device is copied to the host here: `kvobj.gpu` codes it where it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kvobj.errors import InvalidRequestError
from kvobj.tensors.codec_protocol import Profile
from kvobj.tensors.codecs import (
    decode_frame,
    decode_layers,
    encode_bound,
    encode_frame,
    parse_tensor_frame,
)
from kvobj.tensors.form import AXES, Dtype, Kind, TensorForm
from kvobj.tensors.frame import TensorFrame

TORCH_DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}

ENGINE_ORDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "transformers": AXES,  # past_key_values stacked: [layer, K or V, head, token, dim]
    "vllm": ("layer", "kv", "token", "head", "dim"),  # NHD, the default of its FlashAttention back end
    "vllm-hnd": ("layer", "kv", "head", "token", "dim"),
    "lmcache": ("kv", "layer", "token", "head", "dim"),  # KV_2LTD, its last axis split into head and dim
    "sglang": ("kv", "layer", "token", "head", "dim"),  # the two pools of MHATokenToKVPool, stacked
}
"""Orders in which engines hold K and V, for `order`."""

_DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_AXIS_COUNT: Final = len(AXES)


def form_of(tensor: torch.Tensor, *, kind: Kind = "kv", order: Sequence[str] = AXES) -> TensorForm:
    """The form of a tensor whose axes are in that order. `InvalidRequestError` for a shape or dtype that no form has."""
    if tensor.dim() != _AXIS_COUNT:
        raise InvalidRequestError(f"a chunk's tensor has the axes {', '.join(order)}", shape=tuple(tensor.shape))
    dtype = _DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequestError("no form has this dtype", dtype=str(tensor.dtype))
    sizes = dict(zip(order, tensor.shape, strict=True))
    if sizes.get("kv") != (2 if kind == "kv" else 1):
        raise InvalidRequestError(f"the axis kv of kind {kind} has another size", shape=tuple(tensor.shape))
    try:
        return TensorForm(
            kind=kind,
            dtype=dtype,
            layers=sizes["layer"],
            kv_heads=sizes["head"],
            head_dim=sizes["dim"],
            tokens=sizes["token"],
            order=tuple(order),
        )
    except (KeyError, ValueError) as error:
        raise InvalidRequestError(f"not a chunk's tensor: {error}", shape=tuple(tensor.shape)) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, writable: without a copy where it is dense and in host memory, else of a copy. Keeps the memory alive."""
    dense = tensor.detach().contiguous().cpu()
    memory = (ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr())
    memory.tensor = dense  # the view keeps the array, and the array the tensor
    return memoryview(memory).cast("B")


def tensor_of(plain: bytearray | memoryview, form: TensorForm) -> torch.Tensor:
    """Plain bytes as a tensor over the same memory, which must be writable; axes in the form's order.

    `InvalidRequestError` where these are not as many bytes as the form has.
    """
    if len(plain) != form.plain_bytes:
        raise InvalidRequestError("these are not the bytes of that form", size_bytes=len(plain), want=form.plain_bytes)
    flat = torch.frombuffer(plain, dtype=torch.uint8)
    return flat.view(TORCH_DTYPES[form.dtype]).view(form.shape)


def encode_tensor(
    tensor: torch.Tensor,
    codec: str,
    *,
    kind: Kind = "kv",
    order: Sequence[str] = AXES,
    fingerprint: bytes = bytes(16),
    profile: Profile | None = None,
) -> memoryview:
    """The frame of a tensor: the caller's own memory, writable.

    `InvalidRequestError` for a tensor or a codec that do not fit (`codecs.refusal`); `UnavailableError` without kernels.
    """
    form = form_of(tensor, kind=kind, order=order)
    frame = memoryview(bytearray(encode_bound(codec, form)))
    size_bytes = encode_frame(bytes_of(tensor), frame, codec=codec, form=form, fingerprint=fingerprint, profile=profile)
    return frame[:size_bytes]


def decode_tensor(
    frame: bytes | bytearray | memoryview,
    *,
    layers: range | None = None,
    profile: Profile | None = None,
    head: TensorFrame | None = None,
) -> torch.Tensor:
    """The tensor that a frame holds, in host memory of its own, its axes in the order that the frame names.

    `layers`: only these, read from their own blocks; of any order. `head`: what `parse_tensor_frame` made of it, if that is known.
    Checksums are checked, the digest of the whole is not. `FrameCorruptError`; `UnavailableError` without kernels.
    """
    view = memoryview(frame).cast("B")
    if head is None:
        head = parse_tensor_frame(view, len(view))
    form = head.form if layers is None else head.form.layers_only(layers)
    # torch's own memory: uninitialised, where a bytearray would be written twice.
    tensor = torch.empty(form.shape, dtype=TORCH_DTYPES[form.dtype])
    if layers is None:
        decode_frame(view, head, bytes_of(tensor), profile=profile)
    else:
        decode_layers(view, head, layers, bytes_of(tensor), offset=0, profile=profile)
    return tensor
