"""The one place that knows S3 error codes: which code, status and message each failure gets, and the XML it is told in.

Inside the API a refusal that only S3 has a name for is an `S3Error`; what comes from the store and the catalog are the
typed errors of `kvobj.errors`, mapped here leaf by leaf. Error bodies never hold a secret, nor the signature that was expected.
Source: Amazon S3 API reference, "Error responses".
"""

from __future__ import annotations

from typing import Final

from kvobj.api import xml
from kvobj.api.message import HttpFault, Refusal, Reply
from kvobj.errors import (
    AccessDeniedError,
    BatchTooLargeError,
    BodyTimeoutError,
    BucketExistsError,
    BucketNotEmptyError,
    BusyError,
    CapacityError,
    ConflictError,
    CorruptionError,
    DigestMismatchError,
    DocumentTooLargeError,
    EntityTooLargeError,
    EntityTooSmallError,
    FencedError,
    ImmutableChunkError,
    IncompleteBodyError,
    InvalidChunkIdError,
    InvalidPartError,
    InvalidPartOrderError,
    InvalidRangeError,
    InvalidRequestError,
    InvalidTokensError,
    KvobjError,
    LayoutMismatchError,
    NamespaceConflictError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchNamespaceError,
    NoSuchSessionError,
    NoSuchUploadError,
    NoSuchUserError,
    NotFoundError,
    NotSharedError,
    ParentNotFoundError,
    PinLimitExceededError,
    PreconditionFailedError,
    QuotaExceededError,
    SessionExpiredError,
    TooManyUploadsError,
    UnavailableError,
)

XML_HEADER: Final = ("content-type", "application/xml")

