"""The codecs' benchmark: its independent model of our codecs, its judgement of targets, and a small run of all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from codec_bench import reference, reference_tables
from codec_bench.rows import Row, find, from_json, spread, to_json
from codec_bench.targets import TARGETS, judge
from hypothesis import given
from hypothesis import strategies as st
from module_paths import ModulePaths
from torch_python import run_with_torch

from kvobj.tensors import codecs
from kvobj.tensors.form import TensorForm

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KERNELS: Final = REPOSITORY / "kvobj" / "tensors" / "kernels"


def noise(*shape: int, seed: int = 3, mean: float = 0.0) -> npt.NDArray[np.uint16]:
    """bf16 words [tokens, heads, head_dim] of normal values, each column with a deviation of its own."""
    source = np.random.default_rng(seed)
    values = source.normal(size=shape) * np.exp(0.5 * source.normal(size=shape[1:])) + mean
    return reference.to_bf16(values.astype(np.float32))


def committed(name: str) -> npt.NDArray[np.int64]:
    """The numbers of a committed table."""
    lines = [line for line in (KERNELS / name).read_text().splitlines() if not line.startswith("//")]
    return np.array([int(number) for line in lines for number in re.findall(r"\d+", line)])


class TestTables:
    def test_those_of_xa_are_what_the_definition_gives(self) -> None:
        table = reference_tables.xa_frequencies()
        assert (table.sum(axis=1) == reference_tables.TOTAL).all()
        assert (committed("tables_xa.cuh").reshape(64, 24) == table[:, :-1]).all()

    def test_those_of_eq_are_what_the_definition_gives(self) -> None:
        table = reference_tables.eq_frequencies()
        assert (table.sum(axis=1) == reference_tables.TOTAL).all()
        assert (table[:, 126::-1] == table[:, 128:255]).all()
        assert (committed("tables_eq.cuh").reshape(64, 128) == table[:, 127:255]).all()

    def test_costs_are_those_of_the_frequencies(self) -> None:
        costs = committed("tables_cost.cuh")
        table = reference_tables.eq_frequencies()
        # The commonest symbol of a table may have all but one of 4,096; an escape has 1.
        assert (costs[np.where(table == 0, 1, table)] == reference_tables.costs(table)).all()


class TestModel:
    @given(st.integers(0, 2**16 - 1))
    def test_bf16_values_round_to_themselves(self, word: int) -> None:
        if word & 0x7F80 != 0x7F80:
            words = np.array([word], np.uint16)
            assert (reference.to_bf16(reference.from_bf16(words)) == words).all()

    def test_halves_round_to_even(self) -> None:
        values = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
        assert reference.to_bf16(values).tolist() == [0x3F80, 0x3F82, 0x3F81]

    @given(st.integers(-40_000, 40_000), st.integers(1, 3))
    def test_demotion_is_rounding_at_three_times_the_step(self, integer: int, rungs: int) -> None:
        found = np.array([integer])
        for _ in range(rungs):
            found = reference.demoted(found)
        nearest = (abs(integer) + 3**rungs // 2) // 3**rungs  # the quotient of odd steps has no halves
        assert found[0] == np.sign(integer) * nearest

    def test_a_window_ends_at_the_lower_median_of_its_columns_greatest(self) -> None:
        found = np.full((192, 1, 128), 100)
        found[5, 0, 0], found[70, 0, 0], found[130, 0, 0] = 120, 110, 130
        found[:, 0, 1] = 0
        found[:64, 0, 2] = 0
        tops = reference.x3_tops(found)[0]
        assert tops[:4].tolist() == [120, 6, 100, 100]

    def test_tokens_far_from_the_median_are_guarded_unless_they_are_many(self) -> None:
        values = (reference.from_bf16(noise(64, 2, 16)) * 1000).astype(np.int64)
        values[5] *= 50
        values[9] //= 100
        exponents = np.array([10, 10])
        assert reference.guarded_tokens(values, exponents).tolist() == [5, 9]
        values[:8] *= 50
        assert reference.guarded_tokens(values, exponents).size == 0

    def test_errors_of_a_quantiser_are_half_a_step(self) -> None:
        words = noise(64, 2, 16, mean=3.0)
        for power in (0, 1, 2):
            coded = reference.eq(words, 100, power)
            error = np.abs(reference.from_bf16(coded.decoded()) - reference.from_bf16(words)).max(axis=(0, 2))
            steps = coded.steps * 3**power
            assert (error > 0.2 * steps).all()
            assert (error <= 0.5 * steps + 2.0**-8 * 8).all()

    def test_frames_align_blocks_and_groups_of_layers(self) -> None:
        head = 128 + 12 * 4
        assert head < 4096
        assert reference.frame_bytes([10, 10, 10, 10], kinds=2) == 4096 + 3 * 256 + 10
        long = 600 * 1024 + 1
        # The first layer has more than a MiB: the second begins a group.
        first_end = 4096 + 600 * 1024 + 256 + long
        assert reference.frame_bytes([long] * 4, kinds=2) == -(-first_end // 4096) * 4096 + 600 * 1024 + 256 + long

    def test_a_gaussian_column_takes_what_theory_says(self) -> None:
        bits = 8 * reference.eq(noise(2048, 1, 32), 250).size().payload / (2048 * 32)
        assert bits == pytest.approx(np.log2(np.sqrt(2 * np.pi * np.e) / 0.25), abs=0.3)


CASES: Final = ((64, 2, 32), (96, 1, 20), (17, 3, 64))


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize(
    ("codec", "step", "power"), [("eq57", 83, 0), ("eq4", 83, 1), ("eq:83/2", 83, 2), ("eq3", 500, 0)]
)
def test_frames_of_eq_decode_to_the_words_of_the_model(
    codec: str, step: int, power: int, shape: tuple[int, int, int]
) -> None:
    if (reason := codecs.unavailable(codec)) is not None:
        pytest.skip(reason)
    words = noise(*shape, mean=1.5)
    words[3] = reference.to_bf16(reference.from_bf16(words[3]) * 40)
    decoded, _ = through_a_frame(words, codec)
    assert (decoded == reference.eq(words, step, power).decoded()).all()


@pytest.mark.parametrize("codec", ["x3", "xa", "eq57", "eq4", "eq3"])
def test_blocks_take_what_the_model_says(codec: str) -> None:
    if (reason := codecs.unavailable(codec)) is not None:
        pytest.skip(reason)
    words = noise(256, 4, 128, mean=0.5)
    _, length = through_a_frame(words, codec)
    if codec == "x3":
        expected = reference.x3(words).total
    elif codec == "xa":
        expected = reference.xa(words).total
    else:
        steps = {"eq57": (83, 0), "eq4": (83, 1), "eq3": (500, 0)}
        expected = reference.eq(words, *steps[codec]).size().total
    assert length == pytest.approx(expected, rel=0.005)


def through_a_frame(words: npt.NDArray[np.uint16], codec: str) -> tuple[npt.NDArray[np.uint16], int]:
    """The words that come back from a frame of one layer's K, and the length of its block."""
    tokens, heads, head_dim = words.shape
    form = TensorForm("k", "bf16", 1, heads, head_dim, tokens)
    plain = words.transpose(1, 0, 2).tobytes()
    frame = memoryview(bytearray(codecs.encode_bound(codec, form)))
    frame = frame[: codecs.encode_frame(memoryview(plain), frame, codec=codec, form=form)]
    head = codecs.parse_tensor_frame(frame, len(frame))
    back = bytearray(len(plain))
    codecs.decode_frame(frame, head, memoryview(back))
    found = np.frombuffer(back, np.uint16).reshape(heads, tokens, head_dim).transpose(1, 0, 2)
    return found, head.blocks[0].length


