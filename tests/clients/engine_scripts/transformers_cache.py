"""`kvobj.connectors.transformers` in a process with transformers and torch: tiny random models, generation with and without it.

Run in `.envs/engines` with kvobj's source tree on PYTHONPATH; see `command_lines` for how. Weights come from a seed, so that
another process has the same model. Generation is greedy; every logit of every step counts, so "equal" means bit for bit.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from command_lines import digest_of, serve
from torch import distributed
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    BatchEncoding,
    BertConfig,
    BertLMHeadModel,
    CLIPVisionConfig,
    CpmAntConfig,
    CpmAntForCausalLM,
    DynamicCache,
    EvollaConfig,
    EvollaForProteinText2Text,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    QuantizedCache,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    XmodConfig,
    XmodForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)
from transformers_changes import CHANGES, Packed

from kvobj.connectors import LinkSettings
from kvobj.connectors.transformers import PrefixCache
from kvobj.errors import InvalidRequestError

VOCABULARY: Final = 199
STEPS: Final = 12
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
torch.set_num_threads(1)
models: dict[str, Any] = {}
stores: dict[str, PrefixCache] = {}


def _made(kind: str, options: dict[str, Any]) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 - each is a class of its own
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**_SMALL, num_key_value_heads=2, **options))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**_SMALL, num_key_value_heads=2, **options))
        case "neox":
            return GPTNeoXForCausalLM(GPTNeoXConfig(**_SMALL, **options))
        case "neox-japanese":
            return GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseConfig(**_SMALL, **options))
        case "gemma3":  # RoPE by kind of layer; its class declares images, which only the model around it reads
            kinds = ["full_attention"] * _SMALL["num_hidden_layers"]
            return Gemma3ForCausalLM(Gemma3TextConfig(**_SMALL, num_key_value_heads=1, layer_types=kinds, **options))
        case "gemma4":
            kinds = ["full_attention"] * _SMALL["num_hidden_layers"]
            return Gemma4ForCausalLM(Gemma4TextConfig(**_SMALL, num_key_value_heads=1, layer_types=kinds, **options))
        case "llava":
            vision = CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=4,
            )
            text = LlamaConfig(**_SMALL, num_key_value_heads=2)
            return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **options))
        case "gemma":
            return GemmaForCausalLM(GemmaConfig(**_SMALL, num_key_value_heads=1, head_dim=16, **options))
        case "hrm":
            return HrmTextForCausalLM(HrmTextConfig(**_SMALL, num_key_value_heads=2, head_dim=16, **options))
        case "falcon":
            return FalconForCausalLM(FalconConfig(**_SMALL, **options))
        case "cpmant":
            small = {"hidden_size": 64, "dim_ff": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "dim_head": 16}
            return CpmAntForCausalLM(CpmAntConfig(vocab_size=VOCABULARY, **small, **options))
        case "rwkv":
            return RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2))
        case "xlstm":
            return xLSTMForCausalLM(
                xLSTMConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=4)
            )
        case "mixtral":
            experts = {"num_local_experts": 20, "num_experts_per_tok": 2}
            return MixtralForCausalLM(MixtralConfig(**_SMALL, num_key_value_heads=2, **experts, **options))
        case "gpt2":
            return GPT2LMHeadModel(GPT2Config(**_GPT, **options))
        case "gptj":
            return GPTJForCausalLM(GPTJConfig(**_GPT, rotary_dim=8, **options))
        case "bert":
            return BertLMHeadModel(BertConfig(**_SMALL, **options))
        case "roberta":
            return RobertaForCausalLM(RobertaConfig(**{**_SMALL, "is_decoder": True, **options}))
        case "roformer":
            return RoFormerForCausalLM(RoFormerConfig(**_SMALL, **options))
        case "xmod":
            languages = {"languages": ["en_XX", "de_DE"]}
            return XmodForCausalLM(XmodConfig(**{**_SMALL, "pad_token_id": 1}, is_decoder=True, **languages, **options))
        case "evolla":  # reads a protein beside the text
            protein: dict[str, Any] = {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            resampler = {
                "resampler_depth": 1,
                "resampler_dim_head": 16,
                "resampler_heads": 2,
                "resampler_num_latents": 4,
            }
            aligner = {"resampler_ff_mult": 2, "aligner_ffn_mult": 2, "aligner_num_add_layers": 3}
            parts = {"protein_encoder_config": {**protein, "vocab_size": 40, "pad_token_id": 1}, **resampler, **aligner}
            return EvollaForProteinText2Text(EvollaConfig(**_SMALL, num_key_value_heads=2, **parts))
        case "mistral":
            return MistralForCausalLM(MistralConfig(**_SMALL, num_key_value_heads=2, sliding_window=32, **options))
        case _:
            return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=32, num_layers=2))


def make(
    model: str, *, kind: str, seed: int = 0, dtype: str = "float32", options: dict[str, Any] | None = None
) -> None:
    """A model of random weights under this name."""
    torch.manual_seed(seed)
    made = _made(kind, options or {})
    models[model] = made.to(getattr(torch, dtype)).eval()


def pack(model: str, *, seed: int) -> None:
    """Quantise one layer of a model, of which nothing else changes."""
    torch.manual_seed(seed)
    layer = models[model].model.layers[0].mlp
    layer.down_proj = Packed(torch.nn.Linear(layer.down_proj.in_features, layer.down_proj.out_features, bias=False))


def take_text_part(model: str, *, of: str) -> None:
    """The language model of a model that reads more than text, under a name of its own."""
    models[model] = models[of].model.language_model


def declare_text(model: str) -> None:
    """Have a model declare no inputs but text, as one from before transformers 5 and one of other code does."""
    models[model].input_modalities = "text"


def shard(model: str, *, rank: int, count: int, meeting: str) -> str:
    """Spread a model over `count` processes that meet in a file, each with its share of every layer's heads: what its weights are
    of then."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    mesh = distributed.init_device_mesh("cpu", (count,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in models[model].model.layers:
        parallelize_module(layer, mesh, plan)
    return type(models[model].model.layers[0].self_attn.k_proj.weight).__name__