# In S3's own words where S3 has the code: clients match on them, and people search for them.
_STATUS: Final[dict[str, tuple[int, str]]] = {
    "AccessDenied": (403, "Access Denied"),
    "AccessForbidden": (403, "CORSResponse: This CORS request is not allowed."),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "AuthorizationQueryParametersError": (400, "The query parameters for authentication are malformed."),
    "BadDigest": (
        400,
        "The Content-MD5 or checksum value that you specified did not match what the server received.",
    ),
    "BadRequest": (400, "An error occurred when parsing the HTTP request."),
    "BatchTooLarge": (400, "One call may not name so many."),
    "BucketAlreadyExists": (
        409,
        (
            "The requested bucket name is not available. The bucket namespace is shared by all users "
            "of the system. Please select a different name and try again."
        ),
    ),
    "BucketAlreadyOwnedByYou": (
        409,
        "Your previous request to create the named bucket succeeded and you already own it.",
    ),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty"),
    "ConditionalRequestConflict": (
        409,
        "The conditional request cannot succeed due to a conflicting operation against this resource.",
    ),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed size"),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size"),
    "HttpVersionNotSupported": (505, "Only HTTP/1.0 and HTTP/1.1 are spoken here."),
    "ImmutableChunk": (409, "A live chunk of another size exists under this key."),
    "IncompleteBody": (400, "You did not provide the number of bytes specified by the Content-Length HTTP header"),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidChunkId": (400, "The key is no chunk id, or none of its namespace's."),
    "InvalidChunkSizeError": (403, "Only the last chunk is allowed to have a size less than 8192 bytes."),
    "InvalidDigest": (400, "The Content-MD5 you specified was invalid."),
    "InvalidLocationConstraint": (400, "The specified location-constraint is not valid"),
    "InvalidPart": (
        400,
        (
            "One or more of the specified parts could not be found.  The part may not have been "
            "uploaded, or the specified entity tag may not match the part's entity tag."
        ),
    ),
    "InvalidPartNumber": (416, "The requested partnumber is not satisfiable"),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order. Parts must be ordered by part number."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid request."),
    "InvalidStorageClass": (400, "The storage class you specified is not valid"),
    "InvalidTag": (400, "The tag provided was not a valid tag."),
    "InvalidToken": (400, "The provided token is malformed or otherwise invalid."),
    "InvalidTokens": (400, "A token id or a number of tokens is out of its bounds."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long"),
    "LayoutMismatch": (409, "The chunk does not have its namespace's layout."),
    "MalformedACLError": (400, "The ACL that you provided was not well-formed or did not validate."),
    "MalformedPolicy": (400, "Policy has invalid syntax."),
    "MalformedTrailerError": (
        400,
        "The request contained trailing data that was not well-formed or did not conform to our published schema.",
    ),
    "MalformedXML": (400, "The XML you provided was not well-formed or did not validate against our published schema"),
    "MaxMessageLengthExceeded": (400, "Your request was too big."),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size"),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "MissingSecurityHeader": (400, "Your request was missing a required header"),
    "NamespaceConflict": (409, "The namespace is declared otherwise."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchBucketPolicy": (404, "The bucket policy does not exist"),
    "NoSuchCORSConfiguration": (404, "The CORS configuration does not exist"),
    "NoSuchEntity": (404, "The user does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchLifecycleConfiguration": (404, "The lifecycle configuration does not exist"),
    "NoSuchNamespace": (404, "The specified namespace does not exist."),
    "NoSuchSession": (404, "The specified session does not exist."),
    "NoSuchTagSet": (404, "The TagSet does not exist"),
    "NoSuchUpload": (
        404,
        (
            "The specified upload does not exist. The upload ID may be invalid, or the upload may have "
            "been aborted or completed."
        ),
    ),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NotImplemented": (501, "A header or query you provided implies functionality that is not implemented."),
    "ParentNotFound": (409, "The chunk's parent is not stored."),
    "PinLimitExceeded": (403, "The session, or its user, may not pin more."),
    "PolicyTooLarge": (400, "Policy exceeds the maximum allowed document size."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "QuotaExceeded": (403, "The namespace, or the user's unfinished uploads, may not hold more."),
    "RequestHeaderSectionTooLarge": (
        400,
        "Your request header section exceeds the maximum allowed request header size.",
    ),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is too large."),
    "RequestTimeout": (
        400,
        "Your socket connection to the server was not read from or written to within the timeout period.",
    ),
    "RequestURITooLong": (414, "The request line is too long."),
    "ServiceUnavailable": (503, "The service cannot answer at present. Retry."),
    "SessionExpired": (409, "The session's time has passed, and its pins with it."),
    "SignatureDoesNotMatch": (
        403,
        (
            "The request signature we calculated does not match the signature you provided. Check your "
            "key and signing method."
        ),
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "StoreFull": (507, "The store is full."),
    "UnexpectedContent": (400, "This request does not support content."),
    "UnresolvableGrantByEmailAddress": (
        400,
        "The e-mail address that you provided does not match any account on record.",
    ),
    "TooManyUploads": (
        400,
        "The bucket has as many multipart uploads in progress as it may have. Complete or abort some.",
    ),
    "XAmzContentSHA256Mismatch": (400, "The provided 'x-amz-content-sha256' header does not match what was computed."),
}

# Leaf before branch: the first class that fits decides.
_CODES: Final[tuple[tuple[type[KvobjError], str], ...]] = (
    (InvalidRangeError, "InvalidRange"),
    (InvalidPartError, "InvalidPart"),
    (InvalidPartOrderError, "InvalidPartOrder"),
    (EntityTooSmallError, "EntityTooSmall"),
    (DocumentTooLargeError, "MaxMessageLengthExceeded"),
    (EntityTooLargeError, "EntityTooLarge"),
    (DigestMismatchError, "BadDigest"),
    (BodyTimeoutError, "RequestTimeout"),
    (IncompleteBodyError, "IncompleteBody"),
    (TooManyUploadsError, "TooManyUploads"),
    (BatchTooLargeError, "BatchTooLarge"),
    (InvalidChunkIdError, "InvalidChunkId"),
    (InvalidTokensError, "InvalidTokens"),
    (InvalidRequestError, "InvalidRequest"),
    (PinLimitExceededError, "PinLimitExceeded"),
    (QuotaExceededError, "QuotaExceeded"),
    (AccessDeniedError, "AccessDenied"),
    (NoSuchBucketError, "NoSuchBucket"),
    (NoSuchKeyError, "NoSuchKey"),
    (NoSuchUploadError, "NoSuchUpload"),
    (NoSuchNamespaceError, "NoSuchNamespace"),
    (NoSuchSessionError, "NoSuchSession"),
    (NoSuchUserError, "NoSuchEntity"),
    (NotFoundError, "NoSuchKey"),
    (PreconditionFailedError, "PreconditionFailed"),
    (ImmutableChunkError, "ImmutableChunk"),
    (BucketExistsError, "BucketAlreadyExists"),
    (BucketNotEmptyError, "BucketNotEmpty"),
    (NamespaceConflictError, "NamespaceConflict"),
    (ParentNotFoundError, "ParentNotFound"),
    (LayoutMismatchError, "LayoutMismatch"),
    (SessionExpiredError, "SessionExpired"),
    (FencedError, "ServiceUnavailable"),
    (ConflictError, "ConditionalRequestConflict"),
    (BusyError, "SlowDown"),
    (CapacityError, "StoreFull"),
    (UnavailableError, "ServiceUnavailable"),
    (CorruptionError, "InternalError"),
)

_CODES_WITH_OWN_MESSAGE: Final = frozenset(
    {
        "BatchTooLarge",
        "InvalidArgument",
        "InvalidChunkId",
        "InvalidRequest",
        "InvalidTokens",
        "LayoutMismatch",
        "NotImplemented",
    }
)
RETRY_AFTER_SECONDS: Final = 1

# What of an error's data its XML tells, and as which element.
_ELEMENTS: Final[tuple[tuple[type[KvobjError], str, str], ...]] = (
    (NoSuchBucketError, "bucket", "BucketName"),
    (NoSuchKeyError, "key", "Key"),
    (DocumentTooLargeError, "limit_bytes", "MaxMessageLengthBytes"),
    (ParentNotFoundError, "parent", "Parent"),
    (TooManyUploadsError, "limit", "Limit"),
    (AccessDeniedError, "hint", "Hint"),
)

_METHODS: Final = "GET, HEAD, PUT, POST, DELETE, OPTIONS"
_FAULTS: Final[dict[HttpFault, str]] = {
    HttpFault.MALFORMED: "BadRequest",
    HttpFault.BAD_TARGET: "InvalidURI",
    HttpFault.LINE_TOO_LONG: "RequestURITooLong",
    HttpFault.HEAD_TOO_LONG: "RequestHeaderSectionTooLarge",
    HttpFault.UNKNOWN_METHOD: "MethodNotAllowed",
    HttpFault.UNKNOWN_VERSION: "HttpVersionNotSupported",
    HttpFault.TIMEOUT: "RequestTimeout",
    HttpFault.INCOMPLETE_BODY: "IncompleteBody",
    HttpFault.BUSY: "SlowDown",
    HttpFault.DEFECT: "InternalError",
}


class S3Error(KvobjError):
    """A refusal that has a name only in S3. `code` must be in this module's table; `message` replaces the table's text;
    the data become elements of the error's XML, so it must hold nothing secret."""

    def __init__(self, code: str, message: str = "", **data: object) -> None:
        status, text = _STATUS[code]
        super().__init__(message or text, **data)
        self.code = code
        self.status = status


def describe(error: KvobjError) -> tuple[str, int, str]:
    """The S3 code, HTTP status and message of an error. Total over `KvobjError`: what no rule fits is an InternalError."""
    if isinstance(error, S3Error):
        return error.code, error.status, error.message
    for kind, code in _CODES:
        if isinstance(error, kind):
            status, message = _STATUS[code]
            # Only a request's own fault is told in the words of who refused it: the others could tell of the inside.
            is_own = code in _CODES_WITH_OWN_MESSAGE or isinstance(error, NotSharedError)
            return code, status, error.message if is_own else message
    status, message = _STATUS["InternalError"]
    return "InternalError", status, message


def error_reply(
    error: KvobjError, *, request_id: str, host_id: str, resource: str, is_head: bool, close: bool
) -> Reply:
    """The reply that tells of an error: XML, or no body to a HEAD."""
    code, status, message = describe(error)
    return _reply(
        code,
        status,
        message,
        error=error,
        request_id=request_id,
        host_id=host_id,
        resource=resource,
        is_head=is_head,
        close=close,
    )


def internal_error_reply(*, request_id: str, host_id: str, resource: str, is_head: bool) -> Reply:
    """The reply to a request that met a defect: InternalError, and the connection is closed, its state being unknown."""
    status, message = _STATUS["InternalError"]
    return _reply(
        "InternalError",
        status,
        message,
        error=None,
        request_id=request_id,
        host_id=host_id,
        resource=resource,
        is_head=is_head,
        close=True,
    )


def refusal_reply(refusal: Refusal, *, host_id: str) -> Reply:
    """What the HTTP layer answers by itself, in the same XML. Whether the connection is closed is that layer's affair."""
    code = _FAULTS[refusal.fault]
    status, message = _STATUS[code]
    headers = [("x-amz-request-id", refusal.request_id), ("x-amz-id-2", host_id), XML_HEADER]
    data: dict[str, object] = {}
    if refusal.fault is HttpFault.MALFORMED:
        message = f"{message.removesuffix('.')}: {refusal.detail}."
    elif refusal.fault is HttpFault.UNKNOWN_METHOD:
        headers.append(("allow", _METHODS))
        data = {"Method": refusal.method} if refusal.method else {}
    elif refusal.fault is HttpFault.BUSY:
        headers.append(("retry-after", str(RETRY_AFTER_SECONDS)))
    document = error_document(
        code,
        message,
        resource=refusal.target.partition("?")[0],
        request_id=refusal.request_id,
        host_id=host_id,
        data=data,
    )
    is_head = refusal.method == "HEAD"
    return Reply(status, tuple(headers), b"" if is_head else document, log={"error": code, "cause": refusal.detail})


def error_document(
    code: str, message: str, *, resource: str, request_id: str, host_id: str, data: dict[str, object] | None = None
) -> bytes:
    """The XML of an error. `data` become further elements, in order."""
    nodes: list[xml.Node] = [("Code", code), ("Message", message)]
    nodes += [(name, str(value)) for name, value in (data or {}).items()]
    if resource:
        nodes.append(("Resource", resource))
    nodes += [("RequestId", request_id), ("HostId", host_id)]
    return xml.document("Error", nodes, namespace=False)


def _reply(
    code: str,
    status: int,
    message: str,
    *,
    error: KvobjError | None,
    request_id: str,
    host_id: str,
    resource: str,
    is_head: bool,
    close: bool,
) -> Reply:
    headers = [("x-amz-request-id", request_id), ("x-amz-id-2", host_id), XML_HEADER]
    data: dict[str, object] = {}
    if isinstance(error, S3Error):
        data = error.data
        if code == "AuthorizationHeaderMalformed" and "Region" in data:
            headers.append(("x-amz-bucket-region", str(data["Region"])))
        if code == "MethodNotAllowed" and "Allow" in data:
            headers.append(("allow", str(data["Allow"])))
    elif isinstance(error, InvalidRangeError) and "size_bytes" in error.data:
        headers.append(("content-range", f"bytes */{error.data['size_bytes']}"))
        data = {"ActualObjectSize": error.data["size_bytes"]}
    elif isinstance(error, LayoutMismatchError | NamespaceConflictError) and "differs" in error.data:
        differs = error.data["differs"]
        data = {"Differs": ",".join(differs) if isinstance(differs, list | tuple) else differs}
    elif isinstance(error, NotSharedError) and "reached" in error.data:
        headers.append(("x-kvobj-durability", str(error.data["reached"])))
    elif error is not None:
        data = {
            element: error.data[name]
            for kind, name, element in _ELEMENTS
            if isinstance(error, kind) and name in error.data
        }
    if status == 503:  # noqa: PLR2004 - the status itself is the name
        headers.append(("retry-after", str(RETRY_AFTER_SECONDS)))
    document = (
        b""
        if is_head
        else error_document(code, message, resource=resource, request_id=request_id, host_id=host_id, data=data)
    )
    return Reply(status, tuple(headers), document, close=close, log={"error": code})
