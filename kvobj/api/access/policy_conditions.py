"""Conditions of policies: an operator, a key, values. Compiled once, then asked of requests. Pure.

Source: IAM user guide, "Policy elements: Condition operators" and "Conditions with multiple context keys or values": several
values are alternatives (to an operator that negates, none of them may fit); an absent key fits no operator but those that negate,
those with IfExists, and ForAllValues.
"""

from __future__ import annotations

import ipaddress
import math
import operator as compare
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from kvobj.api.access.policy_keys import SAID_AT_BEGIN, Asked, is_known_key, values_of
from kvobj.api.access.source_address import Network, parse_address
from kvobj.api.access.wildcards import Pattern, Resolve
from kvobj.api.errors import S3Error
from kvobj.errors import InvalidRequestError

_Fits = Callable[[str, Resolve], bool]
_Relation = Callable[[float, float], bool]
_ARN_PARTS: Final = 6
_ANY, _ALL = "ForAnyValue", "ForAllValues"
_IF_EXISTS: Final = "IfExists"
_EQUALS: Final[_Relation] = compare.eq

# Operator → (how its values are read, whether it negates).
_TEXTS: Final = {
    "StringEquals": False,
    "StringNotEquals": True,
    "StringEqualsIgnoreCase": False,
    "StringNotEqualsIgnoreCase": True,
    "StringLike": False,
    "StringNotLike": True,
}
_ARNS: Final = {"ArnEquals": False, "ArnLike": False, "ArnNotEquals": True, "ArnNotLike": True}
_ADDRESSES: Final = {"IpAddress": False, "NotIpAddress": True}
_RELATIONS: Final[dict[str, tuple[_Relation, bool]]] = {
    "Equals": (_EQUALS, False),
    "NotEquals": (_EQUALS, True),
    "LessThan": (compare.lt, False),
    "LessThanEquals": (compare.le, False),
    "GreaterThan": (compare.gt, False),
    "GreaterThanEquals": (compare.ge, False),
}

# Keys by which a statement for everybody is still not public, if what they ask for is fixed (AWS, "The meaning of public").
_LIMITING_KEYS: Final = frozenset(
    {
        "aws:principalaccount", "aws:principalarn", "aws:principalorgid", "aws:principalorgpaths", "aws:sourceaccount",
        "aws:sourcearn", "aws:sourceip", "aws:sourceorgid", "aws:sourceorgpaths", "aws:sourcevpc", "aws:sourcevpce",
        "aws:userid", "aws:username", "aws:vpcsourceip", "s3:dataaccesspointaccount", "s3:dataaccesspointarn",
        "s3:x-amz-server-side-encryption-aws-kms-key-id",
    }
)  # fmt: skip
_PUBLIC_BITS: Final = {4: 8, 6: 32}
"""A network with fewer bits is the public, as AWS counts."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One operator on one key. `needed`: variables that its values use; `limits`: it keeps the public out; `is_of_begin`: a
    multipart upload is asked when it begins, and not again."""

    key: str
    holds: Callable[[Asked], bool]
    needed: frozenset[str]
    limits: bool
    is_of_begin: bool


def compile_condition(operator: str, key: str, values: Sequence[str], *, has_variables: bool = True) -> Condition:
    """Make one condition ready. Raises `S3Error` MalformedPolicy."""
    if not is_known_key(key):
        raise S3Error("MalformedPolicy", "Policy has an invalid condition key", ConditionKey=key)
    if not values:
        raise _invalid("Policy has a condition without a value", operator)
    if operator == "Null":
        return _null(key, values)
    quantifier, _, name = operator.rpartition(":")
    if quantifier not in ("", _ANY, _ALL):
        raise _invalid("Invalid Condition type", operator)
    if_exists = name.endswith(_IF_EXISTS)
    name = name.removesuffix(_IF_EXISTS)
    patterns: list[Pattern] = []
    networks: list[Network] = []
    try:
        fits, negates = _reader_of(name, values, patterns, networks, has_variables=has_variables)
    except (ValueError, OverflowError, InvalidRequestError) as error:
        raise _invalid("Policy has an invalid condition value", operator) from error
    if not all(is_known_key(variable) for pattern in patterns for variable in pattern.variables):
        raise _invalid("Policy has an invalid variable", operator)
    needed = frozenset(variable for pattern in patterns for variable in pattern.needed)
    is_fixed = not any(pattern.variables for pattern in patterns) and not any(
        character in value for value in values for character in "*?"
    )
    if networks:
        is_fixed = all(network.prefixlen >= _PUBLIC_BITS[network.version] for network in networks)
    limits = is_fixed and not negates and not if_exists and quantifier != _ALL and key.lower() in _LIMITING_KEYS
    return Condition(
        key, _judge(key, fits, quantifier, negates=negates, if_exists=if_exists), needed, limits, _is_of_begin(key)
    )


