"""Bucket policies: documents of statements that allow or deny actions to users on resources under conditions."""

from __future__ import annotations

from enum import Enum

from kvobj.api.access.actions import Action
from kvobj.api.access.request_facts import RequestFacts
from kvobj.catalog.rows import BucketRow, ObjectRow


class Effect(Enum):
    """What a policy says. An explicit Deny beats every Allow."""

    ALLOW = "Allow"
    DENY = "Deny"


def judge(
    bucket: BucketRow, action: Action, *, key: str, row: ObjectRow | None, request: RequestFacts
) -> Effect | None:
    """What the bucket's policy says of the action on the key ("": on the bucket itself); None: nothing."""
    del bucket, action, key, row, request
    return Effect.DENY
