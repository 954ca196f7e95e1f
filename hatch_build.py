"""The build hook: compiles the native libraries into the wheel, or in place for an editable install.

Where that fails kvobj is installed all the same: it runs on its pure twins, and without tensor codecs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDS = {"kvobj/native/build.py": "KVOBJ_NATIVE", "kvobj/tensors/kernels/build.py": "KVOBJ_KERNELS"}
"""With the switches that keep an installed library from being loaded: who never wants it need not wait for it either."""
_OFF = {"off", "0", "no"}


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Runs the builds by their paths, since kvobj is not installed yet."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling's `BuildHookInterface.initialize`."""
        made = [library for path, switch in _BUILDS.items() for library in built(Path(self.root) / path, switch)]
        if made and version != "editable":
            build_data["artifacts"] += [library.relative_to(self.root).as_posix() for library in made]
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"


def built(path: Path, switch: str) -> list[Path]:
    """The libraries that the build at this path makes, or finds made; none where that fails, or the switch is off. What it does is
    told on stderr, which `pip install -v` shows."""
    if os.environ.get(switch, "").lower() in _OFF:
        sys.stderr.write(f"left out: {path.parent.name}, switched off by {switch}\n")
        return []
    spec = importlib.util.spec_from_file_location("_".join(path.parts[-3:-1]) + "_build", path)
    if spec is None or spec.loader is None:
        return []
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    sys.stderr.write(f"compiling {path.parent.name} for at most {build.SECONDS} s ({switch}=off leaves it out)\n")
    sys.stderr.flush()
    try:
        made: list[Path] = build.build()
    except build.BuildError as error:
        sys.stderr.write(f"left out: {path.parent.name}: {error}\n")
        return []
    return made
