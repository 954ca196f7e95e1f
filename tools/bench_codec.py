"""Ratio, error and speed of every tensor codec, on K and V of MiniLM over English prose and on an LLM-like generator.

    make codec-env
    .envs/codec/bin/python tools/bench_codec.py             all tables; minutes
    .envs/codec/bin/python tools/bench_codec.py --check     exits 1 and names what is missed
    .envs/codec/bin/python tools/bench_codec.py --quick     a small part of the generator's set, of torch and numpy alone; seconds

Ours go through `kvobj.tensors.codecs`; every frame is decoded and held against what went in. Comparators are re-created here,
and each says whether it reproduces its published figures within 5 %. `--model` adds an independent model of ours, sizes by
entropy. What cannot be measured is named with its reason. docs/codecs.md, Figures, has the results and the definitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

try:
    import torch
except ModuleNotFoundError:
    sys.exit("torch is not installed: make codec-env, and run this with .envs/codec/bin/python")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # .envs/codec has no kvobj of its own

from codec_bench import datasets, model, others, ours, tables, targets
from codec_bench.rows import Row, Speed, to_json
from command_line import Parser, output_file, run_tool

from kvobj.tensors import codecs as own

PUBLISHED_SETS: Final[tuple[str, ...]] = ("minilm", "synth")
CHUNK_TOKENS: Final = 256
QUICK_TOKENS: Final = 256
QUICK_WINDOWS: Final = 2
SPEED_ROUNDS: Final = 5
SPEED_CODECS: Final = ("x3", "xa", "f8", "eq57", "eq4", "eq3", "h4")
SEED_WINDOWS: Final = 2
"""Of the generator's other seeds: one calibrates, one is measured."""


