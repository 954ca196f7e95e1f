"""`AsyncTensorChunks`: the calls of `TensorChunks` for an event loop. Their contracts stand there. Imports torch."""

from __future__ import annotations

from kvobj.client.aio.calls import OnThreads, awaited
from kvobj.client.aio.kv import AsyncKvClient
from kvobj.client.kv_values import Namespace
from kvobj.client.tensors import TensorChunks
from kvobj.tensors.form import TensorForm


class AsyncTensorChunks(OnThreads[TensorChunks]):
    """The chunks of one namespace as tensors. Calls run, and frames are decoded, on the client's threads; the event loop does
    nothing. A cancelled call lets go of the caller's tensor before `CancelledError` is raised."""

    def __init__(self, client: AsyncKvClient, namespace: Namespace) -> None:
        core = TensorChunks(client.core, namespace)
        super().__init__(core, client.calls, client.streams, client.leases, timeout_seconds=client.timeout_seconds)

    @property
    def form(self) -> TensorForm:
        """See `TensorChunks.form`."""
        return self.core.form

    put = awaited(TensorChunks.put)
    get = awaited(TensorChunks.get)
