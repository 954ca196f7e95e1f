"""Speed of a tensor codec on one pinned core: whole calls of `encode_frame` and `decode_frame`, GB/s of plain bytes.

    python tools/profile_kernels.py x3 xa eq4            # 32 layers x 8 heads x 128 dims x 256 tokens, bf16 (32 MiB)
    KVOBJ_KERNELS=v3 python tools/profile_kernels.py x3  # another variant of the kernels

CPU time of the thread, the fastest of the rounds: whatever else runs on the machine only makes it slower. Checksums and digest are
in it, as in use.
"""

from __future__ import annotations

import os
import random
import time
from array import array

from command_line import Parser, codec_name, one_or_more, run_tool, zero_or_more

from kvobj.tensors.codecs import decode_frame, encode_bound, encode_frame, parse_tensor_frame
from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels.load import status


def gaussian_bf16(values: int, columns: int) -> bytes:
    """Rows of so many columns of unequal gain. A pool of rows is drawn from, which no codec here sees."""
    chance = random.Random(7)
    gains = [2 ** chance.gauss(0, 0.5) for _ in range(columns)]
    rows = []
    for _ in range(257):  # prime: no period meets a codec's
        row = array("f", (chance.gauss(0, gain) for gain in gains)).tobytes()
        rows.append(b"".join(row[at + 2 : at + 4] for at in range(0, len(row), 4)))
    return b"".join(rows[at % 257] for at in range(values // columns))


def main() -> None:
    """Print a line a codec."""
    parser = Parser(__doc__)
    parser.add_argument("codecs", nargs="+", type=codec_name, help="such as x3, xa, eq4")
    parser.add_argument("--layers", type=one_or_more, default=32)
    parser.add_argument("--heads", type=one_or_more, default=8)
    parser.add_argument("--dim", type=one_or_more, default=128)
    parser.add_argument("--tokens", type=one_or_more, default=256)
    parser.add_argument("--rounds", type=one_or_more, default=12)
    parser.add_argument("--core", type=zero_or_more, default=max(os.sched_getaffinity(0)), help="which one it runs on")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {asked.core})
    form = TensorForm("kv", "bf16", asked.layers, asked.heads, asked.dim, asked.tokens)
    plain = gaussian_bf16(form.plain_bytes // 2, asked.dim)
    print(status().detail)
    for codec in asked.codecs:
        print(line(codec, form, plain, asked.rounds))


def line(codec: str, form: TensorForm, plain: bytes, rounds: int) -> str:
    """Encode and decode in turn, so that both see the same load."""
    source, decoded = memoryview(plain), memoryview(bytearray(form.plain_bytes))
    room = memoryview(bytearray(encode_bound(codec, form)))
    encoding = decoding = float("inf")
    frame_bytes = 0
    for _ in range(rounds):
        start = time.thread_time()
        frame_bytes = encode_frame(source, room, codec=codec, form=form)
        encoding = min(encoding, time.thread_time() - start)
        frame = room[:frame_bytes]
        start = time.thread_time()
        decode_frame(frame, parse_tensor_frame(frame, frame_bytes), decoded)
        decoding = min(decoding, time.thread_time() - start)
    speed = form.plain_bytes / 1e9
    bits = 8 * frame_bytes / (form.plain_bytes / form.element_bytes)
    return f"{codec:8} encode {speed / encoding:5.2f} decode {speed / decoding:5.2f} GB/s, {bits:6.3f} bits a value"


if __name__ == "__main__":
    run_tool(main)
