"""The `lm://` listener of a node, where `[lm]` asks for one."""

from __future__ import annotations

import logging
import socket

from kvobj.api.lm import LmCommands, LmLimits, LmServer
from kvobj.api.object_store import ObjectStore
from kvobj.api.users import UserDirectory
from kvobj.app.listening import address_of
from kvobj.app.node import Node
from kvobj.clock import Clock
from kvobj.errors import AccessDeniedError, ConfigurationError, KvobjError, NoSuchUserError
from kvobj.metrics import Metrics


async def start_lm(
    node: Node, store: ObjectStore, bound: socket.socket, *, clock: Clock, metrics: Metrics, log: logging.Logger
) -> LmServer:
    """Serve on the socket; the caller drains and closes. `store`: the node's, with upstreams in front of it where there are any.
    `ConfigurationError`, by the key of the setting, where the bucket or the user will not do."""
    settings = node.settings.lm
    commands = LmCommands(store, UserDirectory(node.catalog, clock), bucket=settings.bucket, user_id=settings.user)
    try:
        await commands.check()
    except (NoSuchUserError, AccessDeniedError) as error:
        raise ConfigurationError([f"lm.user: {error}"]) from error
    except KvobjError as error:
        raise ConfigurationError([f"lm.bucket: {error}"]) from error
    limits = LmLimits(
        allow=settings.allow,
        connections=settings.connections,
        stall_seconds=node.settings.limits.progress_timeout_seconds,
    )
    server = LmServer(commands, limits=limits, metrics=metrics, clock=clock, log=log)
    await server.start(bound)
    log.info("lm: listening on %s for bucket %s", address_of(bound), settings.bucket)
    return server
