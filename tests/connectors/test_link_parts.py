"""What a link is made of, without a server: its settings, when it asks again after an outage, and which pin holds which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import ManualClock

from kvobj.client.session import Pin
from kvobj.connectors.holds import Holds
from kvobj.connectors.link_settings import LinkSettings
from kvobj.connectors.outage import PROBE_SECONDS, Outage, Turn
from kvobj.errors import ConfigurationError, InvalidRequestError

PLACE: dict[str, object] = {"endpoint": "http://127.0.0.1:9000", "bucket": "cache"}
KEYS: dict[str, object] = {"access_key": "A", "secret_key": "S"}


class TestSettings:
    def test_the_keys_come_from_the_table_a_file_or_the_environment_in_this_order(self, tmp_path: Path) -> None:
        file = tmp_path / "credentials"
        file.write_text('access_key = "file-a"\nsecret_key = "file-s"\n')
        environment = {"KVOBJ_ACCESS_KEY": "env-a", "KVOBJ_SECRET_KEY": "env-s"}
        named = {"credentials_file": str(file)}
        tables: list[dict[str, object]] = [{**KEYS, **named}, {**named}, {}]
        parsed = [LinkSettings.parse({**PLACE, **table}, environment) for table in tables]
        assert [(each.access_key, each.secret_key) for each in parsed] == [
            ("A", "S"),
            ("file-a", "file-s"),
            ("env-a", "env-s"),
        ]
        assert "file-s" not in repr(parsed[1])

    def test_every_fault_is_named(self) -> None:
        values: dict[str, object] = {
            "endpoint": "nowhere",
            "timeout_seconds": 0,
            "lease_ms": 5,
            "same_host": "yes",
            "durability": "for ever",
            "declaration": [],
            "buckets": "cache",
        }
        with pytest.raises(InvalidRequestError) as caught:
            LinkSettings.parse(values, {})
        assert isinstance(caught.value, ConfigurationError)
        named = [problem.partition(":")[0] for problem in caught.value.problems]
        assert sorted(named) == sorted([*values, "bucket", "access_key, secret_key"])

    @pytest.mark.parametrize("salt", ["\ud800", ["a", {"b": "\udfff"}], 2**70, object()])
    def test_a_declaration_that_cannot_be_sent_is_refused(self, salt: object) -> None:
        declaration = {"model": "m", "salt": salt}
        with pytest.raises(ConfigurationError) as caught:
            LinkSettings.parse({**PLACE, **KEYS, "declaration": declaration}, {})
        (problem,) = caught.value.problems
        assert problem.startswith("declaration: cannot be sent: ")

    @pytest.mark.parametrize("half", ["access_key", "secret_key"])
    def test_half_a_pair_of_keys_is_refused(self, half: str) -> None:
        with pytest.raises(ConfigurationError, match="without the other"):
            LinkSettings.parse({**PLACE, half: "x"}, {"KVOBJ_ACCESS_KEY": "a", "KVOBJ_SECRET_KEY": "s"})

    @pytest.mark.parametrize("content", [None, "access_key = 1", "no toml"])
    def test_a_file_without_keys_is_refused(self, tmp_path: Path, content: str | None) -> None:
        file = tmp_path / "credentials"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigurationError, match="credentials_file"):
            LinkSettings.parse({**PLACE, "credentials_file": str(file)}, {})

    def test_a_file_may_be_named_by_its_users_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "keys").write_text('access_key = "file-a"\nsecret_key = "file-s"\n')
        assert LinkSettings.parse({**PLACE, "credentials_file": "~/keys"}, {}).access_key == "file-a"
        with pytest.raises(ConfigurationError, match="credentials_file: ~nobody-of-this-name/keys: "):
            LinkSettings.parse({**PLACE, "credentials_file": "~nobody-of-this-name/keys"}, {})

    @pytest.mark.parametrize("wrong", ["k\n", "k\r", "a\tb", "a b", "k\x00", "ké"])
    @pytest.mark.parametrize("name", ["access_key", "secret_key"])
    def test_a_key_that_cannot_be_sent_is_told_by_where_it_stands_and_not_shown(
        self, tmp_path: Path, name: str, wrong: str
    ) -> None:
        keys = {**KEYS, name: wrong}
        file = tmp_path / "credentials"
        file.write_text("".join(f"{each} = {json.dumps(value)}\n" for each, value in keys.items()))
        variables = {f"KVOBJ_{each.upper()}": str(value) for each, value in keys.items()}
        problem = "must be printable ASCII without blanks and line breaks"
        for table, environment, where in (
            (keys, {}, name),
            ({"credentials_file": str(file)}, {}, f"credentials_file: {file}: {name}"),
            ({}, variables, f"KVOBJ_{name.upper()}"),
        ):
            with pytest.raises(ConfigurationError) as caught:
                LinkSettings.parse({**PLACE, **table}, environment)
            assert caught.value.problems == [f"{where}: {problem}"]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("endpoint", "http://user:pw@h:9000"),
            ("endpoint", "http://h :9000"),
            ("bucket", "a/b"),
            ("bucket", ".."),
            ("bucket", "Cache"),
            ("access_key", "a/b"),
            ("region", "us-east-1\n"),
        ],
    )
    def test_a_place_that_cannot_be_meant_is_refused(self, name: str, value: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            LinkSettings.parse({**PLACE, **KEYS, name: value}, {})
        (problem,) = caught.value.problems
        assert problem.startswith(f"{name}: ")
        assert "pw" not in problem


class TestOutage:
    def test_rests_double_up_to_their_bound_and_begin_anew_after_an_answer(self) -> None:
        clock = ManualClock()
        outage = Outage(rest=0.5, rest_max=4.0, now=clock.monotonic)
        assert outage.failed(outage.turn())
        for rest in (0.5, 1.0, 2.0, 4.0, 4.0):
            clock.advance(rest - 0.01)
            assert outage.turn() is Turn.REST
            clock.advance(0.01)
            assert outage.turn() is Turn.PROBE
            assert not outage.failed(Turn.PROBE), "the outage has begun already"
        clock.advance(4.0)
        assert outage.answered(outage.turn()) == pytest.approx(15.5)
        assert outage.is_up
        assert outage.failed(outage.turn())
        clock.advance(0.5)
        assert outage.turn() is Turn.PROBE

    def test_one_call_probes_while_the_others_go_on_resting(self) -> None:
        clock = ManualClock()
        outage = Outage(rest=1.0, rest_max=1.0, now=clock.monotonic)
        outage.failed(outage.turn())
        clock.advance(5)
        assert [outage.turn() for _ in range(3)] == [Turn.PROBE, Turn.REST, Turn.REST]
        outage.left(Turn.PROBE)
        assert outage.turn() is Turn.PROBE
        outage.answered(Turn.PROBE)
        assert outage.turn() is Turn.ASK

    def test_a_probe_of_which_nothing_is_heard_is_followed_by_another(self) -> None:
        clock = ManualClock()
        outage = Outage(rest=1.0, rest_max=1.0, now=clock.monotonic)
        outage.failed(outage.turn())
        clock.advance(1)
        assert outage.turn() is Turn.PROBE
        clock.advance(PROBE_SECONDS - 1)
        assert outage.turn() is Turn.REST
        clock.advance(1)
        assert outage.turn() is Turn.PROBE

    def test_calls_that_fail_together_are_one_outage(self) -> None:
        clock = ManualClock()
        outage = Outage(rest=1.0, rest_max=8.0, now=clock.monotonic)
        turns = [outage.turn() for _ in range(4)]
        assert [outage.failed(turn) for turn in turns] == [True, False, False, False]
        clock.advance(1.0)
        assert outage.turn() is Turn.PROBE, "the rest did not double"


class TestHolds:
    @staticmethod
    def pins(count: int) -> list[Pin]:
        return [cast("Pin", object()) for _ in range(count)]

    def test_a_pin_ends_with_the_last_of_its_names(self) -> None:
        holds = Holds()
        (pin,) = self.pins(1)
        holds.add(pin, ("a", "b", "c"))
        assert holds.take(["c", "a"]) == []
        assert len(holds) == 1
        assert holds.take(["b"]) == [pin]
        assert holds.take(["a", "b", "never"]) == []

    def test_a_name_held_twice_is_released_twice(self) -> None:
        holds = Holds()
        first, second = self.pins(2)
        holds.add(first, ("a",))
        holds.add(second, ("a", "b"))
        assert holds.take(["a"]) == [first]
        assert cast("Any", holds.pin_of("a")) is second
        assert holds.take(["a", "a"]) == []
        assert holds.pin_of("a") is None
        assert holds.take(["b"]) == [second]
        assert len(holds) == 0