def row(codec: str, bits: float = 4.0, attention: float = 0.0) -> Row:
    return Row("synth", codec, "ours", 1024, bits, attention=attention)


class TestJudgement:
    def test_a_codec_that_was_not_measured_is_missed(self) -> None:
        verdicts = judge([], {"synth": 1024}, None)
        assert {verdict.says.split()[0] for verdict in verdicts} == {"x3", "xa", "eq55", "eq4", "eq3"}
        assert not any(verdict.is_met for verdict in verdicts)

    def test_targets_hold_for_every_seed_of_a_set(self) -> None:
        rows = [Row("synth-11", "x3", "ours", 1024, 11.5), Row("synth", "x3", "ours", 1024, 11.4)]
        verdicts = judge(rows, {"synth": 1024, "synth-11": 1024}, 0.1)
        assert {verdict.data: verdict.is_met for verdict in verdicts if verdict.says.startswith("x3")} == {
            "synth": True,
            "synth-11": False,
        }

    def test_bounds_themselves_are_met(self) -> None:
        rows = [row("eq4", bits=4.15, attention=0.068), row("x3", bits=16 / 1.4)]
        met = {verdict.says: verdict.is_met for verdict in judge(rows, {"synth": 1024}, 0.12)}
        assert met["eq4 bits <= 4.15"]
        assert met["eq4 attention <= 0.068"]
        assert met["x3 ratio >= 1.4"]
        assert met["eq4 overhead <= 0.12"]

    def test_a_broken_certificate_is_missed_at_any_chunk_length(self) -> None:
        rows = [Row("synth", "eq4", "ours", 256, 4.0, holds=False, tightness=1.01)]
        broken = [verdict for verdict in judge(rows, {"synth": 1024}, 0.1) if "certificates" in verdict.says]
        assert [verdict.is_met for verdict in broken] == [False]

    def test_every_target_is_of_a_set_and_codec_that_are_measured(self) -> None:
        assert {target.data for target in TARGETS} == {"minilm", "synth"}
        assert {target.codec for target in TARGETS} <= codecs.LOSSLESS | codecs.LOSSY

    def test_rows_survive_json(self) -> None:
        rows = [
            Row("synth", "eq4", "ours", 256, 4.0, attention=0.0625, holds=True, tightness=0.5),
            row("x3", bits=11.25),
        ]
        assert from_json(json.loads(json.dumps(to_json(rows)))) == rows

    def test_a_spread_is_of_the_rows_given(self) -> None:
        rows = [row("eq4", bits=bits) for bits in (4.0, 5.0, 3.0)]
        assert spread(rows, "bits") == (3.0, 4.0, 5.0)
        assert find(rows, "synth", "eq4", 1024) == rows[0]
        assert find(rows, "synth", "eq4", 256) is None


