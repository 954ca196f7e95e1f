"""Text in header values: what arrives, and what can be sent. Pure."""

from __future__ import annotations

import base64
import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search
_NOT_LATIN_1: Final = re.compile(r"[^\t\x20-\x7e\xa0-\xff]").search

Header = tuple[str, str]


def is_plain(value: str) -> bool:
    """Whether a header may carry the text: no control characters, no line end."""
    return not _CONTROL(value)


def is_latin_1(value: str) -> bool:
    """Whether the text is of letters that a header carries as they are, one byte each; controls above ASCII are none."""
    return _NOT_LATIN_1(value) is None


def from_wire(value: str) -> str:
    """Header values are bytes read as latin-1; clients that send more than ASCII send UTF-8."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def to_wire(value: str) -> str:
    """Non-ASCII text as RFC 2047 has it, which is what S3 sends."""
    return value if value.isascii() else f"=?UTF-8?B?{base64.b64encode(value.encode()).decode()}?="
