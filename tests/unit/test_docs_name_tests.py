"""What the documents say is tested is: every test that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# A test's name as the documents write it: words with underscores, without `test_`; other code has dots, slashes or hyphens.
NAMED = re.compile(r"`(?:test_)?([a-z0-9]+(?:_[a-z0-9]+){3,})`")
ENGINES = ("lmcache", "vllm", "sglang", "transformers", "lm-protocol")
DOCUMENTS = (
    *("s3.md", "kv-api.md", "gc.md", "reliability.md", "layer-wise.md", "engines-s3.md"),
    *(f"engines/{name}.md" for name in ENGINES),
)


def existing_names() -> set[str]:
    found: set[str] = set()
    for path in (REPOSITORY / "tests").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_a_document_names_exists(document: str) -> None:
    text = (REPOSITORY / "docs" / document).read_text()
    named = {
        name for line in text.splitlines() if line.startswith("|") for name in NAMED.findall(line.rpartition("| ")[2])
    }
    missing = named - existing_names()
    assert not missing


def test_the_table_of_s3_names_a_test_in_every_row() -> None:
    text = (REPOSITORY / "docs" / "s3.md").read_text()
    operations = text.partition("## Operations")[2].partition("\n## ")[0]
    rows = [line for line in operations.splitlines() if line.startswith("| ") and " --- " not in line][1:]
    assert len(rows) > 20
    untested = [row for row in rows if not NAMED.search(row.rpartition(" | ")[2])]
    assert not untested
