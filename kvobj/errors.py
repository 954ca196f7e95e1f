"""Every error kvobj raises on purpose, branched by what the caller should do about it.

A branch says how to react, a leaf exists only where somebody reacts differently to it. Messages are
lower case with the data last; the data is also on the exception as attributes. Only `api/errors.py`
turns these into S3 codes. A miss is a value (`None`), never an exception.
"""

from __future__ import annotations


class KvobjError(Exception):
    """Root of all deliberate errors. Keyword data becomes attributes and the tail of the message."""

    def __init__(self, message: str, **data: object) -> None:
        self.message = message
        self.data = data
        super().__init__(message)

    def __str__(self) -> str:
        return " ".join([self.message, *(f"{name}={_shown(value)}" for name, value in self.data.items())])


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


class InvalidRequestError(KvobjError):
    """The request is wrong as it stands: change it (400, 416)."""


class ConfigurationError(InvalidRequestError):
    """The configuration cannot be used; `problems` lists every fault with its path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class InvalidRangeError(InvalidRequestError):
    """A byte range starts at or past the end (416)."""


class InvalidPartError(InvalidRequestError):
    """Complete names a part that was not uploaded, or with another ETag."""


class InvalidPartOrderError(InvalidRequestError):
    """Complete lists its parts out of ascending order."""


class EntityTooSmallError(InvalidRequestError):
    """A part other than the last is smaller than 5 MiB."""


class EntityTooLargeError(InvalidRequestError):
    """A body, part or object is larger than its bound."""


class DocumentTooLargeError(EntityTooLargeError):
    """A document of parameters is larger than its bound."""


class DigestMismatchError(InvalidRequestError):
    """The bytes that arrived do not have the digest that the client announced."""


class IncompleteBodyError(InvalidRequestError):
    """The body ended before, or went on after, its declared length."""


class BodyTimeoutError(IncompleteBodyError):
    """The body came too slowly and was given up."""


class TooManyUploadsError(InvalidRequestError):
    """The bucket has as many multipart uploads in progress as it may have, `limit`: complete or abort some."""


class BatchTooLargeError(InvalidRequestError):
    """One call names more chunks, pins or tokens than its bound."""


class InvalidChunkIdError(InvalidRequestError):
    """A chunk id is not 32 bytes (64 lower-case hex digits), or a key is none of its namespace's."""


class InvalidTokensError(InvalidRequestError):
    """A token id is outside 0 … 2^32-1, or the tokens do not make whole chunks."""


class AccessDeniedError(KvobjError):
    """Who asks may not (403)."""


class PinLimitExceededError(AccessDeniedError):
    """The session holds as many pins, or the user as many pinned bytes, as it may (403)."""


class QuotaExceededError(AccessDeniedError):
    """The namespace holds as many chunks or bytes as it may (403)."""


class NotFoundError(KvobjError):
    """The thing named by the request is not there (404)."""


class NoSuchBucketError(NotFoundError):
    """No such bucket."""


class NoSuchKeyError(NotFoundError):
    """No such key, where its absence is an error (If-Match on an absent key, copy of an absent source)."""


class NoSuchUploadError(NotFoundError):
    """No such multipart upload."""


class NoSuchUserError(NotFoundError):
    """No such user."""


class NoSuchNamespaceError(NotFoundError):
    """No such namespace in this bucket, or none that the user may use: both are told alike."""


class NoSuchSessionError(NotFoundError):
    """No such session of this user in this bucket. Who held one opens another and pins again."""


class ConflictError(KvobjError):
    """The state is not what the request assumed: re-read, then decide (409, 412)."""


class PreconditionFailedError(ConflictError):
    """If-Match, If-None-Match or a date condition does not hold (412)."""


class ImmutableChunkError(ConflictError):
    """A live chunk exists under this key with another size or layout (409)."""


class BucketExistsError(ConflictError):
    """The bucket exists already; `owned` says whether it is the caller's."""


class BucketNotEmptyError(ConflictError):
    """The bucket still holds objects or uploads."""


class UserExistsError(ConflictError):
    """A user with this id or access key exists already."""


class NamespaceConflictError(ConflictError):
    """The namespace is declared otherwise; `differs` lists the fields."""


class ParentNotFoundError(ConflictError):
    """The parent that a chunk names is not live; `parent` is its key."""


class LayoutMismatchError(ConflictError):
    """The chunk does not have its namespace's layout; `differs` lists what disagrees."""


class SessionExpiredError(ConflictError):
    """The session's deadline has passed: its pins are gone."""


class FencedError(ConflictError):
    """The writer's session epoch is no longer recorded as alive: nothing of it may commit."""


class CapacityError(KvobjError):
    """There is no room."""


class StoreFullError(CapacityError):
    """No tier that the asked durability needs can take the bytes (507)."""


class BusyError(CapacityError):
    """Room did not come free within the deadline: try again later (503 SlowDown)."""


class UnavailableError(KvobjError):
    """A part that is needed does not answer: retry (503 + Retry-After)."""


class TierUnavailableError(UnavailableError):
    """A tier's medium failed or missed its deadline; on the read path this counts as a miss there."""


class RemoteRefusedError(TierUnavailableError):
    """The remote tier's server refuses what no repeat will cure: credentials, bucket, clock, region. `reason` is a word for it, the
    message a sentence for the operator."""

    def __init__(self, message: str, *, reason: str, **data: object) -> None:
        super().__init__(message, reason=reason, **data)
        self.reason = reason


class NotSharedError(TierUnavailableError):
    """Class `shared` was asked for by name and cannot be had, or was not reached in time (503). Then what was written is stored, of
    the class `reached`, and goes to the remote tier later; without `reached` nothing was stored."""


class DeviceError(UnavailableError):
    """A GPU, or what drives it, is not there, failed, or missed its deadline."""


class CorruptionError(KvobjError):
    """Bytes at rest are not what was written: an operator should know (500)."""


class UntrustedError(CorruptionError):
    """What lies on the remote is whole, and not signed by this store."""


class FrameCorruptError(CorruptionError):
    """A frame's header, directory, block or digest does not check out; never served."""
