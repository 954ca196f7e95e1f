"""What can go wrong with one request, in the words of who decides whether to repeat it, and the errors that it becomes.

Sources: Amazon S3 API Reference, "Error responses"; RFC 9110 §15. A fault never leaves this package: `RemoteFault.error` is what
does.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Final, Literal

from kvobj.errors import KvobjError, RemoteRefusedError, StoreFullError, TierUnavailableError

FaultKind = Literal["network", "timeout", "server", "busy", "down", "refused", "full", "client"]

_FIRST_CLIENT_ERROR: Final = 400
_TIMEOUT: Final = 408
_TOO_MANY: Final = 429
_FIRST_SERVER_ERROR: Final = 500
_NOT_IMPLEMENTED: Final = 501
_UNAVAILABLE: Final = 503
_INSUFFICIENT_STORAGE: Final = 507
_OF_THE_REQUEST: Final = frozenset({412, 413, 416})
"""Statuses that speak of this request's condition, length or range and of nothing else, also where no code stands beside them."""
_RETRY_AFTER_SECONDS_MAX: Final = 60.0
_CODE_CHARACTERS_MAX: Final = 64
_MESSAGE_CHARACTERS_MAX: Final = 200

_BUSY_CODES: Final = frozenset(
    {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException"}
)
_FULL_CODES: Final = frozenset({"QuotaExceeded", "InsufficientCapacity", "EntityTooLargeForQuota", "XMinioStorageFull"})
# What a repeat may cure although the status says that the request is wrong.
_TRANSIENT_CODES: Final = frozenset(
    {
        "RequestTimeout",
        "IncompleteBody",
        "BadDigest",
        "InvalidDigest",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "OperationAborted",
        "ConditionalRequestConflict",
        "InternalError",
    }
)
CLOCK_CODES: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
UNTRUSTED_CERTIFICATE: Final = "UntrustedCertificate"
"""The code, of this package's own, where nobody who is trusted has signed the server's certificate."""
INVALID_CERTIFICATE: Final = "InvalidCertificate"
"""Where it is signed, and not to be used all the same: it has expired, or is of another name."""
_REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "InvalidAccessKeyId": (
        "credentials",
        "the remote does not know the access key: check access_key of the remote tier",
    ),
    "SignatureDoesNotMatch": (
        "credentials",
        "the remote refuses the signature: check secret_key and region of the remote tier",
    ),
    "ExpiredToken": ("credentials", "the credentials of the remote tier have expired"),
    "InvalidToken": ("credentials", "the remote refuses the credentials"),
    "TokenRefreshRequired": ("credentials", "the credentials of the remote tier have expired"),
    "AccountProblem": ("credentials", "the remote has closed the account"),
    "AccessDenied": (
        "access",
        "the remote denies access: these credentials need to read, write, list and delete in the bucket",
    ),
    "AllAccessDisabled": ("access", "the remote denies all access to the bucket"),
    "RequestTimeTooSkewed": ("clock", "the remote's clock and this machine's are too far apart: set the clock right"),
    "RequestExpired": ("clock", "the remote's clock and this machine's are too far apart: set the clock right"),
    "NoSuchBucket": ("bucket", "the remote has no such bucket: make it, kvobj makes none there"),
    "PermanentRedirect": ("region", "the remote's bucket is elsewhere: check endpoint and region of the remote tier"),
    "TemporaryRedirect": ("region", "the remote's bucket is elsewhere: check endpoint and region of the remote tier"),
    "AuthorizationHeaderMalformed": (
        "region",
        "the remote refuses the signature's region: check region of the remote tier",
    ),
    UNTRUSTED_CERTIFICATE: (
        "certificate",
        "the remote's certificate is of an issuer that is not trusted, check ca_bundle of the remote tier",
    ),
    INVALID_CERTIFICATE: ("certificate", "the remote's certificate is not valid"),
    "DeletesNothing": ("deletes", "the remote does not delete objects: a store on it would grow without end"),
    "InvalidBucketName": ("bucket", "the remote does not take the bucket's name"),
}


