"""The edge of the configuration: reads the file that was named. The command lines call this, nobody else.

Relative paths inside a configuration are taken from the working directory, as `--data` is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from kvobj.config.parse import parse_settings
from kvobj.config.settings import Settings
from kvobj.errors import ConfigurationError


def load_settings(
    config: Path | None,
    *,
    environment: Mapping[str, str],
    data: str | None = None,
    listen: str | None = None,
) -> Settings:
    """Settings of the file (None: the embedded default), with `data` and `listen` of the command line over them.

    All paths of the result are absolute. Raises `ConfigurationError` with every problem.
    """
    document = {} if config is None else _read_document(config)
    server = document.get("server", {})
    if isinstance(server, dict):
        overrides = {"data": data, "listen": listen}
        document["server"] = {**server, **{key: value for key, value in overrides.items() if value is not None}}
    return _with_absolute_paths(parse_settings(document, environment=environment))


def example_text() -> str:
    """The annotated example configuration: every key with its default."""
    return files("kvobj").joinpath("config_example.toml").read_text(encoding="utf-8")


def _read_document(config: Path) -> dict[str, object]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{config}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"{config}: is not TOML: {error}"]) from error


def _with_absolute_paths(settings: Settings) -> Settings:
    server, tls = settings.server, settings.server.tls
    if tls is not None:
        tls = replace(tls, certificate=tls.certificate.absolute(), key=tls.key.absolute())
    dram, nvme, remote = settings.dram, settings.nvme, settings.remote
    if remote is not None and remote.ca_bundle is not None:
        remote = replace(remote, ca_bundle=remote.ca_bundle.absolute())
    return replace(
        settings,
        server=replace(server, data=server.data.absolute(), tls=tls),
        dram=replace(dram, path=dram.path and dram.path.absolute()),
        nvme=replace(nvme, path=nvme.path and nvme.path.absolute()),
        remote=remote,
    )