def _judge(key: str, fits: _Fits, quantifier: str, *, negates: bool, if_exists: bool) -> Callable[[Asked], bool]:
    def holds(asked: Asked) -> bool:
        found = values_of(key, asked)
        if found is None:
            return if_exists or negates
        if len(found) == 1:
            return fits(found[0], asked.one) is not negates
        return any(fits(value, asked.one) for value in found) is not negates

    def holds_for_any(asked: Asked) -> bool:
        found = values_of(key, asked)
        return if_exists if found is None else any(fits(value, asked.one) is not negates for value in found)

    def holds_for_all(asked: Asked) -> bool:
        return all(fits(value, asked.one) is not negates for value in values_of(key, asked) or ())

    return {_ANY: holds_for_any, _ALL: holds_for_all}.get(quantifier, holds)


def _null(key: str, values: Sequence[str]) -> Condition:
    wanted = {value.lower() for value in values}
    if not wanted <= {"true", "false"}:
        raise _invalid("Policy has an invalid condition value", "Null")
    return Condition(
        key,
        lambda asked: ("true" if values_of(key, asked) is None else "false") in wanted,
        frozenset(),
        limits=False,
        is_of_begin=_is_of_begin(key),
    )


def _is_of_begin(key: str) -> bool:
    base = key.partition("/")[0].lower()
    return base in SAID_AT_BEGIN or base.startswith("s3:requestobjecttag")


def _reader_of(
    name: str, values: Sequence[str], patterns: list[Pattern], networks: list[Network], *, has_variables: bool
) -> tuple[_Fits, bool]:
    """How a request's value is held against the values, and whether the operator negates. Tells of patterns and networks."""
    if name in _TEXTS:
        has_wildcards = name.endswith("Like")
        patterns += [Pattern(value, has_wildcards=has_wildcards, has_variables=has_variables) for value in values]
        return (_same_letters(patterns) if name.endswith("IgnoreCase") else _matches_any(patterns)), _TEXTS[name]
    if name in _ARNS:
        rows = [_arn_patterns(value, has_variables=has_variables) for value in values]
        patterns += [pattern for row in rows for pattern in row]
        return _matches_arn(rows), _ARNS[name]
    if name in _ADDRESSES:
        networks += [ipaddress.ip_network(value, strict=False) for value in values]
        return _in_networks(networks), _ADDRESSES[name]
    if name == "Bool":
        wanted = {value.lower() for value in values}
        if not wanted <= {"true", "false"}:
            raise ValueError(name)
        return (lambda value, _: value.lower() in wanted), False
    for kind, read in (("Numeric", _number), ("Date", _date)):
        if name.startswith(kind) and name[len(kind) :] in _RELATIONS:
            relation, negates = _RELATIONS[name[len(kind) :]]
            return _relates(read, relation, [read(value) for value in values]), negates
    raise S3Error("MalformedPolicy", f"Invalid Condition type : {name}", ConditionOperator=name)


def _matches_any(patterns: Sequence[Pattern]) -> _Fits:
    if len(patterns) == 1:
        return patterns[0].matches
    return lambda value, resolve: any(pattern.matches(value, resolve) for pattern in patterns)


def _same_letters(patterns: Sequence[Pattern]) -> _Fits:
    def fits(value: str, resolve: Resolve) -> bool:
        lower = value.lower()
        return any((text := pattern.text(resolve)) is not None and text.lower() == lower for pattern in patterns)

    return fits


def _arn_patterns(value: str, *, has_variables: bool) -> list[Pattern]:
    parts = value.split(":", _ARN_PARTS - 1)
    if len(parts) != _ARN_PARTS or parts[0] != "arn":
        raise ValueError(value)
    return [Pattern(part, has_variables=has_variables) for part in parts]


def _matches_arn(rows: Sequence[Sequence[Pattern]]) -> _Fits:
    """Each part of an ARN by itself: a wildcard does not reach past a colon."""

    def fits(value: str, resolve: Resolve) -> bool:
        parts = value.split(":", _ARN_PARTS - 1)
        return len(parts) == _ARN_PARTS and any(
            all(pattern.matches(part, resolve) for pattern, part in zip(row, parts, strict=True)) for row in rows
        )

    return fits


def _in_networks(networks: Sequence[Network]) -> _Fits:
    def fits(value: str, _resolve: Resolve) -> bool:
        address = parse_address(value)
        return address is not None and any(address in network for network in networks)

    return fits


def _relates(read: Callable[[str], float], relation: _Relation, wanted: Sequence[float]) -> _Fits:
    def fits(value: str, _resolve: Resolve) -> bool:
        try:
            number = read(value)
        except (ValueError, OverflowError):
            return False
        return any(relation(number, each) for each in wanted)

    return fits


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _date(text: str) -> float:
    """Seconds since the epoch, of such or of an ISO 8601 date, whose zone is UTC where it names none."""
    if text.isascii() and text.lstrip("-").isdigit():
        return _number(text)
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()


def _invalid(message: str, operator: str) -> S3Error:
    return S3Error("MalformedPolicy", message, ConditionOperator=operator)
