"""What a Hugging Face model's KV cache is to the store: its layout, and the declaration of the namespace that its chunks are in.

Everything that makes two caches differ is in the declaration: the model's name, a fingerprint of its weights, layers, heads, dtype,
RoPE, chunk length, rank, adapter and salt. Models whose cache is more than keys and values of every token in every layer are
refused by name (`InvalidRequestError`).

Source: transformers 5.23, `cache_utils.DynamicCache` and `modeling_rope_utils`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from blake3 import blake3
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvobj.errors import InvalidRequestError
from kvobj.ids.canonical_json import canonical_json

DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ORDER: Final = ("layer", "kv", "head", "token", "dim")
"""A chunk's bytes: all of a layer together, so that layers can be read alone."""

_SHIFTING_ROPE: Final = ("dynamic", "longrope")
_SAMPLES: Final = 16
_NAME_CHARACTERS_MAX: Final = 64
_OUTSIDE_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class KvShape:
    """The keys and values of one token in one layer, how many layers there are, and where the model keeps them."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of all layers of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * int(self.dtype.itemsize)


def shape_of(model: PreTrainedModel) -> KvShape:
    """What the model's configuration says. `InvalidRequestError` for a model whose cache is of another kind."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise InvalidRequestError("an encoder-decoder model caches cross-attention too, which is not stored")
    if len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        raise InvalidRequestError("a model that is spread over several devices is not supported")
    rope_type = rope_of(config).get("rope_type", "default")
    if rope_type in _SHIFTING_ROPE:
        raise InvalidRequestError(
            f"RoPE of type {rope_type} changes with the length of a sequence: keys cannot be shared"
        )
    layers = DynamicCache(config=model.config).layers
    for layer in layers:
        check_layer(layer)
    if model.dtype not in DTYPES:
        raise InvalidRequestError(f"a cache of {model.dtype} is not supported: {', '.join(map(str, DTYPES))} are")
    heads = config.num_attention_heads
    return KvShape(
        layers=len(layers),
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=model.device,
    )


def check_layer(layer: object) -> None:
    """Raise `InvalidRequestError` unless the layer of a cache keeps every token's keys and values as they are: no sliding window,
    nothing quantised, no state of linear attention, no indexer."""
    if type(layer) is not DynamicLayer:
        raise InvalidRequestError(f"cache layers of class {type(layer).__name__} are not supported: DynamicLayer is")


def declaration_of(
    model: PreTrainedModel,
    shape: KvShape,
    *,
    name: str,
    chunk_tokens: int,
    salt: str = "",
    adapter: str | None = None,
    rank: tuple[int, int] = (0, 1),
) -> dict[str, object]:
    """The namespace's declaration (docs/formats.md)."""
    rope = rope_of(model.config.get_text_config(decoder=True))
    theta = rope.pop("rope_theta", None)
    if rope == {"rope_type": "default"}:
        rope = {}
    return {
        "model": name,
        "revision": revision_of(model),
        "chunk_tokens": chunk_tokens,
        "layout": {
            "kind": "kv",
            "dtype": DTYPES[shape.dtype],
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "order": ORDER,
        },
        "rank": {"tensor": rank, "pipeline": (0, 1)},
        "adapter": adapter,
        "rope": None if theta is None else {"theta": float(theta), "applied": True, "scaling": rope or None},
        "salt": salt,
        "ids": "kvobj",
    }


def namespace_name(declaration: Mapping[str, object]) -> str:
    """A name that only this declaration has: the model's own with a digest."""
    model = _OUTSIDE_NAME.sub("-", str(declaration["model"])).strip("-.")[-_NAME_CHARACTERS_MAX:]
    return f"hf-{model}-{blake3(canonical_json(declaration)).hexdigest()[:16]}"


def rope_of(config: Any) -> dict[str, Any]:  # noqa: ANN401 - configurations differ from model to model
    """The RoPE parameters that are no tables; those that differ between kinds of layers, under `KIND.NAME`."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if isinstance(value, bool | int | float | str)}


def weights_state(model: PreTrainedModel) -> tuple[object, ...]:
    """What changes when parameters are written to, replaced, moved or added, as far as torch notes it: cheap to compare, and says
    nothing of what they are. A change by way of `.data` is not noted."""
    return tuple(
        (_place(each), 0 if each.is_inference() else each._version, each.dtype)  # noqa: SLF001 - torch names it so
        for each in model.parameters()
    )


def _place(parameter: torch.Tensor) -> int:
    """Where its bytes lie; of a tensor that is made of others (quantised) which object it is."""
    try:
        return int(parameter.data_ptr())
    except RuntimeError:
        return id(parameter)


def revision_of(model: PreTrainedModel) -> str:
    """The commit that the model was loaded from, where one is known, and a fingerprint of its weights: some numbers of each
    parameter, so that a fine-tuned or merged model of the same name is another one."""
    hasher = blake3()
    for name, parameter in model.named_parameters():
        hasher.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().flatten()
            step = max(1, flat.numel() // _SAMPLES)
            hasher.update(str(flat[::step][:_SAMPLES].float().tolist()).encode())
    commit = getattr(model.config, "_commit_hash", None)
    weights = f"weights-{hasher.hexdigest()[:32]}"
    return f"{commit}+{weights}" if commit else weights
