"""Where the server is and who signs: flags, then a profile, then the environment, then the data directory.

A profile is a table of `$XDG_CONFIG_HOME/kvobj/profiles.toml` with `endpoint`, `access_key`, `secret_key` and optionally
`region` and `ca_bundle`. Without anything named, the credentials of `./kvobj-data` are taken if they are there, which is what
`kvobj serve` without options made. Who takes a data directory's keys means its server and no other.
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvobj.client import Credentials
from kvobj.data_directory import read_admin_endpoint, read_credentials
from kvobj.errors import ConfigurationError

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:9001"
DEFAULT_DATA: Final = Path("kvobj-data")

_PROFILE_KEYS: Final = frozenset({"endpoint", "access_key", "secret_key", "region", "ca_bundle"})


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """What the command line said; None where it said nothing."""

    endpoint: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    profile: str | None = None
    data: Path | None = None
    ca_bundle: Path | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach and sign. `ca_bundle`: the authorities that an https server's certificate is checked against; None: the
    system's, or those of SSL_CERT_FILE and SSL_CERT_DIR."""

    endpoint: str
    credentials: Credentials
    region: str = "us-east-1"
    ca_bundle: Path | None = None

    def tls_context(self) -> ssl.SSLContext:
        """What to connect to an https endpoint with. `ConfigurationError` where the bundle cannot be used."""
        try:
            return ssl.create_default_context(cafile=self.ca_bundle)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(
                [f"--ca-bundle: {self.ca_bundle}: cannot be used: {error.strerror or error}"]
            ) from error


def find_access(flags: AccessFlags, environment: Mapping[str, str]) -> Access:
    """The access that was asked for. `ConfigurationError` where a part of it is missing or contradicts itself, and where it is that
    of a data directory which does not say where its server is."""
    if (flags.access_key is None) != (flags.secret_key is None):
        raise ConfigurationError(["--access-key and --secret-key: one goes with the other"])
    profile = {} if flags.profile is None else _read_profile(flags.profile, environment)
    is_of_directory = flags.data is not None
    if flags.access_key is not None and flags.secret_key is not None:
        credentials = Credentials(flags.access_key, flags.secret_key)
    elif "access_key" in profile and "secret_key" in profile:
        credentials = Credentials(profile["access_key"], profile["secret_key"])
    else:
        is_of_directory = is_of_directory or _credentials_of(environment) is None
        credentials = find_credentials(flags.data, environment)
    data = flags.data or DEFAULT_DATA
    endpoint = flags.endpoint or profile.get("endpoint") or read_admin_endpoint(data)
    if not endpoint:
        # Whatever answers at the default may be another store, which a copy of a data directory has the keys of.
        if is_of_directory:
            raise ConfigurationError([_no_endpoint(data)])
        endpoint = DEFAULT_ENDPOINT
    bundle = flags.ca_bundle or (Path(profile["ca_bundle"]) if "ca_bundle" in profile else None)
    return Access(endpoint, credentials, profile.get("region", "us-east-1"), bundle)


def find_credentials(data: Path | None, environment: Mapping[str, str]) -> Credentials:
    """The root user's credentials: a named data directory's first, then the environment's, then `./kvobj-data`'s."""
    given = _credentials_of(environment) if data is None else None
    if given is not None:
        return given
    directory = data or DEFAULT_DATA
    if data is None and not (directory / "credentials").exists():
        raise ConfigurationError(
            [
                "no credentials: give --access-key and --secret-key, --profile, or --data DIR (which reads DIR/credentials)"
            ]
        )
    found = read_credentials(directory)
    return Credentials(found.access_key, found.secret_key)


def _credentials_of(environment: Mapping[str, str]) -> Credentials | None:
    access_key, secret_key = environment.get("KVOBJ_ACCESS_KEY"), environment.get("KVOBJ_SECRET_KEY")
    return Credentials(access_key, secret_key) if access_key and secret_key else None


def _no_endpoint(data: Path) -> str:
    # A server writes the file once it is ready, and takes it away with a clean stop.
    file = data / "endpoints"
    try:
        file.stat()
    except FileNotFoundError:
        return f"no server runs on {data} (no {file}): start it, or give --endpoint"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}: give --endpoint"
    return f"{file}: does not say where the server's admin port is: give --endpoint"


def _read_profile(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "")) / ".config")
    file = Path(home) / "kvobj" / "profiles.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{file}: is not TOML: {error}"]) from error
    profile = document.get(name)
    if not isinstance(profile, dict):
        raise ConfigurationError([f"{file}: has no profile [{name}]"])
    problems = [f"{file}: {name}.{key}: is no known key" for key in profile if key not in _PROFILE_KEYS]
    problems += [
        f"{file}: {name}.{key}: must be a text" for key, value in profile.items() if not isinstance(value, str)
    ]
    if problems:
        raise ConfigurationError(problems)
    return {key: str(value) for key, value in profile.items()}
