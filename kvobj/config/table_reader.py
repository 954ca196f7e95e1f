"""Reads one TOML table key by key, checks types, and keeps every problem with its path instead of stopping at the first.

After a problem a reader returns the default, so that the rest is still read; whoever ends the reading looks at `problems` first
and throws the values away if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from kvobj.config.quantities import parse_duration_seconds, parse_listen_address, parse_size_bytes
from kvobj.config.settings import ListenAddress

T = TypeVar("T")
ChoiceT = TypeVar("ChoiceT", bound=str)


class TableReader:
    """One table at `path`. `finish()` reports the keys that nobody asked for."""

    __slots__ = ("_asked", "_table", "path", "problems")

    def __init__(self, table: Mapping[str, object], path: str, problems: list[str]) -> None:
        self._table = table
        self._asked: set[str] = set()
        self.path = path
        self.problems = problems

    def path_of(self, key: str) -> str:
        """The path of a key as problems name it."""
        return f"{self.path}.{key}" if self.path else key

    def report(self, key: str, problem: str) -> None:
        """Keep a problem of a key."""
        self.problems.append(f"{self.path_of(key)}: {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is written down."""
        return key in self._table

    def text(self, key: str, default: str) -> str:
        """A text that is not empty."""
        value = self._take(key, str, "a text", default)
        if not value and self.has(key):
            self.report(key, "must not be empty")
            return default
        return value

    def optional_text(self, key: str) -> str | None:
        """A text that is not empty, or None where the key is absent."""
        return self.text(key, "") or None

    def required_text(self, key: str) -> str:
        """A text that must be there."""
        if not self.has(key):
            self._asked.add(key)
            self.report(key, "is missing")
            return ""
        return self.text(key, "")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where the key is absent."""
        values: list[object] = self._take(key, list, "a list of texts", [])
        texts = tuple(value for value in values if isinstance(value, str) and value)
        if len(texts) != len(values):
            self.report(key, "must be a list of texts")
        return texts

    def choice(self, key: str, choices: Sequence[ChoiceT], default: ChoiceT) -> ChoiceT:
        """One of a few texts."""
        value = self._take(key, str, "a text", default)
        for choice in choices:
            if value == choice:
                return choice
        self.report(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return self._take(key, bool, "true or false", default)

    def whole_number(self, key: str, default: int, *, low: int, high: int) -> int:
        """A whole number within bounds."""
        value = self._take(key, int, "a whole number", default)
        if not low <= value <= high:
            self.report(key, f"must be from {low} to {high}, not {value}")
            return default
        return value

    def fraction(self, key: str, default: float, *, low: float, high: float) -> float:
        """A number within bounds."""
        value = self._table.get(key, default)
        self._asked.add(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.report(key, f"must be a number, not {_kind_of(value)}")
            return default
        if not low <= value <= high:
            self.report(key, f"must be from {low} to {high}, not {value}")
            return default
        return float(value)

    def size_bytes(self, key: str, default: int, *, low: int, high: int) -> int:
        """A size with its unit, within bounds given in bytes."""
        size_bytes = self._quantity(key, default, parse_size_bytes, 'a size like "4 GiB"')
        if not low <= size_bytes <= high:
            self.report(key, f"must be from {low} B to {high} B, not {size_bytes} B")
            return default
        return size_bytes

    def optional_size_bytes(self, key: str, *, low: int, high: int) -> int | None:
        """A size with its unit, within bounds; None where the key is absent, and after a problem: no bound of other sizes then."""
        if not self.has(key):
            self._asked.add(key)
            return None
        told = len(self.problems)
        size_bytes = self.size_bytes(key, low, low=low, high=high)
        return size_bytes if len(self.problems) == told else None

    def seconds(self, key: str, default: float, *, low: float = 0.001, high: float = 366 * 86400.0) -> float:
        """A duration with its unit, within bounds given in seconds."""
        seconds = self._quantity(key, default, parse_duration_seconds, 'a duration like "30 s"')
        if not low <= seconds <= high:
            self.report(key, f"must be from {low} s to {high} s, not {seconds} s")
            return default
        return seconds

    def address(self, key: str, default: ListenAddress) -> ListenAddress:
        """A listen address."""
        return self._quantity(key, default, parse_listen_address, 'a text like "127.0.0.1:9000"')

    def table(self, key: str) -> Self:
        """The reader of a table inside this one; an empty one where the key is absent."""
        table: dict[str, object] = self._take(key, dict, "a table", {})
        return type(self)(table, self.path_of(key), self.problems)

    def tables(self, key: str) -> list[Self]:
        """The readers of an array of tables; none where the key is absent."""
        values: list[object] = self._take(key, list, f"tables, written [[{key}]]", [])
        if not all(isinstance(value, dict) for value in values):
            self.report(key, f"must be tables, written [[{key}]]")
        return [
            type(self)(value, f"{self.path_of(key)}[{position}]", self.problems)
            for position, value in enumerate(values)
            if isinstance(value, dict)
        ]

    def items(self) -> list[tuple[str, str]]:
        """All keys with their texts, for a table whose keys are the user's to name."""
        return [(key, self.text(key, "")) for key in self._table]

    def finish(self) -> None:
        """Report every key that nobody asked for."""
        for key in self._table:
            if key not in self._asked:
                known = ", ".join(sorted(self._asked))
                self.report(key, f"is no known key (known here: {known})")

    def ignore_rest(self) -> None:
        """Ask for all keys: where a problem about the whole table makes a list of unknown keys noise."""
        self._asked.update(self._table)

    def _take(self, key: str, kind: type[T], wanted: str, default: T) -> T:
        self._asked.add(key)
        if key not in self._table:
            return default
        value = self._table[key]
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
        self.report(key, f"must be {wanted}, not {_kind_of(value)}")
        return default

    def _quantity(self, key: str, default: T, parse: Callable[[str], T], wanted: str) -> T:
        text = self._take(key, str, wanted, "")
        if not text:
            if isinstance(self._table.get(key), str):
                self.report(key, f"must be {wanted}, not empty")
            return default
        try:
            return parse(text)
        except ValueError as error:
            self.report(key, str(error))
            return default


def _kind_of(value: object) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return f"the bare number {value}"
        case str():
            return f"the text {value!r}"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return f"a {type(value).__name__}"
