"""A fingerprint of what a Hugging Face model computes with beside its configuration: weights, frequencies of RoPE, adapters and an
attention of one's own.

Some numbers of each tensor are read at every `load` and `save`, gathered on the model's device and brought to the host at once.
Torch counts writes too (`Tensor._version`), but not those of fused optimisers, in inference mode, by way of `.data` and of NumPy:
the numbers themselves tell of all.

Source: transformers 5.23, `modeling_rope_utils`, `modeling_utils.AttentionInterface`; PEFT 0.21, `tuners_utils.BaseTunerLayer` and
`lora.layer.LoraLayer`; bitsandbytes 0.50, `functional.QuantState`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from blake3 import blake3
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from kvobj.errors import InvalidRequestError

DIGEST_CHARACTERS: Final = 32
_SAMPLES: Final = 16
_MATRICES_MAX: Final = 1024
"""Of a tensor of more matrices some are left out."""
_GROWING: Final = re.compile("weights|(cos|sin)_cached")
"""Tables of positions that models compute anew when they meet a longer sequence. They follow from the rest."""
_COMPILED: Final = "_orig_mod."
"""What `torch.compile` puts into the names of what it wraps."""


def fingerprint_of(model: PreTrainedModel) -> str:
    """Stands for some numbers of each weight, and of each buffer that is computed with; for which adapters are switched on, and
    how they are scaled; for a registered attention that is not one of transformers'. The same in every process that has the same
    model; of weights that are spread over several processes the numbers are this one's.

    `InvalidRequestError` for weights that are elsewhere (on `meta`), or of a class whose numbers cannot be read.
    """
    hasher = blake3()
    samples: list[torch.Tensor] = []
    with torch.no_grad():
        for name, weight in _weights(model):
            hasher.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
            samples += (_sample(part, name) for part in _parts(weight, name))
        for numbers in _numbers(samples):
            hasher.update(numbers)
    for line in _settings(model):
        hasher.update(f"{line}\n".encode())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers: quantised weights (GPTQ, AWQ) are such, and so are RoPE's frequencies, which are made from the
    configuration in fp32 whatever the weights' dtype, but change with `model.to(dtype)`."""
    for name, parameter in model.named_parameters():
        yield _plain_name(name), parameter
    for prefix, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - torch tells in no other way which are saved
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as above
            if buffer is not None and (name not in unsaved or _is_computed_with(name, buffer)):
                yield _plain_name(f"{prefix}.{name}" if prefix else name), buffer


def _is_computed_with(name: str, buffer: torch.Tensor) -> bool:
    """Whether a buffer that is not saved tells one model from another: masks and positions are alike in all."""
    return (buffer.is_floating_point() or buffer.is_complex()) and not _GROWING.fullmatch(name)


def _plain_name(name: str) -> str:
    return name.replace(_COMPILED, "")


def _parts(weight: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """The plain tensors that a weight is made of: what this process has of one that is spread over several (`DTensor`), numbers and
    scales of a quantised one (torchao, quanto, bitsandbytes)."""
    inner = getattr(weight, "__tensor_flatten__", None)
    if inner is None:
        yield weight
    else:
        values = [getattr(weight, part) for part in inner()[0]]  # which mesh it is spread over may be among them
        parts = [part for value in values if isinstance(value, torch.Tensor) for part in _parts(value, name)]
        if not parts:
            raise _unreadable(weight, name)
        yield from parts
    state = getattr(weight, "quant_state", None)
    while state is not None:  # scales that are quantised themselves have scales of their own
        if isinstance(absmax := getattr(state, "absmax", None), torch.Tensor):
            yield absmax
        state = getattr(state, "state2", None)


def _sample(part: torch.Tensor, name: str) -> torch.Tensor:
    """Some of its numbers, no copy: at even distances, which are odd so that they are not all of one column; of a tensor of many
    matrices (experts) some of each."""
    if part.device.type == "meta":
        raise InvalidRequestError(
            f"a model whose weights are not in memory ({name} is on meta, as accelerate's offloading leaves it) is not supported: "
            "nobody can tell it from others"
        )
    try:
        flat = part.detach().flatten()
        matrices = part.shape[0] if part.dim() > 2 else 1  # noqa: PLR2004 - a matrix has two dimensions
        # No longer than a matrix, so that there is one in each; the next lower odd number.
        distance = (max(1, flat.numel() // max(_SAMPLES, min(matrices, _MATRICES_MAX))) - 1) | 1
        return flat[::distance]
    except (RuntimeError, AssertionError, TypeError) as error:
        raise _unreadable(part, name) from error


def _unreadable(weight: torch.Tensor, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"weights of class {type(weight).__name__} ({name}) are not supported: their numbers cannot be read"
    )


def _numbers(samples: list[torch.Tensor]) -> Iterator[bytes]:
    """Their bytes, those of one dtype together: one copy to the host, and one wait for the device, for each."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for sample in samples:
        by_dtype.setdefault(sample.dtype, []).append(sample)
    for group in by_dtype.values():
        is_spread = len({sample.device for sample in group}) > 1
        try:
            gathered = torch.cat([sample.cpu() for sample in group] if is_spread else group)
        except RuntimeError as error:
            raise InvalidRequestError(
                f"weights of {group[0].dtype} are not supported: they cannot be gathered"
            ) from error
        yield gathered.view(torch.uint8).cpu().numpy().tobytes()


# -- what modules are told to do with the weights --------------------------------------------------------------------
def _settings(model: PreTrainedModel) -> Iterator[str]:
    for name, module in model.named_modules():
        told = dict(_adapter(module))
        padding = getattr(module, "padding_idx", None) if "position" in name.rpartition(".")[2] else None
        if padding is not None:  # positions are counted from it (RoBERTa)
            told["padding_idx"] = padding
        if told:
            yield f"{_plain_name(name)} {told}"
    for kind, interface in (("attn", AttentionInterface()), ("experts", ExpertsInterface())):
        chosen = getattr(model.config, f"_{kind}_implementation", None)
        if not _is_of_transformers(chosen, interface):
            yield f"{kind} {chosen}"


def _adapter(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """How a layer of PEFT, or one like it, uses the adapters that it has: the parameters do not tell."""
    scaling = _attribute(module, "scaling")
    if isinstance(scaling, Mapping):  # that of an attention is a number, and follows from the configuration
        yield "scaling", sorted((str(name), _number(value)) for name, value in scaling.items())
    for name in ("active_adapters", "merged_adapters"):
        value = _attribute(module, name)
        if isinstance(value, str | list | tuple):
            yield name, [value] if isinstance(value, str) else [str(each) for each in value]
    is_off = _attribute(module, "_disable_adapters")
    if isinstance(is_off, bool):
        yield "disable_adapters", is_off


def _attribute(module: torch.nn.Module, name: str) -> Any:  # noqa: ANN401 - whatever it is
    """None where there is none: sooner told than by torch, which looks among parameters, buffers and modules first."""
    return getattr(module, name, None) if name in vars(module) or hasattr(type(module), name) else None


def _number(value: object) -> object:
    """Scales are tensors where adapters are to be replaced beneath a compiled model."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _is_of_transformers(chosen: object, interface: Mapping[str, object]) -> bool:
    """Whether a model is computed as transformers does, in one of its ways: those are alike but for rounding. What others register
    may compute anything, under a name of transformers' too."""
    if not isinstance(chosen, str):
        return True
    name = chosen if chosen in interface else chosen.removeprefix("paged|")
    if name not in interface:
        return name == "eager"
    function = interface[name]
    module = getattr(getattr(function, "func", function), "__module__", None) or ""
    return module.partition(".")[0] == "transformers"
