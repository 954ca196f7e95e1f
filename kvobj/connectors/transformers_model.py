"""What a Hugging Face model's KV cache is to the store: its layout, and the declaration of the namespace that its chunks are in.

Everything that makes two caches differ is in the declaration: the model's name, fingerprints of its weights and its configuration,
layers, heads, dtype, RoPE, chunk length, rank, adapter and salt.

Source: transformers 5.23, `cache_utils.DynamicCache`, `modeling_rope_utils` and `configuration_utils.PreTrainedConfig.to_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from blake3 import blake3
from transformers import DynamicCache, PreTrainedModel

from kvobj.connectors.transformers_fitness import check_model
from kvobj.connectors.transformers_weights import DIGEST_CHARACTERS
from kvobj.errors import InvalidRequestError
from kvobj.ids.canonical_json import canonical_json

DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ORDER: Final = ("layer", "kv", "head", "token", "dim")
"""A chunk's bytes: all of a layer together, so that layers can be read alone."""

_NOT_COMPUTED: Final = re.compile(
    "transformers_version|_?name_or_path|_commit_hash|architectures|auto_map|(torch_)?dtype"
    "|_?(attn|experts)_implementation.*|use_cache|cache_implementation|gradient_checkpointing"
    "|(use_)?return_dict|_?output_(attentions|hidden_states|router_logits|scores)|id2label|label2id|num_labels|problem_type"
    "|(forced_)?(bos|eos)_token_id|pad_token_id|decoder_start_token_id|tokenizer_class|task_specific_params|.*(dropout|pdrop|layerdrop)"
)
"""What a configuration says of where it came from, how it is run, what is made of the output, and training: caches are alike
whatever it is. A name that is missing here separates caches that are alike; one too many would mix caches that are not."""
_SAFE_INTEGER: Final = 2**53
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
    check_model(model)
    config = model.config
    if model.dtype not in DTYPES:
        raise InvalidRequestError(f"a cache of {model.dtype} is not supported: {', '.join(map(str, DTYPES))} are")
    kv_heads, head_dim = _heads(config)
    return KvShape(
        layers=len(DynamicCache(config=config).layers),
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
    given: object = rank  # whatever the type says
    pair = list(given) if isinstance(given, tuple | list) else []
    index, count = pair if [type(each) for each in pair] == [int, int] else (0, 0)
    if not 0 <= index < count:
        raise InvalidRequestError(f"rank is (index, count), the index below the count, and not {rank}")
    if kv_heads % count and count % kv_heads:
        raise InvalidRequestError(f"{kv_heads} heads of keys and values are not shared out evenly among {count} ranks")
    return max(1, kv_heads // count)


def declaration_of(
    model: PreTrainedModel,
    shape: KvShape,
    *,
    name: str,
    fingerprint: str,
    chunk_tokens: int,
    salt: str = "",
    adapter: str | None = None,
    rank: tuple[int, int] = (0, 1),
) -> dict[str, object]:
    """The namespace's declaration (docs/formats.md). `fingerprint`: the model's (`transformers_weights`)."""
    return {
        "model": name,
        "revision": revision_of(model, fingerprint),
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


def revision_of(model: PreTrainedModel, fingerprint: str) -> str:
    """The commit that the model was loaded from, where one is known, and fingerprints of its weights and its configuration: some
    numbers of each, and all that the configuration says of how they are used. So a fine-tuned or merged model of the
    same name is another one, and so is one whose RoPE or normalisation was set otherwise. Of weights that are spread over several
    processes the numbers are this one's: the same in every process of this rank."""
    commit = getattr(model.config, "_commit_hash", None)
    weights = f"weights-{fingerprint}+config-{config_digest(model.config.to_dict())}"
    return f"{commit}+{weights}" if commit else weights


def config_digest(config: Mapping[Any, Any]) -> str:
    """Stands for what of a configuration changes a cache: the same in every process, after saving and loading it, and in every
    version of transformers whose configurations say the same."""
    return blake3(canonical_json(_plain(config))).hexdigest()[:DIGEST_CHARACTERS]


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