class RemoteFault(Exception):  # noqa: N818 - not an error yet: it may be repeated
    """One request did not do what it should."""

    def __init__(
        self,
        kind: FaultKind,
        detail: str,
        *,
        code: str = "",
        status: int = 0,
        retry_after_seconds: float | None = None,
        is_repeatable: bool = True,
        date: str = "",
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.code = code
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.is_repeatable = is_repeatable
        self.date = date
        """What the answer's Date says."""

    @property
    def is_ambiguous(self) -> bool:
        """Whether the server may have done what was asked all the same. It also says that server or network are ailing."""
        return self.kind in ("network", "timeout", "server", "busy")

    def error(self, operation: str, key: str) -> KvobjError:
        """What leaves this package."""
        data = {"operation": operation, "key": key, "detail": self.detail}
        if self.code:
            data["code"] = self.code
        match self.kind:
            case "refused":
                reason, sentence = _REFUSALS.get(self.code, ("access", self.detail))
                if reason == "certificate":
                    sentence = f"{sentence}: {self.detail}"
                return RemoteRefusedError(sentence, reason=reason, **data)
            case "full":
                return StoreFullError("the remote is full", **data)
            case "busy":
                return TierUnavailableError("the remote asks to slow down", **data)
            case "down":
                return TierUnavailableError("the remote is down, and is not asked", **data)
            case "timeout":
                return TierUnavailableError("the remote did not answer in time", **data)
            case _:
                return TierUnavailableError("the remote failed", **data)


def fault_of_answer(status: int, headers: Mapping[str, str], body: bytes, *, has_code: bool = True) -> RemoteFault:
    """The fault that an answer which is no success tells. `has_code`: a server would say by a code why it refuses, since its
    answer has a body. Who says none there (a load balancer without a backend, a page of a proxy) is not the server, and it is as
    if that had failed."""
    code, message = error_of(body)
    detail = f"{status} {code or 'without a code'}{': ' if message else ''}{message}"
    retry_after = _retry_after(headers.get("retry-after", ""))

    def fault(kind: FaultKind, *, is_repeatable: bool) -> RemoteFault:
        return RemoteFault(
            kind,
            detail,
            code=code,
            status=status,
            retry_after_seconds=retry_after,
            is_repeatable=is_repeatable,
            date=headers.get("date", ""),
        )

    if code in _FULL_CODES or status == _INSUFFICIENT_STORAGE:
        return fault("full", is_repeatable=False)
    if code in _REFUSALS or status in (401, 403, 301, 307, 308):
        return fault("refused", is_repeatable=False)
    if code in _BUSY_CODES or status in (_TOO_MANY, _UNAVAILABLE):
        return fault("busy", is_repeatable=True)
    if code in _TRANSIENT_CODES or status == _TIMEOUT:
        return fault("client" if status < _FIRST_SERVER_ERROR else "server", is_repeatable=True)
    if status >= _FIRST_SERVER_ERROR:
        return fault("server", is_repeatable=status != _NOT_IMPLEMENTED)
    is_nobodys = has_code and not code and status not in _OF_THE_REQUEST
    # A redirect is never followed, and would be the same again.
    return fault("server" if is_nobodys else "client", is_repeatable=is_nobodys and status >= _FIRST_CLIENT_ERROR)


def error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an error document; empty texts where it is none."""
    if b"<Error" not in body or b"<!" in body or b"\0" in body:
        return "", ""
    try:
        root = ET.fromstring(body)  # noqa: S314 - no DOCTYPE, and so no entities
    except (ET.ParseError, ValueError):
        return "", ""
    found = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    return _told(found.get("Code", ""), _CODE_CHARACTERS_MAX), _told(found.get("Message", ""), _MESSAGE_CHARACTERS_MAX)


def _told(text: str, limit: int) -> str:
    """What a stranger says, as it may stand in a line of a log, in an error or in `status`."""
    return "".join([each if each.isprintable() else " " for each in text[:limit]])


def _retry_after(written: str) -> float | None:
    """Seconds; the form with a date is not used by S3 servers."""
    if not (written.isascii() and written.isdigit()):
        return None
    return min(float(written[:9]), _RETRY_AFTER_SECONDS_MAX)
