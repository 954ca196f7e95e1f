"""The data directory of one store: its format version, its lock, its identity and the root user's credentials; and where the
segments of its nvme tier were at the last start.

Whoever holds a `DataDirectory` is the only process that does (flock on it and on `lock` in it, freed by the kernel with the
process). A directory of a newer format is refused by name, and so is one that is not a store's. Guarantees that a first start may
be killed at any point: `FORMAT` is written last, and its absence beside nothing but our own leavings means "begin again".
It does not know what lies in the subdirectories.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, Self

from blake3 import blake3

from kvobj.config import RootCredentials
from kvobj.errors import ConfigurationError, CorruptionError, KvobjError, UnavailableError
from kvobj.ids import RandomBytes

FORMAT_VERSION: Final = 1
STORE_ID_BYTES: Final = 16
STORE_KEY_BYTES: Final = 32
STORE_KEY_TAG_BYTES: Final = 16

_FORMAT: Final = "FORMAT"
_LOCK: Final = "lock"
_STORE_KEY: Final = "store_key"
_CREDENTIALS: Final = "credentials"
_ENDPOINTS: Final = "endpoints"
_REMOTE_CLAIM: Final = "remote"
_REBUILDING: Final = "rebuilding"
_NVME_PATH: Final = "nvme_path"
_TAG_CONTEXT: Final = b"kvobj 2026-11-29 tag of the store key"
_BEFORE_FORMAT: Final = frozenset({_LOCK, _STORE_KEY, _STORE_KEY + ".new", _FORMAT + ".new"})
_ACCESS_KEY_RANDOM_BYTES: Final = 10
_SECRET_KEY_RANDOM_BYTES: Final = 30
_OTHERS: Final = 0o077
_OUT_OF_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DataDirectory:
    """An open and locked data directory. A context manager; `close()` frees the lock.

    `store_id` names the store for ever (16 random bytes); `store_key` (32 random bytes) keys the MACs of record pages, and the
    wrapping key of namespace keys follows from it where the configuration names none. It never leaves the directory.
    """

    __slots__ = ("_lock", "_random_bytes", "path", "store_id", "store_key")

    def __init__(
        self, path: Path, lock: tuple[int, ...], *, store_id: bytes, store_key: bytes, random_bytes: RandomBytes
    ) -> None:
        self.path = path
        self.store_id = store_id
        self.store_key = store_key
        self._lock = lock
        self._random_bytes = random_bytes

    def adopt(self, store_id: bytes) -> None:
        """Become the directory of this store, most often another: what lies in it is going to be made anew from that store's remote
        tier. The store key, which is this store's from here on, and the credentials stay."""
        write_private(self.path / _FORMAT, _format_text(store_id, self.store_key))
        self.store_id = store_id

    @classmethod
    def open(
        cls, path: Path, *, random_bytes: RandomBytes = os.urandom, create: bool = True, takes_any_key: bool = False
    ) -> Self:
        """Lock the directory, making it at first start (mode 0700); `create=False` refuses an absent one, and writes down nothing
        that a start does.

        Raises `UnavailableError` while another process holds it, `ConfigurationError` where the directory cannot be used
        (newer format, not a store's, not writable) or its store key is another store's, `CorruptionError` where its identity is
        damaged. A directory that versions before the store key's tag made gets one here, unless there is no room for it: the key
        that is there is then taken for the store's. `takes_any_key`: for who makes anew all that lies in it; `adopt` then marks
        the key that is there as the store's.
        """
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not (path / _FORMAT).is_file():
                raise ConfigurationError([f"{path}: is no kvobj data directory"])
            if not (path / _FORMAT).exists():
                # Before the lock's file is made, so that nothing is left in a directory that is somebody else's.
                _require_no_strangers(path)
            lock = _acquire(path)
        except OSError as error:
            raise ConfigurationError([f"{path}: cannot be used as data directory: {error.strerror}"]) from error
        try:
            if not (path / _FORMAT).exists():
                _begin(path, random_bytes)
            identity, store_key = _read_format(path / _FORMAT), _read_store_key(path / _STORE_KEY)
            if not takes_any_key:
                _check_key(path, store_key, identity, marks=create)
        except OSError as error:
            _release(lock)
            raise ConfigurationError([f"{path}: cannot be used as data directory: {error.strerror}"]) from error
        except BaseException:
            _release(lock)
            raise
        return cls(path, lock, store_id=identity.store_id, store_key=store_key, random_bytes=random_bytes)

    @property
    def catalog_path(self) -> Path:
        """Directory of the durable LMDB environment."""
        return self.path / "catalog"

    @property
    def record_log_path(self) -> Path:
        """Directory of the record log."""
        return self.path / "records"

    @property
    def nvme_path(self) -> Path:
        """Directory of the nvme tier's segments, where the configuration names none."""
        return self.path / "nvme"

    def note_nvme_path(self, directory: Path) -> None:
        """Write down where the nvme tier's segments lie, durably, for who works on the stopped store without its configuration. A
        place within this directory is written relative to it, so that it moves along, and is copied along, with it. A file
        system without room is left as it is."""
        text = os.fsencode(_relative_within(self.path, directory)) + b"\n"
        file = self.path / _NVME_PATH
        try:
            if not file.is_file() or file.read_bytes() != text:
                _write_if_room(file, text)
        except OSError as error:
            raise ConfigurationError([f"{file}: cannot be used: {error.strerror}"]) from error

    def noted_nvme_path(self) -> Path | None:
        """Where the last start that found all of the nvme tier's segments had them; None where none has written it down."""
        file = self.path / _NVME_PATH
        try:
            text = file.read_bytes().removesuffix(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError([f"{file}: cannot be read: {error.strerror}"]) from error
        return self.path / os.fsdecode(text) if text else None

    @property
    def credentials_path(self) -> Path:
        """The root user's credentials: TOML, mode 0600."""
        return self.path / _CREDENTIALS

    def root_credentials(self, override: RootCredentials | None = None) -> RootCredentials:
        """The root user's credentials: `override` if given (the file is left alone), else the file's, which the first call
        makes. Raises `ConfigurationError` where the file is open to others or is no such TOML."""
        if override is not None:
            return override
        if not self.credentials_path.exists():
            write_private(self.credentials_path, _new_credentials(self._random_bytes))
        return read_credentials(self.path)

    @property
    def remote_claim_path(self) -> Path:
        """What the store has written down of its place on the remote (`tiers.remote.identity`)."""
        return self.path / _REMOTE_CLAIM

    @property
    def rebuild_mark_path(self) -> Path:
        """A file that is there while the directory is being made from the remote, and after that was cut short."""
        return self.path / _REBUILDING

    def require_whole(self) -> None:
        """`ConfigurationError` where a rebuild from the remote was cut short: what is here knows less than the remote does, and a
        node that goes on from it would take the rest there for leftovers."""
        if self.rebuild_mark_path.exists():
            raise ConfigurationError(
                [f"{self.path}: a rebuild from the remote was cut short: repeat kvobj-admin rebuild --remote"]
            )

    def write_endpoints(self, *, s3: str, admin: str) -> None:
        """Write down where the running server answers, for `kvobj-admin --data`; `close()` takes it away."""
        write_private(self.path / _ENDPOINTS, f's3 = "{s3}"\nadmin = "{admin}"\n'.encode())

    def close(self) -> None:
        """Free the lock. Idempotent."""
        if not self._lock:
            return
        (self.path / _ENDPOINTS).unlink(missing_ok=True)
        _release(self._lock)
        self._lock = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_credentials(path: Path) -> RootCredentials:
    """The credentials kept in a data directory, which needs no lock. `ConfigurationError` where they cannot be used."""
    file = path / _CREDENTIALS
    try:
        if file.stat().st_mode & _OTHERS:
            raise ConfigurationError([f"{file}: is open to other users; run: chmod 600 {file}"])
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{file}: is not TOML"]) from error
    access_key, secret_key = document.get("access_key"), document.get("secret_key")
    if not (isinstance(access_key, str) and access_key and isinstance(secret_key, str) and secret_key):
        raise ConfigurationError([f"{file}: has no access_key and secret_key"])
    return RootCredentials(access_key=access_key, secret_key=secret_key)


def read_admin_endpoint(path: Path) -> str | None:
    """Where the server of a data directory answers `kvobj-admin`, or None if none has written it down."""
    try:
        document = tomllib.loads((path / _ENDPOINTS).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    endpoint = document.get("admin")
    return endpoint if isinstance(endpoint, str) else None


def default_nvme_capacity_bytes(*, free_bytes: int, used_bytes: int = 0) -> int:
    """Capacity of an nvme tier that was given none: half of what its file system could give, at most 64 GiB, in whole
    GiB where there are that many. `used_bytes`: what the tier's own files hold already, so that the figure stays put."""
    half = (free_bytes + used_bytes) // 2
    gibibyte = 2**30
    return min(half - half % gibibyte, 64 * gibibyte) if half >= gibibyte else half


def _acquire(path: Path) -> tuple[int, ...]:
    """Lock the directory and the file in it; what holds the locks, for `_release`.

    The file alone would let in a second holder once somebody has removed it. The directory alone is not enough either: some
    file systems lock none (NFS asks for a descriptor that may write), and an older version looks at the file only. No child
    inherits them.
    """
    held: list[int] = []
    try:
        held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path) from error
        except OSError:
            os.close(held.pop())
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        _release(held)
        raise
    return tuple(held)


def _release(held: Iterable[int]) -> None:
    for each in held:
        os.close(each)


def _in_use(path: Path) -> UnavailableError:
    try:
        with (path / _LOCK).open("rb") as lock:
            holder = lock.read(32).decode("ascii", "replace").strip()
    except OSError:  # it was removed
        holder = ""
    return UnavailableError("data directory is in use by another process", path=path, pid=holder or "unknown")


def _begin(path: Path, random_bytes: RandomBytes) -> None:
    _require_no_strangers(path)
    path.chmod(0o700)
    store_key = random_bytes(STORE_KEY_BYTES)
    write_private(path / _STORE_KEY, store_key)
    write_private(path / _FORMAT, _format_text(random_bytes(STORE_ID_BYTES), store_key))


def _require_no_strangers(path: Path) -> None:
    """`ConfigurationError` where a directory that is no store's holds anything but what a first start leaves that was killed."""
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in _BEFORE_FORMAT)
    # Of another first start under way these are a store's: it writes FORMAT before them.
    if strangers and not (path / _FORMAT).exists():
        raise ConfigurationError([f"{path}: is neither empty nor a kvobj data directory (it holds {strangers[0]})"])


