"""Patterns of policies: text with `*` (any run), `?` (any one character) and `${variable}`. Pure.

Between two stars the leftmost place is taken and never given up, which is right for such patterns: at the worst a pattern costs its
length times that of what is matched, so that no policy makes a request slow. Source:
IAM user guide, "Policy elements: Variables and tags", "Resource" and "String condition operators".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvobj.errors import InvalidRequestError

Matcher = Callable[[str], bool]
Resolve = Callable[[str], str | None]
"""The value of a variable by its name, None where the request has none."""

_VARIABLE: Final = re.compile(r"\$\{([^{}]*)\}")
_NAMED: Final = re.compile(r"\s*([A-Za-z0-9:/_\-]+)\s*(?:,\s*'([^']*)')?\s*\Z").match
_LITERAL: Final = {"*": "*", "?": "?", "$": "$"}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable by its name, and what stands in its place where the request has none."""

    name: str
    default: str | None


# A pattern's parts: text; text whose `*` and `?` are wildcards; variables.
_Part = str | tuple[str] | Variable


class Pattern:
    """A pattern that is matched against whole texts. `needed`: its variables without a default."""

    __slots__ = ("_matcher", "_parts", "needed", "variables")

    def __init__(self, pattern: str, *, has_wildcards: bool = True, has_variables: bool = True) -> None:
        """Raises `InvalidRequestError` for what is no variable."""
        self._parts = _parse(pattern, has_wildcards=has_wildcards, has_variables=has_variables)
        self.variables = frozenset(part.name for part in self._parts if isinstance(part, Variable))
        self.needed = frozenset(
            part.name for part in self._parts if isinstance(part, Variable) and part.default is None
        )
        self._matcher = None if self.variables else _matcher_of(self._parts, _nothing)

    def matches(self, text: str, resolve: Resolve) -> bool:
        """Whether the text fits. A variable without a value makes that nothing does."""
        matcher = self._matcher
        if matcher is None:
            matcher = _matcher_of(self._parts, resolve)
        return matcher is not None and matcher(text)

    def text(self, resolve: Resolve) -> str | None:
        """The pattern as plain text, its variables replaced; None where one has no value."""
        pieces: list[str] = []
        for part in self._parts:
            piece = _value(part, resolve)
            if piece is None:
                return None
            pieces.append(piece)
        return "".join(pieces)


def wildcard_matcher(pattern: str) -> Matcher:
    """The test of a pattern without variables."""
    found = _matcher_of([(pattern,)], _nothing)
    assert found is not None
    return found


def _parse(pattern: str, *, has_wildcards: bool, has_variables: bool) -> list[_Part]:
    parts: list[_Part] = []
    position = 0

    def add(text: str) -> None:
        if text:
            parts.append((text,) if has_wildcards else text)

    for found in _VARIABLE.finditer(pattern) if has_variables else ():
        add(pattern[position : found.start()])
        position = found.end()
        literal = _LITERAL.get(found[1])
        named = _NAMED(found[1])
        if literal is not None:
            parts.append(literal)
        elif named is not None:
            parts.append(Variable(named[1], named[2]))
        else:
            raise InvalidRequestError("not a policy variable", variable=found[0])
    add(pattern[position:])
    return parts


def _value(part: _Part, resolve: Resolve) -> str | None:
    if isinstance(part, Variable):
        value = resolve(part.name)
        return part.default if value is None else value
    return part if isinstance(part, str) else part[0]


def _matcher_of(parts: list[_Part], resolve: Resolve) -> Matcher | None:
    """Stretches between stars; in each, None stands for one character of any kind."""
    stretches: list[list[str | None]] = [[]]
    for part in parts:
        value = _value(part, resolve)
        if value is None:
            return None
        if isinstance(part, tuple):
            _add_wildcards(stretches, value)
        elif value:
            stretches[-1].append(value)
    if any(piece is None for stretch in stretches for piece in stretch):
        return _expression_of(stretches)
    texts = ["".join([piece for piece in stretch if piece is not None]) for stretch in stretches]
    if len(texts) == 1:
        return texts[0].__eq__
    return _Stretches(texts[0], [text for text in texts[1:-1] if text], texts[-1])


def _add_wildcards(stretches: list[list[str | None]], text: str) -> None:
    for number, stretch in enumerate(text.split("*")):
        if number:
            stretches.append([])
        for position, piece in enumerate(stretch.split("?")):
            if position:
                stretches[-1].append(None)
            if piece:
                stretches[-1].append(piece)


class _Stretches:
    """Text of which the first and last stretch are fixed, and the middle ones follow in order."""

    __slots__ = ("_first", "_last", "_least", "_middle")

    def __init__(self, first: str, middle: list[str], last: str) -> None:
        self._first = first
        self._middle = middle
        self._last = last
        self._least = len(first) + len(last)

    def __call__(self, text: str) -> bool:
        if len(text) < self._least or not text.startswith(self._first) or not text.endswith(self._last):
            return False
        position, end = len(self._first), len(text) - len(self._last)
        for piece in self._middle:
            position = text.find(piece, position, end)
            if position < 0:
                return False
            position += len(piece)
        return True


def _expression_of(stretches: list[list[str | None]]) -> Matcher:
    first, *others = ["".join(["." if piece is None else re.escape(piece) for piece in each]) for each in stretches]
    # Atomic groups: a stretch that has found its place does not look for another one.
    middle = "".join([f"(?>.*?{stretch})" for stretch in others[:-1] if stretch])
    last = f".*{others[-1]}" if others else ""
    match = re.compile(f"{first}{middle}{last}\\Z", re.DOTALL).match
    least = sum(1 if piece is None else len(piece) for stretch in stretches for piece in stretch)
    return lambda text: len(text) >= least and match(text) is not None


def _nothing(_name: str) -> None:
    return None
