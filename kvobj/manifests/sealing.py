"""What of a catalog's log entries may not leave the node as it is: users' secret keys, sealed under the store's wrapping key.

Namespaces' keys are wrapped in their rows already. The root user is in no manifest: each start makes or is given its credentials.
Kinds from 0xc0 on are those of manifests; no entry of the record log has them.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from kvobj.catalog.log_entries import LogEntry, decode_entry, encode_entry
from kvobj.catalog.rows import UserRow
from kvobj.errors import CorruptionError

_SEALED_USER: Final = 0xC0
_FIRST_OWN_KIND: Final = 0xC0
_USER_PUT: Final = encode_entry(UserRow("", "", "", ""))[0]


class Sealer(Protocol):
    """Seals and opens under one key; the same content is sealed to the same bytes."""

    def seal(self, content: bytes) -> bytes:
        """What may lie with strangers."""
        ...

    def unseal(self, sealed: bytes) -> bytes | None:
        """What was sealed, None where another key did it, or nobody."""
        ...


class SealedUser(msgspec.Struct, frozen=True, array_like=True):
    """A user, but for the secret. `sealed` holds (id, access key, secret key): a secret cannot be put under another name."""

    id: str
    display_name: str
    access_key: str
    sealed: bytes


_decode_sealed_user = msgspec.msgpack.Decoder(SealedUser).decode
_decode_secret = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


def sealed_content(content: bytes, sealer: Sealer) -> bytes | None:
    """The content as a manifest holds it; None for what no manifest holds (the root user)."""
    if content[0] != _USER_PUT:
        return content
    user = decode_entry(content)
    if not isinstance(user, UserRow):
        raise CorruptionError("a user's log entry holds something else")
    if user.is_root:
        return None
    secret = sealer.seal(msgspec.msgpack.encode((user.id, user.access_key, user.secret_key)))
    return bytes([_SEALED_USER]) + msgspec.msgpack.encode(
        SealedUser(user.id, user.display_name, user.access_key, secret)
    )


def opened_content(content: bytes, sealer: Sealer) -> LogEntry | SealedUser:
    """The entry that a manifest's content is; a `SealedUser` where the secret does not open with this key. `CorruptionError` for
    what no manifest holds."""
    if not content or content[0] < _FIRST_OWN_KIND:
        entry = decode_entry(content)
        if isinstance(entry, UserRow):
            # Nobody wrote it who has the wrapping key. Whoever can write to the bucket must not make users of a rebuilt store.
            raise CorruptionError("a manifest holds a user that is not sealed", user=entry.id)
        if entry is None:
            raise CorruptionError("a manifest holds an entry that is no catalog's", kind=content[0])
        return entry
    if content[0] != _SEALED_USER:
        raise CorruptionError("manifest entry of an unknown kind: written by a newer version?", kind=content[0])
    try:
        user = _decode_sealed_user(content[1:])
        opened = sealer.unseal(user.sealed)
        if opened is None:
            return user
        user_id, access_key, secret_key = _decode_secret(opened)
    except msgspec.MsgspecError as error:
        raise CorruptionError("manifest entry that cannot be decoded", kind=content[0]) from error
    if (user_id, access_key) != (user.id, user.access_key):
        raise CorruptionError("a sealed secret is another user's", user=user.id)
    return UserRow(user.id, user.display_name, user.access_key, secret_key)
