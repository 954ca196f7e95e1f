"""How a command answers: a table for people, or one JSON document a line for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console


def visible(text: str) -> str:
    """The text as it may stand on a line of a terminal: what would break the line, move the cursor or hide what follows is
    written as its escape. Names and keys come from whoever wrote the object."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


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
            self.stream.write(json.dumps(document, ensure_ascii=False) + "\n")
        else:
            render(self.console)

    def complain(self, text: str) -> None:
        """Tell why the command did not do what was asked."""
        self.errors.write(f"kvobj-admin: {visible(text)}\n")
