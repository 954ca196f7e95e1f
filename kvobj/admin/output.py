"""How a command answers: a table for people, or one JSON document a line for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text


def visible(text: str) -> str:
    """The text as it may stand on a line of a terminal: what would break the line, move the cursor or hide what follows is
    written as its escape. Names and keys come from whoever wrote the object."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def tell(console: Console, text: str) -> None:
    """Print the text on a line of its own, as `visible` has it: what it says of names, brackets and colons is no markup."""
    console.out(visible(text), highlight=False)


class Rows(Table):
    """A table whose cells are shown as `visible` has them, and never read as markup."""

    def __init__(self, *titles: str) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold")
        for title in titles:
            self.add_column(Text(visible(title)), overflow="fold")

    def add(self, *cells: str) -> None:
        """Add a row."""
        self.add_row(*(Text(visible(cell)) for cell in cells))


@dataclass(frozen=True, slots=True)
class Output:
    """Where answers go. `console` prints tables to the same stream that JSON would go to; `errors` is for people alone."""

    stream: TextIO
    errors: TextIO
    console: Console
    is_json: bool

    def show(self, document: object, render: Callable[[Console], None]) -> None:
        """Print the document as JSON, or let `render` print it as a table."""
        if self.is_json:
            written = json.dumps(document, ensure_ascii=False)
            # A terminal may take a character beyond ASCII for an order too: then all such are written as escapes.
            self.stream.write((written if written.isprintable() else json.dumps(document)) + "\n")
        else:
            render(self.console)

    def progress(self, *columns: ProgressColumn) -> Progress:
        """A bar for who looks at a terminal, gone when it ends; nothing is shown where `errors` is none or answers are JSON."""
        is_watched = self.errors.isatty() and not self.is_json
        return Progress(*columns, console=Console(file=self.errors), transient=True, disable=not is_watched)

    def complain(self, text: str) -> None:
        """Tell why the command did not do what was asked."""
        self.errors.write(f"kvobj-admin: {visible(text)}\n")
