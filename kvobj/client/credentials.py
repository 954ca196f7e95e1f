"""Who signs: an access key and its secret."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvobj.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Credentials:
    """One user's keys. The secret is not printed."""

    access_key: str
    secret_key: str = field(repr=False)

    def __post_init__(self) -> None:
        """`InvalidRequestError` for a key that is no text, such as the None of a variable that the environment does not have."""
        # Whatever the types say: keys come from environments and files.
        given: dict[str, object] = {"access_key": self.access_key, "secret_key": self.secret_key}
        missing = [f"{name} is {_kind(value)}" for name, value in given.items() if not isinstance(value, str)]
        if missing:
            raise InvalidRequestError(f"access_key and secret_key are both needed, as texts: {', '.join(missing)}")


def _kind(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
