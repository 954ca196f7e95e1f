"""What a medium that lies gives a reader, whoever moves the bytes: threads or the kernel by itself."""

from __future__ import annotations

import pytest
from fakes_nvme import KIB, MIB, NvmeNode, blob

from kvobj.errors import FrameCorruptError, TierUnavailableError


class NvmeReadFaults:
    """A subclass's module gives the fixture `node`."""

    async def test_a_file_that_was_cut_is_a_failed_medium(self, node: NvmeNode) -> None:
        await node.start()
        await node.put(1, MIB)
        with (node.directory / "segment-000000").open("r+b") as file:
            file.truncate(512 * KIB)
        with pytest.raises(TierUnavailableError, match="ends early"):
            await node.read(1)

    @pytest.mark.parametrize("offset", [-4096, -4080, -1])
    async def test_a_flipped_bit_in_the_record_is_never_served(self, node: NvmeNode, offset: int) -> None:
        await node.start()
        await node.put(1, MIB)
        node.flip(1, offset)
        frame = await node.tier.get(blob(1))
        assert frame is not None
        with pytest.raises(FrameCorruptError):
            await frame.ready(1)
        frame.release()
