"""Bucket policies as documents: read strictly, and made ready to be asked. Pure.

What is not understood is refused when a policy is put, never ignored: an element that nobody reads would let in whom its author
meant to keep out. Sources: IAM user guide, "IAM JSON policy elements reference"; S3 User Guide, "Bucket policies" and "The meaning
of public".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NoReturn

from kvobj.api.access.actions import Action
from kvobj.api.access.policy_actions import NamedActions, actions_of, all_but, named
from kvobj.api.access.policy_conditions import Condition, compile_condition
from kvobj.api.access.policy_keys import Asked, is_known_key
from kvobj.api.access.wildcards import Pattern, wildcard_matcher
from kvobj.api.errors import S3Error
from kvobj.errors import InvalidRequestError

MAX_POLICY_BYTES: Final = 20 * 1024
_VARIABLES_SINCE: Final = "2012-10-17"
_VERSIONS: Final = (_VARIABLES_SINCE, "2008-10-17")
_ELEMENTS: Final = {"Version", "Id", "Statement"}
_STATEMENT_ELEMENTS: Final = {
    "Sid", "Effect", "Principal", "NotPrincipal", "Action", "NotAction", "Resource", "NotResource", "Condition",
}  # fmt: skip
_RESOURCE: Final = "arn:aws:s3:::"
_ARN_OF_IAM: Final = "arn:aws:iam::"


class Effect(Enum):
    """What a policy says. An explicit Deny beats every Allow."""

    ALLOW = "Allow"
    DENY = "Deny"


@dataclass(frozen=True, slots=True)
class Principals:
    """Whom a statement is about: everybody, or users by id; `excluded`: everybody but these."""

    everybody: bool
    user_ids: frozenset[str]
    excluded: bool = False

    def hold(self, user_id: str) -> bool:
        """Whether the statement is about this user; "" is who signs nothing."""
        return (self.everybody or user_id in self.user_ids) is not self.excluded


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: it speaks where all of it fits. `needed`: variables that its resources and conditions use."""

    effect: Effect
    principals: Principals
    actions: frozenset[Action]
    resources: tuple[Pattern, ...]
    excludes_resources: bool
    conditions: tuple[Condition, ...]
    needed: frozenset[str]

    @property
    def asks_for_tags(self) -> bool:
        """Whether it is about what a write says of the object's tags."""
        return any(condition.key.lower().startswith("s3:requestobjecttag") for condition in self.conditions)

    def speaks(self, asked: Asked, resource: str) -> bool:
        """Whether it says something of what is asked, one of its actions, about `bucket` or `bucket/key`."""
        if not self.principals.hold(asked.user_id):
            return False
        # A variable that the request has no value for must let nobody in, in whatever it stands.
        if self.needed and self.effect is Effect.ALLOW and any(asked.one(name) is None for name in self.needed):
            return False
        return self._covers(asked, resource) and self._holds(asked)

    def _covers(self, asked: Asked, resource: str) -> bool:
        for pattern in self.resources:
            if pattern.matches(resource, asked.one):
                return not self.excludes_resources
        return self.excludes_resources

    def _holds(self, asked: Asked) -> bool:
        for condition in self.conditions:
            if condition.is_of_begin and asked.is_within_upload:
                if self.effect is Effect.DENY:  # it did not deny the upload's begin
                    return False
            elif not condition.holds(asked):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Policy:
    """A document made ready. `by_action`: the statements about each action, those that deny before those that allow;
    `named_users`: ids that must exist when it is put."""

    statements: tuple[Statement, ...]
    by_action: dict[Action, tuple[Statement, ...]]
    named_users: frozenset[str]

    @property
    def is_public(self) -> bool:
        """Whether it lets the public in: everybody, and no condition keeps them to what is fixed."""
        return any(
            statement.effect is Effect.ALLOW
            and statement.principals.everybody
            and not any(condition.limits for condition in statement.conditions)
            for statement in self.statements
        )