def save_and_load(model: str, *, directory: str) -> None:
    """Write a model down, and load it from there in its own place."""
    models[model].save_pretrained(directory)
    models[model] = type(models[model]).from_pretrained(directory, attn_implementation="eager").eval()


def load_in(model: str, *, of: str, directory: str, dtype: str, cast: bool) -> None:
    """Write a model down, and load it under another name: in this dtype, or cast to it after loading."""
    models[of].save_pretrained(directory)
    kind = type(models[of])
    loaded = kind.from_pretrained(directory, dtype=torch.float32 if cast else getattr(torch, dtype))
    models[model] = (loaded.to(getattr(torch, dtype)) if cast else loaded).eval()


def open_store(store: str, *, model: str, settings: dict[str, Any], **options: Any) -> str:  # noqa: ANN401 - PrefixCache's
    """A `PrefixCache` of the model under this name; its namespace."""
    if "rank" in options:
        options["rank"] = tuple(options["rank"])
    opened = PrefixCache(LinkSettings.parse(settings, os.environ), models[model], **{"name": "tiny", **options})
    stores[store] = opened
    return opened.namespace


def refused(*, model: str, settings: dict[str, Any], **options: Any) -> str:  # noqa: ANN401 - PrefixCache's
    """With what words a store for this model is refused."""
    try:
        PrefixCache(LinkSettings.parse(settings, os.environ), models[model], **{"name": "tiny", **options})
    except InvalidRequestError as error:
        return str(error)
    raise AssertionError("it was not refused")


def refused_table(*, model: str, settings: dict[str, Any]) -> str:
    """With what words a table in the place of `LinkSettings` is refused."""
    table: Any = settings
    try:
        PrefixCache(table, models[model], name="tiny")
    except InvalidRequestError as error:
        return str(error)
    raise AssertionError("it was not refused")


def wrong_inputs(*, store: str, model: str) -> list[str]:
    """With what words `load` and `save` refuse what is no sequence of token ids: what a tokenizer answers first of all."""
    words = []
    inputs: tuple[Any, ...] = (
        BatchEncoding({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2)}),
        {"input_ids": [1, 2]},
        "a prompt",
        [[1, 2], [3, 4]],
        None,
        "1" * 40,
        b"1" * 40,
        [1.0] * 40,
        [1.9] * 40,
        torch.ones(1, 40),
        torch.ones(1, 40, dtype=torch.bool),
    )
    cache = DynamicCache(config=models[model].config)
    for given in inputs:
        for call in (stores[store].load, lambda ids: stores[store].save(ids, cache)):
            try:
                call(given)
            except InvalidRequestError as error:
                words.append(str(error))
    return words


def _run(model: Any, tokens: list[int], cache: DynamicCache) -> tuple[list[int], str]:  # noqa: ANN401 - a model
    """The sequence that `generate` makes greedily, and a digest of the logits of all its steps."""
    settings = GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, output_scores=True, return_dict_in_generate=True, use_cache=True
    )
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, generation_config=settings
        )
    logits = torch.stack(made.scores).float().contiguous()
    return made.sequences[0].tolist(), digest_of(memoryview(logits.numpy()).cast("B"))


def plain(*, model: str, tokens: list[int]) -> list[int]:
    """The sequence without any store."""
    return _run(models[model], tokens, DynamicCache(config=models[model].config))[0]


def generate(*, store: str, model: str, tokens: list[int], save: bool = True) -> dict[str, Any]:
    """Load, generate, save: the sequence, its logits, how many tokens were known, and how many are stored now."""
    cache, known = stores[store].load(torch.tensor([tokens]))
    sequence, logits = _run(models[model], tokens, cache)
    stored = stores[store].save(torch.tensor([sequence]), cache) if save else 0
    return {"sequence": sequence, "logits": logits, "known": known, "stored": stored}


def continued(*, model: str, first: list[int], known: int, tokens: list[int]) -> str:
    """The logits of a generation that goes on from the first `known` tokens of the cache that another one left in memory."""
    cache = DynamicCache(config=models[model].config)
    _run(models[model], first, cache)
    cache.crop(known - cache.get_seq_length())
    return _run(models[model], tokens, cache)[1]


