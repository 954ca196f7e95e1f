"""Where LMCache's configuration has the settings of a connector that is a plug-in. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SETTING: Final = "remote_storage_plugin."
_LMCACHES: Final = ("module_path", "class_name")


def plugin_settings(extra_config: Mapping[str, object], plugin_name: str) -> dict[str, object]:
    """The settings of `remote_storage_plugin.TYPE.NAME`, and over them those of `remote_storage_plugin.TYPE.INSTANCE.NAME`."""
    settings: dict[str, object] = {}
    kind, _, instance = plugin_name.partition(".")
    for front in (f"{_SETTING}{kind}.", f"{_SETTING}{kind}.{instance}.")[: 2 if instance else 1]:
        for name, value in extra_config.items():
            setting = name.removeprefix(front)
            if name.startswith(front) and "." not in setting and setting not in _LMCACHES:
                settings[setting] = value
    return settings