def parse_policy(document: bytes, bucket: str) -> Policy:
    """The policy of this bucket that a document states. Raises `S3Error`: MalformedPolicy, PolicyTooLarge."""
    if len(document) > MAX_POLICY_BYTES:
        raise S3Error("PolicyTooLarge", MaxSizeAllowed=MAX_POLICY_BYTES)
    if not document.lstrip().startswith(b"{"):
        raise _malformed("Policies must be valid JSON and the first byte must be '{'")
    try:
        root = json.loads(document, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _malformed("This policy contains invalid Json") from error
    if not isinstance(root, dict):
        raise _malformed("Policies must be valid JSON and the first byte must be '{'")
    _check_elements(root, _ELEMENTS)
    version = root.get("Version", "2008-10-17")
    if version not in _VERSIONS:
        raise _malformed("The policy must contain a valid version string")
    if not isinstance(root.get("Id", ""), str):
        raise _malformed("Policy has an invalid Id")
    if "Statement" not in root:
        raise _malformed("Missing required field Statement")
    listed = root["Statement"]
    if isinstance(listed, dict):
        listed = [listed]
    if not isinstance(listed, list) or not listed:
        raise _malformed("Could not parse the policy: Statement is empty!")
    reader = _Reader(bucket, has_variables=version == _VARIABLES_SINCE)
    statements = [reader.statement(each) for each in listed]
    statements.sort(key=lambda statement: statement.effect is Effect.ALLOW)
    by_action = {action: tuple(each for each in statements if action in each.actions) for action in Action}
    return Policy(tuple(statements), by_action, frozenset(reader.named_users))


class _Reader:
    """Reads the statements of one policy."""

    def __init__(self, bucket: str, *, has_variables: bool) -> None:
        self.named_users: set[str] = set()
        self._bucket = bucket
        self._has_variables = has_variables
        self._sids: set[str] = set()

    def statement(self, element: object) -> Statement:
        if not isinstance(element, dict):
            raise _malformed("Could not parse the policy: Statement is not an object")
        _check_elements(element, _STATEMENT_ELEMENTS)
        self._check_sid(element.get("Sid"))
        effect = element.get("Effect")
        if effect is None:
            raise _malformed("Missing required field Effect")
        if effect not in ("Allow", "Deny"):
            raise _malformed(f"Invalid effect: {effect}")
        principals = self._principals(element, Effect(effect))
        actions = self._actions(element)
        resources = self._resources(element, actions)
        conditions = self._conditions(element.get("Condition", {}))
        needed = [pattern.needed for pattern in resources] + [each.needed for each in conditions]
        return Statement(
            effect=Effect(effect),
            principals=principals,
            actions=actions.ours,
            resources=resources,
            excludes_resources="NotResource" in element,
            conditions=conditions,
            needed=frozenset().union(*needed),
        )

    def _check_sid(self, sid: object) -> None:
        if sid is None:
            return
        if not isinstance(sid, str):
            raise _malformed("Policy has an invalid Sid")
        if sid and sid in self._sids:
            raise _malformed("Statement IDs (SID) in a single policy must be unique")
        self._sids.add(sid)

    def _principals(self, element: dict[str, object], effect: Effect) -> Principals:
        name = _one_of(element, "Principal", "NotPrincipal")
        excluded = name == "NotPrincipal"
        if excluded and effect is Effect.ALLOW:
            # It would let in everybody but a few, and those who sign nothing with them: IAM refuses it too.
            raise _malformed("NotPrincipal is not allowed with Effect Allow")
        value = element[name]
        if value == "*":
            return Principals(everybody=True, user_ids=frozenset(), excluded=excluded)
        if not isinstance(value, dict) or not value or not value.keys() <= {"AWS", "CanonicalUser"}:
            raise _malformed("Invalid principal in policy")
        everybody = False
        user_ids: set[str] = set()
        for kind, listed in value.items():
            for text in _texts(listed, "Invalid principal in policy"):
                if text == "*" and kind == "AWS":
                    everybody = True
                else:
                    user_ids.add(self._user_id(text, kind))
        return Principals(everybody=everybody, user_ids=frozenset(user_ids), excluded=excluded)

    def _user_id(self, text: str, kind: str) -> str:
        """The user that a principal names. An account's root is the user whose id the account is; it need not be there."""
        if kind == "AWS" and text.startswith(_ARN_OF_IAM):
            account, _, rest = text[len(_ARN_OF_IAM) :].partition(":")
            if rest == "root" and account:
                return account
            text = rest.removeprefix("user/") if rest.startswith("user/") else ""
        if not text or "*" in text:
            raise _malformed("Invalid principal in policy")
        self.named_users.add(text)
        return text

    @staticmethod
    def _actions(element: dict[str, object]) -> NamedActions:
        name = _one_of(element, "Action", "NotAction")
        names: set[str] = set()
        for text in _texts(element[name], "Policy has invalid action"):
            found = actions_of(text)
            if not found:
                raise _malformed("Policy has invalid action")
            names |= found
        return named(frozenset(names) if name == "Action" else all_but(frozenset(names)))

    def _resources(self, element: dict[str, object], actions: NamedActions) -> tuple[Pattern, ...]:
        name = _one_of(element, "Resource", "NotResource")
        patterns: list[Pattern] = []
        on_bucket = on_objects = False
        for text in _texts(element[name], "Policy has invalid resource"):
            if not text.startswith(_RESOURCE):
                raise _malformed("Policy has invalid resource")
            path = text[len(_RESOURCE) :]
            front, slash, key = path.partition("/")
            if not front or "${" in front or not wildcard_matcher(front)(self._bucket) or (slash and not key):
                raise _malformed("Policy has invalid resource")
            on_bucket = on_bucket or not slash
            on_objects = on_objects or bool(slash) or front.endswith("*")
            patterns.append(self._pattern(path))
        if name == "Resource" and not ((on_bucket and actions.on_buckets) or (on_objects and actions.on_objects)):
            raise _malformed("Action does not apply to any resource(s) in statement")
        return tuple(patterns)

    def _pattern(self, text: str) -> Pattern:
        try:
            pattern = Pattern(text, has_variables=self._has_variables)
        except InvalidRequestError as error:
            raise _malformed("Policy has an invalid variable") from error
        if not all(is_known_key(variable) for variable in pattern.variables):
            raise _malformed("Policy has an invalid variable")
        return pattern

    def _conditions(self, element: object) -> tuple[Condition, ...]:
        if not isinstance(element, dict):
            raise _malformed("Policy has an invalid condition")
        conditions: list[Condition] = []
        for operator, keys in element.items():
            if not isinstance(keys, dict) or not keys:
                raise _malformed("Policy has an invalid condition")
            for key, listed in keys.items():
                values = _values(listed)
                conditions.append(compile_condition(operator, key, values, has_variables=self._has_variables))
        return tuple(conditions)


def _one_of(element: dict[str, object], name: str, negated: str) -> str:
    """Which of the two stands there. Raises `S3Error` unless exactly one does."""
    if name in element and negated in element:
        raise _malformed(f"Statement has both {name} and {negated}")
    if name not in element and negated not in element:
        raise _malformed(f"Missing required field {name}")
    return name if name in element else negated


def _texts(value: object, problem: str) -> Sequence[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) for each in listed):
        raise _malformed(problem)
    return listed


def _values(value: object) -> list[str]:
    """A condition's values as text: JSON's numbers and truth values stand for theirs."""
    texts: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, bool):
            texts.append("true" if each else "false")
        elif isinstance(each, str | int | float):
            texts.append(str(each))
        else:
            raise _malformed("Policy has an invalid condition value")
    return texts


def _check_elements(element: dict[str, object], known: set[str]) -> None:
    for name in element:
        if name not in known:
            raise _malformed(f"Unknown field {name}")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    element = dict(pairs)
    if len(element) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return element


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _malformed(message: str) -> S3Error:
    return S3Error("MalformedPolicy", message)
