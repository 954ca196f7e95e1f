"""Condition keys of policies: which there are, and what each is of a request.

Names are without case, but for the part behind a slash (a tag's name). A key that the request does not have is absent, which each
operator judges in its own way; so are keys about what kvobj has not (networks, organisations, encryption). Any other name is
refused when a policy is put. Sources: IAM user guide, "AWS global condition context keys"; "Actions, resources, and condition keys
for Amazon S3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import gmtime, strftime
from typing import Final

import msgspec

from kvobj.api.access.actions import Action
from kvobj.api.access.request_facts import RequestFacts
from kvobj.api.errors import S3Error
from kvobj.api.request import decode
from kvobj.catalog.rows import ObjectRow

USER_ARN: Final = "arn:aws:iam:::user/"
MAX_VALUE_CHARACTERS: Final = 2048
"""Of what a request says. More is refused where a policy asks for it: patterns must not be held against whatever a client sends."""

Values = tuple[str, ...] | None


class Asked(msgspec.Struct, frozen=True):
    """What a policy is asked about. `user_id`: "" for who signs nothing; `request_tags`: those that a write gives the object.
    `missing_key`: the listing is not the request's own, but asked whether it may tell that this key is missing. Then the key is
    what S3 takes for the prefix, and nothing in the query is about it. `stated`: what an entry of the request's document states as
    headers do; the request's own are not about it then."""

    action: Action
    user_id: str
    request: RequestFacts
    row: ObjectRow | None
    request_tags: Callable[[], Mapping[str, str]]
    missing_key: str | None = None
    stated: Mapping[str, str] | None = None

    def one(self, name: str) -> str | None:
        """The value of the key, None where it is absent or may have several."""
        found = values_of(name, self)
        return found[0] if found is not None and len(found) == 1 else None

    @property
    def is_within_upload(self) -> bool:
        """Whether the request writes a part of a multipart upload that was begun before, or ends it."""
        query = self.request.overrides
        return self.action is Action.PUT_OBJECT and "uploadId" in query and "uploads" not in query


_Get = Callable[[Asked], str | None]
_LISTS: Final = frozenset({Action.LIST_BUCKET, Action.LIST_BUCKET_VERSIONS})
_PUTS: Final = frozenset({Action.PUT_OBJECT})
_SETS_ACL: Final = frozenset({Action.PUT_OBJECT, Action.PUT_OBJECT_ACL, Action.PUT_BUCKET_ACL})
_SETS_TAGS: Final = frozenset({Action.PUT_OBJECT, Action.PUT_OBJECT_TAGGING})
_CONDITIONAL: Final = frozenset({Action.PUT_OBJECT, Action.DELETE_OBJECT})

_OF_QUERY: Final = {
    "s3:prefix": ("prefix", _LISTS),
    "s3:delimiter": ("delimiter", _LISTS),
    "s3:max-keys": ("max-keys", _LISTS),
}
_OF_HEADER: Final = {
    "s3:x-amz-acl": _SETS_ACL,
    "s3:x-amz-grant-read": _SETS_ACL,
    "s3:x-amz-grant-write": _SETS_ACL,
    "s3:x-amz-grant-read-acp": _SETS_ACL,
    "s3:x-amz-grant-write-acp": _SETS_ACL,
    "s3:x-amz-grant-full-control": _SETS_ACL,
    "s3:x-amz-metadata-directive": _PUTS,
    "s3:x-amz-storage-class": _PUTS,
    "s3:x-amz-server-side-encryption": _PUTS,
    "s3:x-amz-server-side-encryption-aws-kms-key-id": _PUTS,
    "s3:x-amz-server-side-encryption-customer-algorithm": _PUTS,
    "s3:x-amz-website-redirect-location": _PUTS,
    "s3:if-match": _CONDITIONAL,
    "s3:if-none-match": _PUTS,
}
SAID_AT_BEGIN: Final = frozenset(name for name in _OF_HEADER if name.startswith("s3:x-amz-"))
"""What a multipart upload says once, when it begins: requests about its parts, and its end, do not repeat it."""

_ABSENT: Final = frozenset(
    {
        "aws:calledvia", "aws:calledviafirst", "aws:calledvialast", "aws:federatedprovider", "aws:multifactorauthage",
        "aws:multifactorauthpresent", "aws:principalaccount", "aws:principalorgid", "aws:principalorgpaths",
        "aws:principalservicename", "aws:principalservicenameslist", "aws:sourceaccount", "aws:sourcearn",
        "aws:sourceorgid", "aws:sourceorgpaths", "aws:sourcevpc", "aws:sourcevpcarn", "aws:sourcevpce",
        "aws:tokenissuetime", "aws:vpcsourceip", "s3:accessgrantsinstancearn", "s3:accesspointnetworkorigin",
        "s3:dataaccesspointaccount", "s3:dataaccesspointarn", "s3:object-lock-legal-hold", "s3:object-lock-mode",
        "s3:object-lock-remaining-retention-days", "s3:object-lock-retain-until-date", "s3:versionid",
    }
)  # fmt: skip
_ABSENT_FAMILIES: Final = frozenset({"aws:principaltag", "aws:requesttag", "aws:resourcetag"})
_EXISTING_TAG: Final = "s3:existingobjecttag"
_REQUEST_TAG: Final = "s3:requestobjecttag"
_REQUEST_TAG_NAMES: Final = "s3:requestobjecttagkeys"


