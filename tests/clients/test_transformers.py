"""The connector of transformers against a real server: generation after a reload is generation without, and failures are misses."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engine_process import EngineProcess, needs_engines
from module_paths import ModulePaths
from server_process import ServerProcess
from tier_codecs import lossy
from transformers_engine import CHUNK_TOKENS, ENVIRONMENT, opened, sequence, server_in, settings_of

from kvobj.client import Credentials, KvClient

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with server_in(module_paths.mktemp("transformers")) as running:
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("transformers-engine") / "engine.log"
    with EngineProcess("transformers_cache.py", log, ENVIRONMENT) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("llama", "float32", {}),
        ("llama", "bfloat16", {"head_dim": 24}),
        ("qwen2", "float16", {}),
        ("neox", "float32", {}),
        ("falcon", "float32", {}),
        ("falcon", "float32", {"multi_query": False}),
        ("falcon", "float32", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_generation_after_a_reload_is_that_without_and_the_cache_is_bit_for_bit_the_same(
    engine: EngineProcess, server: ServerProcess, kind: str, dtype: str, options: dict[str, Any]
) -> None:
    name = f"{kind}-{dtype}"
    engine.ask("make", model=name, kind=kind, seed=1, dtype=dtype, options=options)
    opened(engine, server, name)
    prompt = sequence(75, 1)
    without = engine.ask("plain", model=name, tokens=prompt)
    first = engine.ask("generate", store=name, model=name, tokens=prompt)
    assert (first["known"], first["sequence"]) == (0, without)
    # 75 of the prompt and 11 of the 12 that were made: the last one was never an input.
    assert first["stored"] == 80
    again = engine.ask("generate", store=name, model=name, tokens=prompt)
    assert (again["known"], again["stored"], again["sequence"]) == (64, 80, without)
    expected = engine.ask("continued", model=name, first=prompt, known=64, tokens=prompt)
    assert again["logits"] == expected
    assert engine.ask("loaded_equals", store=name, model=name, tokens=sequence(70, 2)) == [True] * 3


def test_another_process_finds_what_this_one_stored(
    engine: EngineProcess, server: ServerProcess, tmp_path: Path
) -> None:
    engine.ask("make", model="shared", kind="llama", seed=2)
    opened(engine, server, "shared")
    prompt = sequence(50, 3)
    first = engine.ask("generate", store="shared", model="shared", tokens=prompt)
    with EngineProcess("transformers_cache.py", tmp_path / "other.log", ENVIRONMENT) as other:
        other.ask("make", model="shared", kind="llama", seed=2)
        opened(other, server, "shared")
        again = other.ask("generate", store="shared", model="shared", tokens=prompt)
    assert (again["known"], again["sequence"]) == (48, first["sequence"])


def test_a_longer_prompt_takes_what_a_shorter_one_left_and_another_one_what_they_share(
    engine: EngineProcess, server: ServerProcess
) -> None:
    engine.ask("make", model="longer", kind="llama", seed=3)
    opened(engine, server, "longer")
    prompt = sequence(40, 4)
    first = engine.ask("generate", store="longer", model="longer", tokens=prompt)
    longer = first["sequence"] + sequence(30, 5)
    second = engine.ask("generate", store="longer", model="longer", tokens=longer)
    assert second["known"] == 48
    assert second["sequence"] == engine.ask("plain", model="longer", tokens=longer)
    forked = prompt[:33] + sequence(20, 6)
    third = engine.ask("generate", store="longer", model="longer", tokens=forked)
    assert third["known"] == 32
    assert third["sequence"] == engine.ask("plain", model="longer", tokens=forked)


def test_a_sequence_of_whole_chunks_leaves_its_last_token_to_the_model(
    engine: EngineProcess, server: ServerProcess
) -> None:
    engine.ask("make", model="whole", kind="llama", seed=4)
    opened(engine, server, "whole")
    prompt = sequence(3 * CHUNK_TOKENS, 7)
    first = engine.ask("generate", store="whole", model="whole", tokens=prompt)
    again = engine.ask("generate", store="whole", model="whole", tokens=prompt)
    assert (first["known"], again["known"]) == (0, len(prompt) - 1)
    assert again["sequence"] == first["sequence"]
    for short in (prompt[:1], prompt[: CHUNK_TOKENS - 1]):
        told = engine.ask("generate", store="whole", model="whole", tokens=short, save=False)
        assert told["known"] == 0
        assert told["sequence"] == engine.ask("plain", model="whole", tokens=short)


def test_another_model_salt_adapter_rank_or_chunk_length_never_matches(
    engine: EngineProcess, server: ServerProcess
) -> None:
    engine.ask("make", model="base", kind="llama", seed=5)
    engine.ask("make", model="tuned", kind="llama", seed=6)
    engine.ask(
        "make",
        model="rope",
        kind="llama",
        seed=5,
        options={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    )
    prompt = sequence(40, 8)
    names = {opened(engine, server, "base")}
    assert engine.ask("generate", store="base", model="base", tokens=prompt)["stored"] == 48
    others: dict[str, dict[str, Any]] = {
        "tuned": {"model": "tuned", "salt": "base"},
        "rope": {"model": "rope", "salt": "base"},
        "salt": {"model": "base", "salt": "other"},
        "adapter": {"model": "base", "salt": "base", "adapter": "lora"},
        "rank": {"model": "base", "salt": "base", "rank": (1, 2)},
        "chunk": {"model": "base", "salt": "base", "chunk_tokens": 8},
        "name": {"model": "base", "salt": "base", "name": "another"},
    }
    for name, options in others.items():
        names.add(opened(engine, server, name, **options))
        assert engine.ask("generate", store=name, model=options["model"], tokens=prompt, save=False)["known"] == 0
    assert len(names) == 1 + len(others)
    opened(engine, server, "same", model="base", salt="base")
    assert engine.ask("generate", store="same", model="base", tokens=prompt, save=False)["known"] == 32


def nested_rope(theta: float, **more: object) -> dict[str, Any]:
    """RoPE parameters by kind of layer; all layers of the models here are of the first."""
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta, **more},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }


@pytest.mark.parametrize(
    ("kind", "base", "other"),
    [
        ("llama", {}, {"rms_norm_eps": 1e-2}),
        ("llama", {}, {"hidden_act": "gelu"}),
        ("llama", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("gemma3", nested_rope(1e4), nested_rope(1e6)),
        ("gemma3", nested_rope(1e4), nested_rope(1e4, rope_type="linear", factor=2.0)),
    ],
)
def test_models_of_equal_weights_that_compute_otherwise_share_nothing(
    engine: EngineProcess, server: ServerProcess, kind: str, base: dict[str, Any], other: dict[str, Any]
) -> None:
    for name, options in (("computes", base), ("otherwise", other)):
        engine.ask("make", model=name, kind=kind, seed=9, options=options)
    prompt = sequence(40, 12)
    names = {opened(engine, server, "computes", salt=f"{kind} {other}")}
    assert engine.ask("generate", store="computes", model="computes", tokens=prompt)["stored"] == 48
    names.add(opened(engine, server, "otherwise", salt=f"{kind} {other}"))
    told = engine.ask("generate", store="otherwise", model="otherwise", tokens=prompt, save=False)
    assert (len(names), told["known"]) == (2, 0)
    assert told["sequence"] == engine.ask("plain", model="otherwise", tokens=prompt)
    assert not engine.ask("report", store="otherwise")["errors"], "the store takes the declaration"


def test_models_that_differ_in_quantised_weights_alone_share_nothing(
    engine: EngineProcess, server: ServerProcess
) -> None:
    for name, seed in (("packed", 1), ("repacked", 2), ("same", 1)):
        engine.ask("make", model=name, kind="llama", seed=14)
        engine.ask("pack", model=name, seed=seed)
    prompt = sequence(40, 14)
    names = [opened(engine, server, name, salt="packed") for name in ("packed", "repacked", "same")]
    assert names[0] == names[2] != names[1]
    assert engine.ask("generate", store="packed", model="packed", tokens=prompt)["stored"] == 48
    assert engine.ask("generate", store="repacked", model="repacked", tokens=prompt, save=False)["known"] == 0
    assert engine.ask("generate", store="same", model="same", tokens=prompt, save=False)["known"] == 32


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_is_not_of_the_model_does_not_separate_caches(
    engine: EngineProcess, server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    engine.ask("make", model="base", kind=kind, seed=10)
    name = opened(engine, server, "base", salt=kind)
    engine.ask("make", model="other", kind=kind, seed=10, options={"attention_dropout": 0.5, "num_labels": 3})
    assert opened(engine, server, "other", salt=kind) == name
    engine.ask("save_and_load", model="base", directory=str(tmp_path / "model"))
    assert opened(engine, server, "base", salt=kind) == name


def test_a_model_that_reads_more_than_text_is_refused_and_its_text_part_is_not(
    engine: EngineProcess, server: ServerProcess
) -> None:
    settings = settings_of(server)
    engine.ask("make", model="llava", kind="llava", options={"image_token_index": 63})
    assert "more than text (image)" in engine.ask("refused", model="llava", settings=settings)
    engine.ask("declare_text", model="llava")
    assert "more than text (pixel_values" in engine.ask("refused", model="llava", settings=settings)
    engine.ask("take_text_part", model="part", of="llava")
    assert opened(engine, server, "part").startswith("hf-tiny-")
    engine.ask("make", model="gemma3", kind="gemma3")
    assert opened(engine, server, "gemma3").startswith("hf-tiny-")


def test_where_a_chunk_in_the_middle_is_gone_the_run_before_it_is_used_and_saved_again(
    engine: EngineProcess, server: ServerProcess
) -> None:
    engine.ask("make", model="middle", kind="llama", seed=7)
    opened(engine, server, "middle")
    prompt = sequence(80, 9)
    first = engine.ask("generate", store="middle", model="middle", tokens=prompt)
    keys = engine.ask("chunk_keys", store="middle", tokens=prompt)
    with server.raw() as raw:
        assert raw.request("DELETE", f"/cache/{keys[2]}", payload=None).status == 204
    again = engine.ask("generate", store="middle", model="middle", tokens=prompt)
    assert (again["known"], again["sequence"]) == (32, first["sequence"])
    assert again["stored"] == first["stored"] == 80
    assert engine.ask("generate", store="middle", model="middle", tokens=prompt, save=False)["known"] == 79


def test_what_cannot_be_stored_is_refused_by_name(engine: EngineProcess, server: ServerProcess) -> None:
    settings = settings_of(server)
    for name, kind, options, words in (
        ("window", "mistral", {}, "DynamicSlidingWindowLayer"),
        ("t5", "t5", {}, "encoder-decoder"),
        ("double", "llama", {}, "torch.float64"),
        (
            "ntk",
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE of type dynamic",
        ),
        ("nested", "gemma3", nested_rope(1e4, rope_type="dynamic", factor=2.0), "RoPE of type dynamic"),
        ("rwkv", "rwkv", {}, "RwkvConfig does not tell how many heads"),
        ("xlstm", "xlstm", {}, "xLSTMConfig does not tell how many heads"),
        ("cpmant", "cpmant", {}, "prompt_length=32"),
        ("widths", "gemma4", {}, "layers that differ in head_dim"),
        ("forward", "gemma4", {"use_bidirectional_attention": "all"}, "attend to later ones"),
        ("across", "gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("languages", "xmod", {}, "more than text (lang_ids)"),
        ("protein", "evolla", {}, "more than text (protein_input_ids"),
    ):
        engine.ask("make", model=name, kind=kind, dtype="float64" if name == "double" else "float32", options=options)
        assert words in engine.ask("refused", model=name, settings=settings)
    engine.ask("make", model="fine", kind="llama")
    assert "give a name" in engine.ask("refused", model="fine", settings=settings, name="")
    assert "at least one token" in engine.ask("refused", model="fine", settings=settings, chunk_tokens=0)
    for options, expected in (
        ({"chunk_tokens": 16.0}, "chunk_tokens is a whole number, and not 16.0"),
        ({"chunk_tokens": True}, "chunk_tokens is a whole number, and not True"),
        ({"chunk_tokens": "64"}, "chunk_tokens is a whole number, and not '64'"),
        ({"salt": 3}, "salt is a text, and not 3"),
        ({"salt": None}, "salt is a text, and not None"),
        ({"name": 3}, "name is a text, or None, and not 3"),
        ({"adapter": 3}, "adapter is a text, or None, and not 3"),
        ({"rank": [0, 2.0]}, "rank is (index, count)"),
        ({"rank": 1}, "rank is (index, count)"),
    ):
        assert expected in engine.ask("refused", model="fine", settings=settings, **options)
    assert "LinkSettings.parse" in engine.ask("refused_table", model="fine", settings=settings)
    opened(engine, server, "fine")
    words = engine.ask("wrong_inputs", store="fine", model="fine")
    assert len(words) == 22
    for told in words[:4]:
        assert "its input_ids alone" in told
    for told in words[4:]:
        assert "one sequence" in told
    words = engine.ask("wrong_caches", store="fine", model="fine", tokens=sequence(20, 10))
    for told, expected in zip(
        words,
        (
            *("one sequence at a time", "(2, 2, 20, 16)", "float16", "StaticCache", "QuantizedCache"),
            "the cache has 20 tokens, and the sequence 19",
            *(
                "keys of class NoneType",
                "values of class NoneType",
                "some of its layers only",
                "values on the device meta",
            ),
        ),
        strict=True,
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("kind", "refused", "words", "accepted"),
    [
        ("hrm", {}, "prefix_lm=True", {"prefix_lm": False}),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True", {}),
        (
            "llama",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention='all'",
            {"use_bidirectional_attention": "vision"},
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True", {}),
        ("llama", {"is_causal": False}, "is_causal=False", {"is_causal": True}),
        ("bert", {}, "is_causal=False in BertSelfAttention", {"is_decoder": True}),
        ("roformer", {}, "is_decoder=False in RoFormerLayer", {"is_decoder": True}),
        ("neox-japanese", {"is_causal": False}, "is_causal=False", {"is_decoder": False}),
    ],
)
def test_a_model_whose_tokens_attend_to_later_ones_is_refused_and_one_that_only_could_is_not(
    engine: EngineProcess,
    server: ServerProcess,
    kind: str,
    refused: dict[str, Any],
    words: str,
    *,
    accepted: dict[str, Any],
) -> None:
    engine.ask("make", model="both", kind=kind, options=refused)
    told = engine.ask("refused", model="both", settings=settings_of(server))
    assert "attend to later ones" in told
    assert words in told
    engine.ask("make", model="causal", kind=kind, options=accepted)
    assert opened(engine, server, "causal", salt=f"{kind} {accepted}").startswith("hf-tiny-")


def test_ranks_store_and_find_their_shares_of_the_heads(engine: EngineProcess, server: ServerProcess) -> None:
    engine.ask("make", model="ranks", kind="llama", seed=15)
    prompt = sequence(3 * CHUNK_TOKENS + 1, 15)
    names = set()
    for store, rank, head in (("half", (0, 2), 0), ("other", (1, 2), 1), ("copy", (0, 4), 0), ("copied", (1, 4), 0)):
        names.add(opened(engine, server, store, model="ranks", salt="ranks", rank=rank))
        same = engine.ask("save_share", store=store, model="ranks", tokens=prompt, head=head, heads=1)
        assert same == [True] * 3
    assert len(names) == 4
    for rank, words in (((0, 3), "2 heads of keys and values are not shared out"), ((2, 2), "rank is (index, count)")):
        assert words in engine.ask("refused", model="ranks", settings=settings_of(server), rank=rank)


def test_processes_among_which_a_model_is_sharded_find_their_shares_and_so_do_others_in_their_places(
    server: ServerProcess, tmp_path: Path
) -> None:
    prompt = sequence(3 * CHUNK_TOKENS + 5, 16)
    environment = {
        **ENVIRONMENT,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # what this host's name stands for may be no address of its own

    def generated(process: EngineProcess, rank: int, meeting: str) -> tuple[str, dict[str, Any]]:
        process.ask("make", model="sharded", kind="llama", seed=16)
        without = process.ask("plain", model="sharded", tokens=prompt)
        shard = process.ask("shard", model="sharded", rank=rank, count=2, meeting=str(tmp_path / meeting))
        assert shard == "DTensor"
        name = opened(process, server, "sharded", rank=(rank, 2))
        told = process.ask("generate", store="sharded", model="sharded", tokens=prompt)
        assert told["sequence"] == without
        process.ask("change", model="sharded", how="shard")
        words = process.ask("refused_since", store="sharded", tokens=prompt)
        assert ["make another" in each for each in words] == [True] * 2
        process.ask("close", store="sharded")
        return name, told

    with (
        EngineProcess("transformers_cache.py", tmp_path / "one.log", environment) as one,
        EngineProcess("transformers_cache.py", tmp_path / "two.log", environment) as two,
        ThreadPoolExecutor(2) as both,
    ):
        first = list(both.map(generated, (one, two), (0, 1), ("first", "first")))
        second = list(both.map(generated, (two, one), (0, 1), ("second", "second")))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert first[0][0] != first[1][0]
    assert [(told["known"], told["stored"]) for _, told in first] == [(0, 64)] * 2
    assert [(told["known"], told["stored"]) for _, told in second] == [(48, 64)] * 2


@pytest.mark.parametrize("how", ["train", "move", "pack"])
def test_a_model_that_was_changed_since_is_refused_and_never_given_the_cache_of_what_it_was(
    engine: EngineProcess, server: ServerProcess, how: str
) -> None:
    engine.ask("make", model=how, kind="llama", seed=31)
    if how == "pack":
        engine.ask("pack", model=how, seed=31)
    opened(engine, server, how)
    prompt = sequence(60, 31)
    assert engine.ask("generate", store=how, model=how, tokens=prompt)["stored"]
    engine.ask("change", model=how, how="rewrite")
    assert engine.ask("refused_since", store=how, tokens=prompt) == [], "the same weights are the same model"
    engine.ask("change", model=how, how=how)
    told = engine.ask("refused_since", store=how, tokens=prompt)
    assert len(told) == 2
    assert all("make another" in words for words in told)


def test_generation_goes_on_without_the_server_and_finds_it_again(engine: EngineProcess, tmp_path: Path) -> None:
    engine.ask("make", model="outage", kind="llama", seed=8)
    prompt = sequence(60, 11)
    with server_in(tmp_path / "node") as server:
        opened(engine, server, "outage", seconds=2.0)
        first = engine.ask("generate", store="outage", model="outage", tokens=prompt)
        assert first["stored"] == 64
        os.kill(server.pid, signal.SIGSTOP)  # it is there, and answers nobody
        began = time.monotonic()
        told = engine.ask("generate", store="outage", model="outage", tokens=prompt, timeout_seconds=60)
        assert (told["known"], told["stored"], told["sequence"]) == (0, 0, first["sequence"])
        assert time.monotonic() - began < 4 * 2.0
        server.kill()
        for _ in range(2):
            told = engine.ask("generate", store="outage", model="outage", tokens=prompt, timeout_seconds=30)
            assert (told["known"], told["stored"], told["sequence"]) == (0, 0, first["sequence"])
        assert engine.ask("report", store="outage")["is_up"] is False
        server.start()

        def known() -> int:
            told = engine.ask("generate", store="outage", model="outage", tokens=prompt, save=False)
            assert told["sequence"] == first["sequence"]
            return int(told["known"])

        assert any(known() == 48 for _ in range(50))
        engine.ask("close", store="outage")


def test_where_lossy_copies_alone_are_left_the_cache_is_computed_once_more_and_saved_again(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.ask("make", model="lossy", kind="llama", seed=6, dtype="bfloat16")
    prompt = sequence(75, 20)
    with server_in(tmp_path) as server:
        keys = server.credentials()
        with KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache") as client:
            name = opened(engine, server, "lossy")
            engine.ask("generate", store="lossy", model="lossy", tokens=prompt, save=False)  # which declares it
            namespace = client.namespace(name)
            settings = {"codecs": {"nvme": lossy()}, "lossy": True}
            client.declare_namespace(namespace.name, {**namespace.declaration, **settings})
        first = engine.ask("generate", store="lossy", model="lossy", tokens=prompt)
        assert (first["known"], first["stored"]) == (0, 80)
        assert server.terminate() == 0  # a clean stop writes down, and forgets, what memory had
        server.start()
        again = engine.ask("generate", store="lossy", model="lossy", tokens=prompt)
        assert (again["known"], again["stored"], again["sequence"]) == (0, 80, first["sequence"])
        healed = engine.ask("generate", store="lossy", model="lossy", tokens=prompt)
        assert (healed["known"], healed["stored"], healed["sequence"]) == (64, 80, first["sequence"])
        engine.ask("close", store="lossy")
