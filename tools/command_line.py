"""How a tool is called: help that states every default, arguments that are looked at before anything runs, errors of one line.

A tool exits 0 where all is well, 1 where what it looked at is not so, 2 on misuse and where something is missing.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from kvobj.errors import KvobjError
from kvobj.tensors.codec_names import CodecName

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T", int, float)
V = TypeVar("V")
_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("B", "KIB", "MIB", "GIB", "TIB"))}
_INTERRUPTED: Final = 130
_SIGNALLED: Final = 128


class ToolError(Exception):
    """What keeps a tool from its work, in words for who called it."""


class Parser(argparse.ArgumentParser):
    """A tool's arguments; its module's text is the description."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=_Help)


class _Help(argparse.RawDescriptionHelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        default, told = action.default, action.help or ""
        is_shown = isinstance(default, str | int | float | Path | tuple | list) and not isinstance(default, bool)
        if is_shown and default not in ("", argparse.SUPPRESS) and "default" not in told and told != argparse.SUPPRESS:
            shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
            said = f"default: {shown}".replace("%", "%%")
            action.help = f"{told} ({said})" if told else said
        super().add_argument(action)


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Call it and exit with what it returns; what went wrong outside of the tool is told in one line. It leaves its blocks, too,
    where it is told to end: what it started ends with it."""
    for told_to_end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(told_to_end) is signal.SIG_DFL:
            signal.signal(told_to_end, _end)
    try:
        sys.exit(main())
    except ToolError as error:
        status, told = 2, str(error)
    except KvobjError as error:
        status, told = 1, str(error)
    except OSError as error:
        if error.filename is None:  # of a connection, say: where it was made tells more
            raise
        status, told = 2, f"{error.filename}: {error.strerror}"
    except KeyboardInterrupt:
        status, told = _INTERRUPTED, "interrupted"
    print(f"{Path(sys.argv[0]).name}: {told}", file=sys.stderr)
    sys.exit(status)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(_SIGNALLED + number)


def zero_or_more(text: str) -> int:
    """A whole number, 0 or more."""
    return _number(text, int, 0, "a whole number, 0 or more")


def one_or_more(text: str) -> int:
    """A whole number, 1 or more."""
    return _number(text, int, 1, "a whole number above 0")


def amount(text: str) -> float:
    """A number, 0 or more."""
    return _number(text, float, 0, "a number, 0 or more")


def above_zero(text: str) -> float:
    """A number above 0."""
    return _number(text, float, sys.float_info.min, "a number above 0")


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, float, 0, "a number from 0 to 1", most=1)


def listed(kind: Callable[[str], V]) -> Callable[[str], tuple[V, ...]]:
    """One or more of a kind, with commas between them."""

    def values(text: str) -> tuple[V, ...]:
        if not text:
            raise argparse.ArgumentTypeError("'' is not a list: it names nothing")
        return tuple(kind(each) for each in text.split(","))

    return values


def listed_or_none(kind: Callable[[str], V]) -> Callable[[str], tuple[V, ...]]:
    """The same; of an empty text none."""
    values = listed(kind)
    return lambda text: values(text) if text else ()


def one_of(*words: str) -> Callable[[str], str]:
    """One of these words."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return word


def _number(text: str, kind: Callable[[str], T], least: float, what: str, most: float = math.inf) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = kind("-1")
    if not least <= value <= most or value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def size_bytes(text: str) -> int:
    """A size with its unit ("4 GiB", "512MiB"), or plain bytes."""
    digits = text.rstrip("BKMGTbkmgti ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 512MiB or '4 GiB'")
    return size


def http_address(text: str) -> tuple[str, int]:
    """Host and port of a URL such as http://127.0.0.1:18871; port 80 where it names none."""
    try:
        url = urlsplit(text)
        scheme, host, port = url.scheme, url.hostname, 80 if url.port is None else url.port
    except ValueError:  # of a port that is no number, or brackets around no address
        scheme, host, port = "", None, 0
    if not host or not port or scheme != "http":
        raise argparse.ArgumentTypeError(f"{text!r} is not an http URL, such as http://127.0.0.1:18871")
    return host, port


def codec_name(text: str) -> str:
    """A tensor codec, such as "x3" or "eq:83/2"."""
    try:
        CodecName.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def existing_file(text: str) -> Path:
    """A file that is there."""
    return _checked(text, Path(text).exists() and not Path(text).is_dir(), "no such file")


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    return _checked(text, Path(text).is_dir(), "no such folder")


def output_file(text: str) -> Path:
    """A file to write when all is done: its folder is there."""
    problem = "cannot be written: it is a folder" if Path(text).is_dir() else "cannot be written: no such folder"
    return _checked(text, Path(text).parent.is_dir() and not Path(text).is_dir(), problem)


def _checked(text: str, is_right: bool, problem: str) -> Path:  # noqa: FBT001 - what was found out
    if not is_right:
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)
