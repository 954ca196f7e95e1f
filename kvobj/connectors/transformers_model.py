"""What a Hugging Face model's KV cache is to the store: its layout, and the declaration of the namespace that its chunks are in.

Everything that makes two caches differ is in the declaration: the model's name, fingerprints of its weights and its configuration,
layers, heads, dtype, RoPE, chunk length, rank, adapter and salt. Models whose cache is more than keys and values of every token in
every layer, or follows from more than the tokens, are refused by name (`InvalidRequestError`).

Source: transformers 5.23, `cache_utils.DynamicCache`, `modeling_rope_utils`, `modeling_utils.PreTrainedModel.input_modalities` and
`configuration_utils.PreTrainedConfig.to_dict`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
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

_SHIFTING_ROPE: Final = ("longrope", "su")
"""… and all with `dynamic` in their names, which is how transformers tells them. `su` is what `longrope` was called before."""
_ROPE_PARAMETERS: Final = ("rope_parameters", "rope_scaling")
_NOT_TEXT: Final = re.compile(
    "pixel|image|video|audio|speech|input_features|input_values|encoder_outputs|cross_attention_states"
)
"""In the name of an input of a model: what it is of is no text, or has been read by another model."""
_NOT_COMPUTED: Final = re.compile(
    "transformers_version|_?name_or_path|_commit_hash|architectures|auto_map|(torch_)?dtype"
    "|_?(attn|experts)_implementation.*|use_cache|cache_implementation|gradient_checkpointing"
    "|(use_)?return_dict|_?output_(attentions|hidden_states|router_logits|scores)|id2label|label2id|num_labels|problem_type"
    "|(forced_)?(bos|eos)_token_id|decoder_start_token_id|tokenizer_class|task_specific_params|.*(dropout|pdrop|layerdrop)"
)
"""What a configuration says of where it came from, how it is run, what is made of the output, and training: caches are alike
whatever it is. A name that is missing here separates caches that are alike; one too many would mix caches that are not."""
_SAFE_INTEGER: Final = 2**53
_SAMPLES: Final = 16
_DIGEST_CHARACTERS: Final = 32
_KINDS_MAX: Final = 8
"""Kinds of layers whose theta is told by itself; a declaration has room for some such texts only."""
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


def shape_of(model: PreTrainedModel, *, rank: tuple[int, int] = (0, 1)) -> KvShape:
    """What the model's configuration says, of a rank's share of the heads. `InvalidRequestError` for a model whose cache is of
    another kind, and for a rank that can have no share of it."""
    config = model.config
    if config.is_encoder_decoder:
        raise InvalidRequestError("an encoder-decoder model caches cross-attention too, which is not stored")
    check_inputs(model)
    check_attention(config)
    if len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        raise InvalidRequestError("a model that is spread over several devices is not supported")
    for rope_type in _rope_types(config.to_dict()):
        if "dynamic" in rope_type or rope_type in _SHIFTING_ROPE:
            raise InvalidRequestError(
                f"RoPE of type {rope_type} changes with the length of a sequence: keys cannot be shared"
            )
    layers = DynamicCache(config=config).layers
    for layer in layers:
        check_layer(layer)
    if model.dtype not in DTYPES:
        raise InvalidRequestError(f"a cache of {model.dtype} is not supported: {', '.join(map(str, DTYPES))} are")
    kv_heads, head_dim = _heads(config)
    return KvShape(
        layers=len(layers),
        kv_heads=_share(kv_heads, rank),
        head_dim=head_dim,
        dtype=model.dtype,
        device=model.device,
    )


def _heads(config: Any) -> tuple[int, int]:  # noqa: ANN401 - configurations differ from model to model
    """How many heads a layer's cache has, all ranks' together, and how wide they are.

    Falcon has names of its own (`modeling_falcon.FalconAttention`): one head is kept for all (`multi_query`), and its newer
    architecture keeps as many copies as there are heads."""
    heads, told = _of_all_layers(config, "num_attention_heads"), _of_all_layers(config, "num_key_value_heads")
    if _of_all_layers(config, "new_decoder_architecture"):
        kv_heads = heads
    elif not told and _of_all_layers(config, "multi_query"):
        kv_heads = 1
    else:
        kv_heads = told or _of_all_layers(config, "num_kv_heads") or heads
    head_dim, hidden_size = _of_all_layers(config, "head_dim"), _of_all_layers(config, "hidden_size")
    if not head_dim and isinstance(heads, int) and isinstance(hidden_size, int):
        head_dim = hidden_size // max(1, heads)
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int) or min(kv_heads, head_dim) < 1:
        raise InvalidRequestError(
            f"{type(config).__name__} does not tell how many heads keep keys and values, and how wide they are: states of linear "
            "attention are not supported"
        )
    return kv_heads, head_dim


def _of_all_layers(config: Any, name: str) -> Any:  # noqa: ANN401 - as above
    """What the configuration says; None where it says nothing."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # `AmbiguousGlobalPerLayerAttributeError`, which not every version has
        raise InvalidRequestError(f"layers that differ in {name} are not supported") from error


