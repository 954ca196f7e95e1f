"""The examples of docs/client.md, run in order as one program against a real server; what they print is what the page says.

Those about tensors need torch: `tests/clients/test_tensor_client.py` runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from real_client import credentials_of, kv_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TENSORS = re.compile(r"^## Tensors$.*?(?=^## )", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"print\(.*\)  # (.*)$", re.MULTILINE)


def test_the_pages_examples_run_and_print_what_it_says(tmp_path: Path) -> None:
    blocks = _BLOCK.findall(_TENSORS.sub("", PAGE.read_text(encoding="utf-8")))
    program = "\n".join(blocks)
    said = _SAID.findall(program)
    assert len(blocks) == 4
    assert len(said) >= 6
    with kv_server(tmp_path) as server:
        keys = credentials_of(server)
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
        program = program.replace("http://127.0.0.1:9000", server.endpoint)
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == " ".join(said).split()
