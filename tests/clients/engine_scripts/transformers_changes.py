"""What makes one model of transformers another one: training, other dtypes, quantised weights, adapters, an attention of one's own.

`transformers_cache` does these to the models that it has. Adapters are layers with the attributes of PEFT's, which is not
installed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward


class Packed(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """A linear layer as GPTQ and AWQ have them: its weights are buffers."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__()
        scale = of.weight.detach().abs().max() / 127
        self.register_buffer("scales", scale)
        self.register_buffer("qweight", (of.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.qweight * self.scales)


class _Scaled(torch.Tensor):  # type: ignore[misc]  # as above
    """A weight as torchao has them: numbers and a scale, which are multiplied whenever anything is computed with them."""

    def __new__(cls, numbers: torch.Tensor, _scale: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        return made

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        if function in (torch.ops.aten.linear.default, torch.ops.aten.t.default):
            plain = [each.numbers * each.scale if isinstance(each, cls) else each for each in args]
            return function(*plain, **kwargs or {})
        raise NotImplementedError(f"{function} is not done with quantised weights")


class _Opaque(_Scaled):
    """One that says of nothing what it is made of."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class _Adapted(torch.nn.Module):  # type: ignore[misc]  # as above
    """A linear layer with two adapters, with the attributes that PEFT's `LoraLayer` has."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(41)
        self.base_layer = of
        self.lora = torch.nn.ModuleDict(
            {name: torch.nn.Linear(of.in_features, of.out_features) for name in ("one", "two")}
        )
        self.scaling = {"one": 1.0, "two": 1.0}
        self.active_adapters = ["one"]
        self.merged_adapters: list[str] = []
        self._disable_adapters = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.base_layer(hidden)
        for name in () if self._disable_adapters else self.active_adapters:
            made = made + self.scaling[name] * self.lora[name](hidden)
        return made


class _Compiled(torch.nn.Module):  # type: ignore[misc]  # as above
    """A layer as `torch.compile` wraps it, which needs a compiler."""

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = of


def _halved(*inputs: Any, **more: Any) -> Any:  # noqa: ANN401 - as transformers calls it
    made, weights = eager_attention_forward(*inputs, **more)
    return made / 2, weights


def _add_in_place(model: Any) -> None:  # noqa: ANN401 - a model, here and below
    next(iter(model.parameters())).add_(0.25)


def _rewrite(model: Any) -> None:  # noqa: ANN401
    parameter = next(iter(model.parameters()))
    parameter.copy_(parameter.clone())


def _step_fused(model: Any) -> None:  # noqa: ANN401
    """What transformers' Trainer does by default."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.01, fused=True).step()


def _set_data(model: Any) -> None:  # noqa: ANN401
    next(iter(model.parameters())).data += 0.25


def _write_by_numpy(model: Any) -> None:  # noqa: ANN401
    next(iter(model.parameters())).detach().numpy()[...] += 0.25


def _write_in_inference_mode(model: Any) -> None:  # noqa: ANN401
    """Double all weights; the first time they become tensors of inference mode, whose writes torch never counts."""
    with torch.inference_mode():
        for name, weight in list(model.named_parameters()):
            if weight.is_inference():
                weight.mul_(2)
            else:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, torch.nn.Parameter(weight * 2, requires_grad=False))


def _scale(model: Any, kind: type[_Scaled], scale: float) -> None:  # noqa: ANN401
    numbers = torch.arange(64 * 128, dtype=torch.int8).reshape(64, 128)
    weight = kind(numbers, torch.tensor(scale))
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(weight, requires_grad=False)


def _scale_blocks(model: Any, scale: float) -> None:  # noqa: ANN401
    """As bitsandbytes has it: the scales are beside the weight, in no buffer."""
    model.model.layers[0].mlp.down_proj.weight.quant_state = SimpleNamespace(absmax=torch.tensor([scale]), state2=None)


def _quantise_by_torch(model: Any) -> None:  # noqa: ANN401
    with warnings.catch_warnings(action="ignore"):  # torch says where its successor is
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8, inplace=True)


def _adapt(model: Any) -> None:  # noqa: ANN401
    attention = model.model.layers[0].self_attn
    attention.k_proj = _Adapted(attention.k_proj)


def _adapter_of(model: Any) -> _Adapted:  # noqa: ANN401
    adapter: _Adapted = model.model.layers[0].self_attn.k_proj
    return adapter


def _learn_prompt(model: Any) -> None:  # noqa: ANN401
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}


def _attend(model: Any) -> None:  # noqa: ANN401
    AttentionInterface.register("halved", _halved)
    model.set_attn_implementation("halved")


def _attend_to_later_ones(model: Any) -> None:  # noqa: ANN401
    """As LLM2Vec does."""
    model.model.layers[-1].self_attn.is_causal = False


def _set_pad(model: Any) -> None:  # noqa: ANN401
    model.config.pad_token_id = 0


def _compile(model: Any) -> None:  # noqa: ANN401
    model.model.layers[0] = _Compiled(model.model.layers[0])


def _fill_padding(model: Any) -> None:  # noqa: ANN401
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.fill_(0.5)


def _change_expert(model: Any, *, expert: int) -> None:  # noqa: ANN401
    model.model.layers[0].mlp.experts.gate_up_proj[expert].add_(0.25)


CHANGES: Final[dict[str, Callable[[Any], object]]] = {
    "train": _add_in_place,
    "rewrite": _rewrite,
    "fused": _step_fused,
    "data": _set_data,
    "numpy": _write_by_numpy,
    "inference": _write_in_inference_mode,
    "move": lambda model: model.to(torch.bfloat16),
    "shard": lambda model: model.model.layers[0].self_attn.k_proj.weight.mul_(2),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.div_(4),
    "offload": lambda model: model.model.layers[1].to("meta"),
    "pack": lambda model: model.model.layers[0].mlp.down_proj.qweight.neg_(),
    "scale": lambda model: _scale(model, _Scaled, 0.001),
    "scale more": lambda model: _scale(model, _Scaled, 0.002),
    "scale opaquely": lambda model: _scale(model, _Opaque, 0.001),
    "scale blocks": lambda model: _scale_blocks(model, 1.0),
    "scale blocks more": lambda model: _scale_blocks(model, 2.0),
    "quantise by torch": _quantise_by_torch,
    "adapt": _adapt,
    "adapter's scale": lambda model: _adapter_of(model).scaling.update(one=3.0),
    "other adapter": lambda model: setattr(_adapter_of(model), "active_adapters", ["two"]),
    "adapter off": lambda model: setattr(_adapter_of(model), "_disable_adapters", True),
    "adapter on": lambda model: setattr(_adapter_of(model), "_disable_adapters", False),
    "adapter merged": lambda model: _adapter_of(model).merged_adapters.append("one"),
    "learn prompt": _learn_prompt,
    "attend": _attend,
    "attend by sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "attend eagerly": lambda model: model.set_attn_implementation("eager"),
    "attend to later ones": _attend_to_later_ones,
    "begin training": lambda model: model.train(),
    "end training": lambda model: model.eval(),
    "set pad": _set_pad,
    "compile": _compile,
    "fill padding": _fill_padding,
    **{f"expert {expert}": functools.partial(_change_expert, expert=expert) for expert in range(20)},
}
"""Ways to change a model, by name. Without gradients."""
