"""The request heads that nearly all clients send, read in one match: a shape so plain that no two parsers differ about it.

What has any other shape goes to the parser that knows them all (`request_head`): other methods and versions, characters outside of
a URL's or of printable ASCII, a name that comes twice, an empty value, other white space than one space before a value, a
connection that is not to be kept, and a body that is framed in another way than by its length or, behind PUT and POST, in plain
chunks. Pure. Source: RFC 9112 §2.2, §3, §5; of each rule a part.
"""

from __future__ import annotations

import re
from typing import Final

_HEAD: Final = re.compile(
    r"(GET|HEAD|PUT|POST|DELETE) (/[A-Za-z0-9\-._~!$&'()*+,;=:@%/?]*+) HTTP/1\.1\r\n"
    r"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [\x21-\x7e][\x20-\x7e]*+\r\n)++)\r\n"
).fullmatch
_OTHERS: Final = frozenset(
    {"transfer-encoding", "upgrade", "trailer", "te", "keep-alive", "proxy-connection", "sec-websocket-key1"}
)
_CHUNKED_METHODS: Final = ("PUT", "POST")
_KNOWN_NAMES_MAX: Final = 512
_NAME_CHARACTERS_MAX: Final = 64


def read_plain(head: bytes, names: dict[str, str]) -> tuple[str, str, dict[str, str]] | None:
    """Method, target and fields, in order, of a head with its blank line; None where it is for the other parser.

    Names are lower case, values without white space around them; the connection is to be kept. `names`: see `lower_name`.
    """
    found = _HEAD(head.decode("latin-1"))
    if found is None:
        return None
    method, target, lines = found.groups()
    pairs: list[list[str]] = [line.split(": ", 1) for line in lines[:-2].split("\r\n")]
    try:
        fields = {names[name]: value for name, value in pairs}
    except KeyError:
        fields = {names.get(name) or lower_name(name, names): value for name, value in pairs}
    if len(fields) != len(pairs) or " \r\n" in lines:
        return None
    if not _OTHERS.isdisjoint(fields) and not _is_plainly_chunked(method, fields):
        return None
    if "connection" in fields and fields["connection"].lower() != "keep-alive":
        return None
    return method, target, fields


def _is_plainly_chunked(method: str, fields: dict[str, str]) -> bool:
    """Whether that is all that the head has of the others."""
    return (
        fields.get("transfer-encoding") == "chunked"
        and method in _CHUNKED_METHODS
        and "content-length" not in fields
        and len(_OTHERS.intersection(fields)) == 1
    )


def lower_name(raw_name: str, names: dict[str, str]) -> str:
    """A field's name in lower case, remembered in `names`, within bounds: clients send few."""
    name = raw_name.lower()
    if len(raw_name) <= _NAME_CHARACTERS_MAX:
        if len(names) >= _KNOWN_NAMES_MAX:
            names.clear()
        names[raw_name] = name
    return name