def is_known_key(name: str) -> bool:
    """Whether a policy may ask for it."""
    base, slash, tag = name.partition("/")
    base = base.lower()
    if slash:
        return bool(tag) and (base in (_EXISTING_TAG, _REQUEST_TAG) or base in _ABSENT_FAMILIES)
    return base in _SINGLE or base in _OF_QUERY or base in _OF_HEADER or base in _ABSENT or base == _REQUEST_TAG_NAMES


def values_of(name: str, asked: Asked) -> Values:
    """The values of a known key; None where it is absent."""
    base, _, tag = name.partition("/")
    base = base.lower()
    value: str | None = None
    if base in _SINGLE:
        value = _SINGLE[base](asked)
    elif base in _OF_QUERY:
        value = _of_query(base, asked)
    elif base in _OF_HEADER:
        fields = asked.request.fields if asked.stated is None else asked.stated
        value = fields.get(base[3:]) if asked.action in _OF_HEADER[base] else None
    elif base == _EXISTING_TAG:
        value = None if asked.row is None else asked.row.tags.get(tag)
    elif base == _REQUEST_TAG and asked.action in _SETS_TAGS:
        value = asked.request_tags().get(tag)
    elif base == _REQUEST_TAG_NAMES and asked.action in _SETS_TAGS:
        return tuple(asked.request_tags()) or None
    if value is None:
        return None
    if len(value) > MAX_VALUE_CHARACTERS:
        raise S3Error("InvalidArgument", "A value that the bucket's policy asks for is too long.", ConditionKey=name)
    return (value,)


def _of_query(name: str, asked: Asked) -> str | None:
    parameter, actions = _OF_QUERY[name]
    if asked.missing_key is not None:
        return asked.missing_key if parameter == "prefix" else None
    return asked.request.overrides.get(parameter) if asked.action in actions else None


def _principal_type(asked: Asked) -> str:
    authentication = asked.request.authentication
    if authentication.is_anonymous:
        return "Anonymous"
    return "Account" if authentication.user.is_root else "User"


def _principal_arn(asked: Asked) -> str | None:
    return USER_ARN + asked.user_id if asked.user_id else None


def _auth_type(asked: Asked) -> str | None:
    authentication = asked.request.authentication
    if authentication.is_anonymous:
        return None
    return "REST-QUERY-STRING" if authentication.is_presigned else "REST-HEADER"


def _signature_age(asked: Asked) -> str | None:
    """Milliseconds since the request was signed."""
    request = asked.request
    stamp = request.authentication.stamp
    if stamp is None:
        return None
    signed_seconds = _seconds_of_stamp(stamp)
    return None if signed_seconds is None else str(max(0, request.clock.now_ms() - signed_seconds * 1000))


def _seconds_of_stamp(stamp: str) -> int | None:
    try:
        return int(datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def _copy_source(asked: Asked) -> str | None:
    """`bucket/key` as it is read: how it was encoded must not lead past a Deny."""
    value = asked.request.fields.get("x-amz-copy-source") if asked.action is Action.PUT_OBJECT else None
    return None if value is None else decode(value.partition("?")[0]).removeprefix("/")


def _content_sha256(asked: Asked) -> str | None:
    authentication = asked.request.authentication
    if authentication.is_anonymous:
        return asked.request.fields.get("x-amz-content-sha256")
    return authentication.payload_sha256 or authentication.payload_mode.value


def _creates_object(asked: Asked) -> str | None:
    """Whether the request makes an object visible: parts and the begin of an upload do not."""
    if asked.action is not Action.PUT_OBJECT:
        return None
    query = asked.request.overrides
    return "false" if "partNumber" in query or "uploads" in query else "true"


_SINGLE: Final[dict[str, _Get]] = {
    "aws:currenttime": lambda asked: strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(asked.request.clock.now_ms() // 1000)),
    "aws:epochtime": lambda asked: str(asked.request.clock.now_ms() // 1000),
    "aws:principalarn": _principal_arn,
    "aws:principalisawsservice": lambda _: "false",
    "aws:principaltype": _principal_type,
    "aws:referer": lambda asked: asked.request.fields.get("referer"),
    "aws:securetransport": lambda asked: "true" if asked.request.is_secure else "false",
    "aws:sourceip": lambda asked: asked.request.source_address or None,
    "aws:useragent": lambda asked: asked.request.fields.get("user-agent"),
    "aws:userid": lambda asked: asked.user_id or "anonymous",
    "aws:username": lambda asked: asked.user_id or None,
    "aws:viaawsservice": lambda _: "false",
    "s3:authtype": _auth_type,
    "s3:objectcreationoperation": _creates_object,
    "s3:signatureage": _signature_age,
    "s3:signatureversion": lambda asked: None if asked.request.authentication.is_anonymous else "AWS4-HMAC-SHA256",
    # Which version was spoken is not known here; none below 1.2 is.
    "s3:tlsversion": lambda asked: "1.2" if asked.request.head.is_tls else None,
    "s3:x-amz-content-sha256": _content_sha256,
    "s3:x-amz-copy-source": _copy_source,
}
