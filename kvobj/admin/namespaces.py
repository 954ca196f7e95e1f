"""`namespace`: what the namespaces of a bucket are, and one of them with its key from one store to another.

The file of an export holds the key, so nobody but who made it may read it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvobj.admin.output import Output
from kvobj.admin.render import print_namespaces, print_values
from kvobj.client import AdminClient
from kvobj.errors import ConfigurationError, ConflictError, UnavailableError

FORMAT: Final = "kvobj namespace 1"
_FILE_BYTES_MAX: Final = 64 * 1024
_FIELDS: Final = ("name", "declaration", "fingerprint", "root", "key")


def list_namespaces(client: AdminClient, output: Output, bucket: str) -> int:
    """A line a namespace, without keys."""
    found = client.namespaces(bucket)
    output.show({"namespaces": found}, lambda console: print_namespaces(console, found))
    return 0


def show(client: AdminClient, output: Output, bucket: str, name: str) -> int:
    """One namespace, without its key."""
    found = client.namespace(bucket, name)
    flat = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in found.items()}
    output.show(found, lambda console: print_values(console, "namespace", flat))
    return 0


def export(client: AdminClient, output: Output, bucket: str, name: str, path: Path | None) -> int:
    """Write one namespace with its key into a new file of mode 0600 (None: `NAME.namespace.json`). `ConfigurationError` where the
    file exists or cannot be written."""
    path = Path(f"{name}.namespace.json") if path is None else path
    found = client.export_namespace(bucket, name)
    if any(each not in found for each in _FIELDS):
        raise UnavailableError("the answer is no namespace: is this a kvobj admin port?")
    document = {"format": FORMAT, **{each: found[each] for each in _FIELDS}}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigurationError([f"{path}: {error.strerror}"]) from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise ConfigurationError([f"{path}: {error.strerror}"]) from error
    told = {"name": name, "bucket": bucket, "fingerprint": document["fingerprint"], "file": str(path)}
    output.show(told, lambda console: print_values(console, "exported", told))
    output.complain(f"{path} holds the namespace's key: who reads it knows the ids of its chunks")
    return 0


def import_(client: AdminClient, output: Output, bucket: str, path: Path) -> int:
    """Declare the namespace of an export in a bucket of this store. 1 where it came to have another root. `ConfigurationError`
    where the file is no export."""
    document = _read(path)
    found = client.import_namespace(bucket, document)
    if found.get("root") != document["root"]:
        raise ConflictError("the namespace was imported, and has another root than in its file: its key is damaged")
    output.show(found, lambda console: print_values(console, "namespace", found))
    return 0


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            written = file.read(_FILE_BYTES_MAX + 1)
        document = json.loads(written) if len(written) <= _FILE_BYTES_MAX else None
    except OSError as error:
        raise ConfigurationError([f"{path}: {error.strerror}"]) from error
    except ValueError:
        document = None
    if (
        not isinstance(document, dict)
        or document.get("format") != FORMAT
        or any(each not in document for each in _FIELDS)
    ):
        raise ConfigurationError([f"{path}: is no file of `kvobj-admin namespace export`"])
    return {name: document[name] for name in _FIELDS}