class _Identity(NamedTuple):
    """What `FORMAT` says. No tag: a version before it wrote the file."""

    store_id: bytes
    store_key_tag: bytes | None


def _format_text(store_id: bytes, store_key: bytes) -> bytes:
    tag = _tag_of(store_key, store_id)
    return f'version = {FORMAT_VERSION}\nstore_id = "{store_id.hex()}"\nstore_key_tag = "{tag.hex()}"\n'.encode()


def _tag_of(store_key: bytes, store_id: bytes) -> bytes:
    """What a store key is told by. It says nothing of the key."""
    return blake3(_TAG_CONTEXT + store_id, key=store_key).digest(STORE_KEY_TAG_BYTES)


def _check_key(path: Path, store_key: bytes, identity: _Identity, *, marks: bool) -> None:
    """`ConfigurationError` where the key is another store's: under it every record page would count as damaged. `marks`: where
    nothing tells, write down that it is this store's."""
    if identity.store_key_tag is None:
        if marks:
            _write_if_room(path / _FORMAT, _format_text(identity.store_id, store_key))
    elif not hmac.compare_digest(_tag_of(store_key, identity.store_id), identity.store_key_tag):
        raise ConfigurationError([f"{path / _STORE_KEY} is not this store's: put back the one that belongs to it"])


