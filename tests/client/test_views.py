"""A view's own life: it is one of a kind, and is released once, by whoever is done with it or by nobody's having it any more."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable

import pytest

from kvobj.client import ChunkView


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_view_is_not_copied(copied: Callable[[ChunkView], object]) -> None:
    released: list[bool] = []
    with ChunkView(memoryview(b"abc"), digest=None, on_release=lambda: released.append(True)) as view:
        with pytest.raises(TypeError, match="copy its data"):
            copied(view)
        assert view.is_valid
        assert bytes(view.data) == b"abc"
        assert not released
    assert released == [True]


def test_a_view_that_was_not_made_to_its_end_goes_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    view = ChunkView.__new__(ChunkView)  # as an interrupt at the beginning of `__init__` leaves it
    del view
    assert not said


def test_that_nobody_has_a_view_any_more_is_a_release_though_its_data_are_in_use() -> None:
    released: list[bool] = []

    def made() -> memoryview:
        view = ChunkView(memoryview(b"abc"), digest=None, on_release=lambda: released.append(True))
        return memoryview(view.data)

    data = made()
    gc.collect()
    assert released == [True]
    assert bytes(data) == b"abc"
