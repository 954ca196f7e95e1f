"""What a bucket's policy says of a request. Policies are compiled once and remembered by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.access.policy_document import Effect, Policy, parse_policy
from kvobj.api.access.policy_keys import Asked
from kvobj.api.access.request_facts import RequestFacts
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import BucketRow, ObjectRow

__all__ = ("Effect", "allows_write_with_tags", "judge", "policy_of")

COMPILED_MAX: Final = 128
"""How many are kept: with the largest documents some 10 MiB."""


def judge(
    bucket: BucketRow,
    action: Action,
    *,
    key: str,
    row: ObjectRow | None,
    request: RequestFacts,
    request_tags: Callable[[], Mapping[str, str]],
    missing_key: str | None = None,
    stated: Mapping[str, str] | None = None,
) -> Effect | None:
    """What the bucket's policy says of the action on the key ("": on the bucket itself); None: nothing.

    `row`: the key's object, where its tags count; `request_tags`, `missing_key` and `stated` as in `Asked`.
    """
    policy = policy_of(bucket)
    if policy is None:
        return Effect.DENY
    statements = policy.by_action[action]
    if not statements:
        return None
    asked = Asked(action, request.authentication.user.id, request, row, request_tags, missing_key, stated)
    resource = f"{bucket.name}/{key}" if key else bucket.name
    for statement in statements:
        if statement.speaks(asked, resource):
            return statement.effect
    return None


def allows_write_with_tags(
    bucket: BucketRow, key: str, request: RequestFacts, request_tags: Callable[[], Mapping[str, str]]
) -> bool:
    """Whether the policy allows the write of the key by a statement that asks for the tags which the request gives it."""
    policy = policy_of(bucket)
    if policy is None:
        return False
    asked = Asked(Action.PUT_OBJECT, request.authentication.user.id, request, None, request_tags)
    return any(
        statement.effect is Effect.ALLOW and statement.asks_for_tags and statement.speaks(asked, f"{bucket.name}/{key}")
        for statement in policy.by_action[Action.PUT_OBJECT]
    )


def policy_of(bucket: BucketRow) -> Policy | None:
    """The bucket's policy, which it must have; None where this version does not understand what an earlier one took. Nobody but who
    may mend it passes then."""
    return _compiled(bucket.policy, bucket.name)


@lru_cache(maxsize=COMPILED_MAX)
def _compiled(document: bytes, bucket: str) -> Policy | None:
    try:
        return parse_policy(document, bucket)
    except S3Error:
        return None
