"""The record of `make toxics`: what each run has written to its folder, as one JSON document and as tables for docs/reliability.md.

A folder has `tier-*.json` (tests/remote/test_toxics.py), `node-*.json` (test_toxics_of_a_node.py) and `kills.json`
(test_kill_in_upload.py); what is missing is left out. Writes `record.json` and `record.md` beside them and prints the tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command_line import Parser, existing_folder, run_tool
from load_client import hardware

_TIER = (
    ("toxic", "toxic"),
    ("operations_under_fire", "operations"),
    ("hit", "met it"),
    ("injected", "faults"),
    ("succeeded_under_fire", "succeeded"),
    ("failed", "failed"),
    ("not_tried", "not tried"),
    ("corrupt_not_served", "wrong bytes, not served"),
    ("slowest_seconds", "slowest, s"),
    ("recovered_seconds", "well again after, s"),
    ("removed_blobs", "swept blobs"),
    ("aborted_uploads", "swept uploads"),
    ("violations", "violations"),
)
_NODE = (
    ("toxic", "toxic"),
    ("operations", "operations"),
    ("writes", "writes"),
    ("hit_writes", "met it"),
    ("injected", "faults"),
    ("shared", "shared"),
    ("refused", "503"),
    ("slowest_seconds", "slowest, s"),
    ("drained_seconds", "drained after, s"),
)


def main() -> None:
    """Read the folder, write the record, print the tables."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=existing_folder, help="what `make toxics` has written")
    folder: Path = parser.parse_args().folder
    tiers, nodes = _read(folder, "tier-*.json"), _read(folder, "node-*.json")
    kills = _read(folder, "kills.json")
    parts = []
    if tiers:
        parts.append("The remote tier, through each toxic:\n\n" + _table(tiers, _TIER))
    if nodes:
        parts.append("A node, class `shared`, through one toxic after the other:\n\n" + _table(nodes, _NODE))
    parts += [
        "kill -9 in mid-upload: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run.items()) + "."
        for run in kills
    ]
    text = "\n\n".join(parts)
    record = {"hardware": hardware(), "tier": tiers, "node": nodes, "kills": kills}
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "record.md").write_text(text + "\n")
    print(text)


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def _table(runs: list[dict[str, Any]], columns: tuple[tuple[str, str], ...]) -> str:
    lines = ["| " + " | ".join(title for _, title in columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(_cell(run.get(name, "")) for name, _ in columns) + " |" for run in runs]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{sum(value.values()):,}"
    if isinstance(value, list):
        return str(len(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_tool(main)
