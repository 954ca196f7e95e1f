"""Print a frame's header and directory: of a file that holds one, at an offset in a segment, or of every frame found in it.

Reads only. With `--check` every block is compared with its crc32c. Exits 1 if a frame or block is not right or none is found.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from command_line import Parser, ToolError, existing_file, run_tool, zero_or_more
from rich.console import Console
from rich.table import Table

from kvobj.codec.frame import (
    BLOCK_PLAIN_BYTES,
    DIRECTORY_ENTRY_BYTES,
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    MAX_HEAD_BYTES,
    FrameHeader,
    parse_frame,
)
from kvobj.errors import FrameCorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES_AT: Final = 120
_WIDTH: Final = 120
_LENGTH_MASK: Final = 0x7FFF_FFFF


def frame_bytes_at(file: memoryview, offset: int) -> int:
    """The length that a frame's own directory gives it, unchecked; `FrameCorruptError` where there cannot be one."""
    head = file[offset : offset + HEADER_BYTES]
    if len(head) < HEADER_BYTES or bytes(head[: len(MAGIC)]) != MAGIC:
        raise FrameCorruptError("not a frame", offset=offset)
    (entries,) = struct.unpack_from("<I", head, _ENTRIES_AT)
    head_bytes = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * entries
    if head_bytes > MAX_HEAD_BYTES:
        raise FrameCorruptError("directory out of bounds", entries=entries)
    if not entries:
        return -(-int(head_bytes) // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
    if offset + head_bytes > len(file):
        raise FrameCorruptError("directory past the end of the file", offset=offset)
    start, length, _ = struct.unpack_from("<III", file, offset + head_bytes - 12)
    return int(start * FRAME_ALIGNMENT + (length & _LENGTH_MASK))


def find_frames(memory: mmap.mmap) -> Iterator[int]:
    """Offsets at the frame alignment where a frame may start."""
    offset = memory.find(MAGIC)
    while offset >= 0:
        if offset % FRAME_ALIGNMENT == 0:
            yield offset
        offset = memory.find(MAGIC, offset + 1)


def dump(file: memoryview, offset: int, *, check: bool) -> tuple[dict[str, Any], bool]:
    """One frame as a record, and whether all that was looked at is right."""
    try:
        frame_bytes = frame_bytes_at(file, offset)
        frame = file[offset : offset + frame_bytes]
        header = parse_frame(frame, frame_bytes)
        blocks = [block_record(header, block, frame, check=check) for block in range(header.block_count)]
    except FrameCorruptError as error:
        return {"offset": offset, "problem": str(error)}, False
    record = {
        "offset": offset,
        "codec": header.codec,
        "element_bytes": header.element_bytes,
        "plain_bytes": header.plain_bytes,
        "frame_bytes": frame_bytes,
        "block_plain_bytes": BLOCK_PLAIN_BYTES if header.tensor is None else header.tensor.form.block_bytes,
        "payload_offset": header.payload_offset,
        "digest": header.digest.hex(),
        "blocks": blocks,
    }
    if header.tensor is not None:
        record["form"] = asdict(header.tensor.form)
        record["certificate"] = asdict(header.tensor.certificate)
    return record, all(block.get("problem") is None for block in blocks)


def block_record(header: FrameHeader, block: int, frame: memoryview, *, check: bool) -> dict[str, Any]:
    """One directory entry."""
    record: dict[str, Any] = {
        "block": block,
        "offset": header.offset(block),
        "length": header.length(block),
        "is_raw": header.is_raw(block),
        "crc32c": f"{header.crc(block):08x}",
    }
    if check:
        try:
            header.check_block(block, frame[header.offset(block) : header.end(block)])
        except FrameCorruptError as error:
            record["problem"] = str(error)
    return record


def show(record: dict[str, Any]) -> None:
    """Print one frame for people."""
    if "problem" in record:
        print(f"offset {record['offset']:,}: {record['problem']}")
        return
    table = Table("block", "offset", "length", "raw", "crc32c", "problem", title=f"frame at {record['offset']:,}")
    table.caption = (
        f"{record['codec']}, {record['plain_bytes']:,} plain in {record['frame_bytes']:,} bytes, "
        f"elements of {record['element_bytes']}, payload at {record['payload_offset']}\nBLAKE3 {record['digest']}"
    )
    for block in record["blocks"]:
        raw = "yes" if block["is_raw"] else "no"
        numbers = (str(block["block"]), f"{block['offset']:,}", f"{block['length']:,}")
        table.add_row(*numbers, raw, block["crc32c"], block.get("problem", ""))
    Console(width=_WIDTH).print(table)


def main() -> int:
    """Dump what was asked for."""
    parser = Parser(__doc__)
    parser.add_argument("file", type=existing_file, help="a segment of the nvme tier, or a file of one frame")
    parser.add_argument("--offset", type=zero_or_more, default=0, help="where the frame begins")
    parser.add_argument("--scan", action="store_true", help="every frame of the file")
    parser.add_argument("--check", action="store_true", help="compare every block with its checksum")
    parser.add_argument("--json", action="store_true", help="records in place of tables")
    arguments = parser.parse_args()
    if not arguments.file.stat().st_size:
        raise ToolError(f"{arguments.file}: is empty")
    with arguments.file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        offsets = list(find_frames(memory)) if arguments.scan else [arguments.offset]
        with memoryview(memory) as file:
            outcomes = [dump(file, offset, check=arguments.check) for offset in offsets]
    if arguments.json:
        print(json.dumps([record for record, _ in outcomes], indent=2))
    else:
        for record, _ in outcomes:
            show(record)
        if not outcomes:
            print("no frame was found")
    return 0 if outcomes and all(is_right for _, is_right in outcomes) else 1


if __name__ == "__main__":
    run_tool(main)
