"""The connector of transformers: a model never finds the cache of one that computes otherwise, whatever torch notes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engine_process import EngineProcess, needs_engines
from module_paths import ModulePaths
from server_process import ServerProcess
from transformers_engine import ENVIRONMENT, opened, sequence, server_in, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with server_in(module_paths.mktemp("transformers-models")) as running:
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("transformers-models-engine") / "engine.log"
    with EngineProcess("transformers_cache.py", log, ENVIRONMENT) as running:
        yield running


def made(engine: EngineProcess, model: str, *changes: str, kind: str = "llama", seed: int = 51) -> None:
    engine.ask("make", model=model, kind=kind, seed=seed)
    for how in changes:
        engine.ask("change", model=model, how=how)


@pytest.mark.parametrize(
    ("before", "how"),
    [
        ([], "fused"),
        ([], "data"),
        ([], "numpy"),
        (["inference"], "inference"),
        ([], "frequencies"),
        ([], "attend"),
        (["scale"], "scale more"),
        (["scale blocks"], "scale blocks more"),
        (["adapt"], "adapter's scale"),
        (["adapt"], "other adapter"),
        (["adapt"], "adapter off"),
        (["adapt"], "adapter merged"),
    ],
)
def test_a_change_that_torch_counts_no_writes_of_is_refused_and_separates_models(
    engine: EngineProcess, server: ServerProcess, before: list[str], how: str
) -> None:
    made(engine, "was", *before)
    name = opened(engine, server, "was", salt=how)
    prompt = sequence(40, 51)
    assert engine.ask("generate", store="was", model="was", tokens=prompt)["stored"] == 48
    engine.ask("change", model="was", how=how)
    words = engine.ask("refused_since", store="was", tokens=prompt)
    assert ["make another" in each for each in words] == [True] * 2
    assert opened(engine, server, "is", model="was", salt=how) != name
    told = engine.ask("generate", store="is", model="was", tokens=prompt, save=False)
    assert (told["known"], told["sequence"]) == (0, engine.ask("plain", model="was", tokens=prompt))
    made(engine, "same", *before)
    assert opened(engine, server, "same", salt=how) == name
    assert engine.ask("generate", store="same", model="same", tokens=prompt, save=False)["known"] == 32


def test_an_adapter_that_is_switched_on_again_finds_what_it_left(engine: EngineProcess, server: ServerProcess) -> None:
    made(engine, "adapted", "adapt")
    opened(engine, server, "adapted")
    prompt = sequence(40, 52)
    assert engine.ask("generate", store="adapted", model="adapted", tokens=prompt)["stored"] == 48
    engine.ask("change", model="adapted", how="adapter off")
    assert len(engine.ask("refused_since", store="adapted", tokens=prompt)) == 2
    engine.ask("change", model="adapted", how="adapter on")
    assert engine.ask("generate", store="adapted", model="adapted", tokens=prompt, save=False)["known"] == 32


@pytest.mark.parametrize("kind", ["llama", "gptj"])
def test_a_model_that_is_cast_after_loading_shares_nothing_with_one_that_is_loaded_in_that_dtype(
    engine: EngineProcess, server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    made(engine, "saved", kind=kind)
    names = []
    for store, is_cast in (("loaded", False), ("cast", True), ("again", False)):
        engine.ask("load_in", model=store, of="saved", directory=str(tmp_path), dtype="bfloat16", cast=is_cast)
        names.append(opened(engine, server, store, salt=f"{kind} cast"))
    assert names[0] == names[2] != names[1]
    prompt = sequence(200, 53)
    assert engine.ask("generate", store="cast", model="cast", tokens=prompt)["stored"] == 208
    assert engine.ask("generate", store="loaded", model="loaded", tokens=prompt, save=False)["known"] == 0


def test_a_change_of_any_expert_is_noticed(engine: EngineProcess, server: ServerProcess) -> None:
    made(engine, "experts", kind="mixtral")
    opened(engine, server, "experts")
    for expert in range(20):
        assert engine.ask("refused_since", store="experts", tokens=[1, 2, 3]) == []
        engine.ask("change", model="experts", how=f"expert {expert}")
        assert len(engine.ask("refused_since", store="experts", tokens=[1, 2, 3])) == 2
        opened(engine, server, "experts")


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("llama", {"attention_dropout": 0.5}, "attention_dropout=0.5"),
        ("neox", {"hidden_dropout": 0.1}, "Dropout"),
        ("llama", {}, ""),
    ],
)
def test_a_model_in_training_is_refused_if_it_has_dropout(
    engine: EngineProcess, server: ServerProcess, kind: str, options: dict[str, float], words: str
) -> None:
    engine.ask("make", model="trained", kind=kind, options=options)
    opened(engine, server, "trained", salt=f"{kind} {options}")
    engine.ask("change", model="trained", how="begin training")
    told = engine.ask("refused_since", store="trained", tokens=[1, 2, 3])
    assert [words in each and "model.eval()" in each for each in told] == [True] * (2 if words else 0)
    engine.ask("change", model="trained", how="end training")
    assert engine.ask("refused_since", store="trained", tokens=[1, 2, 3]) == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("offload", "on meta"),
        ("quantise by torch", "_packed_params"),
        ("scale opaquely", "their numbers cannot be read"),
        ("learn prompt", "tokens of its own before a prompt"),
        ("attend to later ones", "is_causal=False in LlamaAttention"),
    ],
)
def test_a_model_that_nobody_can_tell_from_others_by_what_it_has_in_memory_is_refused(
    engine: EngineProcess, server: ServerProcess, how: str, words: str
) -> None:
    made(engine, "refused", how)
    assert words in engine.ask("refused", model="refused", settings=settings_of(server))


def test_a_model_that_is_offloaded_since_is_refused(engine: EngineProcess, server: ServerProcess) -> None:
    made(engine, "offloaded")
    opened(engine, server, "offloaded")
    engine.ask("change", model="offloaded", how="offload")
    told = engine.ask("refused_since", store="offloaded", tokens=[1, 2, 3])
    assert ["on meta" in each for each in told] == [True] * 2


def test_how_a_model_is_run_does_not_separate_caches(engine: EngineProcess, server: ServerProcess) -> None:
    made(engine, "plain")
    name = opened(engine, server, "plain", salt="run")
    for how in ("set pad", "attend by sdpa", "attend eagerly", "compile"):
        engine.ask("change", model="plain", how=how)
        assert opened(engine, server, how, model="plain", salt="run") == name
        assert engine.ask("refused_since", store="plain", tokens=[1, 2, 3]) == []


def test_models_that_count_positions_from_different_padding_share_nothing(
    engine: EngineProcess, server: ServerProcess
) -> None:
    names = []
    for padding in (1, 3, 1):
        engine.ask("make", model="padded", kind="roberta", options={"pad_token_id": padding})
        # Padding is a token of zeros, by which alone the weights would differ.
        engine.ask("change", model="padded", how="fill padding")
        names.append(opened(engine, server, "padded"))
    assert names[0] == names[2] != names[1]
