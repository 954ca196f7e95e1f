"""The protocol of leases and gc is safe and live in every order of its steps, and no rule of it can be left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from explore import explore
from protocol_model import LIVENESS_MUTANTS, MUTANTS, Model


def test_every_reachable_state_is_safe_and_can_be_cleaned() -> None:
    found = explore(Model())

    assert found.violation is None, "\n".join(found.trace)
    assert found.stuck == 0
    assert found.states > 100_000


def test_two_holders_and_two_writers_share_a_chain_safely() -> None:
    found = explore(Model(writers=2, holders=2, collectors=1, uploads=3, grants=2, deletes=1, losses=0))

    assert found.violation is None, "\n".join(found.trace)
    assert found.stuck == 0


@pytest.mark.parametrize("mutant", [name for name in MUTANTS.values() if name not in LIVENESS_MUTANTS])
def test_a_protocol_without_one_of_its_rules_is_found_unsafe(mutant: str) -> None:
    found = explore(Model(mutant=mutant), liveness=False)

    assert found.violation is not None
    sys.stdout.write("\n  ".join([f"{mutant}: {found.violation}", *found.trace]) + "\n")


@pytest.mark.parametrize("mutant", sorted(LIVENESS_MUTANTS))
def test_a_protocol_without_its_sweep_leaves_what_nothing_can_clean(mutant: str) -> None:
    found = explore(Model(collectors=1, uploads=2, grants=1, deletes=1, losses=0, mutant=mutant))

    assert found.violation is None
    assert found.stuck > 0