@pytest.fixture(scope="module")
def run(module_paths: ModulePaths) -> Path:
    """A folder with what the small run wrote: codecs.json and codecs.md."""
    folder = module_paths.mktemp("figures")
    files: list[str | Path] = ["--json", folder / "codecs.json", "--markdown", folder / "codecs.md"]
    run_with_torch([REPOSITORY / "tools" / "bench_codec.py", "--quick", "--model", *files])
    return folder


@pytest.fixture(scope="module")
def rows(run: Path) -> list[Row]:
    return from_json(json.loads((run / "codecs.json").read_text())["rows"])


class TestSmallRun:
    def test_fixed_rates_are_what_their_formats_say(self, rows: list[Row]) -> None:
        bits = {each.codec: each.bits for each in rows if each.group == "other"}
        expected = {
            "KIVI-4 g32": 5.0,
            "KIVI-2 g32": 3.0,
            "TurboQuant-4": 4 + 16 / 128,
            "TurboQuant-3 centred": 3 + 16 / 128 + 16 / 256,
            "q4_0": 4.5,
            "int8 per token-head": 8 + 16 / 128,
        }
        assert {name: bits[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert bits["NVFP4"] == pytest.approx(4.5, abs=0.001)

    def test_fewer_bits_of_one_codec_are_more_error(self, rows: list[Row]) -> None:
        error = {each.codec: each.attention for each in rows if each.group == "other"}
        assert 0.02 < error["fp8 per head"] < 0.04
        assert error["TurboQuant-4"] < error["TurboQuant-3"] < error["TurboQuant-2"]
        assert error["TurboQuant-4 centred"] < error["TurboQuant-4"]
        assert error["KIVI-4 g32"] < error["KIVI-2 g32"]
        assert error["CacheGen paper x0.5"] < error["CacheGen paper x1"] < error["CacheGen LMCache"]

    def test_eq4_loses_less_than_what_takes_as_many_bits(self, rows: list[Row]) -> None:
        eq4 = next(each for each in rows if each.codec == "eq4" and each.group == "model")
        assert eq4.bits < 4.2
        for name in ("TurboQuant-4", "KIVI-4 g32", "NVFP4", "q4_0", "CacheGen paper x1"):
            other = next(each for each in rows if each.codec == name)
            assert other.bits > eq4.bits or other.bits > 4.1
            assert other.attention > 1.2 * eq4.attention

    def test_certificates_hold_and_frames_agree_with_the_model(self, rows: list[Row]) -> None:
        ours = [each for each in rows if each.group == "ours"]
        if not ours:
            pytest.skip(codecs.unavailable("eq4") or "nothing measured")
        assert all(each.holds is not False for each in ours)
        model = {each.codec: each for each in rows if each.group == "model"}
        for each in ours:
            if each.codec in model:
                assert each.bits == pytest.approx(model[each.codec].bits, rel=0.01)
                assert each.attention == pytest.approx(model[each.codec].attention, rel=0.01)

    def test_tables_have_a_line_for_each_codec_and_errors_of_the_lossy_ones(self, run: Path, rows: list[Row]) -> None:
        text = (run / "codecs.md").read_text()
        lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
        assert {"KIVI-4 g32", "eq4 (model)"} <= set(lines)
        kivi = next(each for each in rows if each.codec == "KIVI-4 g32")
        assert f"| 5.000 | 3.200x | {kivi.relative_k:.3f} / {kivi.relative_v:.3f} |" in lines["KIVI-4 g32"]
        assert f"| KIVI-4 g32 | 5.00 / 5.00 | {kivi.relative_k:.3f} / " in text.partition("**lossy**")[2]
