"""Whose the key prefix on the remote is: `store.json` there, and what the data directory remembers of it.

The first start writes `store.json` with the store's id and lineage 1. A rebuild on a new machine takes the store over: same id,
next lineage. Every claim has a random name, kept in the data directory before `store.json` is written, so a process knows its own
claim again whatever became of the answer. Who finds another claim of its store there is *fenced*: somebody else goes on with the
store, and nothing may be written to the remote from here any more. Another store's prefix is refused.

Of several who claim at once exactly one wins where the server can put under a condition. Where it cannot, each looks, writes, waits
and reads back: the last one stands, and nobody else believes to have won, since looking and writing may not take longer than the
others wait. Should a server do a request after that nevertheless, the next `check` tells.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, Self

from kvobj import __version__
from kvobj.background import BackgroundWorker
from kvobj.clock import Clock
from kvobj.data_directory import STORE_ID_BYTES, write_private
from kvobj.errors import ConfigurationError, CorruptionError, KvobjError, TierUnavailableError, UnavailableError
from kvobj.ids import RandomBytes
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.object_bucket import ObjectBucket

FORMAT_VERSION: Final = 1
"""Of all that lies under the prefix."""
CHECK_SECONDS: Final = 30.0
UNCLAIMED_SECONDS: Final = 2.0
"""As long as the prefix is not known to be this store's: until then nothing is written there."""

IdentityState = Literal["unclaimed", "claimed", "fenced", "refused"]
"""`unclaimed`: the server has not been reached yet; `fenced`: another claim of this store stands there; `refused`: another store's
does, or none where ours stood, or ours does and there is an objection."""

