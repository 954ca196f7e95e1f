"""What can be allowed or denied: the names that policies use, and which permission of an ACL stands for each.

Sources: Amazon S3 "Actions, resources, and condition keys"; S3 User Guide, "Access control list overview" (mapping of permissions).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kvobj.catalog.setting_rows import Permission


class Action(StrEnum):
    """An action by its name in a policy. Several operations may need one action; each operation names one here."""

    LIST_BUCKET = "s3:ListBucket"
    LIST_BUCKET_VERSIONS = "s3:ListBucketVersions"
    LIST_UPLOADS = "s3:ListBucketMultipartUploads"
    GET_BUCKET_LOCATION = "s3:GetBucketLocation"
    GET_BUCKET_VERSIONING = "s3:GetBucketVersioning"
    GET_BUCKET_ACL = "s3:GetBucketAcl"
    PUT_BUCKET_ACL = "s3:PutBucketAcl"
    GET_BUCKET_POLICY = "s3:GetBucketPolicy"
    PUT_BUCKET_POLICY = "s3:PutBucketPolicy"
    DELETE_BUCKET_POLICY = "s3:DeleteBucketPolicy"
    GET_BUCKET_POLICY_STATUS = "s3:GetBucketPolicyStatus"
    GET_BUCKET_TAGGING = "s3:GetBucketTagging"
    PUT_BUCKET_TAGGING = "s3:PutBucketTagging"
    GET_LIFECYCLE = "s3:GetLifecycleConfiguration"
    PUT_LIFECYCLE = "s3:PutLifecycleConfiguration"
    GET_BUCKET_CORS = "s3:GetBucketCORS"
    PUT_BUCKET_CORS = "s3:PutBucketCORS"
    DELETE_BUCKET = "s3:DeleteBucket"
    GET_OBJECT = "s3:GetObject"
    GET_OBJECT_ATTRIBUTES = "s3:GetObjectAttributes"
    PUT_OBJECT = "s3:PutObject"
    DELETE_OBJECT = "s3:DeleteObject"
    GET_OBJECT_ACL = "s3:GetObjectAcl"
    PUT_OBJECT_ACL = "s3:PutObjectAcl"
    GET_OBJECT_TAGGING = "s3:GetObjectTagging"
    PUT_OBJECT_TAGGING = "s3:PutObjectTagging"
    DELETE_OBJECT_TAGGING = "s3:DeleteObjectTagging"
    LIST_PARTS = "s3:ListMultipartUploadParts"
    ABORT_UPLOAD = "s3:AbortMultipartUpload"


POLICY_ACTIONS: Final = frozenset(
    {
        Action.GET_BUCKET_POLICY,
        Action.PUT_BUCKET_POLICY,
        Action.DELETE_BUCKET_POLICY,
        Action.GET_BUCKET_POLICY_STATUS,
    }
)
"""What no policy can take from the bucket's owner: a mistaken one must be mendable."""

OBJECT_PERMISSIONS: Final = {
    Action.GET_OBJECT: Permission.READ,
    Action.GET_OBJECT_ATTRIBUTES: Permission.READ,
    Action.GET_OBJECT_ACL: Permission.READ_ACP,
    Action.PUT_OBJECT_ACL: Permission.WRITE_ACP,
}
"""Actions that an object's own ACL allows."""

OWN_OBJECT_ACTIONS: Final = frozenset({Action.GET_OBJECT_ACL, Action.PUT_OBJECT_ACL})
"""What nobody can take from the owner of an object but a policy: an ACL that shuts its owner out must be mendable."""

BUCKET_PERMISSIONS: Final = {
    Action.LIST_BUCKET: Permission.READ,
    Action.LIST_BUCKET_VERSIONS: Permission.READ,
    Action.LIST_UPLOADS: Permission.READ,
    Action.PUT_OBJECT: Permission.WRITE,
    Action.DELETE_OBJECT: Permission.WRITE,
    Action.LIST_PARTS: Permission.WRITE,
    Action.ABORT_UPLOAD: Permission.WRITE,
    Action.GET_BUCKET_ACL: Permission.READ_ACP,
    Action.PUT_BUCKET_ACL: Permission.WRITE_ACP,
}
"""Actions that a bucket's ACL allows. What is in neither table is the owner's, and a policy's to give."""

ROW_ACTIONS: Final = frozenset(
    {
        *OBJECT_PERMISSIONS,
        Action.GET_OBJECT_TAGGING,
        Action.PUT_OBJECT_TAGGING,
        Action.DELETE_OBJECT_TAGGING,
    }
)
"""Actions that are decided once the object's row is known: its grants or its tags count."""
