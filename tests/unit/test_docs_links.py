"""What the documents point to is there: files, headings, tools with their options, commands of kvobj-admin, targets of make."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvobj.admin.cli import parser

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").rglob("*.md")])
TODAY = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
TOOL = re.compile(r"tools/(\w+\.py)([^`\n|]*)")
MAKE = re.compile(r"(?:^|`)make ((?:[a-z][a-z0-9-]* ?)+)(?:`|$)", re.MULTILINE)
ADMIN = re.compile(r"kvobj-admin ([^`\n)\"|;#]*)")


def names(documents: list[Path]) -> list[str]:
    return [str(document.relative_to(REPOSITORY)) for document in documents]


@cache
def anchors(document: Path) -> frozenset[str]:
    """What headings are linked to by, as forges make them."""
    found: list[str] = []
    for heading in HEADING.findall(CODE.sub("", document.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return frozenset(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    dead = []
    for link in LINK.findall(CODE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def options_of(tool: Path) -> set[str]:
    """The options that a tool takes, by its source and that of what it imports from beside it."""
    source = tool.read_text()
    beside = [tool.parent / f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)]
    return set(re.findall(r'"(--[a-z-]+)"', "".join([source, *(each.read_text() for each in beside if each.exists())])))


@pytest.mark.parametrize("document", [*TODAY, REPOSITORY / "Makefile"], ids=names([*TODAY, REPOSITORY / "Makefile"]))
def test_every_tool_that_a_document_names_is_there_and_takes_the_options_it_is_given(document: Path) -> None:
    wrong = []
    for name, rest in TOOL.findall(document.read_text()):
        tool = REPOSITORY / "tools" / name
        given = re.findall(r"(?<!\S)(--[a-z][a-z-]*)", re.split(r"-->|;|&&", rest)[0])
        if name != "NAME.py" and not (tool.exists() and set(given) <= options_of(tool)):
            wrong.append(f"{name} {' '.join(given)}")
    assert not wrong


def test_every_target_of_make_that_a_document_names_is_there() -> None:
    rules = (REPOSITORY / "Makefile").read_text()
    phony = {name for line in re.findall(r"^\.PHONY: (.*)$", rules, re.MULTILINE) for name in line.split()}
    for document in TODAY:
        for targets in MAKE.findall(document.read_text()):
            assert set(targets.split()) <= phony, document


def admin_commands() -> Iterator[tuple[Path, list[str]]]:
    """What documents give kvobj-admin; a command's name alone stands for it, and a variable for what it holds."""
    for document in TODAY:
        text = document.read_text()
        code = [*CODE.findall(text), *SPAN.findall(CODE.sub("", text))]
        for words in ADMIN.findall("\n".join(code)):
            yield document, [word for word in shlex.split(words) if not word.startswith("$")]


def test_every_command_of_kvobj_admin_that_a_document_gives_is_one() -> None:
    assert sum(1 for _ in admin_commands()) > 50
    for document, words in admin_commands():
        at, grammar = 0, parser()
        while at < len(words) and words[at].startswith("--"):
            at += 2 if "=" not in words[at] and words[at] != "--json" else 1
        for word in words[at:]:
            choices = [each.choices for each in grammar._actions if isinstance(each, argparse._SubParsersAction)]
            if not choices or choices[0] is None:
                break
            assert word in choices[0], (document, words)
            grammar = choices[0][word]
        known = {option for action in grammar._actions for option in action.option_strings}
        assert {word for word in words[at:] if word.startswith("--")} <= known, (document, words)
