"""The rows as tables: for a terminal, and for `docs/codecs.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from codec_bench.others import PUBLISHED, TOLERANCE, deviation
from codec_bench.rows import ZSTD_PLANES, ZSTD_RAW, Row, Speed, find, spread
from codec_bench.targets import Verdict

GB: Final = 1e9
Table = tuple[str, list[str], list[list[str]]]
"""Title, heads, lines."""


def rows_table(rows: Sequence[Row], data: str, tokens: int) -> Table:
    """Every codec on one set at one chunk length: bits, ratio, errors, and whether a comparator reproduces."""
    found = [row for row in rows if row.data == data and row.tokens == tokens]
    order = {"ours": 0, "model": 1, "other": 2}
    found.sort(key=lambda row: (not row.is_lossless, order[row.group], -row.bits))
    lines = [
        [_named(row), f"{row.bits:.3f}", f"{row.ratio:.3f}x", *_errors(row), _certified(row), _reproduces(row)]
        for row in found
    ]
    heads = ["codec", "b/v", "ratio", "relK / relV", "attention", "worst cosine", "error / certified", "as published"]
    return f"{data}, chunks of {tokens} tokens", heads, lines


def summary_table(rows: Sequence[Row], windows: Mapping[str, int], shorter: int, *, is_lossless: bool) -> Table:
    """A line for each codec with all sets beside each other: b/v at a window and at shorter chunks, errors, worst cosine."""
    order = {"ours": 0, "model": 1, "other": 2}
    found = [row for row in rows if row.is_lossless == is_lossless and row.tokens == windows.get(row.data)]
    found.sort(key=lambda row: (order[row.group], -row.bits))
    lines = []
    for name, group in dict.fromkeys((row.codec, row.group) for row in found):
        line = [f"**`{name}`**" if group == "ours" else name]
        for data, tokens in windows.items():
            of_codec = {row.tokens: row for row in rows if (row.data, row.codec, row.group) == (data, name, group)}
            line += _summary(of_codec.get(tokens), of_codec.get(shorter))
        lines.append(line)
    heads = ["codec"]
    for data, tokens in windows.items():
        heads.append(f"{data}: b/v at {tokens:,} / {shorter} tokens")
        heads += ["ratio"] if is_lossless else ["relK / relV; attention; worst cosine"]
    return ("lossless" if is_lossless else "lossy"), heads, lines


def _summary(row: Row | None, shorter: Row | None) -> list[str]:
    if row is None:
        return ["-", "-"]
    bits = f"{row.bits:.2f}" + ("" if shorter is None else f" / {shorter.bits:.2f}")
    if row.is_lossless:
        return [bits, f"{row.ratio:.3f}x" + ("" if shorter is None else f" / {shorter.ratio:.3f}x")]
    return [bits, f"{row.relative_k:.3f} / {row.relative_v:.3f}; {row.attention:.4f}; {row.worst_cosine:.2f}"]


def spread_table(rows: Sequence[Row], data: Mapping[str, int], codecs: Sequence[str]) -> Table:
    """Each codec over the seeds of one generator: least, mean, most of b/v and attention error."""
    lines = []
    for codec in codecs:
        found = [row for name, tokens in data.items() if (row := find(rows, name, codec, tokens)) is not None]
        if found:
            bits, error = spread(found, "bits"), spread(found, "attention")
            errors = "0" if error[2] == 0.0 else " / ".join(f"{value:.4f}" for value in error)
            lines.append([codec, str(len(found)), " / ".join(f"{value:.3f}" for value in bits), errors])
    return "seeds of synth: least / mean / most", ["codec", "seeds", "b/v", "attention"], lines


def speed_table(speeds: Sequence[Speed]) -> Table:
    """GB/s of plain bytes on one core, and the ratios to zstd's on the same bytes."""
    by_name = {speed.codec: speed for speed in speeds}
    bases = [by_name[name] for name in (ZSTD_RAW, ZSTD_PLANES) if name in by_name]
    lines = []
    for speed in speeds:
        line = [speed.codec, f"{speed.encode / GB:.2f}", f"{speed.decode / GB:.2f}"]
        line += [f"{speed.encode / base.encode:.2f} / {speed.decode / base.decode:.2f}" for base in bases]
        lines.append(line)
    heads = ["codec", "encode GB/s", "decode GB/s", *(f"of {base.codec}" for base in bases)]
    return "one core: plain bytes, encode / decode", heads, lines


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Each target, what was measured, and whether it is met."""
    lines = [
        [
            verdict.data,
            verdict.says,
            "-" if verdict.value is None else f"{verdict.value:.4f}",
            "met" if verdict.is_met else "MISSED",
        ]
        for verdict in verdicts
    ]
    return "targets", ["set", "target", "measured", ""], lines


def markdown(table: Table) -> str:
    """A table as a document holds it, without its title."""
    _title, heads, lines = table
    rule = ["---"] * len(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def show(tables: Sequence[Table]) -> None:
    """Print them: with rich where it is installed, else as Markdown."""
    try:
        from rich.console import Console  # noqa: PLC0415 - the quick run does without
        from rich.table import Table as Drawn  # noqa: PLC0415
    except ImportError:
        for table in tables:
            print(f"\n{table[0]}\n\n{markdown(table)}")
        return
    console = Console(width=None if Console().is_terminal else 150)
    for title, heads, lines in tables:
        drawn = Drawn(title=title, title_justify="left")
        for at, head in enumerate(heads):
            drawn.add_column(head, justify="left" if at == 0 else "right")
        for line in lines:
            drawn.add_row(*line)
        console.print(drawn)


def _named(row: Row) -> str:
    return f"{row.codec} (model)" if row.group == "model" else row.codec


def _errors(row: Row) -> list[str]:
    if row.is_lossless:
        return ["0", "0", "0"]
    relative = f"{row.relative_k:.3f} / {row.relative_v:.3f}"
    return [relative, f"{row.attention:.4f}", f"{row.worst_cosine:.3f}"]


def _certified(row: Row) -> str:
    if row.holds is None or row.tightness is None:
        return ""
    return f"{row.tightness:.3f}" + ("" if row.holds else " BROKEN")


def _reproduces(row: Row) -> str:
    off = deviation(row)
    if off is None:
        return ""
    published = PUBLISHED[row.data, row.codec]
    figures = f"{published.bits:.2f}" + (f"; {published.attention:.3f}" if published.attention else "")
    return f"{figures}: " + ("reproduces" if off <= TOLERANCE else f"off by {off:.1%}")