def main() -> int:
    """Measure what was asked for; the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    sets = _sets(arguments)
    codecs = [codec for codec in ours.CODECS if _is_usable(codec)]
    rows: list[Row] = []
    for data in sets:
        print(f"{data.name}: {data.values} values, BLAKE3 {data.digest()}", file=sys.stderr)
        rows += _rows(data, codecs, arguments)
    windows = {data.name: data.test[0][0].k.shape[0] for data in sets}
    overhead = _overhead(sets) if "eq4" in codecs else None
    verdicts = targets.judge(rows, windows, overhead)
    speeds = _speeds(sets, codecs) if arguments.speed else []
    shown = _tables(rows, windows, codecs, speeds, verdicts if arguments.check else [])
    tables.show(shown)
    sets_shown: dict[str, int] = {name: windows[name] for name in PUBLISHED_SETS if name in windows}
    if arguments.markdown:
        summaries = [
            tables.summary_table(rows, sets_shown, CHUNK_TOKENS, is_lossless=is_lossless)
            for is_lossless in (True, False)
        ]
        parts = [f"**{table[0]}**\n\n{tables.markdown(table)}" for table in (*summaries, *shown)]
        arguments.markdown.write_text("\n\n".join(parts) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(sets, rows, speeds, overhead), indent=1) + "\n")
    if arguments.plots:
        _plot(arguments.plots, rows, sets_shown)
    for row in others.unreproduced(rows):
        print(f"{row.data}: {row.codec} is off its published figures by {others.deviation(row):.1%}", file=sys.stderr)
    return _missed(verdicts) if arguments.check else 0


def _missed(verdicts: list[targets.Verdict]) -> int:
    """Name what is missed; 1 where anything is."""
    missed = [verdict for verdict in verdicts if not verdict.is_met]
    for verdict in missed:
        print(f"MISSED on {verdict.data}: {verdict.says}, measured {verdict.value}", file=sys.stderr)
    return int(bool(missed))


def _tables(
    rows: list[Row], windows: dict[str, int], codecs: list[str], speeds: list[Speed], verdicts: list[targets.Verdict]
) -> list[tables.Table]:
    """All that has something to show."""
    shown = [
        tables.rows_table(rows, name, tokens)
        for name, window in windows.items()
        if name in PUBLISHED_SETS
        for tokens in dict.fromkeys((window, CHUNK_TOKENS))
    ]
    of_synth = {name: tokens for name, tokens in windows.items() if name.startswith("synth")}
    if len(of_synth) > 1:
        shown.append(tables.spread_table(rows, of_synth, codecs))
    if speeds:
        shown.append(tables.speed_table(speeds))
    if verdicts:
        shown.append(tables.verdict_table(verdicts))
    return shown


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="two short windows of the generator, and no MiniLM")
    parser.add_argument("--model", action="store_true", help="rows of the independent model, too")
    parser.add_argument("--no-others", action="store_true", help="our codecs alone")
    parser.add_argument("--seeds", action="store_true", help="the generator's other seeds, too")
    parser.add_argument("--speed", action="store_true", help="CPU speeds on one core")
    parser.add_argument("--check", action="store_true", help="judge the targets; exit 1 where one is missed")
    parser.add_argument("--json", type=output_file, help="file to write all figures to")
    parser.add_argument("--markdown", type=output_file, help="file to write the tables to")
    parser.add_argument("--plots", type=Path, help="folder to write codec-*.svg to")
    return parser.parse_args()


def _sets(arguments: argparse.Namespace) -> list[datasets.DataSet]:
    if arguments.quick:
        return [datasets.synth(windows=QUICK_WINDOWS, tokens=QUICK_TOKENS)]
    found = []
    try:
        found.append(datasets.minilm())
    except FileNotFoundError as error:
        print(f"minilm: {error}", file=sys.stderr)
    found.append(datasets.synth())
    if arguments.seeds:
        found += [datasets.synth(seed, SEED_WINDOWS) for seed in datasets.SPREAD_SEEDS if seed != datasets.SYNTH_SEED]
    return found


def _is_usable(codec: str) -> bool:
    reason = own.unavailable(codec)
    if reason is not None:
        print(f"{codec}: {reason}", file=sys.stderr)
    return reason is None


def _rows(data: datasets.DataSet, codecs: list[str], arguments: argparse.Namespace) -> Iterator[Row]:
    window = data.test[0][0].k.shape[0]
    for tokens in dict.fromkeys((window, CHUNK_TOKENS)):
        for codec in codecs:
            yield ours.measure(data, codec, tokens)
        if arguments.model:
            for codec in model.CODECS:
                yield model.measure(data, codec, tokens)
    if arguments.no_others or data.name not in PUBLISHED_SETS:
        return
    for comparator in others.comparators():
        yield others.measure(data, comparator, window)
    if find_spec("zstandard") is None:
        print("zstd and the other lossless comparators: zstandard is not installed", file=sys.stderr)
    else:
        yield from others.measure_lossless(data, window)


def _overhead(sets: list[datasets.DataSet]) -> float | None:
    """Of eq4 on a chunk as a usual model has it; None where there is no set to make one of."""
    data = next((data for data in sets if data.name == "synth"), None)
    try:
        chunk = None if data is None else model.real_size_chunk(data)
    except ValueError:
        return None
    if chunk is None:
        return None
    return model.overhead(chunk, "eq4", ours.code_chunk(chunk, "eq4").frame_bytes)


def _speeds(sets: list[datasets.DataSet], codecs: list[str]) -> list[Speed]:
    from codec_bench import speeds  # noqa: PLC0415 - needs zstandard

    data = next(data for data in sets if data.name == "synth")
    chunk = model.real_size_chunk(data)
    names = [codec for codec in SPEED_CODECS if codec in codecs]
    return speeds.measure(ours.form_of(chunk), ours.plain_of(chunk), names, rounds=SPEED_ROUNDS)


def _plot(folder: Path, rows: list[Row], windows: dict[str, int]) -> None:
    from codec_bench import plots  # noqa: PLC0415 - needs matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    plots.plot_rate(folder / "codec-rate.svg", rows, windows)
    plots.plot_lossless(folder / "codec-lossless.svg", rows, windows)


def _document(
    sets: list[datasets.DataSet], rows: list[Row], speeds: list[Speed], overhead: float | None
) -> dict[str, Any]:
    return {
        "hardware": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "text": datasets.text_digest(),
        "sets": {data.name: {"blake3": data.digest(), "values": data.values} for data in sets},
        "rows": to_json(rows),
        "overhead": overhead,
        "speeds": [asdict(speed) for speed in speeds],
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    run_tool(main)