_RECORD_BYTES_MAX: Final = 64 * 1024
_CLAIM_RANDOM_BYTES: Final = 16
_LINEAGE_MAX: Final = 2**32 - 1
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """`store.json`: which store lies under the prefix, in which lineage, by whose claim; when that was made, by what version."""

    store_id: bytes
    lineage: int
    claim: str
    made: str
    version: str
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The object's body."""
        document = {
            "format": self.format,
            "store_id": self.store_id.hex(),
            "lineage": self.lineage,
            "claim": self.claim,
            "made": self.made,
            "version": self.version,
        }
        return (json.dumps(document, indent=2) + "\n").encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read it back; what later versions add is passed over. `CorruptionError` for anything else, `ConfigurationError` for a
        newer format."""
        try:
            document = json.loads(body)
            version, lineage = document["format"], document["lineage"]
            store_id, claim = bytes.fromhex(document["store_id"]), document["claim"]
            made, made_by = str(document.get("made", "")), str(document.get("version", ""))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptionError("store.json on the remote is not one") from error
        if type(version) is int and version > FORMAT_VERSION:
            raise ConfigurationError(
                [
                    f"the store on the remote is of format {version}, newer than {FORMAT_VERSION}, which this version knows"
                ]
            )
        is_sound = (
            version == FORMAT_VERSION
            and type(lineage) is int
            and 1 <= lineage <= _LINEAGE_MAX
            and isinstance(claim, str)
            and len(store_id) == STORE_ID_BYTES
        )
        if not is_sound:
            raise CorruptionError("store.json on the remote is not one")
        return cls(store_id, lineage, claim, made, made_by)


class UnreadableRecordError(TierUnavailableError):
    """What is answered for `store.json` is none: damaged, or a page of whoever stands where the remote should be. As good as no
    answer: nobody knows whose the prefix is."""


@dataclass(frozen=True, slots=True)
class LocalClaim:
    """What the data directory remembers: the claim that this store made, or was about to make (`is_made` False)."""

    store_id: bytes
    lineage: int
    claim: str
    where: str
    is_made: bool

    def write(self, file: Path) -> None:
        """Durably, whole or not at all. Blocking."""
        document = {
            "store_id": self.store_id.hex(),
            "lineage": self.lineage,
            "claim": self.claim,
            "where": self.where,
            "is_made": self.is_made,
        }
        write_private(file, (json.dumps(document, indent=2) + "\n").encode())

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """None where there is none. `CorruptionError` for what is none. Blocking."""
        try:
            document = json.loads(file.read_bytes())
            return cls(
                store_id=bytes.fromhex(str(document["store_id"])),
                lineage=int(document["lineage"]),
                claim=str(document["claim"]),
                where=str(document["where"]),
                is_made=bool(document["is_made"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError("the claim of the remote in the data directory is not one", path=file) from error


class StoreIdentity:
    """See the module's text. Event-loop-only; calls take turns. `where` names bucket and prefix for people; `claim_file` is in the
    data directory (`DataDirectory.remote_claim_path`)."""

    def __init__(
        self,
        bucket: ObjectBucket,
        names: RemoteNames,
        *,
        claim_file: Path,
        clock: Clock,
        where: str = "",
        settle_seconds: float = 3.0,
        random_bytes: RandomBytes = os.urandom,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        objection: Callable[[int], Awaitable[str]] | None = None,
        on_anew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`objection`: asked once, of our own lineage, before the prefix counts as claimed: why this data directory must not write
        there although the claim is its own, "" where it may. `on_anew`: awaited before a store begins at a place: what it knows of
        another is of no use there, and must be forgotten durably."""
        self._bucket = bucket
        self._key = names.store
        self._file = claim_file
        self._clock = clock
        self._where = where or names.store
        self._settle_seconds = settle_seconds
        self._random_bytes = random_bytes
        self._sleep = sleep
        self._own: LocalClaim | None = None
        self._ask_objection = objection
        self._objection: str | None = None
        self._on_anew = on_anew
        self._turn = asyncio.Lock()
        self.state: IdentityState = "unclaimed"
        self.reason = "the remote has not answered yet"

    @property
    def lineage(self) -> int:
        """The one that this data directory has claimed; 0 before the first time."""
        return self._own.lineage if self._own is not None and self._own.is_made else 0

    @property
    def is_fenced(self) -> bool:
        """Whether somebody else goes on with this store, or stands where it stood."""
        return self.state in ("fenced", "refused")

    def may_write(self) -> bool:
        """Whether the prefix is this process's to write to, as of the last look."""
        return self.state == "claimed"

    async def read(self) -> StoreRecord | None:
        """What `store.json` says; None where there is none. `TierUnavailableError` where the server does not answer, as
        `UnreadableRecordError` where it answers with what is none; `ConfigurationError` for a newer format."""
        found = await self._read()
        return None if found is None else found[0]

    async def claim(self, store_id: bytes) -> IdentityState:
        """Make the prefix this store's, or find that it is. At each start, and again where the server did not answer.

        `ConfigurationError` where it cannot be: the prefix is another store's; this data directory never joined the store that lies
        there; or `store.json`, which this store wrote, is gone. `TierUnavailableError` where the server does not answer, or with
        what is no `store.json`: then nothing has changed. `CorruptionError` where the data directory's own claim cannot be read.
        """
        async with self._turn:
            try:
                return await self._claim(store_id)
            except (ConfigurationError, CorruptionError) as error:
                self._settle("refused", str(error))
                raise

    async def _claim(self, store_id: bytes) -> IdentityState:
        own = await asyncio.to_thread(LocalClaim.read, self._file)
        if own is not None and own.store_id != store_id:
            raise ConfigurationError([f"{self._file}: is another store's"])
        self._own = own
        for _ in range(_TRIES):
            found = await self._read_expecting(own)
            if found is not None:
                return await self._join(found[0], own, store_id)
            if own is not None and own.is_made:
                problem = (
                    f"{self._where}: store.json is gone, which this store wrote to {own.where}: is this the right bucket and "
                    f"prefix? If it is to begin anew here, without what it has on the remote, remove {self._file}"
                )
                raise ConfigurationError([problem])
            if own is None:
                if self._on_anew is not None:
                    await self._on_anew()
                own = await self._announce(store_id, lineage=1)
            await self._write(own, etag=None)
        raise TierUnavailableError("store.json on the remote does not stay", where=self._where)

    async def _join(self, record: StoreRecord, own: LocalClaim | None, store_id: bytes) -> IdentityState:
        """Judge what stands there."""
        if record.store_id != store_id:
            raise ConfigurationError([_foreign(self._where, record)])
        if own is None:
            problem = (
                f"{self._where}: holds this store in lineage {record.lineage}, which this data directory never joined: rebuild "
                "from the remote (kvobj-admin rebuild) to go on with it"
            )
            raise ConfigurationError([problem])
        if record.claim != own.claim:
            return self._settle("fenced", _succeeded(record, own))
        if not own.is_made:
            own = replace(own, is_made=True)
            await asyncio.to_thread(own.write, self._file)
        self._own = own
        return await self._settle_claimed(own)

    async def _settle_claimed(self, own: LocalClaim) -> IdentityState:
        """The claim that stands there is ours."""
        if self._objection is None:
            self._objection = "" if self._ask_objection is None else await self._ask_objection(own.lineage)
        return self._settle("refused" if self._objection else "claimed", self._objection)

    async def take_over(self, store_id: bytes) -> int:
        """Go on with the store that lies there, in its next lineage, which is returned: whoever wrote to it before is fenced. For a
        rebuild. Repeating it after a crash takes the same lineage.

        `ConfigurationError` where no store or another one lies there, `UnavailableError` where somebody else was quicker.
        """
        async with self._turn:
            own = await asyncio.to_thread(LocalClaim.read, self._file)
            for attempt in range(_TRIES):
                found = await self._read()
                if found is None:
                    raise ConfigurationError([f"{self._where}: no store lies there (no store.json)"])
                record, etag = found
                if record.store_id != store_id:
                    raise ConfigurationError([_foreign(self._where, record)])
                if own is not None and record.claim == own.claim:
                    await self._join(record, own, store_id)
                    return record.lineage
                if attempt and own is not None and record.lineage >= own.lineage:
                    raise UnavailableError("another rebuild has taken this store over", lineage=record.lineage)
                if own is None or own.is_made or own.store_id != store_id or own.lineage != record.lineage + 1:
                    own = await self._announce(store_id, lineage=record.lineage + 1)
                await self._write(own, etag=etag)
            raise TierUnavailableError("store.json on the remote does not stay", where=self._where)

    async def check(self) -> bool:
        """Look whether the prefix is still this store's; `may_write` afterwards. `TierUnavailableError` where the server does not
        answer, or with what is no `store.json`: then nothing has changed."""
        own = self._own
        if own is None or not own.is_made:
            return self.may_write()
        async with self._turn:
            try:
                found = await self._read_expecting(own)
            except ConfigurationError as error:
                self._settle("refused", str(error))
                return False
            record = None if found is None else found[0]
            if record is None:
                self._settle("refused", f"{self._where}: store.json is gone")
            elif record.store_id != own.store_id:
                self._settle("refused", _foreign(self._where, record))
            elif record.claim != own.claim:
                self._settle("fenced", _succeeded(record, own))
            else:
                await self._settle_claimed(own)
            return self.may_write()

    async def _announce(self, store_id: bytes, *, lineage: int) -> LocalClaim:
        """Write down, here, what is about to be claimed there."""
        claim = self._random_bytes(_CLAIM_RANDOM_BYTES).hex()
        own = LocalClaim(store_id, lineage, claim, self._where, is_made=False)
        await asyncio.to_thread(own.write, self._file)
        return own

    async def _write(self, own: LocalClaim, *, etag: str | None) -> None:
        """Put our record there, over none (`etag` None) or over the one of this ETag. What became of it shows when it is read."""
        made = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).isoformat(timespec="seconds")
        body = StoreRecord(own.store_id, own.lineage, own.claim, made, __version__).encode()
        capabilities = self._bucket.capabilities or await self._bucket.probe()
        if etag is None and capabilities.if_absent:
            await self._bucket.put_small(self._key, body, if_absent=True)
        elif etag is not None and capabilities.if_match:
            await self._bucket.put_small(self._key, body, if_match=etag)
        else:
            await self._write_and_settle(body, etag)

    async def _write_and_settle(self, body: bytes, etag: str | None) -> None:
        """For servers without conditions: whoever has seen the same as we will have written before we read it back."""
        try:
            async with asyncio.timeout(self._settle_seconds):
                found = await self._read()
                if (None if found is None else found[1]) != etag:
                    return
                await self._bucket.put_small(self._key, body)
        except TimeoutError as error:
            raise TierUnavailableError("the remote is too slow to claim a prefix of", where=self._where) from error
        finally:
            await self._sleep(self._settle_seconds)

    async def _read_expecting(self, own: LocalClaim | None) -> tuple[StoreRecord, str] | None:
        """What stands there. Where ours stood and something else is found, it is what a second look finds: one odd answer (of a
        load balancer, of a backend that is not the bucket's) must neither end a start nor stop all writing."""
        if own is None or not own.is_made:
            return await self._read()
        try:
            found = await self._read()
        except (ConfigurationError, UnreadableRecordError):
            found = None
        if found is not None and (found[0].store_id, found[0].claim) == (own.store_id, own.claim):
            return found
        return await self._read()

    async def _read(self) -> tuple[StoreRecord, str] | None:
        found = await self._bucket.get_small(self._key, max_bytes=_RECORD_BYTES_MAX)
        if found is None:
            return None
        try:
            return StoreRecord.decode(found[0]), found[1]
        except CorruptionError as error:
            if self.state == "unclaimed":
                self.reason = f"{self._where}: {error}"
            raise UnreadableRecordError(str(error), where=self._where) from error

    def _settle(self, state: IdentityState, reason: str) -> IdentityState:
        self.state, self.reason = state, reason
        return state


