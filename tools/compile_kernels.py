"""Compiles every kernel for the GPUs that are named, by NVRTC alone, and writes the matrix of what came out into docs/gpu.md.

python tools/compile_kernels.py            # print it
python tools/compile_kernels.py --write    # put it between the marks in docs/gpu.md
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from command_line import Parser, run_tool

from kvobj.gpu.kernel_source import kernel_names, kernel_source
from kvobj.gpu.nvrtc import ARCHITECTURES, CompileError, find_nvrtc

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
BEGIN: Final = "<!-- compile matrix: tools/compile_kernels.py --write -->\n"
END: Final = "<!-- end of the compile matrix -->\n"
CARDS: Final = {"sm_80": "A100", "sm_90": "H100, H200", "sm_100": "B200"}


def matrix() -> tuple[str, bool]:
    """The table in Markdown, and whether everything compiles."""
    compiler = find_nvrtc()
    names = kernel_names()
    lines = [
        f"{len(names)} kernels, NVRTC {compiler.version[0]}.{compiler.version[1]}:",
        "",
        "| architecture | GPUs | kernels in the machine code | machine code |",
        "| --- | --- | --- | --- |",
    ]
    is_whole = True
    for arch in ARCHITECTURES:
        began = time.perf_counter()
        try:
            cubin = compiler.compile(kernel_source(), name="kernels.cu", arch=arch).cubin
        except CompileError as error:
            lines.append(f"| `{arch}` | {CARDS[arch]} | none: {error.log.splitlines()[0]} | |")
            is_whole = False
            continue
        found = [name for name in names if f"kv_{name}\0".encode() in cubin]
        is_whole &= len(found) == len(names)
        lines.append(f"| `{arch}` | {CARDS[arch]} | {len(found)} of {len(names)} | {len(cubin) // 1024} KiB |")
        print(f"{arch}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    kernels = ", ".join(f"`{name}`" for name in names)
    return "\n".join([*lines, "", f"They are: {kernels}.", ""]), is_whole


def main() -> int:
    """Run what the command line says; 1 where a kernel does not compile."""
    parser = Parser(__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/gpu.md")
    options = parser.parse_args()
    table, is_whole = matrix()
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    else:
        print(table)
    return 0 if is_whole else 1


if __name__ == "__main__":
    run_tool(main)