def _relative_within(path: Path, directory: Path) -> Path:
    """`directory` relative to `path` if it lies within it, however the two are spelled, else absolute."""
    for inner, outer in ((directory.absolute(), path.absolute()), (directory.resolve(), path.resolve())):
        if inner.is_relative_to(outer):
            return inner.relative_to(outer)
    return directory.absolute()


def store_id_in(path: Path) -> bytes | None:
    """The id of the store whose data directory this is; None where it is none, or none that can be read."""
    try:
        return _read_format(path / _FORMAT).store_id
    except (OSError, KvobjError):
        return None


def _read_format(file: Path) -> _Identity:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("the format file is not TOML", path=file) from error
    version, store_id = document.get("version"), document.get("store_id")
    if not isinstance(version, int) or version < 1:
        raise CorruptionError("the format file has no version", path=file)
    if version > FORMAT_VERSION:
        raise ConfigurationError(
            [
                f"{file}: format {version} is newer than format {FORMAT_VERSION}, the newest that this version of kvobj reads"
            ]
        )
    raw, tag = _bytes_of(store_id), document.get("store_key_tag")
    if len(raw) != STORE_ID_BYTES:
        raise CorruptionError("the format file has no store id", path=file)
    if tag is not None and len(_bytes_of(tag)) != STORE_KEY_TAG_BYTES:
        raise CorruptionError("the format file's tag of the store key is damaged", path=file)
    return _Identity(raw, None if tag is None else _bytes_of(tag))


def _bytes_of(value: object) -> bytes:
    """The bytes of a text in hex, none for anything else."""
    try:
        return bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return b""


def _read_store_key(file: Path) -> bytes:
    try:
        store_key = file.read_bytes()
    except FileNotFoundError as error:
        raise CorruptionError("the store key is gone: record pages cannot be checked without it", path=file) from error
    if len(store_key) != STORE_KEY_BYTES:
        raise CorruptionError("the store key has a wrong length", path=file, size_bytes=len(store_key))
    return store_key


def _new_credentials(random_bytes: RandomBytes) -> bytes:
    access_key = "KV" + random_bytes(_ACCESS_KEY_RANDOM_BYTES).hex().upper()
    secret_key = random_bytes(_SECRET_KEY_RANDOM_BYTES).hex()
    return f'access_key = "{access_key}"\nsecret_key = "{secret_key}"\n'.encode()


def _write_if_room(file: Path, content: bytes) -> None:
    """`write_private`, for what a start can do without: a full disk keeps no store from starting."""
    try:
        write_private(file, content)
    except OSError as error:
        if error.errno not in _OUT_OF_ROOM:
            raise


def write_private(file: Path, content: bytes) -> None:
    """Write a file of mode 0600 whole or not at all, durably: temporary file, fsync, rename, fsync of the directory."""
    temporary = file.with_name(file.name + ".new")

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    opener: Callable[[str, int], int] = open_private
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb", opener=opener) as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
