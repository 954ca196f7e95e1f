"""Sizes, durations and addresses as people write them: `4 GiB`, `500 ms`, `127.0.0.1:9000`.

Pure. A bare number is refused, since "64" has been read as bytes, KiB and MiB by different people. Every function
returns the value or raises ValueError with the text that follows the path in a problem.
"""

from __future__ import annotations

import re
from typing import Final

from kvobj.config.settings import ListenAddress

SIZE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS: Final[dict[str, float]] = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_QUANTITY: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", re.ASCII)
_PORT_DIGITS_MAX: Final = 5
_PORT_MAX: Final = 65535


def parse_size_bytes(text: str) -> int:
    """Bytes of `4 GiB`. Binary units have an i, decimal ones do not; fractions must come to whole bytes."""
    number, unit = _split(text, "4 GiB", SIZE_UNITS)
    size_bytes = number * SIZE_UNITS[unit]
    if size_bytes != int(size_bytes):
        raise ValueError(f"is not a whole number of bytes: {text!r}")
    return int(size_bytes)


def parse_duration_seconds(text: str) -> float:
    """Seconds of `30 s` or `500 ms`."""
    number, unit = _split(text, "30 s", DURATION_UNITS)
    return number * DURATION_UNITS[unit]


def parse_listen_address(text: str) -> ListenAddress:
    """`HOST:PORT`; an IPv6 host stands in brackets; port 0 means any free port."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not is_bracketed):
        raise ValueError(f"must be HOST:PORT, with an IPv6 host in brackets, not {text!r}")
    if not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS_MAX and int(port) <= _PORT_MAX):
        raise ValueError(f"has no port from 0 to {_PORT_MAX}: {text!r}")
    bare_host = host[1:-1] if is_bracketed else host
    if not bare_host or any(character.isspace() for character in bare_host):
        raise ValueError(f"has no host: {text!r}")
    return ListenAddress(host=bare_host, port=int(port))


def _split(text: str, sample: str, units: dict[str, int] | dict[str, float]) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'must be a number with a unit, like "{sample}", not {text!r}')
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"has the unknown unit {unit!r} (known: {', '.join(units)})")
    return (float(number) if "." in number else int(number)), unit
