"""Which Hugging Face models, and layers of a cache, the store has no place for: each is refused by name (`InvalidRequestError`).

Chunks hold keys and values of every token in every layer, and are named by token ids alone. So nothing is stored of a model whose
cache is more than that, or follows from more than the tokens.

Source: transformers 5.23, `cache_utils.DynamicCache`, `modeling_rope_utils` and `modeling_utils.PreTrainedModel.input_modalities`;
PEFT 0.21, `config.PromptLearningConfig`; torch 2.13, `ao.nn.quantized`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvobj.errors import InvalidRequestError

_SHIFTING_ROPE: Final = ("longrope", "su")
"""… and all with `dynamic` in their names, which is how transformers tells them. `su` is what `longrope` was called before."""
_ROPE_PARAMETERS: Final = ("rope_parameters", "rope_scaling")
_NOT_TEXT: Final = re.compile(
    "pixel|image|video|audio|speech|input_features|input_values|encoder_outputs|cross_attention_states|protein|^lang_ids$|^langs$"
)
"""In the name of an input of a model: what it is of is no text, or has been read by another model, or tells how to read text."""
_RANDOM: Final = re.compile("drop|jitter")
_RANDOM_ATTENTION: Final = re.compile("att.*drop|attn_pdrop")


def check_model(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` for a model whose cache is of another kind, or follows from more than the tokens before."""
    config = model.config
    if config.is_encoder_decoder:
        raise InvalidRequestError("an encoder-decoder model caches cross-attention too, which is not stored")
    if getattr(config, "add_cross_attention", False):
        raise InvalidRequestError(
            "a decoder with cross-attention (add_cross_attention) is not supported: keys and values depend on what an encoder read"
        )
    check_inputs(model)
    check_attention(model)
    check_adapters(model)
    if len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        raise InvalidRequestError("a model that is spread over several devices is not supported")
    if any(hasattr(module, "_packed_params") for module in model.modules()):
        raise InvalidRequestError(
            "a model quantised by torch.ao (_packed_params) is not supported: its weights cannot be told from others"
        )
    for rope_type in _rope_types(config.to_dict()):
        if "dynamic" in rope_type or rope_type in _SHIFTING_ROPE:
            raise InvalidRequestError(
                f"RoPE of type {rope_type} changes with the length of a sequence: keys cannot be shared"
            )
    for layer in DynamicCache(config=config).layers:
        check_layer(layer)


def check_attention(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` unless keys and values of a token follow from it and those before it: chunks are named by these
    alone.

    Told by what transformers computes with: a block of a prompt whose tokens attend to each other (`prefix_lm`, HRM), attention in
    both directions (`use_bidirectional_attention`, Gemma; "vision" is of images alone; `is_causal`, every model's masks, and that
    of the modules, which some set alone; BERT and its like without `is_decoder`), and prompts of the model's own (`prompt_length`,
    CPM-Ant), before which the first token is not the first."""
    config = model.config
    found = {
        "prefix_lm": getattr(config, "prefix_lm", False),
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", None)
        not in (None, False, "vision"),
        "is_causal": not getattr(config, "is_causal", True),
    }
    told = [f"{name}={getattr(config, name)!r}" for name, is_forward in found.items() if is_forward]
    told = told or list(_modules_in_both_directions(model))
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


def _modules_in_both_directions(model: PreTrainedModel) -> Iterator[str]:
    """What tells that tokens attend to later ones though the configuration's words for it do not.

    `is_causal` is False in cross-attention too, which reads no tokens of the sequence, and in some decoders, which have a mask
    (`is_decoder`: BigBird-Pegasus). BERT's like without `is_causal` have layers that say that they are no decoder; the
    configuration says so of some that are causal anyway (GPT-NeoX)."""
    modules = list(model.modules())
    for module in modules:
        kind = type(module).__name__
        if (
            getattr(module, "is_causal", None) is False
            and not getattr(module, "is_decoder", False)
            and "Cross" not in kind
        ):
            yield f"is_causal=False in {kind}"
            return
    if not any(getattr(module, "is_causal", False) for module in modules):
        undecided = {type(module).__name__ for module in modules if getattr(module, "is_decoder", None) is False}
        yield from (f"is_decoder=False in {kind}" for kind in sorted(undecided)[:1])


def check_inputs(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` unless text is all that the model reads: chunks are named by token ids, and what stands for an
    image or a sound is the same token whichever it is.

    Told by what transformers declares (from 5.0 on; a model of code of one's own may say nothing), by the arguments of `forward`
    (a language that is told beside the tokens too: X-MOD), by models of other inputs inside, and by a configuration of which the
    text's is a part. A model that is itself the text part of another (`model.language_model`) is text alone, though it may have
    inherited the declaration of the whole."""
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
            f"a model that reads more than text ({', '.join(found)}) is not supported: token ids do not tell one image, sound or "
            "language from another; its text part alone is"
        )


def check_adapters(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` for PEFT's prompts that are learnt: they stand before the tokens, in the cache too."""
    adapters = getattr(model, "peft_config", None)
    for name, adapter in adapters.items() if isinstance(adapters, Mapping) else ():
        if getattr(adapter, "is_prompt_learning", False):
            raise InvalidRequestError(
                f"an adapter that puts tokens of its own before a prompt ({name}: {type(adapter).__name__}) is not supported: the "
                "cache has more tokens than the sequence"
            )


def check_layer(layer: object) -> None:
    """Raise `InvalidRequestError` unless the layer of a cache keeps every token's keys and values as they are: no sliding window,
    nothing quantised, no state of linear attention, no indexer."""
    if type(layer) is not DynamicLayer:
        raise InvalidRequestError(f"cache layers of class {type(layer).__name__} are not supported: DynamicLayer is")


def check_states(layer: object) -> None:
    """Raise `InvalidRequestError` where a layer of a cache that was filled has no keys or values that could be copied."""
    if not getattr(layer, "is_initialized", False):
        return
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if not isinstance(states, torch.Tensor):
            raise InvalidRequestError(f"the cache has {name} of class {type(states).__name__}: tensors are stored")
        if states.is_meta:
            raise InvalidRequestError(f"the cache has {name} on the device meta, where tensors have no values")


def check_dropout(model: PreTrainedModel) -> None:
    """Raise `InvalidRequestError` where the same tokens give other keys and values each time: in training, with dropout."""
    found = next(_dropouts(model), None)
    if found is not None:
        raise InvalidRequestError(
            f"a model in training with dropout ({found}) has other keys and values each time: call model.eval() before"
        )


def _dropouts(model: PreTrainedModel) -> Iterator[str]:
    """What is left to chance while modules are in training: told by their types and attributes, and of attention by the
    configuration, which some read at each call."""
    for module in model.modules():
        if module.training:
            kind = type(module).__name__
            if "Dropout" in kind and _is_chance(getattr(module, "p", 0)):
                yield kind
            yield from _chances(vars(module), _RANDOM)
    if model.training:
        yield from _chances(vars(model.config), _RANDOM_ATTENTION)


def _chances(attributes: Mapping[str, Any], names: re.Pattern[str]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in attributes.items() if names.search(name) and _is_chance(value))


def _is_chance(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _rope_types(value: object, place: str = "") -> Iterator[str]:
    """Every type of RoPE that a configuration names, at whatever depth: some have one for each kind of layer."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "rope_type" or (name == "type" and place in _ROPE_PARAMETERS):
                yield str(inner)
            else:
                yield from _rope_types(inner, place if place in _ROPE_PARAMETERS else str(name))