class IdentityWatch(BackgroundWorker):
    """Looks every `interval_seconds` whether the prefix is still this store's, or claims it where that could not be done yet. While
    it is not this store's, as far as is known, it looks more often (nothing is written to the remote then): a remote that comes
    back is used at once. Logs each change once and calls `on_changed` with it; an answer that is no `store.json` changes nothing
    and is logged once, too."""

    worker_name = "remote-identity"

    def __init__(
        self,
        identity: StoreIdentity,
        store_id: bytes,
        *,
        log: logging.Logger,
        on_changed: Callable[[IdentityState], None] = lambda _: None,
        interval_seconds: float = CHECK_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._identity = identity
        self._store_id = store_id
        self._log = log
        self._on_changed = on_changed
        self._interval_seconds = interval_seconds
        self._sleep = sleep
        self._told = (identity.state, identity.reason)
        self._is_unreadable = False

    async def look(self) -> None:
        """Look now. A server that does not answer, or with what is no `store.json`, changes nothing."""
        try:
            if self._identity.lineage:
                await self._identity.check()
            else:
                await self._identity.claim(self._store_id)
        except UnreadableRecordError as error:
            if not self._is_unreadable:
                self._is_unreadable = True
                self._log.warning("whose the place on the remote is cannot be told, it is looked at again: %s", error)
            return
        except KvobjError as error:  # what is wrong with the prefix is the state's reason by now
            if isinstance(error, UnavailableError):
                return
        self._is_unreadable = False
        self._tell()

    def _tell(self) -> None:
        state, reason = found = (self._identity.state, self._identity.reason)
        if found == self._told:
            return
        self._told = found
        if state == "claimed":
            self._log.info("the remote is this store's lineage=%d", self._identity.lineage)
        else:
            self._log.error("the remote is not written to any more state=%s reason=%s", state, reason)
        self._on_changed(state)

    async def _run(self) -> None:
        while True:
            await self.look()
            is_ours = self._identity.may_write()
            await self._sleep(self._interval_seconds if is_ours else min(UNCLAIMED_SECONDS, self._interval_seconds))


def _foreign(where: str, record: StoreRecord) -> str:
    return (
        f"{where}: belongs to another store ({record.store_id.hex()}, lineage {record.lineage}): give this one a bucket or a "
        "prefix of its own"
    )


def _succeeded(record: StoreRecord, own: LocalClaim) -> str:
    return (
        f"another data directory goes on with this store: lineage {record.lineage}, made {record.made}, while this is lineage "
        f"{own.lineage}"
    )
