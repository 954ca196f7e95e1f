"""Actions as policies name them: every action of S3's on buckets and objects, with wildcards, and which of ours they stand for.

A policy may name what kvobj does not do (versions, retention): it is S3's name, and stands for nothing here. What is no name of
S3's is refused. Source: "Actions, resources, and condition keys for Amazon S3".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.access.wildcards import wildcard_matcher

_OF_OBJECTS: Final = frozenset(
    f"s3:{name}"
    for name in (
        "AbortMultipartUpload", "BypassGovernanceRetention", "DeleteObject", "DeleteObjectTagging", "DeleteObjectVersion",
        "DeleteObjectVersionTagging", "GetObject", "GetObjectAcl", "GetObjectAttributes", "GetObjectLegalHold",
        "GetObjectRetention", "GetObjectTagging", "GetObjectTorrent", "GetObjectVersion", "GetObjectVersionAcl",
        "GetObjectVersionAttributes", "GetObjectVersionForReplication", "GetObjectVersionTagging",
        "GetObjectVersionTorrent", "InitiateReplication", "ListMultipartUploadParts", "ObjectOwnerOverrideToBucketOwner",
        "PutObject", "PutObjectAcl", "PutObjectLegalHold", "PutObjectRetention", "PutObjectTagging",
        "PutObjectVersionAcl", "PutObjectVersionTagging", "ReplicateDelete", "ReplicateObject", "ReplicateTags",
        "RestoreObject",
    )
)  # fmt: skip
_OF_BUCKETS: Final = frozenset(
    f"s3:{name}"
    for name in (
        "CreateBucket", "DeleteBucket", "DeleteBucketPolicy", "DeleteBucketWebsite", "GetAccelerateConfiguration",
        "GetAnalyticsConfiguration", "GetBucketAcl", "GetBucketCORS", "GetBucketLocation", "GetBucketLogging",
        "GetBucketNotification", "GetBucketObjectLockConfiguration", "GetBucketOwnershipControls", "GetBucketPolicy",
        "GetBucketPolicyStatus", "GetBucketPublicAccessBlock", "GetBucketRequestPayment", "GetBucketTagging",
        "GetBucketVersioning", "GetBucketWebsite", "GetEncryptionConfiguration", "GetIntelligentTieringConfiguration",
        "GetInventoryConfiguration", "GetLifecycleConfiguration", "GetMetricsConfiguration",
        "GetReplicationConfiguration", "ListBucket", "ListBucketMultipartUploads", "ListBucketVersions",
        "PutAccelerateConfiguration", "PutAnalyticsConfiguration", "PutBucketAcl", "PutBucketCORS", "PutBucketLogging",
        "PutBucketNotification", "PutBucketObjectLockConfiguration", "PutBucketOwnershipControls", "PutBucketPolicy",
        "PutBucketPublicAccessBlock", "PutBucketRequestPayment", "PutBucketTagging", "PutBucketVersioning",
        "PutBucketWebsite", "PutEncryptionConfiguration", "PutIntelligentTieringConfiguration",
        "PutInventoryConfiguration", "PutLifecycleConfiguration", "PutMetricsConfiguration",
        "PutReplicationConfiguration",
    )
)  # fmt: skip
_BY_LOWER: Final = {name.lower(): name for name in _OF_OBJECTS | _OF_BUCKETS}
_OURS: Final = {action.value: action for action in Action}


@dataclass(frozen=True, slots=True)
class NamedActions:
    """What the actions of a statement stand for: ours, and whether any of S3's are on buckets or on objects."""

    ours: frozenset[Action]
    on_buckets: bool
    on_objects: bool


def actions_of(pattern: str) -> frozenset[str]:
    """S3's actions that a policy's text names, without regard to case; empty where it names none."""
    lower = pattern.lower()
    if "*" not in lower and "?" not in lower:
        name = _BY_LOWER.get(lower)
        return frozenset() if name is None else frozenset({name})
    matches = wildcard_matcher(lower)
    return frozenset(name for key, name in _BY_LOWER.items() if matches(key))


def all_but(names: frozenset[str]) -> frozenset[str]:
    """S3's actions without these: what NotAction means."""
    return frozenset(_BY_LOWER.values()) - names


def named(names: frozenset[str]) -> NamedActions:
    """What these names of S3's stand for here."""
    return NamedActions(
        ours=frozenset(_OURS[name] for name in names if name in _OURS),
        on_buckets=not names.isdisjoint(_OF_BUCKETS),
        on_objects=not names.isdisjoint(_OF_OBJECTS),
    )
