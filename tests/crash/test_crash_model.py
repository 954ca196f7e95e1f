"""The checker itself: it must accept what may happen and refuse what must not, or the crash loop proves nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from crash_model import ABSENT, KeyHistory, Model, Version

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = Version(1, 1000), Version(2, 1000)


def acknowledged(history: KeyHistory, version: Version) -> KeyHistory:
    history.begin_put(version)
    history.end(status=200, existed=False)
    return history


def test_an_acknowledged_put_must_be_found() -> None:
    history = acknowledged(KeyHistory(is_kv=False), OLD)
    history.settle_after_crash()
    with pytest.raises(AssertionError):
        history.observe(ABSENT)


def test_an_open_overwrite_is_either_old_or_new_and_then_stays() -> None:
    history = acknowledged(KeyHistory(is_kv=False), OLD)
    history.begin_put(NEW)
    assert history.settle_after_crash()
    history.observe(NEW)
    with pytest.raises(AssertionError):
        history.observe(OLD)


def test_an_open_put_on_a_live_chunk_cannot_replace_it() -> None:
    history = acknowledged(KeyHistory(is_kv=True), OLD)
    history.begin_put(NEW)
    history.settle_after_crash()
    with pytest.raises(AssertionError):
        history.observe(NEW)


def test_a_deleted_key_stays_deleted_and_an_open_delete_may_have_happened() -> None:
    history = acknowledged(KeyHistory(is_kv=True), OLD)
    history.begin_delete()
    history.settle_after_crash()
    assert history.possible == {OLD, ABSENT}
    history.begin_delete()
    history.end(status=204, existed=False)
    history.settle_after_crash()
    with pytest.raises(AssertionError):
        history.observe(OLD)


def test_a_refused_put_changes_nothing() -> None:
    history = acknowledged(KeyHistory(is_kv=False), OLD)
    history.begin_put(NEW)
    history.end(status=503, existed=False)
    assert history.possible == {OLD}


def test_other_bytes_are_wrong_bytes() -> None:
    history = acknowledged(KeyHistory(is_kv=False), OLD)
    body = bytearray(OLD.content("key"))
    assert history.identify("key", bytes(body)) == OLD
    body[-1] ^= 1
    with pytest.raises(AssertionError, match="wrong bytes"):
        history.identify("key", bytes(body))


def test_a_torn_journal_line_was_never_sent(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    line = {"what": "put", "bucket": "b", "key": "k", "version": 1, "size": 5}
    journal.write_text(json.dumps(line) + "\n" + json.dumps({**line, "version": 2})[:20])
    model = Model(kv_buckets=frozenset())
    model.absorb(journal)
    assert model.history("b", "k").possible == {ABSENT, Version(1, 5)}
    assert (model.acknowledged, model.in_flight) == (0, 1)
