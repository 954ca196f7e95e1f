"""What plugs into inference engines: each stands on one `StoreLink` and fills an interface of its engine.

An engine never sees an exception of these nor waits beyond their deadlines: what fails is a miss, counted, told in the log once
per outage, and tried again after a rest. Imports nothing of the server.
"""

from __future__ import annotations

from kvobj.connectors.link import StoreLink
from kvobj.connectors.link_settings import LinkSettings

__all__ = ["LinkSettings", "StoreLink"]
