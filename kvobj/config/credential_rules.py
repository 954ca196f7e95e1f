"""Which credentials are fit to guard a store: shapes that every S3 client can sign with, and none that stands in a manual. And what
a user may be called."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_ACCESS_KEY: Final = re.compile(r"[A-Za-z0-9._-]{3,128}", re.ASCII)
_SECRET_KEY: Final = re.compile(r"[!-~]{8,128}", re.ASCII)
_NAME_BYTES_MAX: Final = 128
_UNFIT_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

# Defaults and samples from the documentation of S3 servers and clients: whoever scans a network tries these first.
PUBLISHED_ACCESS_KEYS: Final = frozenset(
    {
        "AKIAIOSFODNN7EXAMPLE",
        "AKIAI44QH8DHBEXAMPLE",
        "minioadmin",
        "minio",
        "rustfsadmin",
        "accessKey1",
        "Q3AM3UQ867SPQQA43P2F",
        "0555b35654ad1656d804",
    }
)
PUBLISHED_SECRET_KEYS: Final = frozenset(
    {
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "je7MtGbClwBF/2Zp9Utk/h3yCo8nvbEXAMPLEKEY",
        "minioadmin",
        "minio123",
        "rustfsadmin",
        "verySecretKey1",
        "zuf+tfteSlswRu7BJ86wekitnifILbZam1KYY3TG",
        "h7GhxuBLTrlhVUyxSPUKUV8r/2EI4ngqJxD7iBdBYLhwluN30JaT3Q==",
        "password",
        "changeme",
        "change-me",
    }
)


def user_name_problem(name: str) -> str | None:
    """What is wrong with a user's id, or None. It is part of the catalog's keys and of policies, and is shown in lists and logs."""
    return _name_problem(name, is_fit=name.isprintable())


def display_name_problem(name: str) -> str | None:
    """What is wrong with a user's display name, or None. It is for people, and may have any script's spaces; what would steer a
    terminal or break a line it may not have."""
    return _name_problem(name, is_fit=not any(unicodedata.category(each) in _UNFIT_CATEGORIES for each in name))


def _name_problem(name: str, *, is_fit: bool) -> str | None:
    if is_fit and 0 < len(name.encode(errors="surrogatepass")) <= _NAME_BYTES_MAX:
        return None
    return f"must be 1 to {_NAME_BYTES_MAX} bytes of printable characters"


def access_key_problem(access_key: str) -> str | None:
    """What is wrong with an access key, or None. A `/`, `,` or `=` in one would break the Authorization header apart."""
    if access_key in PUBLISHED_ACCESS_KEYS:
        return "is a published example: choose another"
    if _ACCESS_KEY.fullmatch(access_key) is None:
        return "must be 3 to 128 of letters, digits, dot, underscore and hyphen"
    return None


def secret_key_problem(secret_key: str) -> str | None:
    """What is wrong with a secret key, or None. The text never repeats the key."""
    if secret_key in PUBLISHED_SECRET_KEYS:
        return "is a published example: choose another"
    if _SECRET_KEY.fullmatch(secret_key) is None:
        return "must be 8 to 128 printable ASCII characters without blanks"
    return None