def _share(kv_heads: int, rank: tuple[int, int]) -> int:
    """Of so many heads those of one rank; where ranks are more than heads each has a copy of one."""
    index, count = rank
    if not 0 <= index < count:
        raise InvalidRequestError(f"rank is (index, count), the index below the count, and not {rank}")
    if kv_heads % count and count % kv_heads:
        raise InvalidRequestError(f"{kv_heads} heads of keys and values are not shared out evenly among {count} ranks")
    return max(1, kv_heads // count)


def check_attention(config: Any) -> None:  # noqa: ANN401 - configurations differ from model to model
    """Raise `InvalidRequestError` unless keys and values of a token follow from it and those before it: chunks are named by these
    alone.

    Told by what transformers computes with: a block of a prompt whose tokens attend to each other (`prefix_lm`, HRM), attention in
    both directions (`use_bidirectional_attention`, Gemma; "vision" is of images alone; `is_causal`, every model's masks), and
    prompts of the model's own (`prompt_length`, CPM-Ant), before which the first token is not the first."""
    found = {
        "prefix_lm": getattr(config, "prefix_lm", False),
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", None)
        not in (None, False, "vision"),
        "is_causal": not getattr(config, "is_causal", True),
    }
    told = [f"{name}={getattr(config, name)!r}" for name, is_forward in found.items() if is_forward]
    if told:
        raise InvalidRequestError(
            f"a model whose tokens attend to later ones ({', '.join(told)}) is not supported: keys and values of a prefix depend "
            "on what follows it"
        )
    if getattr(config, "prompt_length", 0) and getattr(config, "use_prompt", True):
        raise InvalidRequestError(
            f"a model that puts tokens of its own before a prompt (prompt_length={config.prompt_length}) is not supported: its "
            "cache has more tokens than the sequence"
        )


def check_inputs(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` unless text is all that the model reads: chunks are named by token ids, and what stands for an
    image or a sound is the same token whichever it is.

    Told by what transformers declares (from 5.0 on; a model of code of one's own may say nothing), by the arguments of `forward`,
    by models of other inputs inside, and by a configuration of which the text's is a part. A model that is itself the text part of
    another (`model.language_model`) is text alone, though it may have inherited the declaration of the whole."""
    config = model.config
    declared = getattr(model, "input_modalities", ()) or ()
    modalities = {declared} if isinstance(declared, str) else set(declared)
    if type(config).__name__.endswith("TextConfig"):
        modalities = set()
    inputs = [name for name in inspect.signature(model.forward).parameters if _NOT_TEXT.search(name)]
    readers = [
        type(each).__name__
        for each in model.modules()
        if isinstance(each, PreTrainedModel) and each.main_input_name != "input_ids"
    ]
    is_composite = config.get_text_config(decoder=True) is not config
    if modalities - {"text"} or inputs or readers or is_composite:
        found = sorted(modalities - {"text"}) or inputs or readers or [type(config).__name__]
        raise InvalidRequestError(
            f"a model that reads more than text ({', '.join(found)}) is not supported: token ids do not tell one image or sound "
            "from another; its text part alone is"
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
        "rope": _declared_rope(model.config),
        "salt": salt,
        "ids": "kvobj",
    }


def namespace_name(declaration: Mapping[str, object]) -> str:
    """A name that only this declaration has: the model's own with a digest."""
    model = _OUTSIDE_NAME.sub("-", str(declaration["model"])).strip("-.")[-_NAME_CHARACTERS_MAX:]
    return f"hf-{model}-{blake3(canonical_json(declaration)).hexdigest()[:16]}"


def _declared_rope(config: Any) -> dict[str, object] | None:  # noqa: ANN401 - configurations differ from model to model
    """For who compares two declarations: that they differ the fingerprint of the configuration says anyway, tables included.

    Where kinds of layers have parameters of their own, each one's theta is told, and a digest of all."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_kind = {kind: value for kind, value in sorted(parameters.items()) if isinstance(value, Mapping)}
    if by_kind:
        thetas = {kind: value.get("rope_theta") for kind, value in by_kind.items()}
        known = {kind: float(theta) for kind, theta in thetas.items() if theta}
        if not known:
            return None
        told: dict[str, object] = {f"{kind}.rope_theta": theta for kind, theta in list(known.items())[:_KINDS_MAX]}
        told["rope_parameters"] = config_digest(parameters)
        return {"theta": next(iter(known.values())), "applied": True, "scaling": told}
    rope = {name: value for name, value in parameters.items() if isinstance(value, bool | int | float | str)}
    theta = rope.pop("rope_theta", None)
    if rope == {"rope_type": "default"}:
        rope = {}
    return None if theta is None else {"theta": float(theta), "applied": True, "scaling": rope or None}


def _rope_types(value: object, place: str = "") -> Iterator[str]:
    """Every type of RoPE that a configuration names, at whatever depth: some have one for each kind of layer."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "rope_type" or (name == "type" and place in _ROPE_PARAMETERS):
                yield str(inner)
            else:
                yield from _rope_types(inner, place if place in _ROPE_PARAMETERS else str(name))


def weights_state(model: PreTrainedModel) -> tuple[object, ...]:
    """What changes when weights are written to, replaced, moved or added, as far as torch notes it: cheap to compare, and says
    nothing of what they are. A change by way of `.data` is not noted."""
    return tuple(
        (_place(_local(weight)), _writes(weight), _writes(_local(weight)), weight.dtype)
        for _name, weight in _weights(model)
    )


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that are saved with them: quantised weights (GPTQ, AWQ) are such. What is computed when a model is
    made (RoPE's frequencies) is not saved, and follows from its configuration."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - torch tells in no other way which are saved
            if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield f"{prefix}.{name}" if prefix else name, buffer


def _local(weight: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight that is spread over several (`DTensor`), and any other itself."""
    to_local = getattr(weight, "to_local", None)
    if to_local is None:
        return weight
    with torch.no_grad():  # else it is another view at each call
        local: torch.Tensor = to_local()
    return local


def _writes(weight: torch.Tensor) -> int:
    """How often it was written to. What is written to a weight that is spread over several counts there, and not in its part."""
    return 0 if weight.is_inference() else weight._version  # noqa: SLF001 - torch names it so


def _place(parameter: torch.Tensor) -> int:
    """Where its bytes lie; of a tensor that is made of others (quantised) which object it is."""
    try:
        return int(parameter.data_ptr())
    except RuntimeError:
        return id(parameter)


def revision_of(model: PreTrainedModel) -> str:
    """The commit that the model was loaded from, where one is known, and fingerprints of its weights and its configuration: some
    numbers of each, and all that the configuration says of how they are used. So a fine-tuned or merged model of the
    same name is another one, and so is one whose RoPE or normalisation was set otherwise. Of weights that are spread over several
    processes the numbers are this one's: the same in every process of this rank."""
    hasher = blake3()
    for name, weight in _weights(model):
        hasher.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        if weight.device.type != "meta" and _local(weight).numel():
            flat = _local(weight).detach().flatten()
            step = max(1, flat.numel() // _SAMPLES)
            hasher.update(str(flat[::step][:_SAMPLES].float().tolist()).encode())
    commit = getattr(model.config, "_commit_hash", None)
    weights = f"weights-{hasher.hexdigest()[:_DIGEST_CHARACTERS]}+config-{config_digest(model.config.to_dict())}"
    return f"{commit}+{weights}" if commit else weights


def config_digest(config: Mapping[Any, Any]) -> str:
    """Stands for what of a configuration changes a cache: the same in every process, after saving and loading it, and in every
    version of transformers whose configurations say the same."""
    return blake3(canonical_json(_plain(config))).hexdigest()[:_DIGEST_CHARACTERS]


def _plain(value: object) -> object:
    """The value as JSON has it, and in one form: without what is not computed with or not set; a number is one whether it was
    written 1 or 1.0, a name whether it was a number or a text."""
    match value:
        case Mapping():
            plain = {str(name): _plain(each) for name, each in value.items() if not _NOT_COMPUTED.fullmatch(str(name))}
            return {name: each for name, each in plain.items() if each is not None and each != {}}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted(str(each) for each in value)
        case None | bool() | str():
            return value
        case int() | float() if abs(value) < _SAFE_INTEGER:
            return float(value)
        case _:
            return str(value)
