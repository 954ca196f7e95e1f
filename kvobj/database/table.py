"""What a table is called and which environment it lies in. Users of the database declare theirs as constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Table:
    """One sorted map from bytes (1 to 511) to bytes. `volatile`: outlives the process, not the machine's power."""

    name: str
    volatile: bool


META: Final = Table("database_meta", volatile=False)
"""What the database keeps about itself."""