def save_share(*, store: str, model: str, tokens: list[int], head: int, heads: int) -> list[bool]:
    """Store the heads from `head` on of what the model computes, as the rank that has these has them; for each layer whether what
    is loaded is, bit for bit, that."""
    whole = DynamicCache(config=models[model].config)
    with torch.inference_mode():
        models[model](torch.tensor([tokens]), past_key_values=whole, use_cache=True)
    share = DynamicCache(config=models[model].config)
    for index, layer in enumerate(whole.layers):
        share.update(layer.keys[:, head : head + heads], layer.values[:, head : head + heads], index)
    saved = stores[store].save(tokens, share)
    loaded, known = stores[store].load(tokens)
    assert known == saved
    return [
        torch.equal(ours.keys, theirs.keys[:, :, :known]) and torch.equal(ours.values, theirs.values[:, :, :known])
        for ours, theirs in zip(loaded.layers, share.layers, strict=True)
    ]


def loaded_equals(*, store: str, model: str, tokens: list[int]) -> list[bool]:
    """For each layer whether what is loaded is, bit for bit, what the model computes."""
    cache = DynamicCache(config=models[model].config)
    with torch.inference_mode():
        models[model](torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    saved = stores[store].save(tokens, cache)
    loaded, known = stores[store].load(tokens)
    assert known == min(saved, len(tokens) - 1)
    return [
        torch.equal(ours.keys, theirs.keys[:, :, :known]) and torch.equal(ours.values, theirs.values[:, :, :known])
        for ours, theirs in zip(loaded.layers, cache.layers, strict=True)
    ]


def wrong_caches(*, store: str, model: str, tokens: list[int]) -> list[str]:
    """With what words caches that cannot be saved are refused."""
    made = models[model]
    batch = DynamicCache(config=made.config)
    with torch.inference_mode():
        made(torch.tensor([tokens, tokens]), past_key_values=batch, use_cache=True)
    half, whole, headless, valueless, partly, meta = (DynamicCache(config=made.config) for _ in range(6))
    with torch.inference_mode():
        for cache in (half, whole, headless, valueless, partly, meta):
            made(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    half.layers[1].keys = half.layers[1].keys.half()
    headless.layers[0].keys = None
    valueless.layers[1].values = None
    partly.layers[1] = DynamicCache(config=made.config).layers[1]
    meta.layers[2].values = meta.layers[2].values.to("meta")
    static = StaticCache(config=made.config, max_cache_len=64)
    quantised = object.__new__(QuantizedCache)
    words = []
    for ids, cache in (
        (torch.tensor([tokens, tokens]), batch),
        (torch.tensor([tokens]), batch),
        (torch.tensor([tokens]), half),
        (torch.tensor([tokens]), static),
        (torch.tensor([tokens]), quantised),
        (torch.tensor([tokens[:-1]]), whole),
        (torch.tensor([tokens]), headless),
        (torch.tensor([tokens]), valueless),
        (torch.tensor([tokens]), partly),
        (torch.tensor([tokens]), meta),
    ):
        try:
            stores[store].save(ids, cache)
        except InvalidRequestError as error:
            words.append(str(error))
    return words


def change(*, model: str, how: str) -> None:
    """Change a model, which stores may have been made of (`transformers_changes`)."""
    with torch.no_grad():
        CHANGES[how](models[model])


def refused_since(*, store: str, tokens: list[int]) -> list[str]:
    """With what words the calls of a store are refused now; none for a call that is not."""
    words = []
    for call in (lambda: stores[store].load(tokens), lambda: stores[store].save(tokens, DynamicCache())):
        try:
            call()
        except InvalidRequestError as error:
            words.append(str(error))
    return words


def chunk_keys(*, store: str, tokens: list[int]) -> list[str]:
    """The S3 keys of the sequence's whole chunks."""
    space = stores[store]._link.namespace()
    assert space is not None
    return [each.hex() for each in space.chunk_ids(tokens)]


def report(*, store: str) -> dict[str, Any]:
    """The store's own account."""
    return {key: value for key, value in stores[store].report().items() if isinstance(value, bool | int | str)}


def close(*, store: str) -> None:
    """Close it."""
    stores.pop(store).close()


if __name__ == "__main__":
    serve(
        {
            "make": make,
            "pack": pack,
            "take_text_part": take_text_part,
            "declare_text": declare_text,
            "shard": shard,
            "save_share": save_share,
            "save_and_load": save_and_load,
            "load_in": load_in,
            "open": open_store,
            "refused": refused,
            "refused_table": refused_table,
            "wrong_inputs": wrong_inputs,
            "plain": plain,
            "generate": generate,
            "continued": continued,
            "loaded_equals": loaded_equals,
            "wrong_caches": wrong_caches,
            "change": change,
            "refused_since": refused_since,
            "chunk_keys": chunk_keys,
            "report": report,
            "close": close,
        }
    )
    os._exit(0)  # native threads end badly when Python takes itself down
