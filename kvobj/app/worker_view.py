"""What the admin API shows of a node whose worker processes serve S3."""

from __future__ import annotations

from dataclasses import replace

from kvobj.api.admin_view import StoreStatus
from kvobj.app.admin_state import NodeView


class WorkersView(NodeView):
    """A `NodeView` that is ready while workers are (`WorkerPool.is_serving`). Event-loop-only."""

    def is_ready(self) -> bool:
        """See `AdminView.is_ready`."""
        return super().is_ready() and self._workers is not None and self._workers.is_serving

    async def status(self) -> StoreStatus:
        """See `AdminView.status`."""
        return replace(await super().status(), is_ready=self.is_ready())
